"""The command `weightcast`: one module per verb, imported when the verb is called.

To add a verb `name`: write `cli/name.py` with a function `name` whose parameters are typer's (`options` has those that
several verbs share) and whose docstring is what `weightcast name --help` shows; then add a line to `verbs.PANELS`,
which is what `weightcast --help` shows. The function opens buckets with `channels.open_chain` or
`channels.open_bucket`, and raises `WeightcastError`s, which become one line and an exit code. It prints for people with
`console.say`, `facts` and `caution`, and for programs with `tell`: each is silent where the other is wanted. `settings`
has the options that every verb takes, before or after its name.

Quick verbs (`log`, `status`, `plan`) import nothing at their top that needs numpy: see tests/cli/test_startup.py.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from importlib import import_module
from keyword import iskeyword
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from weightcast.cli.console import EXIT_CODES_HELP, Logged, leave, working
from weightcast.cli.settings import apply_setting, begin_run, common
from weightcast.cli.verbs import PANELS, VERBS
from weightcast.errors import UsageError

_LOOKS: dict[str, Any] = {
    "context_settings": {"max_content_width": 100},
    "rich_markup_mode": None,  # rich's help costs a quarter of a second
}


class _Lean:
    """A command with the options of `settings.common`, which passes on plain values as they are.

    typer imports pydantic, in 0.1 s, to look at any value: at strings, at defaults and at what is left out. All other
    values are typer's to convert or refuse.
    """

    callback: Any
    _common: list[Any] | None = None

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        self._common = self._common or _common_options()
        parameters = [*parameters[:-1], *self._common, *parameters[-1:]]  # the last is --help
        kinds = get_type_hints(self.callback) if self.callback else {}
        for parameter in parameters:
            if "process_value" not in vars(parameter):
                parameter.process_value = _plainly(parameter, kinds.get(parameter.name))
        return parameters


def _command_of(function: Callable[..., None]) -> Any:
    made = typer.Typer(add_completion=False)
    made.command()(function)
    return typer.main.get_command(made)


def _common_options() -> list[Any]:
    """The options of `settings.common`, which no verb's function has to take."""
    options: list[Any] = _command_of(common).params
    for option in options:
        option.expose_value = False
        option.callback = _apply
        option.process_value = _plainly(option, str)
    return options


def _apply(context: Any, option: Any, value: Any) -> None:
    if value not in (None, False):
        try:
            apply_setting(option.name, value)
        except UsageError as error:
            raise typer.BadParameter(str(error), ctx=context, param=option) from None


def _plainly(parameter: Any, kind: Any) -> Callable[[Any, Any], Any]:
    convert = parameter.process_value

    def process(context: Any, value: Any) -> Any:
        is_plain = isinstance(value, str) and kind in (str, str | None)
        may_lack = not parameter.required or context.resilient_parsing  # the shell completes an unfinished command
        is_default = not isinstance(value, str) and value in (None, parameter.default) and may_lack
        if (is_plain or is_default) and parameter.nargs == 1 and not parameter.multiple:
            return parameter.callback(context, parameter, value) if parameter.callback else value
        return convert(context, value)

    return process


class _Verb(_Lean, TyperCommand):
    """A verb. Its module is imported when its parameters are needed: to run it, or for its own help."""

    def get_params(self, context: Any) -> list[Any]:
        if self.callback is None:
            name = str(self.name).replace("-", "_") + "_" * iskeyword(str(self.name))
            made = _command_of(getattr(import_module(f"weightcast.cli.{name}"), name))
            self.callback, self.params, self.help = made.callback, made.params, made.help
        return super().get_params(context)

    def invoke(self, context: Any) -> Any:
        with working():
            return super().invoke(context)


class _Verbs(_Lean, TyperGroup):
    """Knows the names and summaries of all verbs without importing any."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.commands.update({name: _Verb(name, short_help=text, **_LOOKS) for name, text in VERBS.items()})

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        begin_run()
        return super().make_context(*arguments, **options)

    def format_commands(self, context: Any, formatter: Any) -> None:
        width = max(map(len, VERBS))
        for panel, verbs in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in verbs.items()])


app = typer.Typer(
    cls=_Verbs,
    help="Ship only the bits of a model that changed, losslessly.",
    epilog=EXIT_CODES_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    **_LOOKS,
)


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if show:
        from weightcast import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    logging.lastResort = Logged(logging.WARNING)
    logging.getLogger("weightcast").addHandler(Logged())
    app()
