"""Record the steps of CUDA graphs: each ``replay()`` repeats the optimizer steps made during the capture.

During a capture nothing is computed, so it is no step. The captured backward passes and steps are recorded in order, and again
at each replay. The loss is read from the tensor that the captured backward began from, which a replay writes to. Gradient
norms are not measured: the optimizer has used, and perhaps cleared, the gradients by then.
"""

from __future__ import annotations

import functools
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from torchobs.probes.timeline import BACKWARD_BEGINS, BACKWARD_ENDS, STEP_BEGINS
from torchobs.taps.patch import Patch

if TYPE_CHECKING:
    from torchobs.probes.context import ProbeContext
    from torchobs.probes.step_recorder import OpenPart
    from torchobs.support.error_guard import CircuitBreaker


class _Capture(NamedTuple):
    """A capture in progress: the graph's id, and the step that it interrupts."""

    graph: int
    interrupted: OpenPart


class CudaGraphs:
    """Patches ``torch.cuda.CUDAGraph``. A part of :class:`~torchobs.probes.steps.StepProbe`."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        self._context, self._training, self._breaker = context, context.training, breaker
        self._takes_loss = context.hooks.takes_loss
        self._patches: list[Patch] = []
        self._capture: _Capture | None = None
        self._noted: list[ref[Any] | None] = []
        self._captured: dict[int, tuple[ref[Any], list[ref[Any] | None]]] = {}
        self._losses: list[ref[Any]] = []
        self._losses_of: dict[int, list[ref[Any]]] = {}

    def install(self) -> None:
        """Apply the patches, if this torch has CUDA graphs."""
        graph: Any = getattr(torch.cuda, "CUDAGraph", None)
        guard, recorder = self._breaker.guard, self._context.recorder
        begins, ends = guard(self._capture_begins), guard(self._capture_ends)
        shorten_trace, after = guard(recorder.relieve), guard(self._after_replay)
        if not all(hasattr(graph, name) for name in ("capture_begin", "capture_end", "replay")):
            return

        def capture_begin(begin: Any) -> Any:
            @functools.wraps(begin)
            def watched(graph: Any, *args: Any, **kwargs: Any) -> Any:
                has_begun = False
                begins(graph)
                try:
                    result = begin(graph, *args, **kwargs)
                    has_begun = True
                    return result
                finally:
                    if not has_begun:
                        ends(graph)

            return watched

        def capture_end(end: Any) -> Any:
            @functools.wraps(end)
            def watched(graph: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    return end(graph, *args, **kwargs)
                finally:
                    ends(graph)

            return watched

        def replayed(replay: Any) -> Any:
            @functools.wraps(replay)
            def watched(graph: Any, *args: Any, **kwargs: Any) -> Any:
                if id(graph) not in self._captured or get_ident() != self._training.thread:
                    return replay(graph, *args, **kwargs)
                begun_ns = monotonic_ns()
                shorten_trace()
                result = replay(graph, *args, **kwargs)
                after(graph, begun_ns)
                return result

            return watched

        wrappers = (("capture_begin", capture_begin), ("capture_end", capture_end), ("replay", replayed))
        self._patches = [Patch(graph, name, make, probe=self._breaker.probe) for name, make in wrappers]

    def remove(self) -> None:
        """Undo the patches."""
        for patch in self._patches:
            patch.undo()

    @property
    def capturing(self) -> bool:
        """Whether the training thread is capturing a graph."""
        return self._capture is not None

    def note_step(self, optimizer: object) -> None:
        """Record an optimizer's step during the capture."""
        self._note_backward()
        self._noted.append(ref(optimizer))

    def _note_backward(self) -> None:
        """Record a backward that was captured since the last step."""
        begun, trace = self._capture, self._context.recorder.trace
        if begun is not None and any(stamp & 15 == BACKWARD_BEGINS for stamp in trace[begun.interrupted.traced :]):
            self._noted.append(None)
            del trace[begun.interrupted.traced :]

    def _note_loss(self, loss: Any, gradients: Any, accumulates: bool) -> None:  # noqa: FBT001  # a listener
        if gradients is None and accumulates and getattr(loss, "numel", lambda: 0)() == 1:
            self._losses.append(ref(loss))

    def _capture_begins(self, graph: object) -> None:
        self._training.captures.begin(id(graph))
        if get_ident() != self._training.thread or self._training.backwards:
            return
        self._capture = _Capture(id(graph), self._context.recorder.begin_capture())
        self._noted, self._losses = [], []
        # it computes no loss yet
        self._context.recorder.plain.listeners = [self._breaker.guard(self._note_loss)]

    def _capture_ends(self, graph: object) -> None:
        self._training.captures.end(id(graph))
        begun = self._capture
        if begun is None or begun.graph != id(graph):
            return
        self._note_backward()
        self._capture = None
        self._context.recorder.end_capture(begun.interrupted)
        self._context.recorder.plain.listeners = self._takes_loss.listeners
        if self._noted:
            key = id(graph)
            self._captured[key] = ref(graph, lambda _: self._forget(key)), self._noted
            self._losses_of[key] = self._losses

    def _forget(self, key: int) -> None:
        self._captured.pop(key, None)
        self._losses_of.pop(key, None)

    def _after_replay(self, graph: object, begun_ns: int) -> None:
        """Record the steps of a replayed graph; the device may still be computing them."""
        recorder, now_ns = self._context.recorder, monotonic_ns()
        losses = iter(self._losses_of[id(graph)])
        for noted in self._captured[id(graph)][1]:
            optimizer = noted() if noted is not None else None
            if noted is None:
                recorder.trace.append(begun_ns << 4 | BACKWARD_BEGINS)
                reference = next(losses, None)
                loss = reference() if reference is not None else None
                for take_loss in self._takes_loss.listeners if loss is not None else ():
                    take_loss(loss, None, True)  # noqa: FBT003  # a listener
                recorder.trace.append(now_ns << 4 | BACKWARD_ENDS)
            elif optimizer is not None:
                self._step(optimizer, now_ns)
            begun_ns = now_ns

    def _step(self, optimizer: Any, now_ns: int) -> None:
        recorder = self._context.recorder
        if id(optimizer) != recorder.plain.sole:
            recorder.optimizer_begins(optimizer)
        recorder.trace.append(now_ns << 4 | STEP_BEGINS)
        rate = optimizer.param_groups[0].get("lr") if id(optimizer) == recorder.plain.rated else None
        if type(rate) is float:
            recorder.set_rate(rate)
        recorder.optimizer_ends(optimizer, now_ns)
