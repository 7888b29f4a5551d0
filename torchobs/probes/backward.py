"""The outermost backward: ``torch.autograd.backward``, which ``Tensor.backward`` resolves by attribute.

Not seen: ``torch.autograd.grad``, functional transforms and direct calls of the engine.
"""

from __future__ import annotations

import functools
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.probes.patching import Patch
from torchobs.probes.trace import BACKWARD_BEGINS, BACKWARD_ENDS, CLOSURE_GOES_ON

if TYPE_CHECKING:
    from torchobs.guarding import Fuse
    from torchobs.probes.host import Host


class BackwardWatch:
    """Notes where a backward pass begins and ends. A part of the step probe, which decides its life."""

    def __init__(self) -> None:
        self._patch: Patch | None = None

    def install(self, host: Host, fuse: Fuse) -> None:
        """Wrap ``torch.autograd.backward``."""
        import torch

        self._host = host
        original = torch.autograd.backward
        begin, end = fuse.guard(self._begin), fuse.guard(self._end)

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            if host.backwards or get_ident() != host.thread:
                return original(*args, **kwargs)  # inside another (reentrant checkpointing), or in another thread
            begin(args, kwargs)
            host.backwards = 1
            try:
                return original(*args, **kwargs)
            finally:
                host.backwards = 0
                end()

        self._patch = Patch(torch.autograd, "backward", backward)

    def remove(self) -> None:
        """Restore it."""
        if self._patch is not None:
            self._patch.undo()

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now_ns, host = monotonic_ns(), self._host
        host.cycle.trace.append(now_ns << 4 | BACKWARD_BEGINS)
        if host.takes_loss is not None:
            tensors = args[0] if args else kwargs.get("tensors")
            gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors", kwargs.get("grad_variables"))
            host.takes_loss(tensors, gradients)
        if host.cycle.metered:
            host.spend("loss", monotonic_ns() - now_ns)

    def _end(self) -> None:
        now_ns, host = monotonic_ns(), self._host
        host.cycle.trace.append(now_ns << 4 | (CLOSURE_GOES_ON if host.in_closure else BACKWARD_ENDS))
        if host.in_closure:
            host.tell(host.after_closure_backward)
