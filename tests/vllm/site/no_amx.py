"""A plug-in of vLLM for tests: no AMX, since some virtual machines advertise it and then die in it."""

import torch


def mask() -> None:
    """Answer vLLM's questions for AMX with no; every process of vLLM calls this before a model is loaded."""
    torch.cpu._is_amx_tile_supported = _no
    torch.cpu._is_amx_fp16_supported = _no


def _no() -> bool:
    return False
