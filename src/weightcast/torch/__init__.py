"""For torch: receive into a module, publish from a training loop (`weightcast.Publisher`) or from a trainer."""

from typing import TYPE_CHECKING, Any

from weightcast.torch.model import TorchTarget

if TYPE_CHECKING:
    from weightcast.torch.callback import WeightcastCallback

__all__ = ["TorchTarget", "WeightcastCallback"]


def __getattr__(name: str) -> Any:
    """The callback needs transformers, which may not be here: it is imported when it is asked for."""
    if name == "WeightcastCallback":
        from weightcast.torch.callback import WeightcastCallback

        return WeightcastCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
