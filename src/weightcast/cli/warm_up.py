"""`weightcast warm-up`"""

from weightcast.cli.console import prepare_kernels


def warm_up() -> None:
    """Compile the kernels now, so that no later command waits for it."""
    prepare_kernels()
