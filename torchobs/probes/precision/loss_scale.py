"""Loss scale and growth tracker of each loss scaler.

The sampler thread reads a scale on the CPU directly. One on a device is copied asynchronously after an ``update()``, at most
ten times a second: ``get_scale()`` would synchronize.
"""

from __future__ import annotations

from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.core.object_index import ObjectIndex

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

COLLAPSED = 1.0
"""Below this a scale shrinks gradients; the documentation of ``GradScaler.update`` calls that "something is likely wrong"."""


class LossScaling:
    """What loss scalers are doing. Written by the AMP probe; read by clipping and by manual steps, in the training thread."""

    __slots__ = ("losses", "scale", "waits_for_unscale")

    def __init__(self) -> None:
        self.losses = 0
        """Number of losses that were scaled"""
        self.scale: Any = None
        """The scale that was last used, a tensor"""
        self.waits_for_unscale = False
        """Whether a loss was scaled since gradients were last unscaled"""


class _Scaler:
    """State of one scaler. ``due``: copy its values at the next update."""

    __slots__ = ("collapsed", "due", "index", "scale", "shown", "tracker")

    def __init__(self, index: int) -> None:
        self.index = index
        self.due, self.collapsed = True, False
        self.scale = self.tracker = nan
        self.shown = (nan, nan)

    def take_scale(self, value: float) -> None:
        self.scale = value

    def take_tracker(self, value: float) -> None:
        self.tracker = value


class LossScales:
    """Publishes the scales for the AMP probe."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self.seen = False
        """True once an enabled scaler was used; the scaler itself may be gone by now."""
        self._scalers = ObjectIndex(len(catalog.SCALER.values), _Scaler)

    def updated(self, scaler: Any) -> None:
        """Note that an enabled scaler was updated; copy its values if they are due."""
        self.seen = True
        state = self._scalers.of(scaler)
        if state is None or not state.due:
            return
        scale, tracker = scaler._scale, scaler._growth_tracker
        if scale is None or tracker is None or scale.is_cpu:
            return
        state.due = False
        self._context.device.take(scale, state.take_scale)
        self._context.device.take(tracker, state.take_tracker)

    def sample(self) -> None:
        """Publish the scales. For the sampler thread."""
        for scaler, state in self._scalers.living():
            scale, tracker = scaler._scale, scaler._growth_tracker
            if scale is not None and tracker is not None and scale.is_cpu:
                state.scale, state.tracker = scale.item(), float(tracker.item())
            state.due = True
            if (state.scale, state.tracker) != state.shown:
                self._show(state)

    def _show(self, state: _Scaler) -> None:
        state.shown = (state.scale, state.tracker)
        for metric, value in ((catalog.AMP_SCALE, state.scale), (catalog.AMP_GROWTH_TRACKER, state.tracker)):
            self._context.set_gauge(metric, value, {"scaler": str(state.index)})
        collapsed = (state.scale if isfinite(state.scale) else inf) < COLLAPSED
        if collapsed and not state.collapsed:
            self._report_collapse(state)
        state.collapsed = collapsed

    def _report_collapse(self, state: _Scaler) -> None:
        context = self._context
        attributes = {"scaler": str(state.index), "scale": state.scale}
        context.event(catalog.EVENT_AMP_SCALE_COLLAPSED, attributes)
        # a scaler that skips does not call the optimizer, before which gradients are looked at: where are they made?
        context.hooks.nonfinite_arrived.notify()
        finds = "the gradients are not finite at any scale, and steps are skipped"
        context.warn_limited(
            "amp scale", f"the loss scale has fallen to {state.scale:g} by step {context.recorder.step}: {finds}"
        )
