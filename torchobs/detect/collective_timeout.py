"""From the message of an exception to the timeout of a collective: how long it waited, and for which ranks. Pure.

Torch raises ``RuntimeError`` there; the messages are those of torch 2.0 to 2.13 (``ProcessGroupGloo.cpp``,
``ProcessGroupNCCL.cpp``, ``TCPStore.cpp``, ``distributed_c10d.py``) and of gloo (``transport/tcp``). Only numbers are taken.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torchobs import catalog

COLLECTIVE, BARRIER, RENDEZVOUS = catalog.COLLECTIVE_TIMEOUTS
"""A collective operation; ``monitored_barrier``, which knows who is absent; the store by which ranks find each other."""

_LONGEST = 4096
"""Characters that are read: a message begins with what has happened."""
_MOST_RANKS = 64
_MS = 1e-3
# the first that is found: a barrier's message goes on with that of the operation that it is made of
_PATTERNS = (
    (BARRIER, re.compile(r"Ranks? ([\d, ]{1,1000}) failed to pass monitoredBarrier in (\d{1,12}) ms"), _MS),
    (COLLECTIVE, re.compile(r"Timed out waiting (\d{1,12})ms for (?:recv|send) operation"), _MS),
    (COLLECTIVE, re.compile(r"[Cc]aught collective operation timeout:.{0,400}?Timeout\(ms\)=(\d{1,12})", re.DOTALL), _MS),
    (COLLECTIVE, re.compile(r"[Cc]aught collective operation timeout"), 0.0),
    (COLLECTIVE, re.compile(r"Application timeout caused pair closure"), 0.0),
    (RENDEZVOUS, re.compile(r"Timed out after (\d{1,9}) seconds waiting for clients"), 1.0),
    (RENDEZVOUS, re.compile(r"wait timeout after (\d{1,12})ms, keys:"), _MS),
    (RENDEZVOUS, re.compile(r"Timed out initializing process group in store based barrier"), 0.0),
)  # fmt: skip
_RECEIVED_ERRORS = re.compile(r"successfully reached monitoredBarrier, but received errors")
"""Of the ranks that came, when one did not"""


class CollectiveTimeout(NamedTuple):
    """A rank gave up waiting for another."""

    kind: str
    """one of ``catalog.COLLECTIVE_TIMEOUTS``"""
    seconds: float | None
    """the timeout; ``None``: not in the message"""
    absent: tuple[int, ...]
    """ranks that did not come; empty: not in the message"""


def parse(message: str) -> CollectiveTimeout | None:
    """Return the timeout that the message of a ``RuntimeError`` tells of; ``None`` if it is about something else."""
    message = message[:_LONGEST]
    for kind, pattern, unit_s in _PATTERNS:
        found = pattern.search(message)
        if found is not None:
            *ranks, number = found.groups() or ("0",)
            absent = [int(one) for one in re.findall(r"\d{1,9}", ranks[0])] if ranks else []
            return CollectiveTimeout(kind, int(number) * unit_s if unit_s else None, tuple(absent[:_MOST_RANKS]))
    return CollectiveTimeout(BARRIER, None, ()) if _RECEIVED_ERRORS.search(message) else None
