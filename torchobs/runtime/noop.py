"""torchobs where it does nothing: systems without POSIX locks and shared maps. ``init()`` says so once; training goes on."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

SUPPORTED = ("linux", "darwin")
_said: list[bool] = []


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
    if not _said:
        _said.append(True)
        logging.getLogger("torchobs").warning("torchobs: does nothing on %s; Linux and macOS are supported", sys.platform)
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
