"""Is the forward pass before the fetch of the next batch, or behind it?

``loss = model(batch); batch = next(batches); loss.backward()`` fetches the next batch while a device computes. What lies
between the fetch and the backward is no forward pass then. A backward pass takes about twice the arithmetic of its forward pass
(two products for each), three times with activation checkpointing (Chen et al., 2016, arXiv:1604.06174): what is less than a
tenth of it cannot be one, and what is more can. Pure: every time is an argument, in ns.
"""

from __future__ import annotations

_LEAST = 10
"""A forward pass takes no less than a tenth of its backward pass."""


def is_forward_before(before_ns: int, after_ns: int, backward_ns: int) -> bool:
    """Return True if what was before a fetch was the forward pass, and not what was between it and the backward."""
    return after_ns * _LEAST < backward_ns <= before_ns * _LEAST
