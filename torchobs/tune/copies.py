"""Copies of what a training consists of, to try steps with; what cannot be copied is put back as the caller had it."""

from __future__ import annotations

import inspect
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchobs.support.kept_state import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def copied(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, loss_fn: Callable[..., Any] | None
) -> tuple[nn.Module, torch.optim.Optimizer | None, Any]:
    """Return copies of them that belong together; of a loss function if it is a module, or has one bound to it.

    A tensor that a module keeps with its graph, as the weight of ``nn.utils.weight_norm``, is copied without it.
    """
    bound = _bound(loss_fn)
    with _without_graphs([model, *bound]):
        odd = {id(buffer): copy for module in (model, *bound) for buffer, copy in _odd_buffers(module)}
        model, optimizer, loss = deepcopy((model, optimizer, loss_fn if bound else None), odd)
    return model, optimizer, loss if bound else loss_fn


def _odd_buffers(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the buffers that ``deepcopy`` of torch cannot copy (CSR, nested), each with a copy."""
    for buffer in module.buffers():
        if buffer.layout is not torch.strided or buffer.is_nested:
            yield buffer, buffer.detach().clone()


@contextmanager
def _without_graphs(models: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules the values alone of the tensors that they computed and keep: torch copies none that has a graph."""
    computed = [
        (vars(module), name, value)
        for model in models
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    for owned, name, value in computed:
        owned[name] = value.detach()
    try:
        yield
    finally:
        for owned, name, value in computed:
            owned[name] = value


@contextmanager
def originals_kept(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Put back the buffers of the caller's model, and of modules that a loss function refers to, when the block ends."""
    kept = [Buffers(module) for module in (model, *_referred(loss_fn))]
    try:
        yield
    finally:
        for buffers in kept:
            buffers.put_back()


class OthersGradients:
    """Gradients of the tensors beneath a loss that are none of the copies': of what a loss function or a batch refers to."""

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._own = {id(tensor) for tensor in own}
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def keep(self, loss: object) -> None:
        """Set them aside, before the first backward pass from such a loss; later calls do nothing."""
        if self._kept is not None or not isinstance(loss, torch.Tensor):  # which the backward pass says
            return
        self._kept = [(leaf, leaf.grad) for leaf in _leaves(loss) if id(leaf) not in self._own]
        for leaf, _ in self._kept:
            leaf.grad = None

    def put_back(self) -> None:
        """Give each its gradient again, or none."""
        for leaf, gradient in self._kept or ():
            leaf.grad = gradient


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors to which a backward pass adds gradients."""
    if loss.is_leaf:
        yield loss
    nodes: list[Any] = [loss.grad_fn]
    seen = {None, *nodes}
    for node in nodes:
        following = dict.fromkeys(each for each, _ in node.next_functions) if node is not None else {}
        nodes += [each for each in following if each not in seen]
        seen.update(following)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _bound(loss_fn: Any) -> list[nn.Module]:
    """Return the modules of which a copy of the loss function has copies."""
    if isinstance(loss_fn, partial):
        parts = (loss_fn.func, *loss_fn.args, *loss_fn.keywords.values())
        return [module for part in parts for module in _bound(part)]
    owner = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
    return [owner] if isinstance(owner, nn.Module) else []


def _referred(loss_fn: Any) -> list[nn.Module]:
    """Return the modules that a function names, or that an object has as attributes."""
    if isinstance(loss_fn, partial):
        return _referred(loss_fn.func)
    values: list[Any] = []
    if inspect.isfunction(loss_fn) or inspect.ismethod(loss_fn):
        with suppress(ValueError):  # a name without a value yet
            named = inspect.getclosurevars(loss_fn)
            values += [*named.nonlocals.values(), *named.globals.values()]
    owner = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
    if not isinstance(owner, nn.Module):
        values += getattr(owner, "__dict__", {}).values()
    return list({id(value): value for value in values if isinstance(value, nn.Module)}.values())
