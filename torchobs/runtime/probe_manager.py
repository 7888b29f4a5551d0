"""Installs, enables and disables probes.

A disabled probe leaves no hook behind. One that is disabled while training runs stops recording at once; hooks are removed
and installed in the training thread, at its next backward pass (:mod:`torchobs.taps.taps`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.taps.patch import LOST, RESTORED, active

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torchobs.probes import ProbeFactories
    from torchobs.probes.context import Probe, ProbeContext
    from torchobs.taps.patch import Patch
    from torchobs.taps.taps import SafePoint

Callbacks = list[tuple[str, "Callable[[], None]"]]
_STEP_PROBES = frozenset({"step", "phases", "data"})
"""Probes that make the step in progress incomplete when they change"""


class ProbeManager:
    """One per session. Probes' own functions are added to ``samples`` and ``slow``, the sampler's lists."""

    def __init__(
        self, context: ProbeContext, find: Callable[[], ProbeFactories], safe_point: SafePoint, samples: Callbacks,
        slow: Callbacks,
    ) -> None:  # fmt: skip
        """``find``: returns the factory of each probe that needs torch; called once that is imported."""
        self._context, self._find, self._safe_point = context, find, safe_point
        self._factories: ProbeFactories = {}
        self._callbacks = (("sample", samples), ("observe", slow))
        self._probes: dict[str, Probe] = {}
        self._off: frozenset[str] = frozenset()
        self._pid = os.getpid()

    def install(self, probe: Probe) -> None:
        """Install a probe and register its callbacks."""
        context, name = self._context, probe.name
        context.count(catalog.PROBE_ERRORS, 0, {"probe": name})
        context.set_gauge(catalog.PROBE_DISABLED, 0.0, {"probe": name})
        context.count(catalog.OVERHEAD, 0, {"probe": name})
        self._probes[name] = probe
        call(context.breaker(name), probe.install, context)
        for method, callbacks in self._callbacks:
            if hasattr(probe, method):
                callbacks.append((name, getattr(probe, method)))
        changed: Callable[[int], None] | None = getattr(probe, "level_changed", None)
        if changed is not None:
            context.hooks.level.register(context.breaker(name), changed)

    def begin(self) -> None:
        """Install the probes that need torch. Called in the training thread, once torch is imported."""
        self._factories = self._find()
        self._apply_changes()

    def switch_off(self, names: Collection[str]) -> None:
        """Disable these probes and enable all others; the exit probe, which needs no torch, stays on. In the sampler thread."""
        context, before = self._context, self._off
        self._off = frozenset(names)
        for name in (self._off - before) & self._probes.keys() & self._factories.keys():
            context.breaker(name).is_open = True
        if self._has_changes():
            self._safe_point.arm(self._apply_changes)

    def records(self, name: str) -> bool:
        """Return whether that probe is enabled, or will be once torch is imported. From any thread."""
        return name not in self._off and not self._context.breaker(name).is_open

    def remove_all(self) -> None:
        """Remove every hook of every probe, for good. Idempotent. The sampler still calls their callbacks in its last round."""
        self._safe_point.close()
        for name in reversed(list(self._probes)):
            self._remove(name)

    def _has_changes(self) -> bool:
        return any((name in self._off) == (name in self._probes) for name in self._factories)

    def _apply_changes(self) -> None:
        """Remove and install probes so that they match the requested set."""
        if self._pid != os.getpid():
            return
        context, before = self._context, self._probes.keys() & _STEP_PROBES
        for name in [name for name in reversed(list(self._probes)) if name in self._off and name in self._factories]:
            self._remove(name)
            for _, callbacks in self._callbacks:
                callbacks[:] = [entry for entry in callbacks if entry[0] != name]
        for name, make in self._factories.items():
            if name not in self._off and name not in self._probes:
                context.breakers[name] = CircuitBreaker(name)  # hooks that could not be removed stay inert
                self.install(make())
        if self._probes.keys() & _STEP_PROBES != before:
            call(CircuitBreaker("switches"), context.recorder.restart)

    def _remove(self, name: str) -> None:
        call(CircuitBreaker(name), self._probes[name].remove)
        del self._probes[name]  # only now: if a signal's handler raises before, the next call removes it
        self._context.hooks.unregister(name)

    def check_patches(self) -> None:
        """Restore patches that other tools have removed by restoring their own originals, with a warning.

        Where that cannot be done, the probe is reported as disabled. In the sampler thread, every ten seconds.
        """
        for patch in active():
            state = patch.check()
            if state == LOST:
                self._report_lost(patch)
            elif state is not None and state != RESTORED:
                off = self._context.breaker(patch.probe).is_open
                self._context.set_gauge(catalog.PROBE_DISABLED, off, {"probe": patch.probe})
            elif state is not None:
                self._context.warn_limited(
                    f"patch {patch.location}",
                    f"another tool had replaced {patch.location}, so that probe {patch.probe!r} saw nothing of it; "
                    "it does again",
                )

    def _report_lost(self, patch: Patch) -> None:
        context, by = self._context, _name(vars(patch.owner).get(patch.attribute))
        context.set_gauge(catalog.PROBE_DISABLED, 1.0, {"probe": patch.probe})
        attributes = {"probe": patch.probe, "exception.type": "replaced", "location": f"{patch.location} by {by}"}
        context.event(catalog.EVENT_PROBE_DISABLED, attributes)
        what = f"{patch.location} was replaced by {by}, which does not call what was there before"
        context.warn_limited(f"patch {patch.location}", f"{what}: probe {patch.probe!r} sees nothing of it")


def _name(replaced_by: Any) -> str:
    kind = replaced_by if hasattr(replaced_by, "__qualname__") else type(replaced_by)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"
