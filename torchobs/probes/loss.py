"""Record the loss: the scalar from which the outermost backward starts without a gradient argument, or the sum of several.

On the CPU it is read at once (143 ns), on a device it is copied without waiting. It is never kept: a loss holds its whole
graph. With ``GradScaler`` the value before scaling is recorded (unknown if there are several scalars). With accumulation the
step's backward passes are summed. What ``torch.autograd.grad`` begins from is no loss: it may be an inner loop's, or an
analysis of the curvature.

A tensor subclass (MONAI's ``MetaTensor``, fastai's ``TensorBase``) is read as a plain tensor, without its
``__torch_function__``, which is the user's code and slow. One with a ``__torch_dispatch__`` of its own may have no value to
read: a DTensor's would need a collective, a fake tensor has none.
"""

from __future__ import annotations

import weakref
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchobs.flight.step_record import StepFlag
from torchobs.probes.step_recorder import GONE, resolve_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.probes.context import ProbeContext
    from torchobs.probes.step_recorder import PendingStep


class _PendingLoss(NamedTuple):
    """Losses of one step, or of a possible part of one; each list is empty until the value has arrived."""

    pending_step: PendingStep | int
    parts: list[list[float]]


class LossProbe:
    """Records the loss of each step."""

    name = "loss"

    def __init__(self) -> None:
        self._unscaled: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        self._pending: list[_PendingLoss] = []
        self._reported: set[str] = set()
        """Types of devices that were reported as unreadable"""

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context
        breaker, plain = context.breaker(self.name), context.recorder.plain
        self._nonfinite = context.hooks.nonfinite_loss.notify
        self._steps = plain
        plain.tensor, plain.loss_breaker, plain.scaled = torch.Tensor, breaker, None
        plain.take_loss, plain.loss_failed = breaker.guard(self._take_loss), breaker.guard(self._failed)
        context.hooks.takes_loss.register(breaker, plain.take_loss, guarded=True)
        context.hooks.loss_scaled.register(breaker, self._note_scaled)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`: there is nothing but listeners."""

    def _note_scaled(self, outputs: object, scaled: object, scale: torch.Tensor | None) -> None:
        """Remember the unscaled loss of a ``GradScaler.scale`` call."""
        if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor):
            plain = self._scalar(outputs)
            if plain is not None:
                self._steps.scaled, self._unscaled, self._scale = weakref.ref(scaled), plain.detach(), scale

    def _scalar(self, tensor: object, gradient: object = None) -> torch.Tensor | None:
        """Return a one-element tensor as a plain tensor; ``None`` for anything else.

        ``gradient``: given to the engine with it; torch and Megatron-LM give ones.
        """
        if type(tensor) is not torch.Tensor:
            if not isinstance(tensor, torch.Tensor) or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                return None
            with torch._C.DisableTorchFunctionSubclass():
                tensor = tensor.detach()
        if tensor.numel() != 1:
            return None
        # of one on a device, which reading would wait for, it is assumed: a given scalar gradient is usually 1
        ones = gradient is None or (
            type(gradient) is torch.Tensor and gradient.numel() == 1 and (not gradient.is_cpu or gradient.item() == 1.0)
        )
        return tensor if ones else None

    def _failed(self, error: Exception, loss: torch.Tensor) -> None:
        """Handle the error of reading a plain loss; a second reading might succeed, and a signal handler's error be lost."""
        if isinstance(error, RuntimeError) and loss.numel() != 1:
            return  # no loss, as torch is about to say, too
        raise error

    def _take_loss(self, tensors: Any, gradients: Any, accumulates: bool) -> None:  # noqa: FBT001  # inline; as a listener
        """Take the loss of a backward pass that begins. ``accumulates``: False for ``torch.autograd.grad``."""
        recorder, in_closure = self._context.recorder, self._steps.in_closure
        begun_ns = monotonic_ns() if self._steps.metered else 0
        if self._steps.log_wins or not accumulates:
            return
        whole = arguments = tensors
        if type(tensors) in {tuple, list}:
            tensors, gradients = self._sum(tensors, gradients)
            whole = whole[0] if len(whole) == 1 else None
        loss = self._scalar(tensors) if gradients is None else None
        if loss is None:
            return
        if self._steps.scaled is not None and self._context.device.cuda.capturing():
            self._steps.scaled = self._unscaled = None  # dividing by the scale would become part of the graph
            return
        value = loss if self._steps.scaled is None else self._plain(whole, loss)
        if not value.is_cpu:
            self._take_later(value.detach(), within=in_closure)
        else:
            number = value.item()
            recorder.add_loss(number, within_step=in_closure)
            if number - number:  # NaN, which is true, unless it is finite
                self._nonfinite(arguments)
        if begun_ns:
            self._context.record_overhead(self.name, monotonic_ns() - begun_ns)

    def _sum(self, tensors: Sequence[Any], gradients: Any) -> tuple[Any, Any]:
        """Return the sum of scalars, or a single tensor, as the loss; ``(None, None)`` if there is none to read."""
        weights = gradients if type(gradients) in {tuple, list} else [gradients] * len(tensors)
        scalars = [self._scalar(*pair) for pair in zip(tensors, weights, strict=False)]
        plain = [scalar.detach() for scalar in scalars if scalar is not None]
        if len(plain) != len(tensors) or len({scalar.device for scalar in plain}) != 1:
            return None, None
        if len(plain) == 1:
            return scalars[0], None
        if self._scale is not None or (not plain[0].is_cpu and self._context.device.cuda.capturing()):
            return None, None
        return sum(scalar.reshape(()) for scalar in plain), None

    def _plain(self, argument: object, tensor: torch.Tensor) -> torch.Tensor:
        """Return the unscaled loss, detached. ``argument``: the backward's, ``tensor`` in its plain form."""
        scaled, unscaled = self._steps.scaled, self._unscaled
        if scaled is None or unscaled is None:
            return tensor.detach()
        alive = scaled()
        self._steps.scaled = self._unscaled = None
        if alive is argument:
            return unscaled
        if self._scale is not None and alive is None:
            return tensor.detach() / self._scale  # divided after scaling, for an accumulation
        return tensor.detach()

    def _take_later(self, value: torch.Tensor, *, within: bool) -> None:
        """Read a loss on a device; a step's backward passes are summed once all have arrived."""
        recorder, pending = self._context.recorder, self._pending
        if within and recorder.values.evaluated:
            return  # the first evaluation is the step's
        recorder.values.evaluated = within
        pending_step = recorder.pending_step()
        if not pending or pending[-1].pending_step != pending_step:
            pending.append(_PendingLoss(pending_step, []))
        parts = pending[-1].parts
        arriving: list[float] = []
        if self._context.device.take(value, arriving.append):
            parts.append(arriving)

    def sample(self) -> None:
        """Write the losses of ended steps that have arrived."""
        for kind in self._context.device.unread.keys() - self._reported:
            self._reported.add(kind)  # why there is no loss and no norm
            self._context.report("device_unread", device_type=kind)
        recorder, pending = self._context.recorder, self._pending
        while pending:
            step, count = resolve_step(pending[0].pending_step), 1
            while count < len(pending) and resolve_step(pending[count].pending_step) == step:
                count += 1
            parts = [part for pending_loss in pending[:count] for part in pending_loss.parts]
            if not step or step > recorder.step or not (all(parts) or step == GONE):
                break
            del pending[:count]
            if parts and step != GONE:
                loss = sum(part[0] for part in parts)
                recorder.late(step, StepFlag.LOSS, loss, 0.0, losses=len(parts))
                if loss - loss:
                    self._context.hooks.nonfinite_arrived.notify()
