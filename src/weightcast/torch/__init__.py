"""For torch: receive into a module, publish from a training loop (`weightcast.Publisher`) or from a trainer."""

from weightcast.torch.model import TorchTarget

__all__ = ["TorchTarget"]
