"""The exporter process that a trainer starts for its node (``node.launch``): runs for election, and serves if elected."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchobs.flight.directory import open_directory
from torchobs.node.election import Election, withdraw
from torchobs.node.launch import detach

if TYPE_CHECKING:  # imported if elected
    from torchobs.node.lifetime import Serve, ServiceStatus


def main() -> None:
    """Run with the arguments set by ``node.launch``: root, directory, address, grace in seconds, import directories."""
    _, _, flight_dir, address, grace_s, *directories = sys.argv
    sys.path.extend(path for path in directories if path not in sys.path)
    detach()
    serve_if_elected(flight_dir, address, float(grace_s), _exporter)


def serve_if_elected(flight_dir: str, address: str, grace_s: float, load: Callable[[], Serve]) -> None:
    """Become the directory's exporter if it has none; ``load`` imports the server, only if elected.

    Raises ``OSError`` when the directory is gone or another user's.
    """
    directory_fd = open_directory(flight_dir)
    election = Election(directory_fd)
    if not election.win():
        return
    withdraw(directory_fd)  # left by a killed predecessor: with the lock held it would count as ours
    from torchobs.node import lifetime

    lifetime.run(flight_dir, address, grace_s, election, directory_fd, load())


def _exporter() -> Serve:
    from torchobs.config import settings
    from torchobs.exporter import config
    from torchobs.exporter.daemon import configure_log, serve

    environ = settings.environment()

    def run(
        flight_dir: str, address: str, *, announce: Callable[[str, bool], None], finished: Callable[[ServiceStatus], bool]
    ) -> None:
        texts: dict[str, tuple[str, ...]] = {"mode": ("node",), "flight_dir": (flight_dir,)}
        texts |= {"listen": (address,)} if address else {}
        chosen = config.parse(texts, environ)
        configure_log(chosen)
        serve(chosen, announce=announce, finished=finished)

    return run
