"""Runs a training under torchobs and collects what is said of it: events, findings, and the steps in which they came.

The sampler's rounds are done by the training itself, one every ``ROUND`` steps, and its clock may be fed: what is found does
not depend on how busy a machine is.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torchobs
from torchobs import catalog
from torchobs.catalog.findings import Finding
from torchobs.diagnosis.diagnosis import RunDiagnosis, diagnose_run
from torchobs.diagnosis.health import INFO
from torchobs.flight.events import Event
from torchobs.ranks.rank_view import RankView
from torchobs.ranks.runs import load

ROUND = 10
_CLOCKS = ("monotonic", "monotonic_ns")
QUIET = {
    event.name
    for event in (
        catalog.EVENT_ANOMALY, catalog.EVENT_NONFINITE_ORIGIN, catalog.EVENT_UNMOVED_LAYERS, catalog.EVENT_MEMORY_GROWTH,
        catalog.EVENT_STARVED, catalog.EVENT_RECOMPILE_STORM, catalog.EVENT_AMP_SCALE_COLLAPSED, catalog.EVENT_AMP_UNSCALED,
        catalog.EVENT_AMP_CLIPPED_SCALED, catalog.EVENT_SCHEDULER_MISUSED, catalog.EVENT_PROBE_DISABLED,
        catalog.EVENT_WORKER_DIED, catalog.EVENT_OTHER_THREAD, catalog.EVENT_LOOP_MISTAKE,
    )
}  # fmt: skip
"""Events that a healthy run has none of. Gradients that are not finite are ordinary with a loss scaler."""


def stem(kind: str) -> str:
    """What kinds of findings have in common that are of one subject."""
    stems = ("nonfinite_origin", "nonfinite_loss", "unmoved_layers")
    return next((name for name in stems if kind.startswith(name)), kind)


@dataclass
class Observed:
    """What was said of a run."""

    reports: list[RankView]
    diagnosis: RunDiagnosis
    errors: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """All findings that are worth a look, of every rank."""
        findings = [*self.diagnosis.together, *(finding for rank in self.diagnosis.by_rank for finding in rank)]
        return [finding for finding in findings if finding.severity != INFO]

    def kinds(self) -> set[str]:
        """The kinds of these findings."""
        return {stem(finding.kind) for finding in self.findings}

    def text(self, *kinds: str) -> str:
        """What the findings of some kinds say, those that are for information alone included."""
        findings = [*self.diagnosis.together, *(finding for rank in self.diagnosis.by_rank for finding in rank)]
        return " ".join(finding.long for finding in findings if stem(finding.kind) in kinds)

    def events(self, event: catalog.Event, since: int = 0, **attributes: object) -> list[Event]:
        """The events of that name from a step on whose attributes are these."""
        return [
            fact for report in self.reports for fact in report.events_named(event)
            if (fact.step or 0) >= since and all(fact.attributes.get(name) == value for name, value in attributes.items())
        ]  # fmt: skip

    def said(self) -> list[str]:
        """Everything that a healthy run has none of."""
        facts = [
            f"{fact.name} in step {fact.step}: {dict(fact.attributes)}"
            for report in self.reports
            for fact in report.events
            if fact.name in QUIET and fact.text("cause") != "unused"
        ]
        return [*facts, *(f"{finding.kind}: {finding.long}" for finding in self.findings), *self.errors]


class Enough(Exception):  # noqa: N818  # it is no error
    """So many steps have been done."""


class Look:
    """A session whose sampler's rounds are done here; ``most``: steps after which the training is ended."""

    def __init__(self, session: torchobs.Session, most: int | None = None) -> None:
        self.session, self.most = session, most
        self.clock: FedClock | None = None
        sampler = session._sampler
        assert sampler is not None
        sampler.stop()
        sampler._thread.join()
        self._sampler, self._steps = sampler, 0

    def stepped(self) -> None:
        """Do a round if it is time."""
        self._steps += 1
        if not self._steps % ROUND:
            self._sampler.round()
        if self._steps == self.most:
            raise Enough

    def observe(self) -> None:
        """Do a whole round."""
        self._sampler.round(last=True)


class FedClock:
    """The clock of all of torchobs, which advances by itself and by what is added."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Let time pass that nobody waits for."""
        self.added_s += seconds

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic() + self.added_s

    def monotonic_ns(self) -> int:
        """Nanoseconds."""
        return time.monotonic_ns() + int(self.added_s * 1e9)


@contextmanager
def fed_clock() -> Iterator[FedClock]:
    """Give every module of torchobs that has been imported a clock that can be fed, until the end."""
    for name in ("torchobs.probes", "torchobs.runtime.session"):  # init() would import them with the clock they have
        importlib.import_module(name)
    clock, undo = FedClock(), list[Callable[[], None]]()
    replacements = {getattr(time, name): getattr(clock, name) for name in _CLOCKS}
    proxy: Any = types.SimpleNamespace(**{**vars(time), **{name: getattr(clock, name) for name in _CLOCKS}})
    for module in [module for name, module in sys.modules.items() if name.startswith("torchobs.") and module is not None]:
        for name, value in list(vars(module).items()):
            fed = proxy if value is time else replacements.get(value) if isinstance(value, types.BuiltinFunctionType) else None
            if fed is not None:
                setattr(module, name, fed)
                undo.append(lambda module=module, name=name, value=value: setattr(module, name, value))  # type: ignore[misc]
            init = vars(value).get("__init__") if isinstance(value, type) and value.__module__ == module.__name__ else None
            defaults = getattr(init, "__defaults__", None)
            if init is not None and defaults and any(isinstance(default, types.BuiltinFunctionType) for default in defaults):
                init.__defaults__ = tuple(
                    replacements.get(default, default) if callable(default) else default for default in defaults
                )
                undo.append(lambda init=init, defaults=defaults: setattr(init, "__defaults__", defaults))  # type: ignore[misc]
    try:
        yield clock
    finally:
        for restore in undo:
            restore()


def observe(train: Callable[[Look], None], *, fed: bool = False, most: int | None = None, **settings: object) -> Observed:
    """Run ``train`` under a session of its own; return what was said. ``fed``: on a clock that it feeds."""
    directory = Path(tempfile.mkdtemp(prefix="torchobs-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        if fed:
            with fed_clock() as clock:  # which the compiled module does not read
                errors = _run(train, directory, {"native": False, **settings}, clock, most)
        else:
            errors = _run(train, directory, settings, None, most)
        return read(directory, errors)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def read(directory: Path, errors: list[str] | None = None) -> Observed:
    """Return what is said of the run in a directory."""
    reports, bad = load(sorted(directory.glob("*.flight")))
    assert not bad, bad
    reports.sort(key=lambda report: int(report.rank))
    return Observed(reports, diagnose_run(reports), errors or [])


def _run(
    train: Callable[[Look], None], directory: Path, settings: dict[str, Any], clock: FedClock | None, most: int | None
) -> list[str]:
    session = torchobs.init(flight_dir=directory, **{"log_level": "CRITICAL", **settings})
    try:
        look = Look(session, most)
        look.clock = clock
        with suppress(Enough):
            train(look)
        look.observe()
        context = session.context
        assert context is not None
        return [f"{breaker.probe}: {breaker.errors}" for breaker in context.breakers.values() if breaker.errors]
    finally:
        torchobs.shutdown()
