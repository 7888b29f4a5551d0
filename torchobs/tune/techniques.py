"""What a plan does to a model or to torch's global flags: each technique can be applied and undone, over and over.

Behaviour is added by giving a module another class, as FSDP does, rather than by hooks or a ``forward`` of its own: the module
stays itself (names, state dict, hooks, identity), and a copy of it or its pickle is of the class it had before.
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
    """Gives modules a subclass of their class. The subclasses are kept, so that applying again needs no new compilation.

    Their forward pass runs within a context manager that ``within`` returns, unless a subclass of this says otherwise.
    """

    def __init__(self, modules: Sequence[nn.Module], within: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._modules, self._within = list(modules), within
        self._before: list[type[nn.Module]] = []
        self._made: dict[type[nn.Module], type[nn.Module]] = {}

    def apply(self) -> None:
        self._before = [type(module) for module in self._modules]
        for module, kind in zip(self._modules, self._before, strict=True):
            if kind not in self._made:
                self._made[kind] = _subclass(kind, self.forward_of(kind))
            module.__class__ = self._made[kind]

    def undo(self) -> None:
        """Give each module its class back.

        Raises:
            RuntimeError: it has been given another one since; nothing is changed then.
        """
        both = list(zip(self._modules, self._before, strict=True))
        if other := next((module for module, kind in both if type(module) not in {self._made[kind], kind}), None):
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
        """Pickle and copy as the class before: the subclass has no name that a file could refer to."""
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
    """Return True if memory is a weight's own, so that it can have other memory: not shared with processes, no part of more."""
    if weight.device.type == "cpu" and weight.is_shared():  # type: ignore[no-untyped-call]
        return False
    return weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


class ChannelsLast:
    """Stores 4-dimensional parameters with the channels last, which convolutions of most devices read faster.

    Those that share their memory, with another process or another parameter, stay as they are.
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
    """Compiles a model's calls; what torch cannot compile runs eagerly from then on, and ``failed`` is told why.

    The compiled function is kept when the plan is undone: applying again compiles nothing that was compiled before.
    """

    def __init__(self, model: nn.Module, mode: str | None, failed: Callable[[str], None]) -> None:
        self._model, self._mode, self._failed = model, mode, failed
        self._call: Callable[..., Any] | None = None

    def apply(self) -> None:
        self._call = self._call or self._compiled_call()
        self._model.__dict__["_compiled_call_impl"] = self._call

    def undo(self) -> None:
        self._model.__dict__.pop("_compiled_call_impl", None)

    def _compiled_call(self) -> Callable[..., Any]:
        from torch._dynamo.exc import TorchDynamoException  # importing the compiler takes a second or more

        model = self._model

        def eager(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        # torch counts recompilations by code object: with a common one, the third model or so would run eagerly in silence
        eager.__code__ = eager.__code__.replace()
        # a function of ours: torch compiles none of its own files, and so `nn.Sequential.compile()` each of its parts alone
        compiled = torch.compile(eager, mode=self._mode)
        failure: list[str] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not failure:
                try:
                    return compiled(*args, **kwargs)
                except TorchDynamoException as error:
                    failure.append(first_line(error))
                    self._failed(failure[0])
            return eager(*args, **kwargs)

        return call


class Kept:
    """Bytes of activations that one forward pass keeps for the backward pass; parameters and buffers are none.

    ``by_block`` has for each of the blocks what recomputing it would save: all that is kept within it but its inputs.
    """

    def __init__(self, model: nn.Module, example: Any, blocks: Sequence[nn.Module]) -> None:
        self.total = 0
        self.by_block = [0] * len(blocks)
        self._within: list[tuple[int, set[int]]] = []
        with ExitStack() as stack:
            stack.enter_context(undisturbed(model))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(kept_memory([*model.parameters(), *model.buffers()], self._note))
            for index, block in enumerate(blocks):
                stack.callback(block.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leave, always_call=True).remove)
            call(model, example)

    def _enter(self, index: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        self._within.append((index, {storage.data_ptr() for each in tensors for storage in storages(each)}))

    def _leave(self, *_: object) -> None:
        self._within.pop()

    def _note(self, storage: Any) -> None:
        self.total += storage.nbytes()
        if self._within and storage.data_ptr() not in self._within[-1][1]:
            self.by_block[self._within[-1][0]] += storage.nbytes()


def recomputed(kept: Kept, budget: int) -> tuple[list[int], int]:
    """Return the indices of the blocks to recompute, the largest first and no more than needed, and what is kept at most then.

    While one of them is recomputed, its own activations are there again: the largest of them counts.
    """
    chosen: list[int] = []
    most = kept.total
    for index in sorted(range(len(kept.by_block)), key=lambda index: -kept.by_block[index]):
        if most <= budget or not kept.by_block[index]:
            break
        chosen.append(index)
        saved = [kept.by_block[each] for each in chosen]
        most = kept.total - sum(saved) + max(saved)
    return sorted(chosen), most


def known_state(blocks: Iterable[nn.Module]) -> str | None:
    """Return what torch has in these blocks that a forward pass changes in training, by class; None if there is nothing."""
    observers = imported("torch.ao.quantization.observer")
    for module in (module for block in blocks for module in block.modules()):
        if isinstance(module, _BatchNorm):
            return "batch normalisation, whose statistics a second forward pass would update twice"
        if isinstance(module, _NormBase) and module.track_running_stats:
            return f"{type(module).__name__} with running statistics, which a second forward pass would update twice"
        hooks = module._forward_pre_hooks.values()
        if isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks):
            return "spectral normalisation, of which a second forward pass would have another weight"
        if observers is not None and isinstance(module, observers.ObserverBase):
            return "observers of quantisation, which a second forward pass would update twice"
    return None


def tried_state(model: nn.Module, example: Any, blocks: Sequence[nn.Module]) -> str | None:
    """Return which block's buffers a forward pass in training mode changes, by trial; None if none does.

    What the first pass alone fills (tables, first statistics) is the same after a second: two are done, without gradients, and
    buffers, random states and modes are put back. State that is in no buffer is not seen.

    Raises:
        ValueError: parameters are not initialised yet, which a pass would do.
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
    """Return whether two buffers hold the same, NaN in the same places: nothing has been written to such a one yet."""
    if (before.shape, before.dtype, before.layout) != (after.shape, after.dtype, after.layout):
        return False
    return all(
        torch.isclose(mine, theirs, rtol=0, atol=0, equal_nan=True).all()
        for mine, theirs in zip(stored(before), stored(after), strict=True)
    )


class DynamicQuantization(Reclassed):
    """Computes linear layers in 8-bit integers by torch.ao; inputs are quantised anew at each call.

    The float32 weights stay where they are, for ``undo`` and the state dict: it saves time, and no memory.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(modules)
        self._quantized: dict[int, tuple[tuple[tuple[int, int], ...], Any]] = {}

    def apply(self) -> None:
        """Quantise weights that changed since the last time, and take over the forward pass."""
        for module in self._modules:
            self._current(module)
        super().apply()

    def _current(self, module: nn.Module) -> Any:
        """Return the layer in integers, made anew if its weight or bias is another than the last time."""
        made_of = tuple((id(each), each._version) for each in (module.weight, module.bias) if isinstance(each, torch.Tensor))
        known = self._quantized.get(id(module))
        if known is None or known[0] != made_of:
            known = self._quantized[id(module)] = (made_of, _quantized_linear(module))
        return known[1]

    def forward_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        """Return a forward pass that is quantised where nothing asks for gradients."""
        current = self._current

        def forward(self: nn.Module, input: torch.Tensor) -> Any:  # noqa: A002  # nn.Linear's name for it
            if torch.is_grad_enabled() or input.dtype is not torch.float32:
                return kind.forward(self, input)
            return current(self)(input)  # a state dict may have been loaded, or a step been taken, since

        return forward


def _quantized_linear(module: nn.Module) -> Any:
    from torch.ao.nn.quantized.dynamic import Linear
    from torch.ao.quantization import default_dynamic_qconfig

    with warnings.catch_warnings(), torch.random.fork_rng([]):  # constructors of layers draw first weights
        twin = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)  # type: ignore[arg-type]
        twin.load_state_dict({name: tensor.detach() for name, tensor in module.state_dict().items()})
        twin.qconfig = default_dynamic_qconfig  # type: ignore[assignment]
        warnings.simplefilter("ignore")  # that torch will give this up is said in the plan's reason
        return Linear.from_float(twin)  # type: ignore[no-untyped-call]
