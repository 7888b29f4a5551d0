"""torchobs where it does nothing: systems without POSIX locks and shared maps, and Python without its global interpreter lock.

``init()`` says so once; training goes on.
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
_said: list[bool] = []


def why_here() -> str:
    """Return why torchobs does nothing in this process; "" if it works.

    What the training thread and the sampler share is ordered by the interpreter's lock alone: without it records would be torn,
    and hooks are changed while they are walked. A free-threaded Python (3.13t, 3.14t) with the lock turned on will do.
    """
    if sys.platform not in SUPPORTED:
        return f"does nothing on {sys.platform}; Linux and macOS are supported"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "needs the GIL and does nothing in a free-threaded Python; PYTHON_GIL=1 turns the GIL on"
    return ""


class Session:
    """What ``init()`` returns: inert."""

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
    """Say once that nothing is recorded here."""
    if not _said and settings.environment().get("LOCAL_RANK", "0") == "0":  # one of a node's ranks says it for all
        _said.append(True)
        logging.getLogger("torchobs").warning("torchobs: %s; training is not affected", why_here())
    return Session()


def shutdown() -> None:
    """Do nothing."""


def step() -> None:
    """Do nothing."""


def log(**_: Any) -> None:
    """Do nothing."""


def event(name: str, **_: Any) -> None:
    """Do nothing."""


def watch(model: Any) -> None:
    """Do nothing."""


def phase(name: str) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    del name
    return contextlib.nullcontext()
