"""Detect a loss that is scaled, and gradients that are not divided by the scale: ``scaler.step(optimizer)`` is missing.

Each step is then as many times too long as the scale is large, or, of Adam and its relatives, as long as ever, with an ``eps``
that counts for nothing. Left alone is who has asked a scaler for its scale, and may divide by hand, and who uses ``step`` or
``unscale_`` of any scaler, however seldom: of several optimizers some may have a loss that is not scaled. Where that comes
late, as the scaled one accumulates gradients meanwhile, what was told is taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import catalog

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

_LEAST = 100
"""Steps, and scaled losses, in which it must have been so: more than gradients are commonly accumulated for"""


class NeverUnscaled:
    """A part of the AMP probe. Told once."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._losses = self._since = 0
        self._divides = False
        self._told = ""

    def scaled(self) -> None:
        """Note a scaled loss. In the training thread."""
        if not self._losses:
            self._since = self._context.recorder.ended
        self._losses += 1

    def divides(self) -> None:
        """Note that gradients are divided by the scale, or that somebody knows it who may do that."""
        self._divides = True

    def sample(self) -> None:
        """Tell what was found, or take it back. In the sampler thread."""
        recorder = self._context.recorder
        if self._divides and self._told:
            told = {"kind": "never_unscaled", "optimizer": self._told, "parameters_affected": 0}
            self._context.event(catalog.EVENT_LOOP_MISTAKE, told)
            self._told = ""
        if self._divides or self._told:
            return
        steps, optimizers = recorder.step - self._since, recorder.optimizers() if self._losses else ()
        if self._losses < _LEAST or steps < _LEAST or not optimizers:
            return
        self._told = ", ".join(dict.fromkeys(type(one).__name__ for one in optimizers))  # which has the scaled loss is unknown
        told = {"kind": "never_unscaled", "optimizer": self._told}
        self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, told, self._since + 1)
        text = (
            "losses are scaled, but gradients are never divided by the scale: call scaler.step(optimizer), not optimizer.step()"
        )
        self._context.warn_limited("loop never_unscaled", text)
