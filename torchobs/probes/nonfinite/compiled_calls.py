"""Note what compiled modules were called with, by weak references: for running one again if its result is not finite.

The graph of a loss has one node for a whole compiled region, which tells nothing of what is within. Its number in the order of
the forward pass says which call made it, and that call can be repeated without the compiler (``eager_replay``) as long as its
arguments live and have not been changed. A call's note takes about a microsecond and keeps no tensor alive. Nothing is patched
before the program has imported ``torch._dynamo``.

A module is compiled by ``torch.compile(module)``, whose result is an ``OptimizedModule``, or in place by ``module.compile()``,
which sets an attribute of that one module. Dynamo looks through the first when it meets one in a function that it compiles, and
ignores the second. Compiled functions are not noted: nothing but the caller's name for it leads to one.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from enum import Enum
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchobs.probes.core.patch import Patch
from torchobs.support.import_hooks import after_import, cancel, imported
from torchobs.support.module_copies import is_constant

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import MetaPathFinder

    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

MOST_CALLS = 256
"""The last ones: the compiled blocks of one step, or several calls of each"""
_MOST_HELD = 64
"""Items of an argument that is a list or a dictionary: with more the call is not noted, which would take too long"""
_ROUNDS = 3
"""Of the sampler's slower work, in which modules that were compiled before ``init()`` are looked for"""
_OURS = "_torchobs_notes_calls"
_TENSOR, _PLAIN, _SEQUENCE, _MAPPING, _OBJECT = range(5)


class GoneError(LookupError):
    """An argument does not live any more, or was changed since the call."""


class CompiledCall(NamedTuple):
    """A call of a compiled module; ``first`` to ``last`` (exclusive): numbers of the nodes that it made."""

    first: int
    last: int
    module: ref[Any]
    arguments: list[Any]
    keywords: dict[str, Any]
    autocast: tuple[tuple[str, bool, Any], ...]
    """For each type of device whether autocast was enabled, and its data type"""
    step: int
    """The last one that had ended"""

    def inputs(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as they were given. Raises :class:`GoneError`."""
        return [*map(_restored, self.arguments)], {name: _restored(each) for name, each in self.keywords.items()}


class CompiledCalls:
    """Notes calls of compiled modules in the training thread. A part of the probe."""

    def __init__(self) -> None:
        self.paused = False
        """While a call is repeated, which is no call of the user's"""
        self._calls: deque[tuple[Any, int, ref[Any]]] = deque(maxlen=MOST_CALLS)
        self._handle: MetaPathFinder | None = None
        self._patches: list[Patch] = []
        self._compiled: list[ref[Any]] = []
        """Modules that have been compiled in place"""
        self._rounds_left = 0

    def install(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        """Wrap the calls now, or once ``torch._dynamo`` is imported."""
        import torch  # torch is optional until training begins

        self._context, self._breaker = context, breaker
        self._rounds_left = _ROUNDS if imported("torch._dynamo") is not None else 0
        if not hasattr(torch.compiler, "set_stance") or not hasattr(torch._C._autograd, "_get_sequence_nr"):
            return  # without the last there is no telling which call made a node; set_stance came with torch 2.6
        context.hooks.watched.register(breaker, self._take_all)
        # at once: the first call is what imports torch._dynamo
        self._patches = [Patch(torch.nn.Module, "compile", self._watched_compile, probe=breaker.probe)]
        self._handle = after_import("torch._dynamo", breaker.guard(self._attach))

    def remove(self) -> None:
        """Restore what was wrapped. Idempotent."""
        if self._handle is not None:
            cancel(self._handle)
        for patch in reversed(self._patches):
            patch.undo()
        for known in self._compiled:
            module = known()
            call: Any = vars(module).get("_compiled_call_impl") if module is not None else None
            if hasattr(call, _OURS):
                vars(module)["_compiled_call_impl"] = call.__wrapped__
        self._patches, self._compiled = [], []
        self._calls.clear()

    def observe(self) -> None:
        """Find modules that were compiled in place before this was installed. For the sampler thread."""
        if self._rounds_left > 0:
            self._rounds_left -= 1
            for outermost in self._context.modules:
                for module in outermost():
                    self._take_all(module)

    def among(self, numbers: list[int]) -> list[CompiledCall]:
        """Return the outermost calls that made nodes of these numbers, in the order of the calls."""
        return [call for call in self._outermost() if any(call.first <= number < call.last for number in numbers)]

    def latest(self) -> list[CompiledCall]:
        """Return the outermost calls of the step in progress that made any node, the last one first."""
        step = self._context.recorder.step
        return [call for call in self._outermost() if call.first < call.last and call.step == step][::-1]

    def _outermost(self) -> list[CompiledCall]:
        found: list[CompiledCall] = []
        calls = [CompiledCall(begun[0], last, module, *begun[1:]) for begun, last, module in self._calls]
        for call in sorted(calls, key=lambda call: (call.first, -call.last)):
            if not found or call.last > found[-1].last:
                found.append(call)
        return found

    def _attach(self) -> None:
        optimized = getattr(sys.modules["torch._dynamo.eval_frame"], "OptimizedModule", None)
        if optimized is not None:
            self._patches.append(Patch(optimized, "__call__", self._watched, probe=self._breaker.probe))

    def _watched(self, original: Any) -> Any:
        begin, end = self._noting()

        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            begun = begin(args, kwargs)
            result = original(module, *args, **kwargs)
            if begun is not None:
                end(begun, ref(module))
            return result

        return call

    def _watched_compile(self, original: Any) -> Any:
        take = self._breaker.guard(self._take)

        @functools.wraps(original)
        def compile_in_place(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            take(module)

        return compile_in_place

    def _take_all(self, outermost: Any) -> None:
        for module in list(outermost.modules()):
            self._take(module)

    def _take(self, module: Any) -> None:
        """Wrap the compiled call of a module that has one of its own."""
        plain = vars(module).get("_compiled_call_impl")
        if plain is None or hasattr(plain, _OURS):
            return
        (begin, end), known = self._noting(), ref(module)

        @functools.wraps(plain)  # with the attributes by which Dynamo knows what has been compiled
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = begin(args, kwargs)
            result = plain(*args, **kwargs)
            if begun is not None:
                end(begun, known)
            return result

        setattr(call, _OURS, True)
        vars(module)["_compiled_call_impl"] = call
        self._compiled.append(known)

    def _noting(self) -> tuple[Callable[[Any, Any], Any], Callable[[Any, ref[Any]], None]]:
        """Return what is called before and after a call of a compiled module: the call may change its arguments."""
        import torch

        calls, breaker, training, kind = self._calls.append, self._breaker, self._context.training, torch.Tensor
        recorder = self._context.recorder
        with_gradient, number = torch.is_grad_enabled, torch._C._autograd._get_sequence_nr
        autocasts: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if breaker.is_open or self.paused or not with_gradient() or get_ident() != training.thread:
                return None
            try:  # a plain tensor without a further call
                held = [(_TENSOR, ref(each), each._version) if type(each) is kind else _held(kind, each) for each in args]
                named = {
                    name: (_TENSOR, ref(each), each._version) if type(each) is kind else _held(kind, each)
                    for name, each in kwargs.items()
                } if kwargs else kwargs  # fmt: skip
                return number(), held, named, _autocast() if autocasts() else (), recorder.step
            except (TypeError, RuntimeError):  # an argument takes no weak reference, or has no version
                return None
            except Exception as error:  # this is the guard
                if not breaker.takes(error):
                    raise
                return None

        def end(begun: Any, module: ref[Any]) -> None:
            calls((begun, number(), module))

        return begin, end


def _autocast() -> tuple[tuple[str, bool, Any], ...]:
    import torch

    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _held(tensor: type, value: Any) -> Any:
    """Return a description of a value that keeps no tensor, and nothing large, alive. Raises ``TypeError``."""
    if isinstance(value, tensor):
        return _TENSOR, ref(value), value._version  # type: ignore[attr-defined]  # a tensor's
    kind = type(value)
    if is_constant(value):
        return _PLAIN, value
    if isinstance(value, (tuple, list, dict)) and len(value) > _MOST_HELD:
        raise TypeError(kind)
    if kind in {tuple, list} or hasattr(kind, "_make"):
        return _SEQUENCE, kind, [_held(tensor, each) for each in value]
    if kind is dict:
        return _MAPPING, {key: _held(tensor, each) for key, each in value.items()}
    if isinstance(value, (FunctionType, type, Enum)):
        return _OBJECT, ref(value)
    raise TypeError(kind)  # it may be changed, by the call or since: a batch of a class of its own, a generator


def _restored(held: Any) -> Any:
    kind = held[0]
    if kind == _PLAIN:
        return held[1]
    if kind == _SEQUENCE:
        values = [_restored(each) for each in held[2]]
        return held[1](values) if held[1] in {tuple, list} else held[1]._make(values)
    if kind == _MAPPING:
        return {name: _restored(each) for name, each in held[1].items()}
    value = held[1]()
    if value is None or (kind == _TENSOR and value._version != held[2]):
        raise GoneError
    return value
