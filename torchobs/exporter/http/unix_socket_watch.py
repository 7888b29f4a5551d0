"""Detect listening Unix sockets whose file was removed or replaced, for instance with its directory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.exporter.http.unix_socket import UnixSocket


class Named:
    """Checks the paths in a background thread. To be used in one event loop."""

    def __init__(self) -> None:
        self._looking: asyncio.Future[list[UnixSocket]] | None = None

    def lost(self, bound: Iterable[UnixSocket]) -> list[UnixSocket]:
        """Return the sockets without a path as of the last check, and start the next check. Returns at once.

        Checks run in a thread, so that a hanging file system blocks nothing else.
        """
        if self._looking is not None and not self._looking.done():
            return []
        found = self._looking.result() if self._looking is not None else []
        self._looking = asyncio.get_running_loop().run_in_executor(None, _without_name, list(bound))
        return found


def _without_name(bound: list[UnixSocket]) -> list[UnixSocket]:
    return [one for one in bound if not one.is_named]
