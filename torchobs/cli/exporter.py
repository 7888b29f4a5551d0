"""``torchobs exporter``: serve the flight files of a directory to Prometheus."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from torchobs._version import __version__
from torchobs.config import option_types, settings
from torchobs.exporter import config, log_format
from torchobs.exporter.otlp import options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HELP = """Serve what training processes write down about themselves to Prometheus.

Every rank that calls torchobs.init(), or runs under `torchobs run`, keeps a flight file. The exporter reads those of one
directory, adds what only an outside process can see (is the rank alive, is it hung, how did it end), and serves all of it at
/metrics. It never writes there, and a training never waits for it: it may be started, stopped and restarted at any time.

\b
examples:
  torchobs exporter                                   on the port 10960, with the files where this user's trainings put them
  torchobs exporter --flight-dir /dev/shm/run7        the files of one directory
  torchobs exporter --web.listen-address 127.0.0.1:9000 --web.listen-address '[::1]:9000'
  curl -s localhost:10960/metrics | grep torchobs_rank_state

In Kubernetes it is a native sidecar. There it never leaves by itself, whatever is wrong with its configuration, for kubelet
starts no training beside a sidecar that fails: it serves what it can, and torchobs_exporter_config_ok is 0. On SIGTERM it waits
until every scraper it has seen has fetched the final state. Every option is also a variable; an option beats its variable.
"""


_KNOWN = (*config.OPTIONS, *options.OPTIONS, *log_format.OPTIONS)
_FALLBACKS = {"flight_dir": "TORCHOBS_DIR", "control_dir": "TORCHOBS_CONTROL_DIR"}


_PROTECTION = "--web.config.file"


def _protection(args: Sequence[str]) -> list[str]:
    """Return what of arguments that cannot be parsed must not be lost: without it, everyone could ask."""
    for word, following in zip_longest(args, args[1:], fillvalue=""):
        flag, equals, path = word.partition("=")
        if flag == _PROTECTION:
            return [f"{_PROTECTION}={path if equals else following}"]
    return []


class _Tolerant(click.Command):
    """Takes what it cannot parse for a problem, not for the end, unless a person is there to read the message."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See :class:`click.Command`."""
        ctx.obj = problems = []
        kept = _protection(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as problem:
            if _is_watched():
                raise
            problems.append(problem.format_message())
            return super().parse_args(ctx, kept)


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_KNOWN):
        variables = [option.variable, *([_FALLBACKS[option.field]] if option.field in _FALLBACKS else [])]
        bare: dict[str, Any] = {"is_flag": False, "flag_value": option.bare} if option.bare else {}
        function = click.option(
            option.flag, option.field, metavar=option.metavar, envvar=variables, show_envvar=True, help=option.brief,
            multiple=option.several, **bare,
        )(function)  # fmt: skip
    return function


@click.command(
    "exporter",
    cls=_Tolerant,
    help=_HELP,
    short_help="Serve the flight files of a directory to Prometheus.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "max_content_width": 128},
)
@_options
@click.version_option(__version__, message=f"torchobs exporter %(version)s (Python {platform.python_version()})")
@click.pass_context
def command(context: click.Context, /, **given: str | tuple[str, ...] | None) -> None:
    """Run the exporter until it is told to end."""
    found: dict[str, tuple[str, ...]] = {
        field: (text,) if isinstance(text, str) else tuple(text) for field, text in given.items() if text is not None
    }
    unknown = [f"no such {'option' if word.startswith('-') else 'argument'}: {_hint(word)}" for word in context.args]
    environ = settings.environment()
    misspelt = config.unknown_variables(environ, _KNOWN)
    if any(_PROTECTION in hint or config.PROTECTION in hint for hint in (*unknown, *misspelt)):
        found.setdefault("web_config_file", ("",))
    log, log_problems = _log_settings(found)
    push, push_problems = options.parse(found, environ)
    problems = [*context.obj, *unknown, *misspelt, *log_problems, *push_problems]
    chosen = replace(config.parse(found, environ.get("XDG_RUNTIME_DIR"), problems), push=push)
    if chosen.problems and _is_watched():
        raise click.UsageError("\n".join(chosen.problems))
    from torchobs.exporter.daemon import serve

    log_format.configure(**log)
    context.exit(serve(chosen))


def _log_settings(found: dict[str, tuple[str, ...]]) -> tuple[dict[str, str], list[str]]:
    chosen, problems = {"level": "info", "form": "logfmt"}, []
    for name, option in zip(chosen, log_format.OPTIONS, strict=True):
        for text in found.get(option.field, ()):
            try:
                chosen[name] = str(option.kind.parse(text))
            except ValueError:
                problems.append(f"{option.flag} {text!r}: allowed is {option.kind.allowed}")
    return chosen, problems


def _hint(word: str) -> str:
    return f"{word!r}{option_types.closest(word.partition('=')[0], [option.flag for option in _KNOWN])}"


def _is_watched() -> bool:
    """Return True if a person is there to read a message. In a pod nobody is, though `tty: true` gives it a terminal."""
    return sys.stderr.isatty() and "KUBERNETES_SERVICE_HOST" not in settings.environment()
