"""Times of fetches that may belong to training or evaluation. A part of :mod:`torchobs.probes.core.timeline`."""

from __future__ import annotations

Undecided = dict[int, tuple[int, int, int]]
"""By loader: ns in its fetches, ns after each until the next boundary, and the number of fetches"""


def fetched_since(now: Undecided, then: Undecided, before: Undecided) -> Undecided:
    """Return the fetches undecided ``before``, and those that were added to ``now`` since ``then``."""
    found = before.copy()
    for loader, (data, rest, fetches) in now.items():
        data_then, rest_then, fetches_then = then.get(loader, (0, 0, 0))
        if fetches > fetches_then:
            data_before, rest_before, fetches_before = found.get(loader, (0, 0, 0))
            found[loader] = (
                data_before + data - data_then, rest_before + rest - rest_then, fetches_before + fetches - fetches_then,
            )  # fmt: skip
    return found
