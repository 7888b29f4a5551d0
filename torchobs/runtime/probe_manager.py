"""Which probes are at work: all that need torch, but for those that somebody has switched off.

What is off leaves no hook behind. A probe that is switched off while training runs stops recording at once; its hooks go, and
those of one that is switched on come, at the training thread's next backward (``probes.core.safe_point``).
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

Asked = list[tuple[str, "Callable[[], None]"]]


_CUTTING = frozenset({"step", "phases", "data"})
"""Probes without which the step in progress is not a whole one."""


class ProbeManager:
    """One per session. ``samples`` and ``slow`` are the sampler's lists, which a probe's own functions join."""

    def __init__(self, context: ProbeContext, samples: Asked, slow: Asked) -> None:
        self._context = context
        self._asked: tuple[tuple[str, list[tuple[str, Any]]], ...] = (
            ("sample", samples), ("observe", slow), ("level_changed", context.on_level),
        )  # fmt: skip
        self._probes: dict[str, Probe] = {}
        self._off: frozenset[str] = frozenset()
        self._pid = os.getpid()
        self._begun = False
        self._safe_point = SafePoint(context)
        context.at_backward = self._safe_point.arm

    def install(self, probe: Probe) -> None:
        """Put one to work."""
        context, name = self._context, probe.name
        for metric in (catalog.PROBE_ERRORS, catalog.PROBE_DISABLED, catalog.OVERHEAD):
            cell = context.writer.table.cell(metric, {"probe": name})
            if cell is not None and metric.kind is catalog.Kind.GAUGE:
                cell.set(0.0)
        self._probes[name] = probe
        call(context.breaker(name), probe.install, context)
        for method, asked in self._asked:
            if hasattr(probe, method):
                asked.append((name, getattr(probe, method)))

    def begin(self) -> None:
        """Torch is there, and this is the training thread."""
        self._begun = True
        self._settle()

    def switch_off(self, names: Collection[str]) -> None:
        """Have these probes off, and all others on, but for how the rank ends, which is always seen. From any thread."""
        context, self._off = self._context, frozenset(names) - {PROBES[0].name}
        for name in self._off & self._probes.keys():
            context.breaker(name).blown = True
        if self._begun and self._is_due():
            self._safe_point.arm(self._settle)

    def records(self, name: str) -> bool:
        """Return True if that probe is at work, or will be when torch is there. From any thread."""
        return name not in self._off and not self._context.breaker(name).blown

    def remove_all(self) -> None:
        """Remove every hook of every probe, for good. Idempotent. The sampler still asks them, in the rank's last round."""
        self._safe_point.disarm()
        for name in reversed(list(self._probes)):
            call(CircuitBreaker(name), self._probes.pop(name).remove)

    def _is_due(self) -> bool:
        return any((name in self._off) == (name in self._probes) for name in (make.name for make in PROBES[1:]))

    def _settle(self) -> None:
        """Remove and install what was asked for."""
        if self._pid != os.getpid():
            return
        context, before = self._context, self._probes.keys() & _CUTTING
        for name in [name for name in reversed(list(self._probes)) if name in self._off]:
            self._remove(name)
        for make in PROBES[1:]:
            if make.name not in self._off and make.name not in self._probes:
                context.breakers[make.name] = CircuitBreaker(make.name)  # hooks that could not be removed stay inert
                self.install(make())
        if self._probes.keys() & _CUTTING != before:
            call(CircuitBreaker("switches"), context.recorder.restart)

    def _remove(self, name: str) -> None:
        probe = self._probes.pop(name)
        call(CircuitBreaker(name), probe.remove)
        context = self._context
        for asked in (
            *(asked for _, asked in self._asked),
            context.before_step,
            context.after_closure_backward,
            context.iterated,
        ):
            asked[:] = [entry for entry in asked if entry[0] != name]
