"""A model that runs beside its training: modes, buffers, random states, gradients and hooks stay as they were."""

from __future__ import annotations

import random
import re
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchobs.support.import_hooks import imported
from torchobs.taps.patch import Patch
from torchobs.tensors.values import storages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    Backward = Callable[[Any], None]
    T = TypeVar("T")


@contextmanager
def random_states_kept(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Put the states of Python, NumPy (where it is imported), torch and these generators back when the block ends."""
    numpy: Any = imported("numpy")
    cuda: Any = torch.cuda if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    of_python, of_torch, states = random.getstate(), torch.get_rng_state(), [generator.get_state() for generator in generators]
    of_numpy, of_cuda = numpy and numpy.random.get_state(), cuda and cuda.get_rng_state_all()
    try:
        yield
    finally:
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if cuda is not None:
            cuda.set_rng_state_all(of_cuda)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Put random states and the model's buffers back when the block ends, those that a forward pass has replaced, too."""
    buffers = Buffers(model)
    with random_states_kept():
        try:
            yield
        finally:
            buffers.put_back()


class Buffers:
    """A model's buffers as they are now. ``put_back`` undoes what a forward pass did to them, in place or by another tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module._buffers, name, buffer, None if buffer is None else _unrepeated(buffer.detach()).clone())  # no setter
            for module in model.modules()
            for name, buffer in module._buffers.items()  # with those that are None
        ]

    def put_back(self) -> None:
        """Restore them. May be called again."""
        for owned, name, buffer, before in self._kept:
            if owned[name] is not buffer:
                owned[name] = buffer
            if buffer is not None and before is not None:
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    _unrepeated(buffer.data).copy_(before)  # which raises no version that a graph of the user's relies on


def _unrepeated(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view of each number in memory once: torch copies nothing into a tensor that ``expand`` has made."""
    if buffer.layout is torch.strided and not buffer.is_nested:
        for dimension, stride in enumerate(buffer.stride()):
            if stride == 0 and buffer.shape[dimension] > 1:
                buffer = buffer.narrow(dimension, 0, 1)
    return buffer


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode within the block, and each back into its own after it, also after an exception.

    A module with a ``train`` of its own has it called, on the way there and back: a layer may merge weights in it, as loralib's
    do, keep a flag, or leave children in a mode that it chooses. Of all others the attribute ``training`` is set. A graph of
    ``torch.export``, which implements neither ``train`` nor ``eval``, has no modes, and is left as it is.
    """
    with _modes_kept(model):
        if _overrides(model, "eval"):
            with suppress(NotImplementedError):
                model.eval()
        else:
            _set(model, mode=False)
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Put all modules into training mode within the block, as :func:`evaluating` does for evaluation mode."""
    with _modes_kept(model):
        _set(model, mode=True)
        yield


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:  # parents before children: a parent's own train() changes their modes
            if _overrides(module, "train") and (mode or module.training):
                _call_train(module, mode=mode)
        for module, mode in modes:
            if module.training != mode:
                module.training = mode


def _set(module: nn.Module, *, mode: bool) -> None:
    """Do what ``module.train(mode)`` does, but not call torch's own: probes take that for the training's own evaluation."""
    if _overrides(module, "train"):
        _call_train(module, mode=mode)
        return
    module.training = mode
    for child in module.children():
        _set(child, mode=mode)


def _call_train(module: nn.Module, *, mode: bool) -> None:
    """Call the module's own ``train`` as torch does, by position."""
    with suppress(NotImplementedError):
        module.train(mode)


def _overrides(module: nn.Module, name: str) -> bool:
    method: Any = getattr(module, name)
    return getattr(method, "__func__", None) is not getattr(torch.nn.Module, name)


def samplers(loader: Any) -> list[Any]:
    """Return the loader's samplers, and those within a batch sampler or a wrapper."""
    inner: dict[int, Any] = {}
    owners = [loader]
    for owner in owners:
        for sampler in (getattr(owner, "sampler", None), getattr(owner, "batch_sampler", None)):
            if sampler is not None and id(sampler) not in inner:
                inner[id(sampler)] = sampler
                owners.append(sampler)
    return list(inner.values())


def generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of the loader and its samplers."""
    owned = [getattr(owner, "generator", None) for owner in (loader, *samplers(loader))]
    return list({id(generator): generator for generator in owned if isinstance(generator, torch.Generator)}.values())


def length(loader: Any) -> int | None:
    """Return the number of batches; None if unknown, as for a generator or a DataLoader over an iterable data set."""
    try:
        return len(loader)
    except TypeError:
        return None


_AUTOGRAD_REFUSES = re.compile(r"requires?[ _]grad")
"""In what autograd says of a tensor that has no graph: "element 0 of tensors does not require grad", "requires_grad=False" """


def wants_gradients(message: str) -> bool:
    """Return whether autograd complains of a tensor without gradients: then the pass works with gradients on."""
    return _AUTOGRAD_REFUSES.search(message) is not None


def nodes_of(loss: Any) -> list[Any]:
    """Return the nodes of the graph of a loss; none of one that has no graph."""
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    visited = set(nodes)
    for node in nodes:  # which grows meanwhile
        following = {next_node for next_node, _ in node.next_functions if next_node is not None} - visited
        visited |= following
        nodes += following
    return nodes


def leaves_of(loss: Any) -> list[Any]:
    """Return the tensors to which a backward pass from a loss with a graph adds gradients."""
    return [node.variable for node in nodes_of(loss) if node.name() == "torch::autograd::AccumulateGrad"]


@contextmanager
def checkpoints_kept() -> Iterator[None]:
    """Let this thread's reentrant checkpoints keep what they compute, as without checkpointing.

    Values and gradients are the same. As ever, a region with no argument that takes a gradient gives none to its parameters.
    """
    from torch.utils.checkpoint import CheckpointFunction

    patch = Patch(CheckpointFunction, "apply", _kept_in(threading.get_ident()))
    try:
        yield
    finally:
        patch.undo()


def _kept_in(thread: int) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def apply(function: Any, preserve: Any, *args: Any) -> Any:
            if threading.get_ident() != thread:
                return original(function, preserve, *args)
            takes_gradient = any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)
            with torch.set_grad_enabled(takes_gradient and torch.is_grad_enabled()):
                return function(*args)

        return apply

    return make


@contextmanager
def running_modules(model: Any) -> Iterator[list[tuple[str, str]]]:
    """Yield paths and classes of the modules that run now, the innermost last; hooks keep them, and are gone afterwards.

    A scripted module takes no hooks: what happens in it is that of the module around it.
    """
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
    """The graph has a node with a backward pass of its own."""


def beside_grad(model: Any, passes: Callable[[Backward], T]) -> T:
    """Return the result of ``passes(backward)``, which runs the model and gives its loss (or ``None``) to ``backward``.

    Differentiated are the leaves of the loss's graph, which under FSDP2 are no parameters of the model once it has run.
    A model with reentrant checkpointing is run again: torch differentiates through that into ``.grad`` alone, so that it
    computes with other parameters meanwhile, in the same memory.
    """

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


@contextmanager
def kept_memory(excluded: Iterable[torch.Tensor], note: Callable[[Any], object]) -> Iterator[None]:
    """Call ``note`` with each storage that forward passes in the block keep for a backward pass, once; not with those known."""
    pointers = {storage.data_ptr() for x in excluded for storage in storages(x)}

    def keep(x: torch.Tensor) -> torch.Tensor:
        for storage in storages(x):
            if storage.data_ptr() not in pointers:  # none is used again before the pass ends: the graph holds what is kept
                pointers.add(storage.data_ptr())
                note(storage)
        return x.detach()  # a node that holds its own output is a cycle of C++ objects, which no collector sees

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield
