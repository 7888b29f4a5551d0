"""Spans and log records as serialised requests of a size that every receiver accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
Packed = list[tuple[bytes, int]]
"""Each request with the number of its data points, spans or log records"""

MOST_ITEMS = 512
"""Spans or log records of one request: the SDK's default."""
MOST_BYTES = 2 * 1024**2
"""Size of one request: gRPC receivers accept 4 MiB by default."""


def packed(items: Sequence[T], build: Callable[[Sequence[T]], Any]) -> Packed:
    """Return requests that hold the items; ``build`` makes the message of some of them. One that is too large is halved."""
    parts = (items[begin : begin + MOST_ITEMS] for begin in range(0, len(items), MOST_ITEMS))
    return [request for part in parts for request in _halved(part, build)]


def _halved(items: Sequence[T], build: Callable[[Sequence[T]], Any]) -> Packed:
    request = build(items)
    if request.ByteSize() > MOST_BYTES and len(items) > 1:
        half = len(items) // 2
        return [*_halved(items[:half], build), *_halved(items[half:], build)]
    return [(request.SerializeToString(), len(items))]
