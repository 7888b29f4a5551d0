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
from torchobs.detect.ration import Ration
from torchobs.flight.record import LIVE_PHASES
from torchobs.flight.room import survive_limits
from torchobs.guarding import Fuse, call
from torchobs.probes.segments import DATA, EVALUATION, FORWARD, OTHER

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.host import Host

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
        self, host: Host, samples: list[tuple[str, Callable[[], None]]], slow: list[tuple[str, Callable[[], None]]]
    ) -> None:
        self._host, self._samples, self._slow = host, samples, slow
        host.say, host.breathe = self.say, self.breathe
        self._stop, self._busy = threading.Event(), threading.Lock()
        self._own, self._ration = Fuse("sampler"), Ration()
        self._shown: dict[str, int] = {}
        self._spoken: dict[str, float] = {}
        now = self.breathed = time.monotonic()
        self._name_checked = self._cost_shown = now
        self._observed = now - OBSERVE_S + OBSERVE_FIRST_S
        self._thread = threading.Thread(target=self._run, name="torchobs-sampler", daemon=True)

    def start(self) -> None:
        """Begin. What was dropped exists at 0 from here on: an increase over a series born at 1 is none."""
        for what in ("series", "event"):
            self._host.writer.table.cell(catalog.FLIGHT_DROPPED, {"what": what})
        self._host.fuses[self._own.probe] = self._own
        self._thread.start()

    def stop(self) -> None:
        """End, waiting at most a second for the round that is being done."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        survive_limits()
        while not self._stop.wait(INTERVAL_S):
            self._host.writer.heartbeat()
            with self._busy:
                if not self._stop.is_set():
                    call(self._own, self.round)
            self._own.blown = False  # the heartbeat must go on; the error is counted all the same

    def end(self) -> None:
        """Do the last round. In the thread that ends the session; the sampler thread may hang in a round of its own."""
        if self._busy.locked():
            self._host.writer.fold()
            return
        with self._busy:  # see flight.block.Block.publish
            self._host.device.settle()
            self.round(last=True)

    def round(self, *, last: bool = False) -> None:
        """Do one round. What costs and changes little is seen to once a second, and in the ``last`` one."""
        host, writer = self._host, self._host.writer
        host.device.poll()
        host.scalars.set_left()
        self._keep_scalars(last=last)
        phase, since_ns = host.cycle.phase()
        if phase in _OF_EVALUATION and host.evaluating_since_ns:
            phase, since_ns = EVALUATION, host.evaluating_since_ns
        elif host.idle:
            phase = LIVE_PHASES.index("idle")
        writer.phase(1 + phase, since_ns)
        for probe, sample in self._samples:
            call(host.fuse(probe), sample)
            self.breathe()
        for _ in range(writer.unfolded // FOLDED_AT_ONCE + 1):
            writer.fold(FOLDED_AT_ONCE)
            self.breathe()
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
                call(host.fuse(probe), sample)
                self.breathe()
        writer.publish()

    def breathe(self) -> None:
        """Let the training thread have the GIL, if this one may have held it for a while. Nobody waits once it is to stop."""
        if time.monotonic() - self.breathed >= STRETCH_S and not self._stop.is_set():
            time.sleep(BREATH_S)
            self.breathed = time.monotonic()

    def _keep_scalars(self, *, last: bool) -> None:
        points = self._host.scalars.points(time.monotonic(), last=last)
        if points is not None:
            self._host.writer.event(catalog.EVENT_SCALARS.name, points, self._host.cycle.step)

    def _tell_anomalies(self) -> None:
        writer = self._host.writer
        found, writer.anomalies = writer.anomalies, []
        now = time.monotonic()
        for anomaly in found:
            omitted = self._ration.take(anomaly.kind, now)
            if omitted is not None:
                more = {"left_out": omitted} if omitted else {}
                attributes = {"kind": anomaly.kind, "value": anomaly.value, "baseline": anomaly.baseline} | more
                writer.event(catalog.EVENT_ANOMALY.name, attributes, anomaly.step)
        self._host.anomalous.extend(anomaly.step for anomaly in found[:100])
        if found:
            first = found[0]
            self.say(
                f"anomaly {first.kind}",
                f"{first.kind.replace('_', ' ')} in step {first.step}: {first.value:.6g}, usual is {first.baseline:.6g}",
            )

    def _tell_trips(self) -> None:
        host = self._host
        for fuse in list(host.fuses.values()):
            while fuse.trips:
                trip = fuse.trips.pop(0)
                for metric, value in ((catalog.PROBE_ERRORS, 1), (catalog.PROBE_DISABLED, 0)):
                    cell = host.writer.table.cell(metric, {"probe": trip.probe})
                    if cell is not None and value:
                        cell.add(value)
                    elif cell is not None:
                        cell.set(float(fuse is not self._own))  # not ``blown``, which nothing is in the last round
                attributes = {"probe": trip.probe, "exception.type": trip.exception, "location": trip.location}
                host.writer.event(catalog.EVENT_PROBE_DISABLED.name, attributes)
                what = f"probe {trip.probe!r} failed with {trip.exception} at {trip.location}"
                self.say(f"probe {trip.probe}", f"{what} and is off; training is not affected")

    def _show_cost(self) -> None:
        host = self._host
        host.spent_ns["sampler"] = time.thread_time_ns()
        for probe, spent in list(host.spent_ns.items()):
            fresh = spent - self._shown.get(probe, 0)
            cell = host.writer.table.cell(catalog.OVERHEAD, {"probe": probe})
            if cell is not None and fresh > 0:
                cell.add(fresh / 1e9)
                self._shown[probe] = spent
        for what, dropped in (("series", host.writer.table.dropped), ("event", host.writer.events.dropped)):
            fresh = dropped - self._shown.get(what, 0)
            if fresh > 0:
                self._shown[what] = dropped
                cell = host.writer.table.cell(catalog.FLIGHT_DROPPED, {"what": what})
                if cell is not None:
                    cell.add(fresh)

    def _check_name(self) -> None:
        try:
            if self._host.writer.check_name():
                self.say("name", "the flight file was deleted; it has been made anew with all it held")
        except OSError as error:
            self.say("name", f"the flight file was deleted and cannot be made anew: {error}")

    def say(self, cause: str, message: str) -> None:
        """Log a warning, at most one a minute for each cause."""
        now = time.monotonic()
        if now - self._spoken.get(cause, -QUIET_S) >= QUIET_S:
            self._spoken[cause] = now
            logger.warning("torchobs: %s", message)
