"""The outermost backward: ``torch.autograd.backward``, which ``Tensor.backward`` resolves by attribute.

Not seen: ``torch.autograd.grad``, functional transforms and direct calls of the engine.
"""

from __future__ import annotations

import functools
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.probes.patching import Patch
from torchobs.probes.segments import FORWARD, OPTIMIZER, OTHER

if TYPE_CHECKING:
    from torchobs.guarding import Fuse
    from torchobs.probes.host import Host


class BackwardWatch:
    """Tells the cycle when a backward pass begins and ends. A part of the step probe, which decides its life."""

    def __init__(self) -> None:
        self._patch: Patch | None = None

    def install(self, host: Host, fuse: Fuse) -> None:
        """Wrap ``torch.autograd.backward``."""
        import torch  # torch is optional until training begins

        self._host = host
        original = torch.autograd.backward
        begin, end = fuse.guard(self._begin), fuse.guard(self._end)

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            if get_ident() != host.thread:
                original(*args, **kwargs)
                return
            host.backwards += 1
            if host.backwards == 1:
                begin(args, kwargs)
            try:
                original(*args, **kwargs)
            finally:
                host.backwards -= 1
                if host.backwards == 0:
                    end()

        self._patch = Patch(torch.autograd, "backward", backward)

    def remove(self) -> None:
        """Restore it."""
        if self._patch is not None:
            self._patch.undo()

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now_ns, host = monotonic_ns(), self._host
        tensors = args[0] if args else kwargs.get("tensors")
        gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors", kwargs.get("grad_variables"))
        for listener in host.before_backward:
            listener(tensors, gradients)
        cycle = host.cycle
        if host.in_closure and cycle.segments.segment == OPTIMIZER:
            cycle.turn(FORWARD, now_ns)  # a later evaluation of the closure: its forward stays the optimizer's
        cycle.backward_begins(now_ns)
        host.spend("step", monotonic_ns() - now_ns)

    def _end(self) -> None:
        now_ns, host = monotonic_ns(), self._host
        host.cycle.turn(OPTIMIZER if host.in_closure else OTHER, now_ns)
        host.spend("step", monotonic_ns() - now_ns)
        for listener in host.after_backward:
            listener()
