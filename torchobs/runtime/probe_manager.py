"""Installs, enables and disables probes.

A disabled probe leaves no hook behind. One that is disabled while training runs stops recording at once; hooks are removed
and installed in the training thread, at its next backward pass (:mod:`torchobs.probes.core.safe_point`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes import PROBES
from torchobs.probes.core.safe_point import SafePoint
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torchobs.probes.core.context import Probe, ProbeContext

Callbacks = list[tuple[str, "Callable[[], None]"]]


_STEP_PROBES = frozenset({"step", "phases", "data"})
"""Probes whose change makes the step in progress incomplete"""


class ProbeManager:
    """One per session. Probes' own functions are added to ``samples`` and ``slow``, the sampler's lists."""

    def __init__(self, context: ProbeContext, samples: Callbacks, slow: Callbacks) -> None:
        self._context = context
        self._callbacks: tuple[tuple[str, list[tuple[str, Any]]], ...] = (
            ("sample", samples), ("observe", slow), ("level_changed", context.on_level),
        )  # fmt: skip
        self._probes: dict[str, Probe] = {}
        self._off: frozenset[str] = frozenset()
        self._pid = os.getpid()
        self._started = False
        self._safe_point = SafePoint(context)
        context.at_backward = self._safe_point.arm

    def install(self, probe: Probe) -> None:
        """Install a probe and register its callbacks."""
        context, name = self._context, probe.name
        for metric in (catalog.PROBE_ERRORS, catalog.PROBE_DISABLED, catalog.OVERHEAD):
            cell = context.writer.table.cell(metric, {"probe": name})
            if cell is not None and metric.kind is catalog.Kind.GAUGE:
                cell.set(0.0)
        self._probes[name] = probe
        call(context.breaker(name), probe.install, context)
        for method, callbacks in self._callbacks:
            if hasattr(probe, method):
                callbacks.append((name, getattr(probe, method)))

    def begin(self) -> None:
        """Install the probes that need torch. Called in the training thread, once torch is imported."""
        self._started = True
        self._apply_changes()

    def switch_off(self, names: Collection[str]) -> None:
        """Disable these probes and enable all others; the exit probe always stays on. From any thread."""
        context, self._off = self._context, frozenset(names) - {PROBES[0].name}
        for name in self._off & self._probes.keys():
            context.breaker(name).is_open = True
        if self._started and self._has_changes():
            self._safe_point.arm(self._apply_changes)

    def records(self, name: str) -> bool:
        """Return True if that probe is enabled, or will be once torch is imported. From any thread."""
        return name not in self._off and not self._context.breaker(name).is_open

    def remove_all(self) -> None:
        """Remove every hook of every probe, for good. Idempotent. The sampler still calls their callbacks in its last round."""
        self._safe_point.disarm()
        for name in reversed(list(self._probes)):
            call(CircuitBreaker(name), self._probes.pop(name).remove)

    def _has_changes(self) -> bool:
        return any((name in self._off) == (name in self._probes) for name in (probe_class.name for probe_class in PROBES[1:]))

    def _apply_changes(self) -> None:
        """Remove and install probes so that they match the requested set."""
        if self._pid != os.getpid():
            return
        context, before = self._context, self._probes.keys() & _STEP_PROBES
        for name in [name for name in reversed(list(self._probes)) if name in self._off]:
            self._remove(name)
        for probe_class in PROBES[1:]:
            if probe_class.name not in self._off and probe_class.name not in self._probes:
                context.breakers[probe_class.name] = CircuitBreaker(
                    probe_class.name
                )  # hooks that could not be removed stay inert
                self.install(probe_class())
        if self._probes.keys() & _STEP_PROBES != before:
            call(CircuitBreaker("switches"), context.recorder.restart)

    def _remove(self, name: str) -> None:
        probe = self._probes.pop(name)
        call(CircuitBreaker(name), probe.remove)
        context = self._context
        for callbacks in (
            *(callbacks for _, callbacks in self._callbacks),
            context.before_step,
            context.after_closure_backward,
            context.iterated,
        ):
            callbacks[:] = [entry for entry in callbacks if entry[0] != name]
