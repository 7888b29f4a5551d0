"""No-op API for unsupported processes: systems without POSIX locks and shared maps, and free-threaded Python without the GIL.

``init()`` warns once; training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from torchobs.config import settings

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

SUPPORTED = ("linux", "darwin")
_warned: list[bool] = []


def why_here() -> str:
    """Return the reason why torchobs does nothing in this process; "" if it is supported.

    Data shared by the training thread and the sampler is protected by the GIL alone: without it records would be torn, and hook
    lists would change during iteration. A free-threaded Python (3.13t, 3.14t) with the GIL turned on works.
    """
    if sys.platform not in SUPPORTED:
        return f"does nothing on {sys.platform}; Linux and macOS are supported"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "needs the GIL and does nothing in a free-threaded Python; PYTHON_GIL=1 turns the GIL on"
    return ""


class Session:
    """Inert session that ``init()`` returns."""

    active = False
    writer = None

    def __enter__(self) -> Session:  # noqa: PYI034  # typing.Self needs Python 3.11
        """Return the session."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def note_exit(self, code: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def init(**_: object) -> Session:
    """Warn once that nothing is recorded here."""
    if not _warned and settings.environment().get("LOCAL_RANK", "0") == "0":  # once per node
        _warned.append(True)
        logging.getLogger("torchobs").warning("torchobs: %s; training is not affected", why_here())
    return Session()


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


shutdown = step = log = event = watch = nothing


def phase(name: str) -> AbstractContextManager[None]:
    """Return a context manager that does nothing."""
    del name
    return contextlib.nullcontext()
