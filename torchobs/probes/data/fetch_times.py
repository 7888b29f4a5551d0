"""Fetches of which it shows later what they were for. A part of ``timeline``."""

from __future__ import annotations

Undecided = dict[int, tuple[int, int, int]]
"""By loader: ns that its fetches took, ns after each up to what came next, and how many there were"""


def fetched_since(now: Undecided, then: Undecided, before: Undecided) -> Undecided:
    """Return what was undecided before, and what has become so since then."""
    found = before.copy()
    for loader, (data, rest, fetches) in now.items():
        data_then, rest_then, fetches_then = then.get(loader, (0, 0, 0))
        if fetches > fetches_then:
            data_before, rest_before, fetches_before = found.get(loader, (0, 0, 0))
            found[loader] = (
                data_before + data - data_then, rest_before + rest - rest_then, fetches_before + fetches - fetches_then,
            )  # fmt: skip
    return found
