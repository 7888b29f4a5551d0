"""Detect a loss that is scaled, and gradients that are not divided by the scale: ``scaler.step(optimizer)`` is missing.

Each step is then as many times too long as the scale is large, or, of Adam and its relatives, as long as ever, with an ``eps``
that counts for nothing. Left alone is who has asked a scaler for its scale, and may divide by hand, and who uses ``step`` or
``unscale_`` of any scaler, however seldom: of several optimizers some may have a loss that is not scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import catalog

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

_LEAST = 3
"""Steps, and scaled losses, in which it must have been so, as of other mistakes of a loop"""


class NeverUnscaled:
    """A part of the AMP probe. Told once."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._losses = self._since = 0
        self._done = False

    def scaled(self) -> None:
        """Note a scaled loss. In the training thread."""
        if not self._losses:
            self._since = self._context.recorder.ended
        self._losses += 1

    def divides(self) -> None:
        """Note that gradients are divided by the scale, or that somebody knows it who may do that."""
        self._done = True

    def sample(self) -> None:
        """Tell what was found. In the sampler thread."""
        recorder = self._context.recorder
        steps, optimizers = recorder.step - self._since, recorder.optimizers() if self._losses else ()
        if self._done or self._losses < _LEAST or steps < _LEAST or not optimizers:
            return
        self._done, kind = True, type(optimizers[0]).__name__
        self._context.writer.event(
            catalog.EVENT_LOOP_MISTAKE.name, {"kind": "never_unscaled", "optimizer": kind}, self._since + 1
        )
        text = (
            "losses are scaled, but gradients are never divided by the scale: call scaler.step(optimizer), not optimizer.step()"
        )
        self._context.warn_limited("loop never_unscaled", text)
