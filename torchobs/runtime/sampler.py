"""The sampler thread: aggregates step records, publishes probes' values and keeps the heartbeat, ten rounds a second.

Every call into torch releases the GIL, and the training thread gets it back when this thread releases it, or after 5 ms
(``sys.getswitchinterval``). So this thread yields after every short stretch of work.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.catalog.findings import finding
from torchobs.flight.directory import remedy
from torchobs.flight.files import survive_limits
from torchobs.runtime.stacks import live_phase
from torchobs.support import anomaly_callbacks
from torchobs.support.after_fork import renew_in_child
from torchobs.support.descriptors import take_lost
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.support.rank_log import THIS_RANK
from torchobs.support.rate_limit import RateLimiter, anomaly_limiter

if TYPE_CHECKING:
    from torchobs.flight.totals import Anomaly
    from torchobs.probes.context import ProbeContext
    from torchobs.runtime.probe_manager import Callbacks
    from torchobs.runtime.spans import RunSpan

INTERVAL_S = 0.1
_BLOWN_UP = frozenset({"gradient_explosion", "loss_spike"})
OVERHEAD_INTERVAL_S = 1.0
_LEAST_NS = 1_000_000
"""Time of a probe from which on it has a series: a probe that was called once and is never used has none"""
NAME_CHECK_INTERVAL_S = 5.0
OBSERVE_INTERVAL_S = 10.0
FIRST_OBSERVE_S = 1.0
WARNING_INTERVAL_S = 60.0
MAX_HOLD_S = 0.00025
"""Longest work without yielding, except for a single call that takes longer"""
RECORDS_PER_FOLD = 24
"""Records, of 14 µs each; a fold of any number takes 270 µs besides, with cold caches"""
YIELD_S = 0.0005
"""Long enough for the kernel to wake a thread that waits for the GIL (50 µs and the timer's slack)"""
logger = logging.getLogger("torchobs")


class SamplerPauses:
    """Releases the GIL during long work of the sampler thread, and ends its sleep between two rounds."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        renew_in_child(self, stop=threading.Event)
        self.yielded = time.monotonic()

    def yield_gil(self) -> None:
        """Release the GIL for the training thread if this thread may have held it for a while; not once it is to stop."""
        if time.monotonic() - self.yielded >= MAX_HOLD_S and not self.stop.is_set():
            time.sleep(YIELD_S)
            self.yielded = time.monotonic()


class LimitedLog:
    """Logs warnings of a session, at most one a minute for each cause."""

    def __init__(self) -> None:
        self._limiter = RateLimiter(WARNING_INTERVAL_S)

    def warn(self, cause: str, message: str, *, rank_only: bool = False) -> None:
        """Log a warning. ``rank_only``: it concerns this rank alone, not all ranks of a node."""
        if self._limiter.take(time.monotonic(), cause):
            logger.warning("torchobs: %s", message, extra=THIS_RANK if rank_only else None)


class Sampler:
    """One daemon thread per session. ``samples`` run every round, ``slow`` after one second and then every ten.

    The spans of ``run`` are written after those, when epochs, steps and anomalies of the round are known.
    """

    def __init__(self, context: ProbeContext, pauses: SamplerPauses, run: RunSpan, samples: Callbacks, slow: Callbacks) -> None:
        self._context, self._pauses, self._run_span, self._samples, self._slow = context, pauses, run, samples, slow
        self._busy = threading.Lock()
        renew_in_child(self, _busy=threading.Lock)
        self._breaker, self._anomalies = CircuitBreaker("sampler"), anomaly_limiter()
        self._published: dict[str, int] = {}
        self._lost: set[tuple[str, str]] = set()
        now = time.monotonic()
        self._name_checked = self._overhead_published = now
        self._observed = now - OBSERVE_INTERVAL_S + FIRST_OBSERVE_S
        self._thread = threading.Thread(target=self._run, name="torchobs-sampler", daemon=True)

    def start(self) -> None:
        """Start. Drop counters exist at 0 from here on: ``increase()`` misses the first value of a series that starts at 1."""
        for what in ("series", "event"):
            self._context.count(catalog.FLIGHT_DROPPED, 0, {"what": what})
        self._context.breakers[self._breaker.probe] = self._breaker
        self._thread.start()

    def stop(self) -> None:
        """Stop, waiting at most a second for the current round."""
        self._pauses.stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        survive_limits()
        captures = self._context.training.captures
        while not self._pauses.stop.wait(INTERVAL_S):
            try:
                if captures.begin_round("sampler"):
                    self._beat_and_sample()
                else:
                    self._beat_alone()
            finally:
                captures.end_round("sampler")

    def _beat_alone(self) -> None:
        """Only keep the heartbeat, without a garbage collection in this thread (``captures``)."""
        collects = gc.isenabled()
        gc.disable()
        self._context.writer.heartbeat()
        self._context.writer.restore()
        if collects:
            gc.enable()

    def _beat_and_sample(self) -> None:
        self._context.writer.heartbeat()
        with self._busy:
            if not self._pauses.stop.is_set():
                call(self._breaker, self.round)
                self._context.spent_ns["sampler"] = time.thread_time_ns()  # here: ``end`` is called by another thread
        self._breaker.is_open = False  # the heartbeat must go on; the error is counted all the same

    def end(self) -> None:
        """Run the last round, in the thread that ends the session: the sampler thread may hang in its own."""
        if self._busy.locked():
            self._context.writer.fold()
            return
        with self._busy:  # see flight.value_blocks.ValueBlock.publish
            self.round(last=True)

    def round(self, *, last: bool = False) -> None:
        """Run one round. Expensive work that changes little runs once a second, and in the ``last`` round."""
        context, writer, yield_gil = self._context, self._context.writer, self._context.yield_gil
        if not writer.restore():
            self._check_name()
        self._receive(last=last)
        context.scalars.set_left()
        self._write_scalars(last=last)
        phase, since_ns = live_phase(context)
        writer.phase(1 + phase, since_ns)
        for probe, sample in self._samples:
            call(context.breaker(probe), sample)
            yield_gil()
        for _ in range(writer.unfolded // RECORDS_PER_FOLD + 1):
            writer.fold(RECORDS_PER_FOLD)
            yield_gil()
        self._report_anomalies()
        call(context.breaker("spans"), self._run_span.sample_steps)
        self._report_failures()
        now = time.monotonic()
        if last or now - self._overhead_published >= OVERHEAD_INTERVAL_S:
            self._overhead_published = now
            self._publish_overhead()
        if now - self._name_checked >= NAME_CHECK_INTERVAL_S:
            self._name_checked = now
            self._check_name()
        if last or now - self._observed >= OBSERVE_INTERVAL_S:
            self._observed = now
            for probe, sample in self._slow:
                call(context.breaker(probe), sample)
                yield_gil()
        writer.publish()
        self._report_lost_files()

    def _receive(self, *, last: bool) -> None:
        """Deliver the values that have arrived from devices; in the thread that ends the session send the others first."""
        context = self._context
        if last and not context.training.captures.in_progress():
            call(context.breaker("device"), context.device.send_rest)
            context.device.settle()
        context.device.poll()

    def _write_scalars(self, *, last: bool) -> None:
        points = self._context.scalars.points(time.monotonic(), last=last)
        if points is not None:
            self._context.event(catalog.EVENT_SCALARS, points)

    def _report_anomalies(self) -> None:
        writer = self._context.writer
        anomalies, writer.anomalies = writer.anomalies, []
        now = time.monotonic()
        for anomaly in anomalies:
            if self._anomalies.take(now, anomaly.kind):
                omitted = self._anomalies.held_back(anomaly.kind)
                more: dict[str, object] = {"left_out": omitted} if omitted else {}
                more |= self._origin(anomaly) | self._blown_layer(anomaly)
                attributes = {"kind": anomaly.kind, "value": anomaly.value, "baseline": anomaly.baseline} | more
                writer.event(catalog.EVENT_ANOMALY.name, attributes, anomaly.step)
            self._notify(anomaly)
        self._run_span.anomalous.extend(anomaly.step for anomaly in anomalies[:100])
        firsts: dict[str, Anomaly] = {}
        for anomaly in anomalies:
            firsts.setdefault(anomaly.kind, anomaly)
        for kind, first in firsts.items():
            words = finding(kind, step=first.step, value=first.value, baseline=first.baseline).short
            # each rank has its own batches; the gradients are reduced
            self._context.warn_limited(f"anomaly {kind}", words, rank_only="loss" in kind)

    def _origin(self, anomaly: Anomaly) -> dict[str, str]:
        """Return the anomaly's origin as attributes, if its value was traced."""
        origin = self._context.origins.get(anomaly.step) if anomaly.kind.startswith("nonfinite") else None
        if origin is None:
            return {}
        named = {"origin": origin.kind, "module": origin.module, "operator": origin.operator, "parameter": origin.parameter}
        return {name: value for name, value in named.items() if value}

    def _blown_layer(self, anomaly: Anomaly) -> dict[str, object]:
        """Return the layer with the most grown gradient in that step, if it was measured."""
        context = self._context
        layer = None
        for name_layer in context.blown_layer if anomaly.kind in _BLOWN_UP else ():
            context.yield_gil()
            layer = call(context.breaker("gradients"), name_layer, anomaly.step)
        return {} if layer is None else {"layer": layer.layer, "layer_norm": layer.norm, "layer_usual": layer.usual}

    def _notify(self, anomaly: Anomaly) -> None:
        if anomaly_callbacks.wanted():
            origin = self._context.origins.get(anomaly.step) if anomaly.kind.startswith("nonfinite") else None
            report = anomaly_callbacks.AnomalyReport(anomaly.kind, anomaly.step, anomaly.value, anomaly.baseline, origin)
            anomaly_callbacks.notify(report)

    def _report_failures(self) -> None:
        context = self._context
        for breaker in list(context.breakers.values()):
            while breaker.failures:
                failure = breaker.failures.pop(0)
                context.count(catalog.PROBE_ERRORS, 1, {"probe": failure.probe})
                off = breaker is not self._breaker  # not ``is_open``, which is reset for the last round
                context.set_gauge(catalog.PROBE_DISABLED, off, {"probe": failure.probe})
                attributes = {"probe": failure.probe, "exception.type": failure.exception, "location": failure.location}
                context.writer.event(catalog.EVENT_PROBE_DISABLED.name, attributes)
                what = f"probe {failure.probe!r} failed with {failure.exception} at {failure.location}"
                self._context.warn_limited(f"probe {failure.probe}", f"{what} and is off; training is not affected")

    def _publish_overhead(self) -> None:
        context = self._context
        for probe, spent in list(context.spent_ns.items()):
            fresh = spent - self._published.get(probe, 0)
            if spent < _LEAST_NS:
                continue
            if fresh > 0 and context.count(catalog.OVERHEAD, fresh / 1e9, {"probe": probe}):
                self._published[probe] = spent
        for what, dropped in (("series", context.writer.table.dropped), ("event", context.writer.events.dropped)):
            fresh = dropped - self._published.get(what, 0)
            if fresh > 0:
                self._published[what] = dropped
                context.count(catalog.FLIGHT_DROPPED, fresh, {"what": what})

    def _report_lost_files(self) -> None:
        """Report files that the program has closed, each once: a program may do so in every step."""
        lost = dict.fromkeys(take_lost())
        fresh, self._lost = [entry for entry in lost if entry not in self._lost], self._lost.union(lost)
        if fresh:
            names = ", ".join(f"{name} ({problem})" if problem else name for name, problem in fresh)
            what = "the program has closed descriptors that it had not opened, files of torchobs among them"
            self._context.warn_limited("descriptors", f"{what}: {names}; what can be opened again is open", rank_only=True)

    def _check_name(self) -> None:
        try:
            if self._context.writer.check_name():
                self._context.warn_limited(
                    "name", "the flight file was deleted; it has been made anew with all it held", rank_only=True
                )
        except OSError as error:
            why = f"{error.strerror or error}; {remedy(error)}"
            what = f"the flight file was deleted and cannot be made anew at {self._context.writer.path}"
            self._context.warn_limited("name", f"{what}: {why}", rank_only=True)
