"""``check_dataloader``: how fast a loader is, whether its workers share the work, and what is in its batches."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchobs.debug.findings import record_findings
from torchobs.debug.tensors import is_batch
from torchobs.support.arguments import is_whole
from torchobs.support.result import Checked, Problem, Result
from torchobs.tensors.batches import walk
from torchobs.tensors.running import generators, length, random_states_kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LEAST_WAIT_S = 0.01
"""A worker is slow if its batches are waited for at least this long while the others are idle"""
LEAST_ALONE = 0.9
"""Least share of a slow worker's batches with all others idle; one of equal workers may be a batch ahead for ever"""
LEAST_BATCHES = 3
"""Least batches of a worker to judge it, after the first batch"""
IMBALANCE = 10.0
"""Ratio of the most to the least frequent class at which it is reported"""
LEAST_OF_CLASS = 10
"""Least labels of the rarest class: with fewer, the ratio may be an accident of the batches taken"""
LEAST_LABELS = 100
"""Labels after which a single class is reported"""
_LABELS = ("labels", "label", "target", "targets", "y")


@dataclass(frozen=True, slots=True)
class WorkerLoad(Result):
    """What one worker did."""

    worker: int
    batches: int
    wait_s: float
    """Time that the main process waited for its batches"""
    typical_s: float
    """The median wait for one of them"""
    longest_s: float


@dataclass(frozen=True, slots=True)
class BatchPart(Result):
    """One tensor of the batches."""

    name: str
    dtype: str
    shapes: tuple[str, ...]
    """The first eight different ones"""
    pinned: bool


@dataclass(frozen=True, slots=True)
class LoaderCheck(Checked):
    """A data loader, by its first batches; fields are ``None`` if these were too few."""

    dataset: str
    dataset_size: int | None
    batch_size: int | None
    workers: int
    batches: int
    """Batches taken"""
    samples: int
    first_batch_s: float | None
    """Time to the first batch, the start of workers included"""
    median_batch_s: float | None
    longest_batch_s: float | None
    samples_per_s: float | None
    """After the first batch, with no work between batches"""
    worker_loads: tuple[WorkerLoad, ...]
    parts: tuple[BatchPart, ...]
    classes: dict[str, int]
    """Labels by class, where batches have integer labels"""
    imbalance: float | None
    """Ratio of the most to the least frequent class that occurred"""
    problems: tuple[Problem, ...]


class _Fetch(NamedTuple):
    seconds: float
    worker: int | None
    batch: Any
    alone: bool | None = None
    """Whether the other workers were idle when it came; ``None`` if they had nothing to do"""


def check_dataloader(loader: Any, *, batches: int = 20) -> LoaderCheck:
    """Take some batches of a loader and report on them. Afterwards its workers end and random states are put back.

    A ``torch.utils.data.DataLoader`` gets an iterator of its own, so that an epoch in progress goes on undisturbed. Another
    iterable that is its own iterator loses its first batches.

    Args:
        loader: a DataLoader, or any iterable of batches.
        batches: how many to take at most.

    Raises:
        TypeError: ``loader`` is not iterable, or a batch.
        ValueError: ``batches`` is not a whole number above 0.
    """
    if not hasattr(loader, "__iter__") or is_batch(loader):
        raise TypeError(f"check_dataloader() takes a DataLoader or an iterable of batches, not {type(loader).__name__}")
    if not is_whole(batches) or batches < 1:
        raise ValueError(f"check_dataloader() takes at least one batch, not {batches!r}")
    dataset = getattr(loader, "dataset", loader)
    summary, fetches = _Batches(), list[_Fetch]()
    for fetch in _fetch(loader, batches):
        summary.add(fetch)
        fetches.append(fetch._replace(batch=None))
    seconds = [fetch.seconds for fetch in fetches]
    later, after_first = seconds[1:], summary.samples - summary.first_samples
    loads = _worker_loads(fetches)
    texts = [*_slow_workers(loads, fetches), *summary.findings()]
    if not seconds:
        texts.append(("no_batch", "loader", "the loader gives no batch"))
    counts = summary.classes
    return LoaderCheck(
        dataset=type(dataset).__name__, dataset_size=length(dataset), batch_size=getattr(loader, "batch_size", None),
        workers=getattr(loader, "num_workers", 0), batches=len(seconds), samples=summary.samples,
        first_batch_s=seconds[0] if seconds else None, median_batch_s=median(later or seconds) if seconds else None,
        longest_batch_s=max(later or seconds, default=None),
        samples_per_s=after_first / sum(later) if later and sum(later) else None,
        worker_loads=loads, parts=summary.parts(), classes={str(key): counts[key] for key in sorted(counts)},
        imbalance=max(counts.values()) / min(counts.values()) if counts else None,
        problems=record_findings("check_dataloader", texts),
    )  # fmt: skip


def _fetch(loader: Any, batches: int) -> Iterator[_Fetch]:
    with random_states_kept(generators(loader)):
        begun = time.perf_counter()
        iterator = loader._get_iterator() if isinstance(loader, torch.utils.data.DataLoader) else iter(loader)
        try:
            for _ in range(batches):
                tasks = getattr(iterator, "_task_info", {})  # a task is its worker and, once that is done, the data
                next_task = tasks.get(getattr(iterator, "_rcvd_idx", None))  # torch hands batches out in order
                worker = next_task[0] if next_task else None
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                seconds = time.perf_counter() - begun
                others = [len(task) for task in tasks.values() if task[0] != worker]
                yield _Fetch(seconds, worker, batch, alone=min(others) > 1 if others else None)
                begun = time.perf_counter()
        finally:
            getattr(iterator, "_shutdown_workers", int)()


class _Batches:
    """Sums over batches."""

    def __init__(self) -> None:
        self.samples = self.first_samples = 0
        self.classes: Counter[int] = Counter()
        self._shapes: dict[str, tuple[str, dict[str, None], bool]] = {}
        self._nonfinite: set[str] = set()

    def add(self, fetch: _Fetch) -> None:
        named = list(walk(fetch.batch, "batch"))
        size = next((int(x.shape[0]) for _, x in named if x.dim()), 0)
        self.first_samples = self.first_samples or size
        self.samples += size
        for name, x in named:
            self._add_tensor(name, x)
        self._count(fetch.batch, size)

    def _add_tensor(self, name: str, x: Any) -> None:
        dtype = str(x.dtype).removeprefix("torch.")
        _, shapes, _ = self._shapes.setdefault(name, (dtype, {}, x.device.type == "cpu" and x.is_pinned()))
        shapes["x".join(map(str, x.shape)) or "scalar"] = None
        if x.is_floating_point() and x.numel() and not bool(x.isfinite().all()):
            self._nonfinite.add(name)

    def _count(self, batch: Any, size: int) -> None:
        labels = _labels(batch)
        if labels is not None and labels.dim() == 1 and len(labels) == size and not labels.is_floating_point():
            self.classes.update(labels.tolist())

    def parts(self) -> tuple[BatchPart, ...]:
        rows = self._shapes.items()
        return tuple(BatchPart(name, dtype, tuple(shapes)[:8], pinned) for name, (dtype, shapes, pinned) in rows)

    def findings(self) -> Iterator[tuple[str, str, str]]:
        """Yield kind, name and text of what is wrong with the batches."""
        for name in sorted(self._nonfinite):
            yield "nonfinite_input", name, "it has NaN or Inf"
        counts = self.classes
        if len(counts) > 1 and (rare := min(counts.values())) >= LEAST_OF_CLASS and max(counts.values()) >= IMBALANCE * rare:
            most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
            text = f"class {most} is {counts[most] / rare:.3g} times as frequent as class {least}"
            yield "class_imbalance", "classes", text
        if counts.total() >= LEAST_LABELS and len(counts) == 1:
            yield "single_class", "classes", f"all {counts.total()} labels seen are {next(iter(counts))}: is the data shuffled?"


def _labels(batch: Any) -> Any:
    """Return the labels of a batch: the part with a usual name, or the last one; ``None`` if it is no tensor."""
    if hasattr(batch, "keys"):
        labels = next((batch[name] for name in _LABELS if name in batch), None)
    else:
        labels = batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    return labels if isinstance(labels, torch.Tensor) else None


def _worker_loads(fetches: Iterable[_Fetch]) -> tuple[WorkerLoad, ...]:
    waits: dict[int, list[float]] = {}
    for index, fetch in enumerate(fetches):
        if fetch.worker is not None and index:  # the first includes the start of all workers
            waits.setdefault(fetch.worker, []).append(fetch.seconds)
    return tuple(WorkerLoad(worker, len(all_), sum(all_), median(all_), max(all_)) for worker, all_ in sorted(waits.items()))


def _slow_workers(loads: tuple[WorkerLoad, ...], fetches: Sequence[_Fetch]) -> Iterator[tuple[str, str, str]]:
    """Yield the workers that the loader waits for while the others are idle.

    The wait alone is no proof: of two equal workers, the one that began a moment later has all the waits.
    """
    judged = {load.worker: load.typical_s for load in loads if load.batches >= LEAST_BATCHES}
    for worker, wait in judged.items():
        alone = [fetch.alone for fetch in fetches[1:] if fetch.worker == worker and fetch.alone is not None]
        if sum(alone) >= LEAST_ALONE * len(alone) > 0 and wait >= LEAST_WAIT_S:
            text = f"it is waited for {wait:.3g} s a batch, while the others are idle"
            yield "slow_worker", f"worker {worker}", text
