"""The command `weightcast`: one file per verb."""

import logging
import signal

import typer

from weightcast.cli.apply import apply
from weightcast.cli.attach import attach
from weightcast.cli.console import EXIT_CODES_HELP, Logged, leave, prepare_kernels
from weightcast.cli.diff import diff
from weightcast.cli.digest import digest
from weightcast.cli.forget import forget
from weightcast.cli.gc import gc
from weightcast.cli.init import init
from weightcast.cli.inspect import inspect
from weightcast.cli.log import log
from weightcast.cli.pin import pin, unpin
from weightcast.cli.plan import plan
from weightcast.cli.publish import publish
from weightcast.cli.pull import pull
from weightcast.cli.repair import repair
from weightcast.cli.reset import reset
from weightcast.cli.show import show
from weightcast.cli.squash import squash
from weightcast.cli.status import status
from weightcast.cli.verify import verify

app = typer.Typer(
    help="Ship only the bits of a model that changed, losslessly.",
    epilog=EXIT_CODES_HELP,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

_PANELS = {
    "Channels: weights through a bucket": (init, publish, pull, log, show, status, plan, verify),
    "Engines": (attach,),
    "Channels: upkeep": (squash, gc, pin, unpin, forget, repair, reset),
    "Patches between checkpoints on disk": (diff, apply, inspect, digest),
}
for _panel, _verbs in _PANELS.items():
    for _verb in _verbs:
        app.command(rich_help_panel=_panel)(_verb)


@app.command("warm-up", rich_help_panel="This machine")
def warm_up() -> None:
    """Compile the kernels now, so that nothing waits for it later."""
    prepare_kernels()


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if show:
        from weightcast import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    logging.lastResort = Logged(logging.WARNING)
    app()
