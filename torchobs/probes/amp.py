"""The loss scaler's effect on steps: one that it skips is a step all the same, and marked.

A non-fused skip calls no optimizer, so no hook fires; a fused optimizer is called with ``found_inf`` set and does nothing.
The patches sit at class level on ``torch.amp.GradScaler``, whose subclasses for CUDA, CPU and FSDP inherit ``step``.
"""

from __future__ import annotations

import functools
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.flight.record import Flag
from torchobs.probes.patching import Patch

if TYPE_CHECKING:
    from torchobs.probes.host import Host


class AmpProbe:
    """Sees what ``GradScaler`` does."""

    name = "amp"

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._stepped: Any = None
        self._under_way: dict[int, list[float]] = {}

    def install(self, host: Host) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        from torch.amp import grad_scaler  # torch is optional until training begins

        self._host = host
        fuse = host.fuse(self.name)
        self._note = (self.name, fuse.guard(self._note_step))
        scaler = grad_scaler.GradScaler
        self._patches = [
            Patch(scaler, "step", self._watched_step(scaler.step, fuse.guard(self._after_step))),
            Patch(scaler, "scale", self._watched_scale(scaler.scale, fuse.guard(self._after_scale))),
        ]

    def remove(self) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        for patch in self._patches:
            patch.undo()

    def sample(self) -> None:
        """Mark ended steps that a fused optimizer turns out to have skipped."""
        cycle = self._host.cycle
        for step in sorted(self._under_way):
            found = self._under_way[step]
            if step > cycle.step or not found:
                return
            del self._under_way[step]
            if found[0]:
                cycle.late(step, Flag.SKIPPED, 0.0, 0.0)

    def _watched_step(self, original: Any, after: Any) -> Any:
        host = self._host

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not host.watches_steps:
                host.watches_steps = True  # from the first scaler on; nobody else pays for it
                host.before_step.append(self._note)
            self._stepped = None
            result = original(scaler, optimizer, *args, **kwargs)
            after(scaler, optimizer)
            return result

        return step

    def _watched_scale(self, original: Any, after: Any) -> Any:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            after(scaler, outputs, scaled)
            return scaled

        return scale

    def _note_step(self, optimizer: Any, closure: bool) -> None:  # noqa: FBT001  # a listener
        """The optimizer is called: not skipped, unless it is a fused one that finds ``found_inf`` set."""
        del closure
        self._stepped = optimizer
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            return
        cycle = self._host.cycle
        if found_inf.device.type == "cpu":
            if found_inf.item():
                cycle.values.flags |= Flag.SKIPPED
            return
        arriving: list[float] = []
        if self._host.device.take(found_inf, arriving.append):
            self._under_way[cycle.step + 1] = arriving

    def _after_step(self, scaler: Any, optimizer: Any) -> None:
        if not scaler.is_enabled() or self._stepped is not None:
            return
        cycle = self._host.cycle
        cycle.optimizer_begins(optimizer)
        cycle.values.flags |= Flag.SKIPPED
        cycle.optimizer_ends(optimizer, monotonic_ns())

    def _after_scale(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        if self._host.loss_scaled is not None and scaler.is_enabled():
            self._host.loss_scaled(outputs, scaled, scaler._scale)  # get_scale() would synchronise
