"""What a plan does to a model or to torch's global flags: each technique can be applied and undone, over and over.

Behaviour is added by giving a module another class, as FSDP does, rather than by hooks or a ``forward`` of its own: the module
stays itself (names, state dict, hooks, identity), and a copy of it or its pickle is of the class it had before.
"""

from __future__ import annotations

import copyreg
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
"""What torch, out of memory included, and a model's own code raise in a mode that they cannot have"""


class Technique(Protocol):
    """One change that can be taken back exactly."""

    def apply(self) -> None:
        """Make the change."""

    def undo(self) -> None:
        """Leave everything as it was before :meth:`apply`."""


class Reclassed:
    """Gives modules a subclass of their class. The subclasses are kept, so that applying again needs no new compilation."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
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
        raise NotImplementedError


def _subclass(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Pickle and copy as the class before: the subclass has no name that a file could refer to."""
        state = nn.Module.__reduce_ex__(self, protocol)[2:]
        return (copyreg._reconstructor, (kind, object, None), *state)  # type: ignore[attr-defined]

    # torch counts recompilations by code object, and gives up on one that many models share
    forward.__code__ = forward.__code__.replace()
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**named, "forward": forward, "__reduce_ex__": reduce})


class Autocast(Reclassed):
    """Runs a model's forward pass under ``torch.autocast``."""

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__([model])
        self._device, self._dtype = device, dtype

    def forward_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        device, dtype = self._device, self._dtype

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                return kind.forward(self, *args, **kwargs)

        return forward


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
                    failure.append(f"{type(error).__name__}: {first_line(error)}")
                    self._failed(failure[0])
            return eager(*args, **kwargs)

        return call


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that has words."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:200]
