"""The techniques of a plan: changes of a model or of torch's global flags that can be applied and undone, over and over.

Behaviour is added by giving a module another class, as FSDP does, not by hooks or a ``forward`` in the instance: names, state
dict, hooks and identity of the module stay, and copies and pickles of it have the class it had before.
"""

from __future__ import annotations

import copyreg
import warnings
from collections import Counter
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import checkpoint

from torchobs.support.import_hooks import imported
from torchobs.tensors.batches import call, first_line
from torchobs.tensors.running import kept_memory, training
from torchobs.tensors.values import storages, stored
from torchobs.tune.difference import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager


class Technique(Protocol):
    """One change that can be taken back exactly."""

    def apply(self) -> None:
        """Make the change."""

    def undo(self) -> None:
        """Leave everything as it was before :meth:`apply`."""


class Reclassed:
    """Gives modules a subclass of their class, the same each time, so that applying again needs no new compilation.

    The forward pass runs within the context manager of ``within``, unless a subclass of this does something else.
    """

    def __init__(self, modules: Sequence[nn.Module], within: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._modules, self._within = list(modules), within
        self._before: list[type[nn.Module]] = []
        self._subclasses: dict[type[nn.Module], type[nn.Module]] = {}

    def apply(self) -> None:
        self._before = [type(module) for module in self._modules]
        for module, kind in zip(self._modules, self._before, strict=True):
            if kind not in self._subclasses:
                self._subclasses[kind] = _subclass(kind, self.forward_of(kind))
            module.__class__ = self._subclasses[kind]

    def undo(self) -> None:
        """Give each module its class back.

        Raises:
            RuntimeError: a module has been given another class since; then nothing is changed.
        """
        both = list(zip(self._modules, self._before, strict=True))
        if other := next((module for module, kind in both if type(module) not in {self._subclasses[kind], kind}), None):
            raise RuntimeError(
                f"{type(other).__name__} was given another class after this plan, by another plan or by FSDP: undo that first"
            )
        for module, kind in both:
            module.__class__ = kind

    def forward_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        within = self._within

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with within():
                return kind.forward(self, *args, **kwargs)

        return forward


def _subclass(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Pickle and copy as the former class: a file could not refer to the subclass by a name."""
        state = nn.Module.__reduce_ex__(self, protocol)[2:]
        return (copyreg._reconstructor, (kind, object, None), *state)  # type: ignore[attr-defined]

    # torch counts recompilations by code object, and gives up on one that many models share
    forward.__code__ = forward.__code__.replace()
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**named, "forward": forward, "__reduce_ex__": reduce})


class Checkpointing(Reclassed):
    """Recomputes modules' activations in the backward pass instead of keeping them (Chen et al. 2016, arXiv:1604.06174)."""

    def forward_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return kind.forward(self, *args, **kwargs)
            return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

        return forward


def is_movable(weight: torch.Tensor) -> bool:
    """Return whether a weight can get other memory: its memory is not shared with processes, and no part of another's."""
    if weight.device.type == "cpu" and weight.is_shared():  # type: ignore[no-untyped-call]
        return False
    return weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


class ChannelsLast:
    """Stores 4-dimensional parameters with the channels last: convolutions of most devices read them faster.

    Parameters that share memory, with another process or another parameter, stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._strides: list[tuple[nn.Parameter, tuple[int, ...]]] = []

    def apply(self) -> None:
        uses = Counter(weight.untyped_storage().data_ptr() for weight in self._model.parameters())
        self._strides = [
            (weight, weight.stride())
            for weight in self._model.parameters()
            if weight.dim() == 4 and is_movable(weight) and uses[weight.untyped_storage().data_ptr()] == 1  # noqa: PLR2004
        ]
        for weight, _ in self._strides:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def undo(self) -> None:
        for weight, strides in self._strides:
            before = torch.empty_strided(weight.shape, strides, dtype=weight.dtype, device=weight.device)
            weight.data = before.copy_(weight.data)


class Flag:
    """Sets an attribute of one of torch's backends."""

    def __init__(self, backend: Any, name: str, value: Any) -> None:
        self._backend, self._name, self._value = backend, name, value
        self._before: Any = None

    def apply(self) -> None:
        self._before = getattr(self._backend, self._name)
        setattr(self._backend, self._name, self._value)

    def undo(self) -> None:
        setattr(self._backend, self._name, self._before)


class Compilation:
    """Compiles a model's calls; if torch fails, they run eagerly from then on, and ``on_failure`` is called with the reason.

    The compiled function stays when the plan is undone: applying again does not compile again.
    """

    def __init__(self, model: nn.Module, mode: str | None, on_failure: Callable[[str], None]) -> None:
        self._model, self._mode, self._on_failure = model, mode, on_failure
        self._call: Callable[..., Any] | None = None

    def apply(self) -> None:
        self._call = self._call or self._compile_call()
        self._model.__dict__["_compiled_call_impl"] = self._call

    def undo(self) -> None:
        self._model.__dict__.pop("_compiled_call_impl", None)

    def _compile_call(self) -> Callable[..., Any]:
        from torch._dynamo.exc import TorchDynamoException  # importing the compiler takes a second or more

        model = self._model

        def eager(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        # torch counts recompilations by code object: with a shared one, the third model or so would silently run eagerly
        eager.__code__ = eager.__code__.replace()
        # torch does not compile functions of its own files: `nn.Sequential.compile()` would compile each part alone
        compiled = torch.compile(eager, mode=self._mode)
        failure: list[str] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not failure:
                try:
                    return compiled(*args, **kwargs)
                except TorchDynamoException as error:
                    failure.append(first_line(error))
                    self._on_failure(failure[0])
            return eager(*args, **kwargs)

        return call


class Kept:
    """Bytes of activations that a forward pass keeps for the backward pass, without parameters and buffers.

    ``by_block`` has for each block what recomputing it would save: all that is kept within it except its inputs.
    """

    def __init__(self, model: nn.Module, example: Any, blocks: Sequence[nn.Module]) -> None:
        self.total = 0
        self.by_block = [0] * len(blocks)
        self._within: list[tuple[int, set[int]]] = []
        with ExitStack() as stack:
            stack.enter_context(undisturbed(model))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(kept_memory([*model.parameters(), *model.buffers()], self._add_storage))
            for index, block in enumerate(blocks):
                stack.callback(block.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leave, always_call=True).remove)
            call(model, example)

    def _enter(self, index: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
        self._within.append((index, {storage.data_ptr() for tensor in tensors for storage in storages(tensor)}))

    def _leave(self, *_: object) -> None:
        self._within.pop()

    def _add_storage(self, storage: Any) -> None:
        self.total += storage.nbytes()
        if self._within and storage.data_ptr() not in self._within[-1][1]:
            self.by_block[self._within[-1][0]] += storage.nbytes()


def recomputed(kept: Kept, budget: int) -> tuple[list[int], int]:
    """Choose the largest blocks to recompute, no more than needed; return their indices and the most bytes then kept.

    A block that is being recomputed has its activations again: the largest of them counts.
    """
    chosen: list[int] = []
    most = kept.total
    for index in sorted(range(len(kept.by_block)), key=lambda index: -kept.by_block[index]):
        if most <= budget or not kept.by_block[index]:
            break
        chosen.append(index)
        saved = [kept.by_block[block] for block in chosen]
        most = kept.total - sum(saved) + max(saved)
    return sorted(chosen), most


def find_state(blocks: Iterable[nn.Module]) -> str | None:
    """Return, by class, a layer of torch in these blocks that a forward pass in training changes; None without one."""
    observers = imported("torch.ao.quantization.observer")
    for module in (module for block in blocks for module in block.modules()):
        if isinstance(module, _BatchNorm):
            return "batch normalisation with statistics that a second forward pass would update twice"
        if isinstance(module, _NormBase) and module.track_running_stats:
            return f"{type(module).__name__} with running statistics, which a second forward pass would update twice"
        hooks = module._forward_pre_hooks.values()
        if isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks):
            return "spectral normalisation, which would have another weight in a second forward pass"
        if observers is not None and isinstance(module, observers.ObserverBase):
            return "observers of quantisation, which a second forward pass would update twice"
    return None


def try_state(model: nn.Module, example: Any, blocks: Sequence[nn.Module]) -> str | None:
    """Return a buffer that a forward pass in training mode changes, by trial; None if there is none.

    Two passes are done, without gradients, since the first one may fill tables for good; buffers, random states and modes are
    put back. State outside buffers is not found.

    Raises:
        ValueError: parameters are not initialised yet: a pass would do that.
    """
    if any(map(is_lazy, model.parameters())):
        raise ValueError("parameters are not initialised yet")
    with undisturbed(model), training(model), torch.no_grad():
        call(model, example)
        before = [{name: buffer.clone() for name, buffer in block.named_buffers()} for block in blocks]
        call(model, example)
        for block, values in zip(blocks, before, strict=True):
            for name, buffer in block.named_buffers():
                if name not in values or not _is_equal(values[name], buffer):
                    return f"{type(block).__name__}'s buffer {name!r}, which a second forward pass would change again"
    return None


def _is_equal(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether two buffers are equal; NaN equals NaN, since memory never written may have it."""
    if (before.shape, before.dtype, before.layout) != (after.shape, after.dtype, after.layout):
        return False
    return all(
        torch.isclose(mine, theirs, rtol=0, atol=0, equal_nan=True).all()
        for mine, theirs in zip(stored(before), stored(after), strict=True)
    )


class DynamicQuantization(Reclassed):
    """Computes linear layers in 8-bit integers by torch.ao; inputs are quantised anew at each call.

    The float32 weights stay, for ``undo`` and the state dict: it saves time, but no memory.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(modules)
        self._quantized: dict[int, tuple[tuple[tuple[int, int], ...], Any]] = {}

    def apply(self) -> None:
        """Quantise weights that changed since the last time, and replace the forward pass."""
        for module in self._modules:
            self._quantized_layer(module)
        super().apply()

    def _quantized_layer(self, module: nn.Module) -> Any:
        """Return the layer in integers, made anew if its weight or bias has changed."""
        versions = tuple((id(x), x._version) for x in (module.weight, module.bias) if isinstance(x, torch.Tensor))
        cached = self._quantized.get(id(module))
        if cached is None or cached[0] != versions:
            cached = self._quantized[id(module)] = (versions, _quantized_linear(module))
        return cached[1]

    def forward_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        """Return a forward pass that is quantised where gradients are off."""
        quantized_layer = self._quantized_layer

        def forward(self: nn.Module, input: torch.Tensor) -> Any:  # noqa: A002  # nn.Linear's name for it
            if torch.is_grad_enabled() or input.dtype is not torch.float32:
                return kind.forward(self, input)
            return quantized_layer(self)(input)  # made anew after a step, or after a state dict was loaded

        return forward


def _quantized_linear(module: nn.Module) -> Any:
    from torch.ao.nn.quantized.dynamic import Linear
    from torch.ao.quantization import default_dynamic_qconfig

    with warnings.catch_warnings(), torch.random.fork_rng([]):  # constructors of layers draw first weights
        twin = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)  # type: ignore[arg-type]
        twin.load_state_dict({name: tensor.detach() for name, tensor in module.state_dict().items()})
        twin.qconfig = default_dynamic_qconfig  # type: ignore[assignment]
        warnings.simplefilter("ignore")  # the plan's reason says that torch will drop this
        return Linear.from_float(twin)  # type: ignore[no-untyped-call]
