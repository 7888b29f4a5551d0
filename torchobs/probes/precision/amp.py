"""Automatic mixed precision: skipped steps, the loss scale, and the data type that autocast uses.

A step that the scaler skips is recorded as a skipped step. A non-fused skip does not call the optimizer, so no hook fires; a
fused optimizer is called with ``found_inf`` set and does nothing. The patches sit at class level on ``torch.amp.GradScaler``,
from which the subclasses for CUDA and the CPU inherit, and on each subclass that overrides a patched method (such as
``ShardedGradScaler``).
"""

from __future__ import annotations

import functools
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.probes.core.hook_removal import remove_hooks
from torchobs.probes.core.patch import Patch
from torchobs.probes.precision.autocast import AutocastWatch
from torchobs.probes.precision.loss_scale import LossScales
from torchobs.probes.precision.overflows import Overflows
from torchobs.support.graph_safe import graph_being_made
from torchobs.support.import_hooks import after_import, cancel
from torchobs.support.living_objects import subclasses

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.abc import MetaPathFinder

    from torch.utils.hooks import RemovableHandle

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.precision.loss_scale import LossScaling

SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"


class AmpProbe:
    """Watches loss scalers and autocast."""

    name = "amp"

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling
        self._patches: list[Patch] = []
        self._patched: set[type] = set()
        self._handle: MetaPathFinder | None = None
        self._hook: RemovableHandle | None = None
        self._autocast = AutocastWatch()
        self._in_scaler_step = self._optimizer_called = self._removed = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        from torch.amp import grad_scaler  # torch is optional until training begins

        self._context, self._scaler = context, grad_scaler.GradScaler
        self._loss_scaled, self._unscales = context.hooks.loss_scaled.listeners, context.hooks.unscales.listeners
        self._overflows, self._scales = Overflows(context), LossScales(context)
        self._breaker, self._graph_being_made = context.breaker(self.name), graph_being_made()
        self._after_step_safely = self._breaker.guard(self._after_step)
        self._after_scale_safely = self._breaker.guard(self._after_scale)
        self._after_update_safely = self._breaker.guard(self._after_update)
        self._note_called_safely = self._breaker.guard(self._note_called)
        self._watch_optimizers_safely = self._breaker.guard(self._watch_optimizers)
        self._patch_all()
        self._handle = after_import(SHARDED, self._breaker.guard(self._patch_all))
        self._autocast.install(context, self._breaker)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._removed = True
        cancel(self._handle)
        if self._hook is not None:
            remove_hooks([self._hook])
        self._autocast.remove()
        for patch in reversed(self._patches):
            patch.undo()

    def sample(self) -> None:
        """Publish the scales; count steps that fused optimizers have skipped."""
        self._overflows.sample()
        self._scales.sample()

    def observe(self) -> None:
        """Patch scaler classes defined since the last call; check autocast."""
        if not self._removed:  # the rank's last round comes after ``remove``
            self._patch_all()
        self._autocast.observe(scaled=self._scales.seen)

    def _patch_all(self) -> None:
        """Patch ``GradScaler`` and each subclass that overrides a patched method, once."""
        watched = {
            "step": self._watched_step, "scale": self._watched_scale, "unscale_": self._watched_unscale,
            "update": self._watched_update,
        }  # fmt: skip
        for owner in subclasses(self._scaler):
            if owner in self._patched:
                continue
            self._patched.add(owner)
            for name in vars(owner).keys() & watched.keys():
                self._patches.append(Patch(owner, name, watched[name], probe=self.name, nests=name == "step"))

    def _watched_step(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # a subclass calls its parent; a disabled scaler has no `_scale` and only forwards
            if (
                self._in_scaler_step
                or self._breaker.is_open
                or not getattr(scaler, "_enabled", False)
                or self._graph_being_made()
            ):
                return original(scaler, optimizer, *args, **kwargs)
            if self._hook is None:
                self._watch_optimizers_safely()
            self._in_scaler_step, self._optimizer_called = True, False
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._in_scaler_step = False
            self._after_step_safely(optimizer)
            return result

        return step

    def _watched_scale(self, original: Any) -> Any:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            scaled = original(scaler, outputs, *args, **kwargs)
            if not self._graph_being_made():
                self._after_scale_safely(scaler, outputs, scaled)
            return scaled

        return scale

    def _watched_unscale(self, original: Any) -> Any:
        note = self._breaker.guard(self._before_unscale)

        @functools.wraps(original)
        def unscale_(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            note(scaler, optimizer)
            return original(scaler, optimizer, *args, **kwargs)

        return unscale_

    def _watched_update(self, original: Any) -> Any:
        @functools.wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            if not self._graph_being_made():
                self._after_update_safely(scaler)
            return result

        return update

    def _watch_optimizers(self) -> None:
        """Hook optimizers from the first scaler step on, so that other trainings do not pay for it."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def _before_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        if self._in_scaler_step and not self._optimizer_called and not self._removed:  # a subclass's step calls its parent's
            self._optimizer_called = True
            self._note_called_safely(optimizer)

    def _note_called(self, optimizer: Any) -> None:
        """Note that the scaler calls the optimizer: it steps, unless it is fused and finds ``found_inf`` set."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            self._overflows.stepped(optimizer)
        else:
            self._overflows.fused(optimizer, found_inf)

    def _after_step(self, optimizer: Any) -> None:
        # without torch's hooks a skip cannot be told from a step
        if self._optimizer_called or self._removed or not getattr(type(optimizer).step, "hooked", False):
            return
        recorder = self._context.recorder
        recorder.optimizer_begins(optimizer)
        self._overflows.skipped(optimizer)
        recorder.optimizer_ends(optimizer, monotonic_ns())

    def _after_scale(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        if not scaler._enabled:
            return
        scaling = self._scaling
        scaling.scale = scaler._scale  # get_scale() would synchronise
        scaling.losses, scaling.waits_for_unscale = scaling.losses + 1, True
        for note_scaled in self._loss_scaled:
            note_scaled(outputs, scaled, scaler._scale)

    def _before_unscale(self, scaler: Any, optimizer: Any) -> None:
        if not scaler._enabled:
            return
        self._scaling.waits_for_unscale = False
        if scaler._scale is not None:
            for note_unscaled in self._unscales:
                note_unscaled(optimizer, scaler._scale)

    def _after_update(self, scaler: Any) -> None:
        if scaler._enabled:
            self._scales.updated(scaler)
