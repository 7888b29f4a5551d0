"""``profile``: where the time of steps, a loop or a block goes, by ``torch.profiler``; its table, and trace files."""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, overload

from torchobs.debug import operations
from torchobs.debug.findings import record_findings
from torchobs.debug.tensors import is_batch
from torchobs.runtime.profiler import Recording
from torchobs.support.arguments import is_whole
from torchobs.support.result import Checked, Problem, fill
from torchobs.tensors.references import collections_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from typing_extensions import Unpack

T = TypeVar("T")
_ROWS, _STACK = 15, 5
"""Rows of the table; lines of recorded stacks by which operators are grouped"""
INTERRUPTED = "nothing is kept: the program's own profiler began before this one ended, and torch allows one"


@dataclass(frozen=True, slots=True)
class Profile(Checked):
    """Recorded steps; fields are empty before the recording ends."""

    name: str
    steps: int | None = None
    time_s: float | None = None
    """Wall time of all recorded steps, with the profiler's own cost"""
    step_time_s: float | None = None
    batch_size: int | None = None
    sample_time_s: float | None = None
    cpu_time_s: float | None = None
    """Time of operators and what they call, on the host, without the Python code around them"""
    device_time_s: float | None = None
    """Time of kernels and copies; ``None`` if no device computed"""
    flops: int | None = None
    """Torch's estimate, for matrix products and convolutions"""
    top_operator: str | None = None
    """The operator with the most time of its own, on the device if one computes"""
    trace: str | None = None
    tensorboard: str | None = None
    problems: tuple[Problem, ...] = ()
    table: str = ""
    """Torch's ``key_averages().table()``: by input shape, and by stack if stacks are recorded"""


class _Options(TypedDict, total=False):
    """Keyword arguments of :func:`profile`."""

    batch_size: int | None
    stacks: bool
    trace: str | Path | None
    tensorboard: str | Path | None


@overload
def profile(what: str = ..., **options: Unpack[_Options]) -> AbstractContextManager[Profile]: ...  # type: ignore[overload-overlap]  # a text is no loop
@overload
def profile(
    what: Callable[[], Any], wait: int = ..., warmup: int = ..., active: int = ..., **options: Unpack[_Options]
) -> Profile: ...
@overload
def profile(
    what: Iterable[T], wait: int = ..., warmup: int = ..., active: int = ..., **options: Unpack[_Options]
) -> ProfiledLoop[T]: ...
def profile(  # noqa: PLR0913  # a schedule, and what to write
    what: Any = "block", wait: int = 1, warmup: int = 1, active: int = 10, *, batch_size: int | None = None,
    stacks: bool = False, trace: str | Path | None = None, tensorboard: str | Path | None = None,
) -> Any:  # fmt: skip
    """Profile training steps, a loop or a ``with`` block with ``torch.profiler``.

    Args:
        what: a function of no arguments that takes one step: it is called ``wait + warmup + active`` times, and a
            :class:`Profile` returned. Or an iterable of batches: iterate over the returned loop instead; its ``result`` is the
            profile once the steps are recorded, and the other batches follow without the profiler. Or a name: the block of the
            returned context manager counts as one step; the profile that it yields is filled at the end, also when the block
            raises.
        wait: steps that are skipped.
        warmup: steps with the profiler running but discarded (its start makes the first ones slow).
        active: steps that are recorded.
        batch_size: samples of a step, for the time by sample.
        stacks: record Python stacks; the table has a row for each. Small operators become several times slower.
        trace: file for a Chrome trace (``.json`` or ``.json.gz``), for Perfetto or ``chrome://tracing``.
        tensorboard: directory for a trace that TensorBoard's profiler plugin reads.

    Raises:
        TypeError: the first argument is none of these, or a batch instead of a loader.
        ValueError: a number of steps is out of range, or the directory of ``trace`` does not exist.
        RuntimeError: another profiler is running, in any thread; torch allows one.
    """
    if not all(map(is_whole, (wait, warmup, active))) or wait < 0 or warmup < 0 or active < 1:
        numbers = ", ".join(map(repr, (wait, warmup, active)))
        raise ValueError(f"profile() needs wait and warmup >= 0, active >= 1, whole numbers, not {numbers}")
    name = what if isinstance(what, str) else "profile"
    result = Profile(name, batch_size=batch_size)
    begin = partial(Recorder, result, stacks=stacks, trace=_trace_path(trace), tensorboard=tensorboard)
    if isinstance(what, str):
        return _block(begin)
    if hasattr(what, "__iter__") and not is_batch(what):
        return ProfiledLoop(what, result, begin, (wait, warmup, active))
    if not callable(what):
        kind = type(what).__name__
        raise TypeError(f"profile() takes a function that takes one step, a loader, or the name of a block, not {kind}")
    for _ in ProfiledLoop(range(wait + warmup + active), result, begin, (wait, warmup, active)):
        what()
    return result


@contextmanager
def _block(begin: Callable[[], Recorder]) -> Iterator[Profile]:
    recorder = begin()
    recorder.start()
    try:
        yield recorder.result
    finally:
        recorder.finish(1)


def _trace_path(trace: str | Path | None) -> Path | None:
    path = None if trace is None else Path(trace)
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"there is no directory {path.parent} for the trace: create it, or name another file")
    if path is not None and not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"a Chrome trace is a .json or .json.gz file, not {path.name!r}")
    return path


class Recorder(Recording):
    """A recording that fills a :class:`Profile`.

    ``light``: without shapes, memory and FLOPs, and over all threads, so that any thread can end it.
    """

    def __init__(
        self, result: Profile, *, stacks: bool = False, trace: Path | None = None, tensorboard: str | Path | None = None,
        light: bool = False,
    ) -> None:  # fmt: skip
        options: dict[str, Any] = dict.fromkeys(("record_shapes", "profile_memory", "with_flops"), not light)
        options |= {"with_stack": stacks, "verbose": stacks}  # without `verbose` events have no stack
        super().__init__(f"torchobs.debug, {result.name!r}", all_threads=light, **options)
        self.result = result
        self._stacks, self._light, self._trace, self._tensorboard = stacks, light, trace, tensorboard
        self._begun = 0.0

    def start(self) -> None:
        """Record from now on."""
        super().start()
        operations.wait_for_devices()
        self._begun = time.perf_counter()

    def finish(self, steps: int) -> None:
        """Stop, and if it was started, fill the result from what was recorded in that many steps."""
        operations.wait_for_devices()
        elapsed = time.perf_counter() - self._begun
        if not self.stop():
            fill(self.result, problems=record_findings("profile", [("interrupted", self.result.name, INTERRUPTED)]))
        elif self._begun:
            with collections_paused():  # torch 2.13 has crashed when garbage was collected while it parsed its events
                self._summarize(steps, elapsed)
                if self._trace is not None or self._tensorboard is not None:
                    self._write()

    def _summarize(self, steps: int, elapsed: float) -> None:
        averages = self.profiler.key_averages()
        device, host = device_and_host_time(averages)
        cost = "self_device_time_total" if device else "self_cpu_time_total"
        operators = sorted((row for row in _on_host(averages) if "::" in row.key), key=attrgetter(cost), reverse=True)
        groups = self.profiler.key_averages(
            group_by_input_shape=not self._light, group_by_stack_n=_STACK if self._stacks else 0
        )
        step_s, size = elapsed / steps if steps else None, self.result.batch_size
        fill(
            self.result, steps=steps, time_s=elapsed, step_time_s=step_s, sample_time_s=step_s and size and step_s / size,
            device_time_s=device or None, cpu_time_s=host, flops=sum(int(row.flops or 0) for row in operators),
            top_operator=operators[0].key if operators else None, table=groups.table(sort_by=cost, row_limit=_ROWS),
        )  # fmt: skip

    def _write(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            written = Path(directory, "trace.json")
            self.profiler.export_chrome_trace(str(written))  # torch writes a trace once
            if self._trace is not None:
                with (gzip.open if self._trace.suffix == ".gz" else Path.open)(self._trace, "wb") as file:
                    file.write(written.read_bytes())
                fill(self.result, trace=str(self._trace))
            if self._tensorboard is not None:
                folder = Path(self._tensorboard)
                folder.mkdir(parents=True, exist_ok=True)
                # the plugin takes the name apart: worker, time, ending
                shutil.copyfile(written, folder / f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace.json")
                fill(self.result, tensorboard=str(folder))


def device_and_host_time(rows: Iterable[Any]) -> tuple[float, float]:
    """Return the seconds of kernels and copies, and those of operators on the host, by rows of ``key_averages()``.

    Rows of ``record_function`` do not count: that on the host has the time of Python code, that on the device spans kernels.
    """
    rows = list(rows)
    device = (row.self_device_time_total for row in rows if row.device_type.name != "CPU" and not row.is_user_annotation)
    return sum(device) / 1e6, sum(row.self_cpu_time_total for row in _on_host(rows)) / 1e6


def _on_host(rows: Iterable[Any]) -> list[Any]:
    return [row for row in rows if row.device_type.name == "CPU" and not row.is_user_annotation and row.key != "[memory]"]


class ProfiledLoop(Generic[T]):
    """The batches of a loop; the profiler starts and stops as they are taken."""

    def __init__(
        self, batches: Iterable[T], result: Profile, begin: Callable[[], Recorder], schedule: tuple[int, int, int]
    ) -> None:
        self.result = result
        """Its ``steps`` is ``None`` until all active steps were taken, or the loop has ended"""
        self._batches, self._begin, self._schedule = batches, begin, schedule

    def __iter__(self) -> Iterator[T]:
        wait, warmup, active = self._schedule
        first, last, taken = wait + warmup, wait + warmup + active, 0
        recorder: Recorder | None = None
        try:
            for batch in self._batches:
                if taken == wait:
                    recorder = self._begin()
                if recorder is not None and taken == first:
                    recorder.start()
                elif recorder is not None and taken == last:
                    recorder.finish(active)
                    recorder = None
                yield batch
                taken += 1
        finally:  # the loop has ended, or left by break or an exception
            if recorder is not None:
                recorder.finish(max(0, min(taken, last) - first))
            if not self.result.steps and not self.result.problems:
                text = f"no step was recorded: the loop ended within wait={wait} and warmup={warmup} steps, or in the next"
                fill(self.result, problems=record_findings("profile", [("not_profiled", "profile", text)]))
