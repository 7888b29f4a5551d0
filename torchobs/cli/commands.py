"""The group ``torchobs``: knows its commands by name, and imports one when it is called."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import click

from torchobs._version import __version__

_BRIEFS = {
    "run": "Run a training script with torchobs watching it.",
    "exporter": "Serve the flight files of a directory to Prometheus.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """See :class:`click.Group`."""
        return list(_BRIEFS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # click's signature
        """See :class:`click.Group`."""
        if cmd_name not in _BRIEFS:
            return None
        return _run if cmd_name == "run" else cast("click.Command", import_module(f"torchobs.cli.{cmd_name}").command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's signature
        """See :class:`click.Group`. A list of commands is no reason to import them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_BRIEFS.items()))


@click.group(cls=_Lazy, context_settings={"max_content_width": 128}, epilog="`torchobs COMMAND --help` has examples.")
@click.version_option(__version__, message="torchobs %(version)s")
def group() -> None:
    """Watch PyTorch training runs: what every rank does, and when one goes bad."""


@click.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _run(arguments: tuple[str, ...]) -> None:
    import_module("torchobs.cli.run").main(arguments)
