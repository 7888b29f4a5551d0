"""The probe: a thread of its own, for a GPU that fell off the bus can hold a call for ever, and the heartbeat must go on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.config import settings
from torchobs.probes.gpu.monitor import GpuAssignment, GpuMonitor
from torchobs.probes.gpu.ownership import GpuOwnership
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

STUCK_S = 15.0
"""A round takes milliseconds, and a second per GPU while the driver loads their state (no persistence mode)."""
FAREWELL_S = 0.04
"""What the end of the process may wait for a last look, and for the thread's end"""


class GpuProbe:
    """Samples the GPUs by NVML. Started by the sampler thread; where there is no library the thread ends at once."""

    name = "gpu"

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._looked = threading.Event()
        renew_in_child(self, _wake=threading.Event, _looked=threading.Event)
        self._busy_since: float | None = None
        self._ending = self._silent = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._context = context
        described = context.writer.header.resource
        local_rank = described.get("local_rank", 0)
        place = GpuAssignment(int(local_rank), settings.environment().get("CUDA_VISIBLE_DEVICES"))
        self._fleet = GpuMonitor(
            context.writer, GpuOwnership(str(Path(context.writer.path).parent), str(described.get("run_id"))), place
        )
        self._breaker = context.breaker(self.name)

    def remove(self) -> None:
        """Look once more and end the thread; a stuck one is left behind (:class:`~torchobs.probes.core.context.Probe`)."""
        thread, self._thread = self._thread, None
        there = thread is not None and thread.is_alive()
        if there and self._busy_since is None:
            self._looked.clear()
            self._wake.set()
            self._looked.wait(FAREWELL_S)
        self._ending = True
        if thread is not None and there:
            self._wake.set()
            thread.join(FAREWELL_S)

    def observe(self) -> None:
        """Have the thread look, unless it is still at it."""
        if self._ending or self._fleet.absent:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchobs-gpu", daemon=True)
            self._thread.start()
        busy_since = self._busy_since
        if busy_since is None:
            self._silent = False
            self._wake.set()
        elif not self._silent and time.monotonic() - busy_since > STUCK_S:
            self._silent = True
            self._fleet.fall_silent(f"the GPU driver has not answered for {STUCK_S:g} s")

    def _run(self) -> None:
        while not self._fleet.absent:
            self._wake.wait()
            self._wake.clear()
            if self._ending:
                break
            self._busy_since = time.monotonic()
            call(self._breaker, self._fleet.round)
            self._busy_since = None
            self._context.spent_ns[self.name] = time.thread_time_ns()
            self._looked.set()
        self._fleet.close()
