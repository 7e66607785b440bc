"""The command `weightcast`: one file per verb."""

import typer

from weightcast.cli.apply import apply
from weightcast.cli.bench import bench
from weightcast.cli.console import prepare_kernels
from weightcast.cli.diff import diff
from weightcast.cli.digest import digest
from weightcast.cli.inspect import inspect

app = typer.Typer(
    help="Ship only the bits of a model that changed, losslessly.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(diff)
app.command()(apply)
app.command()(inspect)
app.command()(digest)
app.add_typer(bench, name="bench")


@app.command("warm-up")
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
    app()
