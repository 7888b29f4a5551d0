"""What a batch fetched ahead of its use says of the phases.

``loss = model(batch); batch = next(batches); loss.backward()`` fetches the next batch while a device computes, so the time
between the fetch and the backward is no forward pass. A backward pass takes about twice the arithmetic of its forward pass
(two products for each), three times with activation checkpointing (Chen et al., 2016, arXiv:1604.06174): less than a tenth of
it cannot be a forward pass, more can. Pure: every time is an argument, in ns.
"""

from __future__ import annotations

_LEAST = 10
"""A forward pass takes at least a tenth of its backward pass."""
LEAST_USE = 0.1
"""A batch used for less than a tenth of its fetch time was only stored; so was one of the training loader that was used for
less than a tenth of the previous batch's forward pass."""


def is_forward_before(before_ns: int, after_ns: int, backward_ns: int) -> bool:
    """Return True if the time before a fetch was the forward pass, not the time between the fetch and the backward."""
    return after_ns * _LEAST < backward_ns <= before_ns * _LEAST


def were_stored(fetches: int, taken: int, fetch_ns: int, use_ns: int, forward_ns: int) -> bool:
    """Return True if the last batches before a loader's end were only fetched, to be trained on next.

    They were if they are no more than the ``taken`` of the last step from the same pass over the loader (0 if there was none):
    how long the process was held up between them says nothing then. A whole pass without a backward may be an evaluation.
    ``forward_ns``: the forward pass of the previous batch of that loader, 0 if there was none.
    """
    return fetches <= taken or use_ns < max(fetch_ns, forward_ns) * LEAST_USE
