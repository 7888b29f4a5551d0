"""Note what compiled regions were called with, by weak references: for running one again if its result is not finite.

The graph of a loss has one node for a whole compiled region, which tells nothing of what is within. Its number in the order of
the forward pass says which call made it, and the graph that Dynamo had made for it can be run again (``eager_replay``) as long
as its inputs live and have not been changed. A call's note takes some 0.1 µs for each input and keeps no tensor alive. Nothing
is patched before the program has imported ``torch._dynamo``, and what it has compiled before that is not noted.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.core.patch import Patch
from torchobs.support.import_hooks import after_import, cancel
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import MetaPathFinder

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.nonfinite.captured_graph import CapturedGraph
    from torchobs.support.error_guard import CircuitBreaker

MOST_CALLS = 256
"""The last ones: the compiled blocks of one step, or several calls of each"""
_MOST_INPUTS = 4_096


class GoneError(LookupError):
    """An input does not live any more, or was changed since the call."""


class CompiledCall(NamedTuple):
    """A call of a compiled region; ``first`` to ``last`` (exclusive): numbers of the nodes that it made."""

    first: int
    last: int
    captured: CapturedGraph
    held: list[Any]
    """Its inputs, tensors as weak references"""
    versions: list[int]
    """Of the tensors that are neither parameters nor statistics, before the call"""
    step: int
    """The last one that had ended"""

    def inputs(self) -> list[Any]:
        """Return the inputs as they were given; statistics as they are now. Raises :class:`GoneError`."""
        found, versions = list[Any](), iter(self.versions)
        for about, held in zip(self.captured.inputs, self.held, strict=True):
            value = held() if about.is_tensor else held
            if about.is_tensor and (value is None or (_may_change(about) and value._version != next(versions))):
                raise GoneError
            found.append(value)
        return found


def _may_change(about: Any) -> bool:
    return about.is_tensor and not about.is_parameter and not about.is_statistic


class CompiledCalls:
    """Notes calls of compiled regions in the training thread. A part of the probe."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=MOST_CALLS)
        self._handle: MetaPathFinder | None = None
        self._patch: Patch | None = None
        self._ended = False

    def install(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        """Wrap what Dynamo compiles now, or once it is imported."""
        import torch  # torch is optional until training begins

        self._context, self._breaker = context, breaker
        if hasattr(torch._C._autograd, "_get_sequence_nr"):  # else there is no telling which call made a node
            self._handle = after_import("torch._dynamo", breaker.guard(self._attach))

    def remove(self) -> None:
        """Restore what was wrapped; regions that are compiled stay wrapped, and note nothing. Idempotent."""
        self._ended = True
        cancel(self._handle)
        if self._patch is not None:
            self._patch.undo()
        self._patch = None
        self._calls.clear()

    def among(self, numbers: list[int]) -> list[CompiledCall]:
        """Return the calls that made nodes of these numbers, in their order."""
        return [call for call in self._all() if any(call.first <= number < call.last for number in numbers)]

    def latest(self) -> list[CompiledCall]:
        """Return the calls of the step in progress that made any node, the last one first."""
        step = self._context.recorder.step
        return [call for call in self._all() if call.first < call.last and call.step == step][::-1]

    def _all(self) -> list[CompiledCall]:
        return [CompiledCall(*call) for call in self._calls]

    def _attach(self) -> None:
        owner = getattr(sys.modules.get("torch._dynamo.output_graph"), "OutputGraph", None)
        if hasattr(owner, "call_user_compiler"):
            self._patch = Patch(owner, "call_user_compiler", self._watched, probe=self._breaker.probe)

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def call_user_compiler(owner: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            captured = self._captured(owner, module)  # before a backend changes it
            compiled = original(owner, module, *args, **kwargs)
            if captured is None or compiled is module or getattr(compiled, "__self__", None) is module:
                return compiled  # the last: the backend has compiled nothing
            return self._noting(compiled, captured)

        return call_user_compiler

    def _captured(self, owner: Any, module: Any) -> CapturedGraph | None:
        """Return what is kept of a graph; ``None`` if it cannot be repeated, has no gradient, or is compiled for a file."""
        import torch

        from torchobs.probes.nonfinite.captured_graph import NotRepeatableError, capture  # needs torch

        if self._ended or self._breaker.is_open or not torch.is_grad_enabled():
            return None
        if getattr(owner, "export", False) or getattr(owner, "package", None) is not None:
            return None
        try:
            captured = capture(module)
        except NotRepeatableError:
            return None
        except Exception as error:  # this is the guard
            if not self._breaker.takes(error):
                raise
            return None
        return captured if len(captured.inputs) <= _MOST_INPUTS else None

    def _noting(self, compiled: Any, captured: CapturedGraph) -> Callable[..., Any]:
        """Return a function that calls ``compiled`` and notes its inputs."""
        import torch

        take, breaker, training, recorder = self._calls.append, self._breaker, self._context.training, self._context.recorder
        with_gradient, number, plain = torch.is_grad_enabled, torch._C._autograd._get_sequence_nr, _plain_versions()
        tensors = [about.is_tensor for about in captured.inputs]
        changing = [place for place, about in enumerate(captured.inputs) if _may_change(about)]

        def call(*args: Any) -> Any:
            if self._ended or breaker.is_open or not with_gradient() or get_ident() != training.thread:
                return compiled(*args)
            try:
                held = [TensorReference(each) if is_tensor else each for each, is_tensor in zip(args, tensors, strict=True)]
                versions = plain([args[place] for place in changing])
            except (TypeError, ValueError, RuntimeError):  # no weak reference, no version: an input of a kind of its own
                return compiled(*args)
            first = number()
            result = compiled(*args)
            take((first, number(), captured, held, versions, recorder.step))
            return result

        return functools.wraps(compiled)(call) if isinstance(compiled, FunctionType) else call


def _plain_versions() -> Callable[[list[Any]], list[int]]:
    """Return a function that reads tensors' versions without a call of the user's, and raises ``TypeError`` for subclasses."""
    import torch

    kinds, modes = {torch.Tensor, torch.nn.Parameter}, getattr(torch._C, "_len_torch_function_stack", int)

    def versions(tensors: list[Any]) -> list[int]:
        if not kinds.issuperset(map(type, tensors)):
            raise TypeError
        if modes():  # set_default_device is one, too
            with torch._C.DisableTorchFunction():
                return [each._version for each in tensors]
        return [each._version for each in tensors]

    return versions
