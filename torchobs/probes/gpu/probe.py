"""GPU probe with a thread of its own: a lost GPU can block an NVML call forever, and the heartbeat must go on."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from torchobs.config import settings
from torchobs.probes.gpu.monitor import GpuAssignment, GpuMonitor
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

STUCK_S = 15.0
"""A round takes milliseconds, or a second per GPU while the driver loads their state (no persistence mode)."""
END_WAIT_S = 0.04
"""How long the end of the process waits for a last round, and for the thread's end"""


class GpuProbe:
    """Samples GPUs through NVML. The sampler thread starts it; without the library its thread ends at once."""

    name = "gpu"

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._round_done = threading.Event()
        renew_in_child(self, _wake=threading.Event, _round_done=threading.Event)
        self._busy_since: float | None = None
        self._ending = self._unresponsive = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._context = context
        local_rank = context.writer.header.resource.get("local_rank", 0)
        assignment = GpuAssignment(int(local_rank), settings.environment().get("CUDA_VISIBLE_DEVICES"))
        self._monitor = GpuMonitor(context.writer, assignment)
        self._breaker = context.breaker(self.name)

    def remove(self) -> None:
        """Sample once more and end the thread; a blocked one is abandoned (:class:`~torchobs.probes.core.context.Probe`)."""
        thread, self._thread = self._thread, None
        alive = thread is not None and thread.is_alive()
        if alive and self._busy_since is None:
            self._round_done.clear()
            self._wake.set()
            self._round_done.wait(END_WAIT_S)
        self._ending = True
        if thread is not None and alive:
            self._wake.set()
            thread.join(END_WAIT_S)

    def observe(self) -> None:
        """Wake the thread for a round, unless one is in progress."""
        if self._ending or self._monitor.absent:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchobs-gpu", daemon=True)
            self._thread.start()
        busy_since = self._busy_since
        if busy_since is None:
            self._unresponsive = False
            self._wake.set()
        elif not self._unresponsive and time.monotonic() - busy_since > STUCK_S:
            self._unresponsive = True
            self._monitor.mark_unresponsive(f"the GPU driver has not answered for {STUCK_S:g} s")

    def _run(self) -> None:
        captures = self._context.training.captures
        while not self._monitor.absent:
            self._wake.wait()
            self._wake.clear()
            if self._ending:
                break
            self._busy_since = time.monotonic()
            try:
                if captures.begin_round(self.name):  # it may collect garbage as any thread may, and asks torch's allocator
                    call(self._breaker, self._monitor.round)
            finally:
                captures.end_round(self.name)
            self._busy_since = None
            if not self._monitor.absent:  # most machines without one would have a series for nothing
                self._context.spent_ns[self.name] = time.thread_time_ns()
            self._round_done.set()
        self._monitor.close()
