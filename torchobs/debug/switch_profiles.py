"""Switches that measure time: a profiled step now and then, and the wait for data."""

from __future__ import annotations

import functools
import time
from typing import Any, ClassVar

from torchobs.debug.findings import found, record_series
from torchobs.debug.profiles import Recorder
from torchobs.debug.switch_checks import Check
from torchobs.detect.starvation import BEGINS
from torchobs.probes.core.patch import Patch

MOST_TRACES = 8
"""Trace files that one ``enable`` writes"""
LEAST_STEPS = 5
"""Steps of a window before the wait for data is judged"""


class StepProfile(Check):
    """A profile of one step; one recording serves both switches, since torch allows one profiler."""

    wanting: ClassVar[list[StepProfile]] = []
    recorder: ClassVar[Recorder | None] = None

    def __init__(self, directory: str | None) -> None:
        self.directory, self.written = directory, 0

    def install(self, guard: Any) -> None:
        self.wanting.append(self)

    def begin_step(self) -> None:
        """Start to record, unless a profiler runs."""
        import torch

        profiler: Any = torch.autograd
        if StepProfile.recorder is not None or profiler._profiler_enabled():
            return
        writers = [one for one in self.wanting if one.directory is not None and one.written < MOST_TRACES]
        options = dict.fromkeys(("record_shapes", "with_stack", "profile_memory", "with_flops"), False)
        recorder = Recorder("step", options, tensorboard=writers[0].directory if writers else None)
        recorder.prepare()
        recorder.record()
        StepProfile.recorder = recorder

    def after_step(self, model: Any, optimizer: Any) -> None:
        """End it."""
        recorder, StepProfile.recorder = StepProfile.recorder, None
        if recorder is None:
            return
        recorder.finish(1)
        result = recorder.result
        top = result.operators[0].name if result.operators else "none"
        for one in self.wanting:
            one.last = f"{result.time or 0:.3g} s, top operator {top}"
            if result.tensorboard is not None and one.directory is not None:
                one.written += 1
                one.last += f", trace in {result.tensorboard}"

    def remove(self) -> None:
        self.wanting.remove(self)
        if not self.wanting and (recorder := StepProfile.recorder) is not None:
            StepProfile.recorder = None
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
