"""Views of the ranks of a scanner's snapshot, as the live page and ``top`` show them, with the contents of their rings."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Protocol

from torchobs import catalog
from torchobs.flight.events import Tail
from torchobs.flight.layout import Region
from torchobs.flight.throughput import RECORDS as LATEST
from torchobs.flight.throughput import pace
from torchobs.ranks import comparison, labels
from torchobs.ranks.events import extended
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.ranks.rank_view import NOT_READ, Recorded, RunView, run_of, steps_of, view_of
from torchobs.ranks.snapshot import Reader, grouped

if TYPE_CHECKING:
    from torchobs.flight.reader import FlightFile
    from torchobs.flight.step_record import StepRecord
    from torchobs.ranks.snapshot import Rank, Snapshot

LEAST_RECORDS = 64
RECORDS = 16_384
"""Records kept over all ranks, at least 64 of each; a new one takes 10 µs, an old one 2. Beyond 64 ranks, the throughput of
ranks that are not focused is over fewer steps."""
EVENTS_S = 0.2
"""Time limit per update for event rings, which take up to 5 ms each at first; the next update reads the remaining ones."""
MOST_FOCUSED = 16
MOST_RUNS = 50
KEPT = 4096
"""Steps of a focused rank: as many as the ring has records."""
LAYERS = {
    "gradient": (catalog.GRAD_LAYER_NORM, "gradient norm"),
    "weights": (catalog.PARAM_LAYER_NORM, "weight norm"),
    "update": (catalog.UPDATE_LAYER_RATIO, "update / weights"),
    "output": (catalog.ACTIVATION_LAYER_MEAN_ABS, "mean output"),
    "spread": (catalog.ACTIVATION_LAYER_STD, "its deviation"),
    "zero": (catalog.ACTIVATION_LAYER_ZERO, "its zeros"),
}
"""Columns of the layers' table: the metric, and its heading. The last three at level extreme: the mean absolute value of a
layer's output, its standard deviation, and the share that is exactly zero."""
METRICS = (
    catalog.STEPS, catalog.LOSS, catalog.LEARNING_RATE, catalog.STEPS_PLANNED, catalog.GRAD_NORM,
    catalog.GRAD_CLIPPED_STEPS, catalog.GRAD_NONFINITE_STEPS, catalog.ANOMALIES, catalog.ANOMALY_ACTIVE,
    catalog.GOODPUT_TIME, catalog.AMP_SCALE, catalog.AMP_STEPS_SKIPPED, catalog.AMP_SKIP_STREAK,
    catalog.AMP_AUTOCAST, catalog.COMPILE_TIME, catalog.COMPILE_COMPILATIONS, catalog.COMPILE_GRAPH_BREAKS,
    catalog.COMPILE_FAILURES, catalog.COMPILE_IN_PROGRESS, catalog.MEMORY_DEVICE_ALLOCATED,
    catalog.MEMORY_DEVICE_RESERVED, catalog.MEMORY_DEVICE_PEAK, catalog.MEMORY_DEVICE_LIMIT, catalog.MEMORY_HOST_RSS,
    catalog.MEMORY_HOST_CHILDREN_RSS, catalog.MEMORY_HOST_UTILIZATION, catalog.MEMORY_TIME_TO_LIMIT,
    catalog.CGROUP_MEMORY_WORKING_SET, catalog.CGROUP_MEMORY_LIMIT, catalog.CHECKPOINTS, catalog.CHECKPOINT_TIMESTAMP,
    catalog.CHECKPOINT_SIZE, catalog.CHECKPOINT_FAILURE_STREAK,
    catalog.SCALAR_VALUE, catalog.DATA_STARVED, catalog.GRAD_UNMOVED_LAYERS, catalog.STEP_PHASE_TIME, catalog.PROBE_DISABLED,
    catalog.DISTRIBUTED_INFO, catalog.GRAD_NORM_RANKS, catalog.MFU, catalog.MODEL_PARAMETERS, *comparison.COLLECTIVE_METRICS,
    catalog.DATA_WORKERS_DIED, catalog.HW_STATUS, catalog.MEMORY_HOST_AVAILABLE, catalog.CGROUP_MEMORY_PEAK,
    catalog.MEMORY_SHARED_USED, catalog.MEMORY_SHARED_SIZE, catalog.CGROUP_MEMORY_OOM_KILLS, catalog.FLIGHT_DROPPED,
    catalog.GRAD_ZERO, catalog.DATA_BATCHES_READY,
    *(metric for metric, _ in LAYERS.values()),
)  # fmt: skip
"""Metrics read from a rank."""
_UNREAD = object()


class FileSource(Protocol):
    """A scanner, or another lender of its files."""

    def flight_file(self, incarnation: str) -> AbstractContextManager[FlightFile]:
        """Lend a rank's file. Raises one of ``READ_ERRORS``."""


Details = Mapping[str, Recorded]
"""Contents of the ranks' rings, by incarnation"""


class _RingReader:
    """Reads the new contents of one rank's rings."""

    def __init__(self, rank: Rank) -> None:
        header = rank.view.header
        self._header = header
        self.recorded = NOT_READ
        self._records: list[StepRecord] = []
        self._tail = Tail(header.regions[Region.EVENTS].length, header.seed)
        self._core: object = _UNREAD
        """the values of the rank when its records were read"""
        self._limit = 0
        self._event_head = -1

    def read_steps(self, files: FileSource, rank: Rank, limit: int) -> None:
        core = rank.view.blocks[0] if rank.view.blocks else None
        if core is self._core and limit <= self._limit:
            return
        with suppress(*READ_ERRORS), files.flight_file(rank.incarnation) as file:  # gone or unreadable: earlier data stays
            self._records = file.latest(limit, self._records if limit <= self._limit else ())
            steps = steps_of(self._records, self._header, self.recorded.steps)
            share = file.forward_share()
            self.recorded = self.recorded._replace(steps=steps, pace=pace(self._records, share), share=share)
            self._core, self._limit = core, limit

    def read_events(self, files: FileSource, rank: Rank) -> None:
        head = rank.view.live.event_head
        if head != self._event_head:
            with suppress(*READ_ERRORS), files.flight_file(rank.incarnation) as file:
                fresh = file.fresh_events(self._tail, head)
                oldest = head - self._header.regions[Region.EVENTS].length
                self.recorded = self.recorded._replace(events=extended(self.recorded.events, fresh, oldest))
            self._event_head = head


class DetailsReader:
    """Reads the ranks' rings, and keeps their contents per incarnation. To be used in one thread."""

    def __init__(self) -> None:
        self._readers: dict[str, _RingReader] = {}

    def gather(self, files: FileSource, snapshot: Snapshot, focused: Iterable[str]) -> Details:
        """Return the details of all ranks of a snapshot, with all steps of the incarnations in ``focused``."""
        chosen = list(dict.fromkeys(focused))[:MOST_FOCUSED]
        limit = min(LATEST, max(LEAST_RECORDS, RECORDS // max(1, len(snapshot.ranks))))
        self._readers = {rank.incarnation: self._readers.get(rank.incarnation) or _RingReader(rank) for rank in snapshot.ranks}
        for rank in snapshot.ranks:
            self._readers[rank.incarnation].read_steps(files, rank, KEPT if rank.incarnation in chosen else limit)
        deadline = time.perf_counter() + EVENTS_S
        for rank in sorted(snapshot.ranks, key=lambda rank: (rank.incarnation not in chosen, rank.up)):
            if time.perf_counter() > deadline:
                break
            self._readers[rank.incarnation].read_events(files, rank)
        return {incarnation: reader.recorded for incarnation, reader in self._readers.items()}


class RunsReader:
    """Builds the runs of a snapshot; caches where each rank's values are in its file."""

    def __init__(self) -> None:
        self._reader = Reader(METRICS)

    def runs(self, snapshot: Snapshot, details: Details, requested: Collection[str] = ()) -> tuple[RunView, ...]:
        """Return the runs in order: the first ones, and those with a key in ``requested``."""
        self._reader.keep(snapshot.ranks)
        runs = []
        for index, ranks in enumerate(grouped(snapshot.ranks)):
            if index < MOST_RUNS or key_of(ranks) in requested:
                views = [view_of(rank, self._reader.read(rank), details.get(rank.incarnation, NOT_READ)) for rank in ranks]
                sizes = ("world_size", "local_world_size")
                world, here = (max(labels.number(rank.view.header.resource, name) or 0 for rank in ranks) for name in sizes)
                runs.append(run_of(views, here or world, world))
        return tuple(runs)


def key_of(ranks: Iterable[Rank]) -> str:
    """Return the key of a run in links."""
    return next(f"{rank.job_name}/{rank.run_id}" for rank in ranks)
