"""The loss: what the outermost backward starts from, if that is one scalar without a given gradient.

On the CPU it is read at once (143 ns), on a device it is copied without waiting. Never held: a loss holds its whole graph. With
``GradScaler`` the value before scaling is meant. With accumulation it is the sum over the step's backward passes.
"""

from __future__ import annotations

import weakref
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.flight.metrics.fold import StepFlag
from torchobs.probes.core.step_values import GONE, is_left_out, resolve_step

if TYPE_CHECKING:
    import torch

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.core.step_values import StepValues


class _Later(NamedTuple):
    """Losses of one step, or of what may turn out to be a part of one: each a list of none until it has arrived."""

    pending_step: StepValues | int
    parts: list[list[float]]


class LossProbe:
    """Takes the loss of each step."""

    name = "loss"

    def __init__(self) -> None:
        self._scaled: weakref.ref[torch.Tensor] | None = None
        self._unscaled: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        self._under_way: list[_Later] = []

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        import torch  # torch is optional until training begins

        self._context, self._tensor = context, torch.Tensor
        breaker = context.breaker(self.name)
        context.takes_loss = breaker.guard(self._take)
        context.loss_scaled = breaker.guard(self._note_scaled)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._context.takes_loss = self._context.loss_scaled = None

    def _note_scaled(self, outputs: object, scaled: object, scale: torch.Tensor | None) -> None:
        """``GradScaler.scale`` was called."""
        if isinstance(outputs, self._tensor) and isinstance(scaled, self._tensor) and outputs.numel() == 1:
            self._scaled, self._unscaled, self._scale = weakref.ref(scaled), outputs.detach(), scale

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``torch.autograd.backward`` was called with these."""
        context = self._context
        recorder = context.recorder
        begun_ns = monotonic_ns() if recorder.metered else 0
        tensors = args[0] if args else kwargs.get("tensors")
        gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors") if kwargs else None
        # exactly a tensor: a DTensor's value would need a collective, a fake one has none
        if gradients is not None or recorder.log_wins or type(tensors) is not self._tensor or tensors.numel() != 1:
            return
        if self._scaled is not None and self._context.device.cuda.capturing():
            self._scaled = self._unscaled = None  # dividing by the scale would become a part of the graph
            return
        value = tensors if self._scaled is None else self._plain(tensors)
        if not value.is_cpu:
            self._take_later(value.detach(), within=context.in_closure)
        elif context.in_closure:
            recorder.add_loss(value.item(), within_step=True)
        else:
            values = recorder.values
            values.loss_sum += value.item()
            values.losses += 1
            values.flags |= 1
        if begun_ns:
            context.record_overhead(self.name, monotonic_ns() - begun_ns)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the loss without the loss scale, detached."""
        scaled, unscaled = self._scaled, self._unscaled
        if scaled is None or unscaled is None:
            return tensor.detach()
        alive = scaled()
        if alive is tensor:
            self._scaled = self._unscaled = None
            return unscaled
        self._scaled = self._unscaled = None
        if self._scale is not None and alive is None:
            return tensor.detach() / self._scale  # divided after scaling, for an accumulation
        return tensor.detach()

    def _take_later(self, value: torch.Tensor, *, within: bool) -> None:
        """Take a loss that a device has; the values of one step's backward passes are summed once all have arrived."""
        recorder, under_way = self._context.recorder, self._under_way
        if within and recorder.values.evaluated:
            return  # the first evaluation is the step's
        recorder.values.evaluated = within
        pending_step = recorder.pending_step()
        if not under_way or under_way[-1].pending_step != pending_step:
            under_way.append(_Later(pending_step, []))
        parts = under_way[-1].parts
        arriving: list[float] = []
        if self._context.device.take(value, arriving.append):
            parts.append(arriving)

    def sample(self) -> None:
        """Write the losses of ended steps whose values have arrived."""
        recorder, under_way = self._context.recorder, self._under_way
        while under_way:
            step, count = resolve_step(under_way[0].pending_step), 1
            while count < len(under_way) and resolve_step(under_way[count].pending_step) == step:
                count += 1
            parts = [part for later in under_way[:count] for part in later.parts if not is_left_out(later.pending_step)]
            if not step or step > recorder.step or not (all(parts) or step == GONE):
                break
            del under_way[:count]
            if parts and step != GONE:
                recorder.late(step, StepFlag.LOSS, sum(part[0] for part in parts), 0.0)
