"""Differentiate a model's loss beside ``.grad``: what is there stays, and no hook on a parameter is called."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Backward = Callable[[Any], None]
    T = TypeVar("T")

_REENTRANT = "CheckpointFunctionBackward"


class _ReentrantError(Exception):
    """The graph has a node that runs a backward pass of its own."""


def beside_grad(model: Any, passes: Callable[[Backward], T]) -> T:
    """Return what ``passes(backward)`` does, which runs the model and gives its loss (or ``None``) to ``backward``.

    A model with reentrant checkpointing is run again: torch differentiates through that into ``.grad`` alone, so that it
    computes with other parameters meanwhile, in the same memory.
    """
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def beside(loss: Any) -> None:
        if loss is not None and loss.requires_grad and parameters:
            if _is_reentrant(loss):
                raise _ReentrantError
            torch.autograd.grad(loss, parameters, allow_unused=True)

    try:
        return passes(beside)
    except _ReentrantError:
        pass  # the frames that hold the first graph are gone after this block
    with _own_parameters(model):
        return passes(torch.autograd.backward)  # of a loss that there is, and that has a graph


def _is_reentrant(loss: Any) -> bool:
    """Return True if a reentrant checkpoint is in the graph: torch's, or one of the same name (Megatron-LM, DeepSpeed)."""
    left = [loss.grad_fn]
    seen = set(left)
    while left:
        node = left.pop()
        if node.name() == _REENTRANT:
            return True
        following = {next_node for next_node, _ in node.next_functions if next_node is not None} - seen
        seen |= following
        left += following
    return False


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
