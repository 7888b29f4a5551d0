"""Observe the outermost backward pass: ``torch.autograd.backward``, ``torch.autograd.grad``, or a direct call of the engine.

``Tensor.backward`` resolves ``torch.autograd.backward`` by attribute. All other callers, names imported before ``init()`` and
Megatron-LM's direct call included, look ``run_backward`` up at the engine, which returns its own while a backward pass runs.
``torch.autograd.grad`` is a backward pass where it differentiates parameters and builds no graph (``create_graph=False``):
with a graph it is a part of the forward (gradient penalties, physics-informed losses, second derivatives), and the gradient of
anything else is an analysis (saliency, an adversarial input). Functional transforms (``torch.func``) are not observed.
"""

from __future__ import annotations

import functools
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.flight.native import ELSEWHERE, make_hook
from torchobs.probes.timeline import BACKWARD_BEGINS, BACKWARD_ENDS, CLOSURE_GOES_ON
from torchobs.support.graph_safe import dispatch_modes, graph_being_made
from torchobs.taps import taps

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

_ACCUMULATE, _CREATE_GRAPH, _INPUTS = 6, 3, 4
"""Positions among the arguments of the engine's ``run_backward``"""


class BackwardWatch:
    """Records where a backward pass begins and ends. A part of :class:`~torchobs.probes.steps.StepProbe`."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        self._context, self._training, self._breaker = context, context.training, breaker
        self._end_pass = breaker.guard(context.recorder.end_pass)

    def install(self) -> None:
        """Wrap ``torch.autograd.backward`` and the engine."""
        taps.BACKWARD.lead_shared(self._watched, self._breaker.probe)
        taps.ENGINE.lead(self._watched_engine, self._breaker.probe)

    def _watched(self, original: Any, busy: Any, divert: Any) -> Any:
        training, breaker, hooks, recorder = self._training, self._breaker, self._context.hooks, self._context.recorder
        note, end_pass = recorder.trace.append, self._end_pass
        takes_loss, modes, is_made = hooks.takes_loss.listeners, dispatch_modes(), graph_being_made()
        notify, thread_id, clock = breaker.guard(hooks.after_closure_backward.notify), get_ident, monotonic_ns

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if busy:
                return divert(*args, **kwargs)
            if training.backwards or breaker.is_open or thread_id() != training.thread or (modes() and is_made()):
                if not training.backwards and thread_id() != training.thread:
                    recorder.note_unseen()
                return original(*args, **kwargs)  # nested (reentrant checkpointing), in another thread, or traced
            # inline, since a call would cost more; nothing here can raise
            note(clock() << 4 | BACKWARD_BEGINS)
            for take_loss in takes_loss:
                gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors") if kwargs else None
                take_loss(args[0] if args else kwargs.get("tensors"), gradients, True)  # noqa: FBT003  # a listener
            training.backwards = 1
            try:
                return original(*args, **kwargs)
            finally:
                training.backwards = 0
                if training.in_closure:
                    note(clock() << 4 | CLOSURE_GOES_ON)
                    notify()
                else:
                    note(clock() << 4 | BACKWARD_ENDS)
                    if recorder.in_pass:
                        end_pass()

        return self._compiled(original, busy, divert, backward) or backward

    def _compiled(self, original: Any, busy: Any, divert: Any, in_python: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return what records nearly every backward pass, and leaves others to ``in_python``; ``None`` if not compiled."""
        context, owners = self._context, (self._training, self._breaker, self._context.recorder)
        held = (
            context.recorder.trace, context.hooks.takes_loss.listeners, dispatch_modes(), original, ELSEWHERE, self._end_pass,
        )  # fmt: skip
        made = make_hook(context.writer.native, "PlainBackward", owners, held)
        if made is None:
            return None
        run = made.run

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if busy:
                return divert(*args, **kwargs)
            if (result := run(args, kwargs)) is not ELSEWHERE:
                return result
            return in_python(*args, **kwargs)

        return backward

    def _watched_engine(self, engine: Any) -> Any:
        """Return a stand-in for the engine, of which there is one in a process, with our ``run_backward``.

        Within a backward pass that is recorded already it returns the original, so that no frame of ours is between torch's.
        """
        training, breaker, plain = self._training, self._breaker, engine.run_backward
        run_backward, modes, is_made = self._watched_run(plain), dispatch_modes(), graph_being_made()

        def found(_: object) -> Callable[..., Any]:
            bypass = training.backwards or breaker.is_open or get_ident() != training.thread or (modes() and is_made())
            original: Callable[..., Any] = plain
            return original if bypass else run_backward

        kind = type("_ImperativeEngine", (type(engine),), {"__slots__": (), "run_backward": property(found)})
        return kind()

    def _watched_run(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the engine's ``run_backward``, recording calls that did not come through ``torch.autograd.backward``."""
        training, breaker, hooks, recorder = self._training, self._breaker, self._context.hooks, self._context.recorder
        note, end_pass = recorder.trace.append, self._end_pass
        takes_loss, trains = hooks.takes_loss.listeners, breaker.guard(_trains)
        notify = breaker.guard(hooks.after_closure_backward.notify)

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            # autograd.grad gives it by name
            accumulates = args[_ACCUMULATE] if len(args) > _ACCUMULATE else kwargs.get("accumulate_grad", False)
            if not accumulates and ((len(args) > _CREATE_GRAPH and args[_CREATE_GRAPH]) or not trains(args, kwargs)):
                return plain(*args, **kwargs)
            tensors = args[0] if args else kwargs.get("tensors")
            note(monotonic_ns() << 4 | BACKWARD_BEGINS)
            for take_loss in takes_loss:
                take_loss(tensors, args[1] if len(args) > 1 else kwargs.get("grad_tensors"), bool(accumulates))
            training.backwards = 1
            try:
                return plain(*args, **kwargs)
            finally:
                training.backwards = 0
                note(monotonic_ns() << 4 | (CLOSURE_GOES_ON if training.in_closure else BACKWARD_ENDS))
                if accumulates and training.in_closure:
                    notify()
                elif recorder.in_pass:
                    end_pass()

        return run_backward

    def remove(self) -> None:
        """Restore them."""
        taps.ENGINE.leave()
        taps.BACKWARD.leave()


def _trains(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the gradients are a model's, and will not be differentiated in turn."""
    import torch

    create_graph = args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else kwargs.get("create_graph")
    inputs: Any = args[_INPUTS] if len(args) > _INPUTS else kwargs.get("inputs")
    return bool(inputs) and not create_graph and isinstance(inputs[-1], torch.nn.Parameter)  # the first may be the data
