"""The sampler thread: folds the step records, shows what probes left, keeps the heartbeat. Ten rounds a second.

Every call into torch gives up the GIL, and the training thread gets it back when this thread lets go of it, or after 5 ms
(``sys.getswitchinterval``). So no stretch of work here is long: there is a breath in between, in which the other runs on.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.event_rate_limit import anomaly_limiter
from torchobs.flight.files.headroom import survive_limits
from torchobs.flight.files.location import remedy
from torchobs.flight.metrics.fold import LIVE_PHASES
from torchobs.probes.core.timeline import DATA, EVALUATION, FORWARD, OTHER
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.support.rank_log import OWN
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext

INTERVAL_S = 0.1
COST_S = 1.0
NAME_CHECK_S = 5.0
OBSERVE_S = 10.0
OBSERVE_FIRST_S = 1.0
QUIET_S = 60.0
STRETCH_S = 0.00025
"""Longest work without a breath, but for a single call that takes longer"""
FOLDED_AT_ONCE = 24
"""Records, of 14 µs each; a fold of any takes 270 µs besides, where caches are cold"""
BREATH_S = 0.0005
"""Long enough for the kernel to wake a thread that waits for the GIL (50 µs and the timer's slack)"""
_OF_EVALUATION = frozenset({DATA, FORWARD, OTHER})
"""What the last boundary says while a model is evaluated"""
logger = logging.getLogger("torchobs")


class Sampler:
    """One daemon thread per session. ``samples`` are called every round, ``slow`` after a second and every ten."""

    def __init__(
        self, context: ProbeContext, samples: list[tuple[str, Callable[[], None]]], slow: list[tuple[str, Callable[[], None]]]
    ) -> None:
        self._context, self._samples, self._slow = context, samples, slow
        context.warn_limited, context.yield_gil = self.warn_limited, self.yield_gil
        self._stop, self._busy = threading.Event(), threading.Lock()
        renew_in_child(self, _stop=threading.Event, _busy=threading.Lock)
        self._own, self._anomalies = CircuitBreaker("sampler"), anomaly_limiter()
        self._shown: dict[str, int] = {}
        self._warnings = RateLimiter(QUIET_S)
        now = self.breathed = time.monotonic()
        self._name_checked = self._cost_shown = now
        self._observed = now - OBSERVE_S + OBSERVE_FIRST_S
        self._thread = threading.Thread(target=self._run, name="torchobs-sampler", daemon=True)

    def start(self) -> None:
        """Begin. What was dropped exists at 0 from here on: an increase over a series born at 1 is none."""
        for what in ("series", "event"):
            self._context.writer.table.cell(catalog.FLIGHT_DROPPED, {"what": what})
        self._context.breakers[self._own.probe] = self._own
        self._thread.start()

    def stop(self) -> None:
        """End, waiting at most a second for the round that is being done."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        survive_limits()
        while not self._stop.wait(INTERVAL_S):
            self._context.writer.heartbeat()
            with self._busy:
                if not self._stop.is_set():
                    call(self._own, self.round)
                    self._context.spent_ns["sampler"] = time.thread_time_ns()  # here: ``end`` is called by another thread
            self._own.blown = False  # the heartbeat must go on; the error is counted all the same

    def end(self) -> None:
        """Do the last round. In the thread that ends the session; the sampler thread may hang in a round of its own."""
        if self._busy.locked():
            self._context.writer.fold()
            return
        with self._busy:  # see flight.block.Block.publish
            self._context.device.settle()
            self.round(last=True)

    def round(self, *, last: bool = False) -> None:
        """Do one round. What costs and changes little is seen to once a second, and in the ``last`` one."""
        context, writer = self._context, self._context.writer
        context.device.poll()
        context.scalars.set_left()
        self._keep_scalars(last=last)
        phase, since_ns = context.recorder.phase()
        if phase in _OF_EVALUATION and context.evaluating_since_ns:
            phase, since_ns = EVALUATION, context.evaluating_since_ns
        elif context.idle:
            phase = LIVE_PHASES.index("idle")
        writer.phase(1 + phase, since_ns)
        for probe, sample in self._samples:
            call(context.breaker(probe), sample)
            self.yield_gil()
        for _ in range(writer.unfolded // FOLDED_AT_ONCE + 1):
            writer.fold(FOLDED_AT_ONCE)
            self.yield_gil()
        self._tell_anomalies()
        self._tell_trips()
        now = time.monotonic()
        if last or now - self._cost_shown >= COST_S:
            self._cost_shown = now
            self._show_cost()
        if now - self._name_checked >= NAME_CHECK_S:
            self._name_checked = now
            self._check_name()
        if last or now - self._observed >= OBSERVE_S:
            self._observed = now
            for probe, sample in self._slow:
                call(context.breaker(probe), sample)
                self.yield_gil()
        writer.publish()

    def yield_gil(self) -> None:
        """Let the training thread have the GIL, if this one may have held it for a while. Nobody waits once it is to stop."""
        if time.monotonic() - self.breathed >= STRETCH_S and not self._stop.is_set():
            time.sleep(BREATH_S)
            self.breathed = time.monotonic()

    def _keep_scalars(self, *, last: bool) -> None:
        points = self._context.scalars.points(time.monotonic(), last=last)
        if points is not None:
            self._context.writer.event(catalog.EVENT_SCALARS.name, points, self._context.recorder.step)

    def _tell_anomalies(self) -> None:
        writer = self._context.writer
        found, writer.anomalies = writer.anomalies, []
        now = time.monotonic()
        for anomaly in found:
            if self._anomalies.take(now, anomaly.kind):
                omitted = self._anomalies.held_back(anomaly.kind)
                more = {"left_out": omitted} if omitted else {}
                attributes = {"kind": anomaly.kind, "value": anomaly.value, "baseline": anomaly.baseline} | more
                writer.event(catalog.EVENT_ANOMALY.name, attributes, anomaly.step)
        self._context.anomalous.extend(anomaly.step for anomaly in found[:100])
        if found:
            first = found[0]
            self.warn_limited(
                f"anomaly {first.kind}",
                f"{first.kind.replace('_', ' ')} in step {first.step}: {first.value:.6g}, usual is {first.baseline:.6g}",
                own="loss" in first.kind,  # each rank has its own batches; the gradients are reduced
            )

    def _tell_trips(self) -> None:
        context = self._context
        for breaker in list(context.breakers.values()):
            while breaker.trips:
                trip = breaker.trips.pop(0)
                for metric, value in ((catalog.PROBE_ERRORS, 1), (catalog.PROBE_DISABLED, 0)):
                    cell = context.writer.table.cell(metric, {"probe": trip.probe})
                    if cell is not None and value:
                        cell.add(value)
                    elif cell is not None:
                        cell.set(float(breaker is not self._own))  # not ``blown``, which nothing is in the last round
                attributes = {"probe": trip.probe, "exception.type": trip.exception, "location": trip.location}
                context.writer.event(catalog.EVENT_PROBE_DISABLED.name, attributes)
                what = f"probe {trip.probe!r} failed with {trip.exception} at {trip.location}"
                self.warn_limited(f"probe {trip.probe}", f"{what} and is off; training is not affected")

    def _show_cost(self) -> None:
        context = self._context
        for probe, spent in list(context.spent_ns.items()):
            fresh = spent - self._shown.get(probe, 0)
            cell = context.writer.table.cell(catalog.OVERHEAD, {"probe": probe})
            if cell is not None and fresh > 0:
                cell.add(fresh / 1e9)
                self._shown[probe] = spent
        for what, dropped in (("series", context.writer.table.dropped), ("event", context.writer.events.dropped)):
            fresh = dropped - self._shown.get(what, 0)
            if fresh > 0:
                self._shown[what] = dropped
                cell = context.writer.table.cell(catalog.FLIGHT_DROPPED, {"what": what})
                if cell is not None:
                    cell.add(fresh)

    def _check_name(self) -> None:
        try:
            if self._context.writer.check_name():
                self.warn_limited("name", "the flight file was deleted; it has been made anew with all it held", own=True)
        except OSError as error:
            why = f"{error.strerror or error}; {remedy(error)}"
            what = f"the flight file was deleted and cannot be made anew at {self._context.writer.path}"
            self.warn_limited("name", f"{what}: {why}", own=True)

    def warn_limited(self, cause: str, message: str, *, own: bool = False) -> None:
        """Log a warning, at most one a minute for each cause. ``own``: it concerns this rank alone, and not all of a node."""
        if self._warnings.take(time.monotonic(), cause):
            logger.warning("torchobs: %s", message, extra=OWN if own else None)
