"""Switches that measure time: a profiled step now and then, and the wait for data."""

from __future__ import annotations

import functools
import time
from threading import get_ident
from typing import Any, ClassVar

from torchobs.debug.findings import found, record_series
from torchobs.debug.profiles import Recorder
from torchobs.debug.switch_checks import Check
from torchobs.detect.starvation import BEGINS
from torchobs.probes.core.patch import Patch
from torchobs.probes.core.torch_profiler import ProfilerBusyError

MOST_TRACES = 8
"""Trace files that one ``enable`` writes"""
LEAST_STEPS = 5
"""Steps of a window before the wait for data is judged"""


class StepProfile(Check):
    """A profile of one step; one recording serves both switches, since torch allows one profiler."""

    wanting: ClassVar[list[StepProfile]] = []
    recorder: ClassVar[Recorder | None] = None
    threads: ClassVar[set[int]] = set()
    """Those that train"""
    just_ended: ClassVar[bool] = False
    """Whether this optimizer step ended a recording: it runs in a ``record_function`` whose end another must not see"""

    def __init__(self, directory: str | None) -> None:
        self.directory, self.written = directory, 0

    def install(self, guard: Any) -> None:
        self.wanting.append(self)

    def begin_step(self) -> None:
        """Start to record, unless a profiler runs. With ``profile_every=1`` it is every second step."""
        if self._several_train():
            self.last = "no profile: steps come from several threads, beside which torch's profiler crashes"
            return
        if (StepProfile.just_ended and self.every == 1) or StepProfile.recorder is not None:
            return
        writers = [one for one in self.wanting if one.directory is not None and one.written < MOST_TRACES]
        options = dict.fromkeys(("record_shapes", "with_stack", "profile_memory", "with_flops"), False)
        directory = writers[0].directory if writers else None
        # in all threads, so that a profiler of the script's that begins in another one can end it
        recorder = Recorder("step", options, tensorboard=directory, all_threads=True)
        try:
            recorder.prepare()
        except ProfilerBusyError as problem:
            self.last = f"no profile: {problem}"
            return
        recorder.record()
        StepProfile.recorder = recorder

    def before_step(self, model: Any, optimizer: Any) -> None:
        """Begin another step."""
        StepProfile.just_ended = False

    def after_step(self, model: Any, optimizer: Any) -> None:
        """End it."""
        recorder = StepProfile.recorder
        if recorder is None or self._several_train():
            return
        StepProfile.recorder, StepProfile.just_ended = None, True
        recorder.finish(1)
        result = recorder.result
        top = result.top_operator or "none"
        for one in self.wanting:
            one.last = f"{result.time:.3g} s, top operator {top}" if result.time is not None else "; ".join(result.anomalies)
            if result.tensorboard is not None and one.directory is not None:
                one.written += 1
                one.last += f", trace in {result.tensorboard}"

    def remove(self) -> None:
        self.wanting.remove(self)
        if not self.wanting:
            self._cancel()
            StepProfile.threads.clear()

    @classmethod
    def _several_train(cls) -> bool:
        """Return whether another thread trains, too; then nothing is recorded any more."""
        cls.threads.add(get_ident())
        if len(cls.threads) > 1:
            cls._cancel()
        return len(cls.threads) > 1

    @staticmethod
    def _cancel() -> None:
        recorder, StepProfile.recorder = StepProfile.recorder, None
        if recorder is not None:
            recorder.cancel()


class Loading(Check):
    """Share of the time between two looks that the training waited for batches."""

    def __init__(self) -> None:
        self._waited, self._begun, self._steps = 0.0, time.perf_counter(), 0
        self._depth = 0

    def install(self, guard: Any) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self._patch = Patch(_BaseDataLoaderIter, "__next__", self._watched)

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def fetch(iterator: Any) -> Any:
            if self._depth:  # a loader over a loader
                return original(iterator)
            self._depth += 1
            begun = time.perf_counter()
            try:
                batch = original(iterator)
                self._steps += 1
                return batch
            finally:
                self._depth -= 1
                self._waited += time.perf_counter() - begun

        return fetch

    def after_step(self, model: Any, optimizer: Any) -> None:
        now = time.perf_counter()
        share, steps = self._waited / max(now - self._begun, 1e-9), self._steps
        self._waited, self._begun, self._steps = 0.0, now, 0
        if not steps:
            return
        self.last = f"{share:.0%} of the time waiting for {steps} batches"
        record_series({"debug.data_wait_share": share})
        if share >= BEGINS and steps >= LEAST_STEPS:
            found("data_wait", f"training waits for data {share:.0%} of the time", function="enable", name="data_loading")

    def remove(self) -> None:
        self._patch.undo()
