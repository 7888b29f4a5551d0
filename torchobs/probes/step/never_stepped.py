"""Detect a training loop without ``optimizer.step()``: backward passes through parameters of an optimizer that never steps.

An analysis (saliency, an adversarial input, influence functions) has backward passes, too, but no optimizer of what it looks
at. Whether a step comes after all is known when the event is read: some accumulate gradients over hundreds of micro-batches.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.support.references import living_optimizers

if TYPE_CHECKING:
    import torch

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.step.manual_steps import ManualSteps

_LEAST = 100
"""Backward passes without a step"""


class NeverStepped:
    """A part of :class:`~torchobs.probes.step.steps.StepProbe`, in the sampler thread. Told once."""

    def __init__(self, context: ProbeContext, manual_steps: ManualSteps) -> None:
        self._context, self._manual_steps = context, manual_steps
        self._due = _LEAST

    def sample(self) -> None:
        """Look for the optimizer, which holds the GIL for some 100 ms, if no step has ended after so many backward passes.

        Soon after: a script that is short has forgotten it when its function has ended.
        """
        count, parameter = self._manual_steps.passes_before_first_step()
        if count < self._due or parameter is None or self._context.recorder.optimizers():
            return
        self._due = 4 * count
        self._context.yield_gil()
        kind = next((type(one).__name__ for one in living_optimizers() if _has(one, parameter)), None)
        if kind is None:
            return
        self._due = sys.maxsize
        told = {"kind": "never_stepped", "optimizer": kind, "backward_passes": count}
        self._context.event(catalog.EVENT_LOOP_MISTAKE, told)
        self._context.warn_limited(
            "loop never_stepped", f"{count} backward passes and no step of the optimizer ({kind}): is optimizer.step() missing?"
        )


def _has(optimizer: Any, parameter: torch.Tensor) -> bool:
    return any(one is parameter for group in list(getattr(optimizer, "param_groups", ())) for one in group["params"])
