"""What a way to the receiver is, and what became of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request.

    ``retry``: it may be sent again, after ``after_s`` if the receiver said so. ``refused``: it never will be taken.
    """

    kind: Literal["sent", "retry", "refused"]
    rejected: int = 0
    """data points or spans that the receiver did not take, of a request that it took otherwise"""
    after_s: float | None = None
    words: str = ""
    """what the receiver or the network said, printable"""


class Transport(Protocol):
    """A way to the receiver of one signal. One thread at a time."""

    def pack(self, message: bytes) -> bytes:
        """Return a serialised request as it will be sent: compressed, where that is the transport's business."""

    def send(self, body: bytes) -> Outcome:
        """Send a packed request and wait for the answer, no longer than the timeout. Raises nothing that a network can do."""

    def cancel(self) -> None:
        """Have the request under way fail, and all that follow. May be called by another thread."""

    def close(self) -> None:
        """Let go of the connection."""


def printable(text: str, longest: int = 200) -> str:
    """Return what a receiver said as one line for the log."""
    return "".join(character if character.isprintable() else " " for character in text[:longest]).strip()
