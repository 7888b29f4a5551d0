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
from torchobs.traceable import graph_being_made

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

        self._host, self._fuse = host, fuse
        self._patch = Patch(torch.autograd, "backward", self._watched, probe=fuse.probe, nests=True)

    def _watched(self, original: Any) -> Any:
        host, fuse = self._host, self._fuse
        note, tell, is_made = host.cycle.trace.append, fuse.guard(host.tell), graph_being_made()

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if host.backwards or fuse.blown or get_ident() != host.thread or is_made():
                return original(*args, **kwargs)  # inside another (reentrant checkpointing), or in another thread, or traced
            # in place, as in the data probe: nothing here can raise
            note(monotonic_ns() << 4 | BACKWARD_BEGINS)
            if host.by_hand is not None:
                host.by_hand.begins(args, kwargs)
            if host.takes_loss is not None:
                host.takes_loss(args, kwargs)
            host.backwards = 1
            try:
                return original(*args, **kwargs)
            finally:
                host.backwards = 0
                if host.in_closure:
                    note(monotonic_ns() << 4 | CLOSURE_GOES_ON)
                    tell(host.after_closure_backward)
                else:
                    note(monotonic_ns() << 4 | BACKWARD_ENDS)
                    if host.by_hand is not None:
                        host.by_hand.ends()

        return backward

    def remove(self) -> None:
        """Restore it."""
        if self._patch is not None:
            self._patch.undo()
