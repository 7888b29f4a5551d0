"""What batches that were fetched ahead of their use say of the phases. Pure: every time is an argument, in ns."""

from __future__ import annotations

LEAST_USE = 0.1
"""A batch used for less than a tenth of its fetch time was only stored; so was one of the training loader that was used for
less than a tenth of the previous batch's forward pass."""


def were_stored(fetches: int, taken: int, fetch_ns: int, use_ns: int, forward_ns: int) -> bool:
    """Return True if the last batches before a loader's end were only fetched, to be trained on next.

    They were if they are no more than the ``taken`` of the last step from the same pass over the loader (0 if there was none):
    how long the process was held up between them says nothing then. A whole pass without a backward may be an evaluation.
    ``forward_ns``: the forward pass of the previous batch of that loader, 0 if there was none.
    """
    return fetches <= taken or use_ns < max(fetch_ns, forward_ns) * LEAST_USE
