"""Run a model beside its training: its loss is differentiated beside ``.grad``, and no hook on a parameter is called."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torchobs.taps.patch import Patch
from torchobs.tensors.running import leaves_of, nodes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Backward = Callable[[Any], None]
    T = TypeVar("T")


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


@contextmanager
def running_modules(model: Any) -> Iterator[list[tuple[str, str]]]:
    """Yield paths and classes of the modules that run now, the innermost last; hooks keep them, and are gone afterwards.

    A scripted module takes no hooks: what happens in it is that of the module around it.
    """
    import torch

    running, handles = list[tuple[str, str]](), []

    def leave(*_: object) -> None:
        running.pop()

    try:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                entry = path, type(module).__name__
                enter = lambda *_, entry=entry: running.append(entry)  # noqa: E731
                handles.append(module.register_forward_pre_hook(enter, prepend=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
        yield running
    finally:
        for handle in handles:
            handle.remove()


_REENTRANT = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint: torch's, or one of the same name (Megatron-LM, DeepSpeed)"""


class _ReentrantError(Exception):
    """The graph has a node that runs a backward pass of its own."""


def beside_grad(model: Any, passes: Callable[[Backward], T]) -> T:
    """Return what ``passes(backward)`` does, which runs the model and gives its loss (or ``None``) to ``backward``.

    Differentiated are the leaves of the loss's graph, which under FSDP2 are no parameters of the model once it has run.
    A model with reentrant checkpointing is run again: torch differentiates through that into ``.grad`` alone, so that it
    computes with other parameters meanwhile, in the same memory.
    """
    import torch

    def beside(loss: Any) -> None:
        if loss is None:
            return
        if any(node.name() == _REENTRANT for node in nodes_of(loss)):
            raise _ReentrantError
        if leaves := leaves_of(loss):
            torch.autograd.grad(loss, leaves, allow_unused=True)

    try:
        return passes(beside)
    except _ReentrantError:
        pass  # the frames that hold the first graph are gone after this block
    with _own_parameters(model):
        return passes(torch.autograd.backward)  # of a loss that there is, and that has a graph


@contextmanager
def _own_parameters(model: Any) -> Iterator[None]:
    """Exchange the parameters for others in the same memory, without gradients and hooks, until the block ends."""
    import torch

    owned = [(module, name, x) for module in model.modules() for name, x in module._parameters.items() if x is not None]
    with torch.inference_mode(mode=False):
        others = {id(x): torch.nn.Parameter(x.detach(), requires_grad=x.requires_grad) for _, _, x in owned}
    try:
        for module, name, x in owned:
            vars(others[id(x)]).update(vars(x))
            setattr(module, name, others[id(x)])  # by attribute: recurrent modules keep a list of them
        yield
    finally:
        for module, name, x in owned:
            setattr(module, name, x)
