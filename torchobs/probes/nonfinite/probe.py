"""Traces each loss or gradient that is not finite to its birth, from the autograd graph of the step it happened in.

Nothing is done until the loss probe or the gradient probe has met such a value: a training that stays finite pays nothing. A
loss is traced when its backward begins, before anything has stepped. Gradients are seen when the optimizer is about to step;
their graph has lost its values by then, so that the node is inferred, and the next backward pass is watched (``armed``). On a
device nothing waits for the loss: after one that arrives non-finite, the next backward pass waits once for its own loss.
"""

from __future__ import annotations

import logging
import sys
import traceback
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch

from torchobs import catalog
from torchobs.catalog.findings import finding
from torchobs.detect.spikes import HEALTHY
from torchobs.probes.nonfinite.backward import BackwardWatch, bad_gradients
from torchobs.probes.nonfinite.locate import ModuleNames, is_users, locals_of
from torchobs.probes.nonfinite.origin import (
    SHARE_OF_STEP,
    UNNAMED,
    GraphTracer,
    NonfiniteOrigin,
    attributes_of,
    computes_in_float16,
    from_overflow,
    gradients_were_finite,
    of_parameters,
    user_frames,
)
from torchobs.probes.timeline import BACKWARD_BEGINS, BACKWARD_ENDS
from torchobs.support.process_group import is_shared
from torchobs.support.rate_limit import RateLimiter
from torchobs.taps import taps
from torchobs.tensors.values import Condition, condition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType

    from torchobs.probes.amp import LossScaling
    from torchobs.probes.context import ProbeContext
    from torchobs.probes.step_recorder import StepRecorder
    from torchobs.tensors.graph import GraphNode

_log = logging.getLogger("torchobs")
TRACE_EVERY_S, TRACES_AT_ONCE = 60.0, 3
SAME_EVERY_S = 600.0
"""An origin is reported again after this time"""
WATCHED_BACKWARDS = 3
_MOST_KEPT = 64
_REFUSALS = (ValueError, RuntimeError, ArithmeticError, AssertionError)
"""Exceptions by which a script, or torch, refuses a value"""
LONGEST_WAIT_S = 1.0
"""Longest wait for a device that still computes: one that hangs must not keep the process from ending"""
_MOST_NAMED = 8


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is not finite. ``origin``: where it was born, if known."""

    def __init__(self, what: str, origin: NonfiniteOrigin | None) -> None:
        super().__init__(what if origin is None else f"{what} {origin.sentence()}")
        self.origin = origin


class NonfiniteProbe:
    """Finds where NaN and infinity are born."""

    name = "nonfinite"

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling
        self._traces = RateLimiter(TRACE_EVERY_S, TRACES_AT_ONCE)
        self._reports = RateLimiter(SAME_EVERY_S)
        self._lost_step = -9
        """Last step with a loss or a gradient that was not finite: its consequences are no other birth"""
        self._bad_gradients_step = -9
        """Last step with gradients that were not finite, of a finite loss"""
        self._last_examined = 0
        """Step with gradients that were examined as the training ended"""
        self._origin: NonfiniteOrigin | None = None
        self._waiting: NonfiniteOrigin | None = None
        """An origin that the graph of the next loss may explain: a detached tensor, as the output of a GAN's generator is"""
        self._was_spoiled = False
        """Whether a parameter was not finite already then; else a step has made it so since"""
        self._has_rest = False
        """Whether parameters and buffers are still to be searched for the remains of such a value"""
        self._rest = -1
        """Number of parameters and buffers with such values at the last search"""
        self._armed = 0
        self._watch: BackwardWatch | None = None
        self._raises: list[Callable[[], None]] = []
        """Unsubscribe from the taps that raise errors, if that was requested"""
        self._pending: NonFiniteError | None = None
        """Error to raise at the next suitable place"""
        self._sentences: list[str] = []

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context, self._breaker = context, context.breaker(self.name)
        context.hooks.nonfinite_loss.register(self._breaker, self._loss)
        context.hooks.nonfinite_gradient.register(self._breaker, self._gradient)
        context.hooks.nonfinite_arrived.register(
            self._breaker, partial(context.at_backward, self._breaker.guard(self._arrived))
        )
        context.hooks.ends_by_error.register(self._breaker, self._ending)
        context.hooks.ends.register(self._breaker, self._end)
        if "nonfinite" in context.settings.raise_on:
            examine = self._breaker.guard(self._examine_gradients)

            def before(optimizer: Any) -> None:
                examine(optimizer)
                self._raise_pending()

            self._raises = [taps.BACKWARD.subscribe(self._around_backward), taps.BEFORE_STEP.subscribe(before)]

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._breaker.guard(self._release)()
        while self._raises:
            self._raises.pop()()
        self._disarm()

    def sample(self) -> None:
        """Log origins, one that waits for another loss once the training is a step on."""
        if self._is_rest_due() and self._traces.take(monotonic(), "rest"):
            self._context.at_backward(self._breaker.guard(self._find_rest))
        waiting = self._waiting  # the training thread may take it at any time
        if waiting is not None and self._context.recorder.step > (waiting.step or 0):
            self._release()
        while self._sentences:
            _log.info("%s", self._sentences.pop(0))  # no warning: standard error is the script's own

    # -- in the training thread --------------------------------------------------------------------------------------------

    def _loss(self, tensors: Any, frames: list[FrameType] | None = None) -> None:
        """Trace a loss that is not finite; its backward pass begins. ``frames``: the user's, if they have ended."""
        step = self._context.recorder.in_progress
        follows = step - self._lost_step <= 1 and self._origin is not None  # parameters are what the last step made of it
        last_lost, self._lost_step = self._lost_step, step
        self._origin = self._origin if follows else None
        waiting, self._waiting = self._waiting, None
        if (not follows or waiting is not None) and self._traces.take(monotonic(), "loss"):
            tracer = GraphTracer(_listed(tensors), frames or user_frames(sys._getframe()), step, *self._trained())
            origin, bad = tracer.forward(earliest=waiting is not None), _bad_parameters(self._trained()[1])
            if waiting is not None:
                later = {"unknown"} if self._was_spoiled else {"unknown", "parameter", "backward"}
                self._report(origin if origin is not None and origin.kind not in later else waiting)
            elif origin is not None and origin.kind == "input" and not origin.parameter:
                self._origin, self._waiting, self._was_spoiled = origin, origin, bool(bad)
            elif origin is not None and origin.kind in {"parameter", "backward"}:
                origin = self._of_weights(bad, origin, tracer.nodes) or origin
                born = self._step_of_spoiling(last_lost, _listed(tensors)) if origin.kind == "backward" else origin.step
                self._report(replace(origin, step=born))
                self._context.origins[step] = self._origin  # of the anomaly that is seen in this step, too
            else:
                self._report(origin)
        self._expect("nonfinite_loss", step)

    def _step_of_spoiling(self, last_lost: int, losses: Sequence[Any]) -> int | None:
        """Return the step in which gradients have spoiled the weights; ``None`` if that is uncertain.

        A device's loss is looked at steps later, and of several optimizers one may have stepped in this step.
        """
        recorder = self._context.recorder
        if last_lost == self._bad_gradients_step >= recorder.ended:
            return last_lost
        is_first = last_lost < recorder.ended and all(loss.is_cpu for loss in losses)
        return recorder.ended if is_first and len(recorder.optimizers()) == 1 else None

    def _of_weights(
        self, bad: Sequence[Any], likely: NonfiniteOrigin | None, nodes: Sequence[GraphNode] = ()
    ) -> NonfiniteOrigin | None:
        """Return the origin if the last step has made these parameters non-finite; ``likely``: by a derivative in the graph.

        It is unknown where gradients were finite, or came from other ranks as well; no derivative is blamed for lost gradients.
        """
        if len(bad) < SHARE_OF_STEP:
            return None
        models, recorder = self._trained()[0], self._context.recorder
        were_finite = gradients_were_finite(bad, recorder.optimizers())
        if not were_finite and not is_shared():
            if were_finite is False and likely is not None and likely.kind == "backward":
                return likely
            if not self._scaling.losses and computes_in_float16(bad, nodes):
                return from_overflow(bad, models, recorder.ended)
        return of_parameters(bad, models, recorder.in_progress)

    def _release(self) -> None:
        """Report an origin that waits for the graph of another loss."""
        waiting, self._waiting = self._waiting, None
        self._report(waiting)

    def _gradient(self, optimizer: Any, keys: frozenset[int] = frozenset()) -> None:
        """Trace gradients that are not finite, of a finite loss; the optimizer is about to step.

        ``keys``: ids of their parameters before clipping, which makes all of them NaN; empty if unknown.
        """
        step = self._context.recorder.in_progress
        if step == self._lost_step or skips_by_itself(optimizer):
            return
        follows, self._lost_step = step - self._lost_step == 1 and self._origin is not None, step
        self._bad_gradients_step = step
        if not follows and self._traces.take(monotonic(), "gradient"):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            bad = set(keys) or {id(parameter) for parameter in bad_gradients(parameters)}
            if bad:
                self._origin = None
                self._report(self._infer(bad, user_frames(sys._getframe()), step, parameters))
                self._arm()
        self._expect("nonfinite_gradient", step)

    def _infer(self, bad: set[int], frames: list[FrameType], step: int, others: Sequence[Any] = ()) -> NonfiniteOrigin | None:
        """Return the origin by the graph of a loss that a running function of the user still has.

        ``others``: parameters of an optimizer that may not have stepped yet.
        """
        for frame in frames:
            values = locals_of(frame).values()
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            losses = [tensor for tensor in tensors if tensor.grad_fn is not None and tensor.numel() == 1]
            for loss in losses:
                tracer = GraphTracer([loss], frames, step, *self._trained())
                origin = tracer.gradients(bad) or self._gradients_overflow(bad, tracer.nodes, step, others)
                if origin is not None:
                    return origin
        return self._gradients_overflow(bad, (), step, others)

    def _gradients_overflow(
        self, bad: set[int], nodes: Sequence[GraphNode], step: int, others: Sequence[Any]
    ) -> NonfiniteOrigin | None:
        """Return the origin if gradients of these parameters (ids) have overflowed in float16."""
        models, parameters = self._trained()
        spoiled = list({id(parameter): parameter for parameter in (*others, *parameters) if id(parameter) in bad}.values())
        if not spoiled or self._scaling.losses or is_shared() or not computes_in_float16(spoiled, nodes):
            return None
        return from_overflow(spoiled, models, step)

    def _ending(self, error: BaseException | None) -> None:
        """Trace what is not finite as an exception, or ``sys.exit(n)``, ends the training.

        A script that checks its loss and raises has no backward pass in which it would be traced, and one with NaN in its
        weights may end in its next forward pass, before a measurement has seen them. The values are still there: in variables
        of the functions that are left, and in the optimizers' parameters and gradients.
        """
        if not isinstance(error, KeyboardInterrupt):
            self._last_gradients(logged=not isinstance(error, _REFUSALS))
        step, frames = self._context.recorder.in_progress, _frames_of(error)
        if step - self._lost_step <= 1 and self._origin is not None:
            return
        parameters, losses = self._trained()[1], _bad_losses(frames)
        bad = _bad_parameters(parameters)
        if losses:
            self._loss(losses, frames)
            self._release()
        elif bad:
            likely = self._infer({id(parameter) for parameter in bad}, frames, self._context.recorder.ended)
            self._report(self._of_weights(bad, likely) or of_parameters(bad, self._trained()[0], step))
        elif not self._scaling.losses:  # what overflows of a scaled loss is no fault
            spoiled = {id(parameter) for parameter in _bad_gradients_left(parameters)}
            self._report(self._infer(spoiled, frames, step) if spoiled else None)

    def _last_gradients(self, *, logged: bool = True) -> None:
        """Report gradients that are not finite, and that nothing has measured before the end: the weights come from them."""
        context = self._context
        step = _step_of_gradients(context.recorder)
        if step - self._lost_step <= 1 or step == self._last_examined or self._scaling.losses:
            return  # known already, or what overflows of a scaled loss
        self._last_examined = step
        attributes = _faults(self._trained()[1], self._trained()[0])
        if attributes:
            context.writer.event(catalog.EVENT_NONFINITE_GRADIENT.name, attributes, step)
            if logged:
                context.warn_limited("anomaly nonfinite_gradient", finding("nonfinite_gradient", step=step).short)

    def _end(self) -> None:
        self._last_gradients()
        if self._is_rest_due():
            self._find_rest()

    def _is_rest_due(self) -> bool:
        return self._has_rest and self._context.recorder.step - self._lost_step >= HEALTHY

    def _find_rest(self) -> None:
        """Report the remains in parameters and buffers, if there are any: a running mean stays NaN for ever."""
        if not self._is_rest_due() or self._context.device.cuda.capturing():
            return
        models, parameters = self._trained()
        if not parameters:
            return  # the optimizers are gone
        names = ModuleNames(parameters, models)
        buffers = [buffer for module in names.modules.values() for buffer in module.buffers(recurse=False)]
        bad = _bad_parameters(parameters)
        bad += [buffer for buffer in _bad_parameters(buffers) if bool(buffer.isnan().any())]  # infinity may be meant
        if len(bad) == self._rest:
            return
        self._has_rest, self._rest = bool(bad), len(bad)
        attributes = {"parameters_affected": len(bad)} | ({"parameter": names.name_of(bad[0]) or UNNAMED} if bad else {})
        self._context.writer.event(catalog.EVENT_NONFINITE_REST.name, attributes, self._context.recorder.step)

    def _arrived(self) -> None:
        """Watch after a loss of a device, as rarely as traces are made: each look at such a loss waits for the device."""
        if self._traces.take(monotonic(), "arrived"):
            self._arm()

    def _arm(self) -> None:
        """Watch the next backward passes."""
        if not self._armed:
            self._context.hooks.takes_loss.register(self._breaker, self._watch_backward)
        self._armed = WATCHED_BACKWARDS

    def _disarm(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._armed, self._watch = 0, None

    def _watch_backward(self, tensors: Any, gradients: Any, accumulates: bool) -> None:  # noqa: FBT001  # a listener
        """Hook the nodes of a backward pass that begins, and trace a loss on a device."""
        del gradients
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        if self._armed <= 0 or not accumulates:
            self._context.hooks.takes_loss.unregister(self.name)
            self._armed = 0
            return
        self._armed -= 1
        losses = [loss for loss in _listed(tensors) if getattr(loss, "grad_fn", None) is not None]
        if not losses or self._context.device.cuda.capturing():
            return
        if any(condition(loss) is not Condition.FINITE for loss in losses):
            if not losses[0].is_cpu:
                self._loss(losses)
            return
        step, frames = self._context.recorder.in_progress, user_frames(sys._getframe())
        tracer = GraphTracer(losses, frames, step, *self._trained())
        tracer.release()
        self._watch = BackwardWatch(tracer.nodes, partial(self._take_node, tracer), self._breaker)

    def _take_node(self, tracer: GraphTracer, node: Any) -> None:
        self._armed = 0
        self._lost_step = self._context.recorder.in_progress
        self._report(tracer.node_origin(node))

    def _trained(self) -> tuple[list[Any], list[Any]]:
        """Return the models that are known and all parameters that are trained."""
        return self._context.outermost(), self._context.trained()

    def _report(self, origin: NonfiniteOrigin | None) -> None:
        if origin is None:
            return
        self._origin, self._has_rest, self._rest = origin, True, -1
        context, origins, step = self._context, self._context.origins, origin.step
        while len(origins) >= _MOST_KEPT:
            origins.pop(next(iter(origins)), None)
        if step is not None:
            origins[step] = origin
        if self._reports.take(monotonic(), (origin.kind, origin.operator, origin.module, origin.parameter)):
            context.writer.event(catalog.EVENT_NONFINITE_ORIGIN.name, attributes_of(origin), step)
            of_step = "" if step is None else f" of step {step}"
            self._sentences.append(f"where the NaN or infinity{of_step} was born: {origin.sentence()}")

    # -- init(raise_on={"nonfinite"}) --------------------------------------------------------------------------------------

    def _expect(self, kind: str, step: int) -> None:
        if self._raises:
            self._pending = NonFiniteError(finding(kind, step=step).short, self._origin)

    def _examine_gradients(self, optimizer: Any) -> None:
        if self._pending is not None or skips_by_itself(optimizer) or self._context.device.cuda.capturing():
            return
        if bad_gradients(parameter for group in optimizer.param_groups for parameter in group["params"]):
            self._gradient(optimizer)

    def _raise_pending(self) -> None:
        error, self._pending = self._pending, None
        if error is not None:
            raise error

    def _around_backward(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        self._raise_pending()
        return result


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def skips_by_itself(optimizer: Any) -> bool:
    """Return whether the optimizer skips steps by itself, as the loss scaler makes fused ones do: its overflow is no fault."""
    return isinstance(getattr(optimizer, "found_inf", None), torch.Tensor)


def _frames_of(error: BaseException | None) -> list[FrameType]:
    """Return the frames of the user's code that an exception has left, or those that run now; innermost first."""
    if error is None:
        return user_frames(sys._getframe())
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    return [frame for frame in frames if is_users(frame.f_code)]


def _bad_losses(frames: Iterable[FrameType]) -> list[Any]:
    """Return the scalars with a graph that are not finite, of the innermost function that has any.

    Objects of the user's are not asked whether they are tensors.
    """
    for frame in frames:
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [value for value in locals_of(frame).values() if issubclass(type(value), torch.Tensor)]
            scalars = [value for value in tensors if value.grad_fn is not None and value.numel() == 1]
        bad = [value for value in scalars if _is_idle(value.device) and condition(value) is Condition.BAD]
        if bad:
            return bad
    return []


def _bad_parameters(parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters that are not finite."""
    idle = set(filter(_is_idle, {parameter.device for parameter in parameters}))  # each is waited for once
    return [parameter for parameter in parameters if parameter.device in idle and condition(parameter) is Condition.BAD]


def _bad_gradients_left(parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters with non-finite gradients that no optimizer has used yet."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    idle = set(filter(_is_idle, {parameter.grad.device for parameter in with_gradient}))
    return bad_gradients(parameter for parameter in with_gradient if parameter.grad.device in idle)


def _is_idle(device: Any) -> bool:
    """Return whether values can be read without waiting for longer than a second."""
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        return False
    stream, until_s = torch.cuda.current_stream(device), monotonic() + LONGEST_WAIT_S
    try:
        while not stream.query():
            if monotonic() >= until_s:
                return False
            sleep(0.01)
    except RuntimeError:  # the device failed: that is what ends the training
        return False
    return True


def _step_of_gradients(recorder: StepRecorder) -> int:
    """Return the number of the step of the last backward pass: the step in progress, or the last one that has ended."""
    begun = any(stamp & 15 in {BACKWARD_BEGINS, BACKWARD_ENDS} for stamp in list(recorder.trace))
    return recorder.in_progress if begun else recorder.ended


def _faults(parameters: Sequence[Any], models: Iterable[Any]) -> dict[str, Any]:
    """Return the attributes of the event for non-finite gradients; empty if there are none."""
    bad = _bad_gradients_left(parameters)
    if not bad:
        return {}
    names = ModuleNames(bad, models)
    layers = list(dict.fromkeys(names.owner(name) for parameter in bad if (name := names.name_of(parameter))))
    kinds = ["nan"] if any(bool(parameter.grad.isnan().any()) for parameter in bad[:_MOST_NAMED]) else ["inf"]
    return {"layers": layers[:_MOST_NAMED], "layers_affected": len(layers), "kinds": kinds, "measured": False}
