"""How far a rank is in each process group, by its metrics."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.collectives import GroupProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchobs.catalog import Metric

METRICS = (
    catalog.COLLECTIVE_ENQUEUED, catalog.COLLECTIVE_COMPLETED, catalog.COLLECTIVE_PENDING_AGE,
    catalog.COLLECTIVE_PENDING_SIZE,
)  # fmt: skip
"""What :func:`group_progress` asks for"""


def called(of: Callable[[Metric], Mapping[tuple[str, ...], float]]) -> dict[str, int]:
    """Return how many collectives a rank has called in each process group, as far as that is known; ``of``: as below."""
    counts = of(catalog.COLLECTIVE_ENQUEUED).items()
    return {f"{key[1]} ({key[0]})": int(number) for key, number in counts if len(key) == 2 and isfinite(number)}  # noqa: PLR2004  # attributes


def group_progress(of: Callable[[Metric], Mapping[tuple[str, ...], float]]) -> dict[str, GroupProgress]:
    """Return a rank's progress in each process group while it makes no step; empty while it does, and if that is unknown.

    ``of``: looks up a metric's values by those of its attributes, which are sorted by name.
    """
    last = of(catalog.COLLECTIVE_ENQUEUED), of(catalog.COLLECTIVE_COMPLETED)
    sizes = of(catalog.COLLECTIVE_PENDING_SIZE)
    found = {}
    for key, age_s in of(catalog.COLLECTIVE_PENDING_AGE).items():
        numbers = [number for one in last if (number := one.get(key[:2])) is not None]
        if len(key) == 3 and len(numbers) == len(last) and all(map(isfinite, (*numbers, age_s))):  # noqa: PLR2004  # attributes
            backend, group, operation = key
            enqueued, completed = map(int, numbers)
            found[f"{group} ({backend})"] = GroupProgress(enqueued, completed, age_s, operation, sizes.get(key))
    return found
