"""Decide whether the forward pass was before or after the fetch of the next batch.

``loss = model(batch); batch = next(batches); loss.backward()`` fetches the next batch while a device computes, so the time
between the fetch and the backward is no forward pass. A backward pass takes about twice the arithmetic of its forward pass
(two products for each), three times with activation checkpointing (Chen et al., 2016, arXiv:1604.06174): less than a tenth of
it cannot be a forward pass, more can. Pure: every time is an argument, in ns.
"""

from __future__ import annotations

_LEAST = 10
"""A forward pass takes at least a tenth of its backward pass."""


def is_forward_before(before_ns: int, after_ns: int, backward_ns: int) -> bool:
    """Return True if the time before a fetch was the forward pass, not the time between the fetch and the backward."""
    return after_ns * _LEAST < backward_ns <= before_ns * _LEAST
