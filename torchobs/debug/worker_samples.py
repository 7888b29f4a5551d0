"""Whether the workers of a loader give the same samples: an iterable data set that they do not share out.

All workers may begin alike, or each may shuffle what all of them read. In data that is shared out, samples may be equal by
accident, but then within a worker as well: the first two samples of a value come from two workers with the probability that any
two samples do, or a smaller one where equal samples lie side by side, in one worker's batch.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torchobs.debug.chance import CHANCE, most_probability

if TYPE_CHECKING:
    from collections.abc import Iterator

_ADVICE = "an IterableDataset splits its samples by torch.utils.data.get_worker_info()"


class WorkerSamples:
    """What each worker gave, as hashes.

    ``by_sample``: compare all samples, and not the first batches alone.
    """

    def __init__(self, *, by_sample: bool) -> None:
        self._by_sample = by_sample
        self._first_batches: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self._first: dict[int, int] = {}
        """Worker of a value's first sample"""
        self._second: dict[int, int] = {}

    def add(self, worker: int, tensors: list[Any], size: int) -> None:
        """Count a batch: its tensors, and the number of its samples, which are the tensors' rows."""
        if worker not in self._first_batches and tensors:
            self._first_batches[worker] = hash(b"".join(map(_bytes, tensors)))
        if not self._by_sample:
            return
        for row in zip(*(map(_bytes, x) for x in tensors if x.dim() and len(x) == size), strict=True):
            value = hash(row)
            self._counts[worker] += 1
            if value in self._first:
                self._second.setdefault(value, worker)
            else:
                self._first[value] = worker

    def findings(self) -> Iterator[tuple[str, str, str]]:
        """Yield kind, name and text of what is wrong."""
        if len(self._first_batches) > 1 and len(set(self._first_batches.values())) == 1:
            text = f"all {len(self._first_batches)} workers begin with the same batch: {_ADVICE}"
            yield "duplicated_data", "workers", text
            return
        between = sum(self._first[value] != worker for value, worker in self._second.items())
        if between and most_probability(between, len(self._second), self._chance_of_two_workers()) <= CHANCE:
            text = f"{between} of {len(self._first)} different samples seen come from more than one worker: {_ADVICE}"
            yield "duplicated_data", "workers", text

    def _chance_of_two_workers(self) -> float:
        """Return the probability that two samples, drawn of all, are of two workers."""
        total = self._counts.total()
        within = sum(count * (count - 1) for count in self._counts.values())
        return 1 - within / (total * (total - 1))


def _bytes(x: Any) -> bytes:
    import torch

    whole = x.int_repr() if x.is_quantized else x.detach()  # a view of a quantised tensor's bits ends the process
    return bytes(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if x.numel() else b""
