"""The same core on torch tensors: detectors for a model in training, and a module as a target for patches."""

from weightcast.torch.adapters import Merged
from weightcast.torch.model import TorchTarget

__all__ = ["Merged", "TorchTarget"]
