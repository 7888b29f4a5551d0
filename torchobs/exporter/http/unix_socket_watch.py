"""Unix sockets whose name leads elsewhere by now, or nowhere: their directory was deleted, or somebody was tidy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.exporter.http.unix_socket import UnixSocket


class Named:
    """Looks at the names now and then. To be used in one event loop."""

    def __init__(self) -> None:
        self._looking: asyncio.Future[list[UnixSocket]] | None = None

    def lost(self, bound: Iterable[UnixSocket]) -> list[UnixSocket]:
        """Return those that had lost their name at the last look, and have the next one begin. Returns at once.

        The looks are a thread's: a directory that does not answer holds up that thread, and nobody else.
        """
        if self._looking is not None and not self._looking.done():
            return []
        found = self._looking.result() if self._looking is not None else []
        self._looking = asyncio.get_running_loop().run_in_executor(None, _without_name, list(bound))
        return found


def _without_name(bound: list[UnixSocket]) -> list[UnixSocket]:
    return [one for one in bound if not one.is_named]
