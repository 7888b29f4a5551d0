"""``torchobs exporter``: serve the flight files of a directory to Prometheus."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import NoReturn

from torchobs._version import __version__
from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError
from torchobs.config import settings
from torchobs.config.options import closest
from torchobs.exporter import config
from torchobs.node import launch

_DESCRIPTION = """\
Serve the metrics of training processes to Prometheus, and a live page for people.

Every rank that calls torchobs.init(), or runs under `torchobs run`, records itself in a flight file. The exporter reads all of
them in one directory, adds what only another process can know (whether a rank is alive, hangs, or how it ended), and serves the
result at /metrics. It never writes there, and no training waits for it: it can be started, stopped and restarted any time."""

_EXAMPLES = """\
examples:
  torchobs exporter                                   port 10960, the directory that this user's trainings write to
  torchobs exporter --flight-dir /dev/shm/run7        another directory
  torchobs exporter --web.listen-address 127.0.0.1:9000 --web.listen-address '[::1]:9000'
  curl -s localhost:10960/metrics | grep torchobs_rank_state

An option or a variable that is wrong ends it with exit status 2, before it listens anywhere. In Kubernetes it is a native
sidecar. As kubelet starts no training beside a sidecar that fails, it never ends by itself there, whatever is wrong with its
configuration: it serves what it can, on loopback only if it cannot read where, and torchobs_exporter_config_ok is 0. On SIGTERM
it waits until every scraper that it knows has fetched the final state. Every option is also an environment variable, which it
overrides."""

_GROUPS = {
    "where to serve": ("--web.",),
    "limits": ("--series-limit-total", "--memory-limit", "--drop-metrics"),
    "commands to ranks": ("--api.", "--control."),
    "metrics of the machine": ("--collect.", "--path."),
    "push over OTLP": ("--otlp.",),
    "log": ("--log.",),
}
_WITHOUT_VALUE = ("-h", "--help", "--version")


class _MistakeError(Exception):
    """The arguments cannot be parsed."""


class _Parser(arguments.Parser):
    """A parser that raises its errors, since a sidecar goes on after them."""

    def error(self, message: str) -> NoReturn:
        """See :class:`argparse.ArgumentParser`."""
        raise _MistakeError(message)


def parser(*, lenient: bool = False) -> arguments.Parser:
    """Return the command's parser; see :func:`torchobs.cli.arguments.add`."""
    parser = arguments.parser("exporter", "torchobs exporter [options]", _DESCRIPTION, _EXAMPLES, _Parser)
    version = f"torchobs exporter {__version__} (Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=version, help="Show the version and end.")
    groups = {
        prefix: group
        for title, prefixes in _GROUPS.items()
        for group in [parser.add_argument_group(title)]
        for prefix in prefixes
    }
    for option in config.EVERY_OPTION:
        group = next((group for prefix, group in groups.items() if option.flag.startswith(prefix)), parser)
        arguments.add(group, option, lenient=lenient)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the exporter until it is signalled to end, and return its exit status.

    Raises:
        CommandError: an option or a variable is wrong, and this is no sidecar.
    """
    lenient, mistakes = parser(lenient=True), []
    try:
        options, rest = lenient.parse_known_args(argv)
    except _MistakeError as mistake:  # a value for a flag: the only error of a lenient parser
        mistakes.append(str(mistake))
        options, rest = lenient.parse_known_args([word for word in argv if not word.startswith(_WITHOUT_VALUE)])
    flags = [option.flag for option in config.EVERY_OPTION]
    for word in rest:
        what, hint = "option" if word.startswith("-") else "argument", closest(word.partition("=")[0], flags)
        mistakes.append(f"no such {what}: {word!r}{hint}")
    values = {name: texts for name, texts in vars(options).items() if texts is not None}
    chosen = config.parse(values, settings.environment(), mistakes)
    if chosen.problems and not launch.in_kubernetes(settings.environment()):
        raise CommandError(f"{'; '.join(chosen.problems)}; `torchobs exporter --help` has all options and variables", 2)
    from torchobs.exporter.daemon import configure_log, serve

    configure_log(chosen)
    return serve(chosen)
