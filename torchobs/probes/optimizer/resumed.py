"""Find from which step a process goes on: the steps that the optimizer's state says it has made before the first one here.

Adam, its relatives and RMSprop count their steps in the state that is saved with a checkpoint (``state[parameter]["step"]``),
fused ones of other libraries in their groups. It is read once, before the first step. A number given to
``torchobs.log(resumed_from=...)`` goes before. SGD counts nothing: then the step is not known.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any
from weakref import ref

from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchobs.probes.core.context import ProbeContext


class ResumeProbe:
    """Reads the step of the optimizer that steps first."""

    name = "resume"

    def __init__(self) -> None:
        self._began = False
        self._fresh: Callable[[], Any] = lambda: None
        """The optimizer, if its state was empty: whether it counts steps is known after the first"""

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._context = context
        context.hooks.before_step.register(context.breaker(self.name), self._before_step)
        context.hooks.before_step.due_at = 0

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._fresh = lambda: None

    def _before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:  # noqa: FBT001  # a listener
        del closure
        if self._began:
            return
        self._began = True
        done, here = counted_steps(optimizer), self._context.recorder.step
        if done is None:
            self._fresh = self._fresh if getattr(optimizer, "state", None) or here else ref(optimizer)
        elif isinstance(done, Real):
            self._show(float(done) - here)
        else:
            self._context.device.take(done, lambda value: self._show(value - here))

    def observe(self) -> None:
        """Show 0 once an optimizer that began without a state has counted its first step."""
        optimizer = self._fresh()
        if optimizer is not None and self._context.recorder.ended:
            self._fresh = lambda: None
            if counted_steps(optimizer) is not None:
                self._show(0.0)

    def _show(self, steps: float) -> None:
        if self._context.scalars.resumed_from is None:
            self._context.set_gauge(catalog.STEPS_RESUMED_FROM, max(0.0, steps))


def counted_steps(optimizer: Any) -> Any:
    """Return the number of steps, or the one-element tensor, that an optimizer counts its steps in; ``None`` without one."""
    state = getattr(optimizer, "state", {})  # what stands for steps by hand has none
    for counts in (*getattr(optimizer, "param_groups", ()), *list(state.values())[:1]):
        counted = counts.get("step") if hasattr(counts, "get") else None
        if isinstance(counted, Real) or getattr(counted, "numel", lambda: 0)() == 1:
            return counted
    return None
