"""Commands by name; the module of each is imported when the command runs."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from opsmith import __version__
from opsmith.core.collector import importing_without_garbage_collection

COMMANDS = {
    "adopt": "opsmith.cli.adopt",
    "benchmark": "opsmith.cli.benchmark",
    "build": "opsmith.cli.build",
    "cache": "opsmith.cli.cache",
    "check": "opsmith.cli.check",
    "compile": "opsmith.cli.compile",
    "doctor": "opsmith.cli.doctor",
    "draw": "opsmith.cli.draw",
    "export": "opsmith.cli.export",
    "mcp": "opsmith.cli.mcp",
    "new": "opsmith.cli.new",
    "page": "opsmith.cli.page",
    "rule": "opsmith.cli.rule",
    "tour": "opsmith.cli.tour",
}
"""Module of each command: its function has the command's name; its `EPILOG`, if any, ends the help."""

HELP = {"help_option_names": ["-h", "--help"]}


class Commands(TyperGroup):
    """Group that imports a command when it runs, or when its help is shown."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return [name for name, module in COMMANDS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with this name; None if there is none."""
        if cmd_name not in self.list_commands(ctx):
            return None
        single = typer.Typer(rich_markup_mode="markdown", add_completion=False, context_settings=HELP)
        with importing_without_garbage_collection():
            module = importlib.import_module(COMMANDS[cmd_name])
        single.command(cmd_name, epilog=getattr(module, "EPILOG", None))(getattr(module, cmd_name))
        command = typer.main.get_command(single)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"opsmith {__version__}")
        raise typer.Exit


@app.callback()
def opsmith(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Write custom PyTorch operators: declare them once, then check, benchmark, draw and export them.

    Begin with `opsmith check my_operators.py`. Every command has `--help`, with examples.

    Exit status: 0 success, 1 something failed, 2 the command could not be carried out, 130 interrupted.
    """
