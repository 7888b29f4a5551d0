"""``profile`` and ``profiling_context``: where the time of steps goes, by ``torch.profiler``: its table, and trace files."""

from __future__ import annotations

import gc
import gzip
import os
import shutil
import socket
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from torchobs.debug import operations
from torchobs.debug.findings import told
from torchobs.probes.core.torch_profiler import Recording
from torchobs.support.arguments import is_whole
from torchobs.support.result import Result, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
TOP = 15
_STACK = 5
"""Lines of the stack by which operators are grouped, where stacks are recorded"""
INTERRUPTED = "nothing is kept: the program's own profiler began before this one ended, and torch allows one"


@dataclass(frozen=True, slots=True)
class Profile(Result):
    """Recorded steps; empty before they are. Times in seconds."""

    name: str
    steps: int | None = None
    time: float | None = None
    """Of all recorded steps, by the clock, with the profiler's own cost"""
    time_per_step: float | None = None
    batch_size: int | None = None
    time_per_sample: float | None = None
    cpu_time: float = 0.0
    """Of operators and what they call, on the host; without Python code around them (``record_function``)"""
    device_time: float = 0.0
    """Of kernels and copies"""
    flops: int = 0
    """Estimated by torch, of matrix products and convolutions"""
    top_operator: str | None = None
    """That which took the most time itself, on the device where one computes"""
    trace: str | None = None
    tensorboard: str | None = None
    anomalies: tuple[str, ...] = ()
    table: str = ""
    """Torch's own, ``key_averages().table()``: by input shape where shapes are recorded, by stack where stacks are"""


@overload
def profile(
    fn_or_loop: Callable[[], Any], wait: int = ..., warmup: int = ..., active: int = ..., *, batch_size: int | None = ...,
    shapes: bool = ..., stacks: bool = ..., memory: bool = ..., flops: bool = ..., top: int = ...,
    trace: str | Path | None = ..., tensorboard: str | Path | None = ...,
) -> Profile: ...  # fmt: skip
@overload
def profile(
    fn_or_loop: Iterable[T], wait: int = ..., warmup: int = ..., active: int = ..., *, batch_size: int | None = ...,
    shapes: bool = ..., stacks: bool = ..., memory: bool = ..., flops: bool = ..., top: int = ...,
    trace: str | Path | None = ..., tensorboard: str | Path | None = ...,
) -> ProfiledLoop[T]: ...  # fmt: skip
def profile(  # noqa: PLR0913  # options of torch.profiler, by keyword
    fn_or_loop: Any, wait: int = 1, warmup: int = 1, active: int = 10, *, batch_size: int | None = None, shapes: bool = True,
    stacks: bool = False, memory: bool = True, flops: bool = True, top: int = TOP, trace: str | Path | None = None,
    tensorboard: str | Path | None = None,
) -> Any:  # fmt: skip
    """Profile training steps with ``torch.profiler``: skip some, warm up, then record.

    Args:
        fn_or_loop: a function of no arguments that takes one step: it is called ``wait + warmup + active`` times, and a
            :class:`Profile` returned. Or an iterable of batches: what is returned is iterated instead, and its ``result`` is
            the profile when the steps are recorded; iteration goes on to the end without the profiler.
        wait: steps that are skipped.
        warmup: steps with the profiler running but discarded (its start makes the first ones slow).
        active: steps that are recorded.
        batch_size: samples of a step, for the time by sample.
        shapes: record input shapes; the table has a row for each.
        stacks: record Python stacks; the table has a row for each. It makes small operators several times slower.
        memory: record allocations.
        flops: estimate floating-point operations of matrix products and convolutions.
        top: rows of the table.
        trace: write a Chrome trace there (``.json`` or ``.json.gz``), for Perfetto or ``chrome://tracing``.
        tensorboard: write a trace into this directory for TensorBoard's profiler plugin.

    Raises:
        TypeError: the first argument is neither.
        ValueError: a number of steps is out of range, or the directory of ``trace`` does not exist.
        RuntimeError: another profiler is running, in whichever thread; torch allows one.
    """
    if not all(map(is_whole, (wait, warmup, active, top))) or wait < 0 or warmup < 0 or active < 1 or top < 1:
        found = ", ".join(map(repr, (wait, warmup, active, top)))
        raise ValueError(f"profile() needs wait and warmup >= 0, active and top >= 1, whole numbers, not {found}")
    options = {"record_shapes": shapes, "with_stack": stacks, "profile_memory": memory, "with_flops": flops}
    recorder = Recorder("profile", options, batch_size, top, _existing(trace), tensorboard)
    loop = ProfiledLoop(fn_or_loop, recorder, (wait, warmup, active))
    if hasattr(fn_or_loop, "__iter__"):
        return loop
    if not callable(fn_or_loop):
        kind = type(fn_or_loop).__name__
        raise TypeError(f"profile() takes a function that takes one step, or an iterable of batches, not {kind}")
    steps = (None for _ in range(wait + warmup + active))
    for _ in ProfiledLoop(steps, recorder, (wait, warmup, active)):
        fn_or_loop()
    return recorder.result


@contextmanager
def profiling_context(  # noqa: PLR0913  # as above
    name: str, *, batch_size: int | None = None, shapes: bool = True, stacks: bool = False, memory: bool = True,
    flops: bool = True, top: int = TOP, trace: str | Path | None = None, tensorboard: str | Path | None = None,
) -> Iterator[Profile]:  # fmt: skip
    """Profile a ``with`` block as one step; it yields a :class:`Profile` that the end fills, also when the block raises.

    Raises:
        RuntimeError: another profiler is running, in whichever thread; torch allows one.
        ValueError: the directory of ``trace`` does not exist.

    The arguments are those of :func:`profile`.
    """
    options = {"record_shapes": shapes, "with_stack": stacks, "profile_memory": memory, "with_flops": flops}
    recorder = Recorder(name, options, batch_size, top, _existing(trace), tensorboard)
    recorder.prepare()
    recorder.record()
    try:
        yield recorder.result
    finally:
        recorder.finish(1)


def _existing(trace: str | Path | None) -> Path | None:
    if trace is None:
        return None
    path = Path(trace)
    if not path.parent.is_dir():
        raise ValueError(f"there is no directory {path.parent} for the trace: create it, or name another file")
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"a Chrome trace is a .json or .json.gz file, not {path.name!r}")
    return path


class Recorder:
    """One recording of ``torch.profiler``: prepared (warming up), recording, finished."""

    def __init__(
        self, name: str, options: dict[str, Any], batch_size: int | None = None, top: int = TOP, trace: Path | None = None,
        tensorboard: str | Path | None = None, *, all_threads: bool = False,
    ) -> None:  # fmt: skip
        self.result = Profile(name, batch_size=batch_size)
        self._options, self._top, self._trace, self._tensorboard = options, top, trace, tensorboard
        self._all_threads = all_threads
        self._recording: Recording | None = None
        self._begun = 0.0

    def prepare(self) -> None:
        """Start the profiler; nothing is kept yet.

        Raises:
            RuntimeError: another one is running.
        """
        purpose, verbose = f"torchobs.debug, {self.result.name!r}", bool(self._options["with_stack"])  # else events have none
        self._recording = Recording(purpose, all_threads=self._all_threads, verbose=verbose, **self._options)

    def record(self) -> None:
        """Keep what runs from now on."""
        if self._recording is not None:
            self._recording.start()
        operations.wait_for_devices()
        self._begun = time.perf_counter()

    def finish(self, steps: int) -> None:
        """End it, and fill the result from what was recorded in that many steps; with none, only stop."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        operations.wait_for_devices()
        elapsed = time.perf_counter() - self._begun
        if not recording.stop():
            fill(self.result, anomalies=(INTERRUPTED,))
        elif self._begun:
            self._fill(recording.profiler, steps, elapsed)

    def _fill(self, profiler: Any, steps: int, elapsed: float) -> None:
        # torch 2.13 has crashed when garbage was collected while it parsed its events
        collects = gc.isenabled()
        gc.disable()
        try:
            self._summarize(profiler, steps, elapsed)
            self._write(profiler)
        finally:
            if collects:
                gc.enable()

    def _summarize(self, profiler: Any, steps: int, elapsed: float) -> None:
        averages = profiler.key_averages()
        device, host = device_and_host_time(averages)
        cost = "self_device_time_total" if device else "self_cpu_time_total"
        operators = sorted((row for row in _on_host(averages) if "::" in row.key), key=attrgetter(cost), reverse=True)
        by_stack = _STACK if self._options["with_stack"] else 0
        groups = profiler.key_averages(group_by_input_shape=self._options["record_shapes"], group_by_stack_n=by_stack)
        times = {"time": elapsed, "device_time": device, "cpu_time": host}
        if steps:
            times["time_per_step"] = elapsed / steps
            if self.result.batch_size:
                times["time_per_sample"] = elapsed / steps / self.result.batch_size
        flops, top = sum(int(row.flops or 0) for row in operators), operators[0].key if operators else None
        table = groups.table(sort_by=cost, row_limit=self._top)
        fill(self.result, steps=steps, flops=flops, top_operator=top, table=table, **times)

    def cancel(self) -> None:
        """Stop it, and keep nothing."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()

    def _write(self, profiler: Any) -> None:
        if self._trace is None and self._tensorboard is None:
            return
        with tempfile.TemporaryDirectory() as directory:
            written = Path(directory, "trace.json")
            profiler.export_chrome_trace(str(written))  # torch writes a trace once
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

    A block of ``record_function`` has a row on the host, whose time is that of the Python code in it, and one on the device
    that spans its kernels.
    """
    rows = list(rows)
    device = (row.self_device_time_total for row in rows if row.device_type.name != "CPU" and not row.is_user_annotation)
    return sum(device) / 1e6, sum(row.self_cpu_time_total for row in _on_host(rows)) / 1e6


def _on_host(rows: Iterable[Any]) -> list[Any]:
    return [row for row in rows if row.device_type.name == "CPU" and not row.is_user_annotation and row.key != "[memory]"]


class ProfiledLoop(Generic[T]):
    """The batches of a loop; the profiler is started, stopped and gone as they are taken."""

    def __init__(self, batches: Iterable[T], recorder: Recorder, schedule: tuple[int, int, int]) -> None:
        self._batches, self._recorder, self._schedule = batches, recorder, schedule

    @property
    def result(self) -> Profile:
        """The profile; its ``steps`` is ``None`` until all active steps were taken, or the loop has ended."""
        return self._recorder.result

    def __iter__(self) -> Iterator[T]:
        wait, warmup, active = self._schedule
        first, last = wait + warmup, wait + warmup + active
        taken, finished = 0, False
        try:
            for batch in self._batches:
                if taken == last:
                    self._recorder.finish(active)
                    finished = True
                if taken == wait:
                    self._recorder.prepare()
                if taken == first:
                    self._recorder.record()
                yield batch
                taken += 1
        finally:
            if not finished:  # the loop has ended, or left by break, return or an exception
                self._recorder.finish(max(0, min(taken, last) - first))
                if not self.result.steps and not self.result.anomalies:
                    text = f"no step was recorded: the loop ended within wait={wait} and warmup={warmup} steps, or in the next"
                    fill(self.result, anomalies=told("profile", [("not_profiled", "profile", text)]))
