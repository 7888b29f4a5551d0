"""The outermost backward: ``torch.autograd.backward``, which ``Tensor.backward`` resolves by attribute.

Not seen: ``torch.autograd.grad``, functional transforms and direct calls of the engine.
"""

from __future__ import annotations

import functools
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.probes.core.boundaries import BACKWARD_BEGINS, BACKWARD_ENDS, CLOSURE_GOES_ON
from torchobs.probes.core.patch import Patch

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker


class BackwardWatch:
    """Notes where a backward pass begins and ends. A part of the step probe, which decides its life."""

    def __init__(self) -> None:
        self._patch: Patch | None = None

    def install(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        """Wrap ``torch.autograd.backward``."""
        import torch

        original = torch.autograd.backward
        trace, note, tell = context.recorder.trace, context.recorder.trace.append, breaker.guard(context.notify)

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            if context.backwards or breaker.blown or get_ident() != context.thread:
                return original(*args, **kwargs)  # inside another (reentrant checkpointing), or in another thread
            # in place, as in the data probe: nothing here can raise
            manual_steps = context.manual_steps
            if manual_steps is None and trace and (len(trace) > 2 or trace[0] & 15):  # noqa: PLR2004  # more than a fetch
                manual_steps = context.steps_by_hand() if context.steps_by_hand is not None else None
            note(monotonic_ns() << 4 | BACKWARD_BEGINS)
            if manual_steps is not None:
                manual_steps.begins(args, kwargs)
            if context.takes_loss is not None:
                context.takes_loss(args, kwargs)
            context.backwards = 1
            try:
                return original(*args, **kwargs)
            finally:
                context.backwards = 0
                if context.in_closure:
                    note(monotonic_ns() << 4 | CLOSURE_GOES_ON)
                    tell(context.after_closure_backward)
                else:
                    note(monotonic_ns() << 4 | BACKWARD_ENDS)
                    if manual_steps is not None:
                        manual_steps.ends(args, kwargs)

        self._patch = Patch(torch.autograd, "backward", backward)

    def remove(self) -> None:
        """Restore it."""
        if self._patch is not None:
            self._patch.undo()
