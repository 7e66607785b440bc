"""Tracing a program on meta tensors: stand-ins, the identity of a storage, the tensors among arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory, in a storage of its own: views of it stay in that storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the tensor's storage until that is freed; then another storage may get the same key."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, such as the arguments and the result of an operation."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
