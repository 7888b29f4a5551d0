"""Run a forward pass without reentrant checkpointing, which refuses ``torch.autograd.grad`` and hides its operators."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchobs.probes.core.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def checkpoints_kept() -> Iterator[None]:
    """Let this thread's reentrant checkpoints keep what they compute, as without checkpointing.

    Values and gradients are the same. As ever, a region of whose arguments none takes a gradient gives none to its parameters.
    """
    from torch.utils.checkpoint import CheckpointFunction

    patch = Patch(CheckpointFunction, "apply", _kept_in(threading.get_ident()))
    try:
        yield
    finally:
        patch.undo()


def _kept_in(thread: int) -> Callable[[Any], Any]:
    import torch

    def make(original: Any) -> Any:
        def apply(function: Any, preserve: Any, *args: Any) -> Any:
            if threading.get_ident() != thread:
                return original(function, preserve, *args)
            takes_gradient = any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
            with torch.set_grad_enabled(takes_gradient and torch.is_grad_enabled()):
                return function(*args)

        return apply

    return make
