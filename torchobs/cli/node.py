"""The process that a trainer starts as its node's exporter (``nodemode.start``): stands for election, and serves if it wins."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from torchobs.nodemode import announcement
from torchobs.nodemode.detach import detach
from torchobs.nodemode.election import Election, open_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.nodemode.daemon import Fleet, Serve


def main() -> None:
    """Run with the arguments that ``nodemode.start`` gives: root, directory, address, grace in seconds, import directories."""
    _, _, flight_dir, address, grace_s, *directories = sys.argv
    sys.path.extend(path for path in directories if path not in sys.path)
    detach()
    stand(flight_dir, address, float(grace_s), _exporter)


def stand(flight_dir: str, address: str, grace_s: float, load: Callable[[], Serve]) -> None:
    """Become the directory's exporter if it has none; ``load`` imports what serves, which a loser does not wait for.

    Raises ``OSError`` when the directory is gone or another user's.
    """
    directory_fd = open_directory(flight_dir)
    election = Election(directory_fd)
    if not election.win():
        return
    announcement.withdraw(directory_fd)  # a killed predecessor's, which would be taken for ours now that the lock is held
    from torchobs.nodemode import daemon

    daemon.hold(daemon.Post(flight_dir, address, grace_s), election, directory_fd, load())


def _exporter() -> Serve:
    from torchobs import settings
    from torchobs.exporter import config, logs
    from torchobs.exporter.otlp import options
    from torchobs.exporter.service import serve

    logs.configure(level="info", form="logfmt")
    environ = settings.environment()
    known = (*config.OPTIONS, *options.OPTIONS)
    given: dict[str, tuple[str, ...]] = {
        option.field: (environ[option.variable],) for option in known if option.variable in environ
    }
    misspelt = config.unknown_variables(environ, (*known, *logs.OPTIONS))
    if any(config.PROTECTION in hint for hint in misspelt):
        given.setdefault("web_config_file", ("",))
    push, push_problems = options.parse(given, environ)
    problems = (*misspelt, *push_problems)

    def run(flight_dir: str, address: str, *, announce: Callable[[str], None], finished: Callable[[Fleet], bool]) -> None:
        here: dict[str, tuple[str, ...]] = {"mode": ("node",), "flight_dir": (flight_dir,)}
        here |= {"listen": (address,)} if address else {}
        chosen = replace(config.parse(given | here, environ.get("XDG_RUNTIME_DIR"), problems), push=push)
        serve(chosen, announce=announce, finished=finished)

    return run
