"""The total L2 norm of the gradients, as the optimizer finds them, unscaled; before clipping, where clipping is seen.

**When**: without a closure in the pre hook (SGD with momentum, nesterov and foreach changes ``p.grad`` in its step; a fused
optimizer with a loss scaler unscales in its step), with one when the outermost backward inside the step returns.
**How often**: every step where that is cheap enough, else every n-th, so that the norm's own time stays within half of
the overhead budget; the interval in use is a metric. Where ``clip_grad_norm_`` computes the norm anyway it is taken from there.
"""

from __future__ import annotations

from math import ceil, sqrt
from time import monotonic_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torchobs import catalog
from torchobs.flight.record import Flag
from torchobs.probes.norms import total_norm
from torchobs.probes.patching import Patch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from torchobs.flight.table import Cell
    from torchobs.probes.host import Host

MAX_INTERVAL = 1000
_SMOOTHING = 0.25
_RECOUNT_EVERY = 64


class GradientProbe:
    """Measures the gradients' total norm."""

    name = "gradients"

    def __init__(self) -> None:
        self._clip: Patch | None = None
        self._cost_ns = 0.0
        self._since_ns = self._since_step = self._due_at = 0
        self._measured = -1
        self._interval, self._shown = 1, 0
        self._clipped: torch.Tensor | None = None
        self._clipped_grads = 0
        self._optimizer: Any = None
        self._under_way: dict[int, list[list[float]]] = {}

    def install(self, host: Host) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        import torch  # torch is optional until training begins

        self._host, self._torch = host, torch
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()
        self._cell: Cell | None = host.writer.table.cell(catalog.GRAD_INTERVAL, {})
        fixed = host.settings.grad_interval
        self._fixed = fixed if isinstance(fixed, int) else None
        fuse = host.fuse(self.name)
        host.before_step.append((self.name, fuse.guard(self._before_step)))
        host.after_closure_backward.append((self.name, fuse.guard(self._after_backward)))
        host.norm_due = 0
        clip = getattr(torch.nn.utils, "clip_grad", None)
        original = getattr(clip, "_get_total_norm", None)  # torch ≥ 2.6; older ones are measured after clipping
        if original is not None:
            note = fuse.guard(self._note_clip)

            def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> torch.Tensor:
                tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                norm: torch.Tensor = original(tensors, norm_type, *args, **kwargs)
                note(len(tensors), norm_type, norm)
                return norm

            self._clip = Patch(clip, "_get_total_norm", get_total_norm)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        if self._clip is not None:
            self._clip.undo()

    def sample(self) -> None:
        """Show the interval; write the norms of ended steps whose values have arrived from a device."""
        if self._cell is not None and self._interval != self._shown:
            self._cell.set(float(self._interval))
            self._shown = self._interval
        cycle = self._host.cycle
        for step in sorted(self._under_way):
            parts = self._under_way[step]
            if step > cycle.step or not all(parts):
                return
            del self._under_way[step]
            if parts:  # none: the device was capturing a graph
                cycle.late(step, Flag.GRAD_NORM, 0.0, sqrt(sum(part[0] * part[0] for part in parts)))

    def _note_clip(self, grads: int, norm_type: float, norm: torch.Tensor) -> None:
        """``clip_grad_norm_`` has computed a norm: of all gradients, unless the optimizer turns out to have more."""
        if float(norm_type) == 2.0:  # noqa: PLR2004  # L2
            self._clipped, self._clipped_grads = norm.detach(), grads
            self._host.norm_due = 0

    def _before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:  # noqa: FBT001  # a listener
        self._optimizer = optimizer
        if closure:
            return
        clipped, self._clipped = self._clipped, None
        if clipped is not None and self._grads_of(optimizer) == self._clipped_grads:
            self._put(clipped, optimizer, within=False, scaled=False)
        elif self._is_due():
            self._measure(optimizer, within=False)
        self._host.norm_due, self._host.norm_step = self._due_at, self._measured

    def _after_backward(self) -> None:
        if self._optimizer is not None and self._is_due():
            self._measure(self._optimizer, within=True)

    def _grads_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Count its gradients, now and then: parameters are seldom frozen or thawed."""
        count, age = self._counts.get(optimizer, (0, _RECOUNT_EVERY))
        if age >= _RECOUNT_EVERY or count != self._clipped_grads:
            count, age = len(_gradients(optimizer)), 0
        self._counts[optimizer] = (count, age + 1)
        return count

    def _is_due(self) -> bool:
        """Tell whether this step is measured: all optimizers of a step that is, or none."""
        step = self._host.cycle.step
        if step >= self._due_at:
            self._set_interval(step)
            self._measured, self._due_at = step, step + self._interval
        return step == self._measured

    def _set_interval(self, step: int) -> None:
        """Choose it by what the last measurement cost and how long a step took since."""
        now_ns = monotonic_ns()
        done = step - self._since_step
        if self._fixed is not None:
            self._interval = self._fixed
        elif done and self._cost_ns:
            length_ns = (now_ns - self._since_ns) / done
            share = max(self._host.settings.overhead_budget / 2, 1e-6)
            wanted = min(MAX_INTERVAL, max(1, ceil(self._cost_ns / (share * length_ns))))
            # at most doubled at a time: the first steps are slow, or one was interrupted
            self._interval = min(wanted, 2 * self._interval)
        self._since_ns, self._since_step = now_ns, step

    def _measure(self, optimizer: torch.optim.Optimizer, *, within: bool) -> None:
        begun_ns = monotonic_ns()
        gradients = _gradients(optimizer)
        if not gradients:
            return
        with self._torch.no_grad():
            for norm in total_norm(gradients):
                self._put(norm, optimizer, within=within, scaled=True)
        cost_ns = monotonic_ns() - begun_ns
        self._cost_ns += (cost_ns - self._cost_ns) * (_SMOOTHING if self._cost_ns else 1.0)

    def _put(self, norm: torch.Tensor, optimizer: torch.optim.Optimizer, *, within: bool, scaled: bool) -> None:
        scale = getattr(optimizer, "grad_scale", None) if scaled else None
        host = self._host
        if norm.device.type == "cpu":
            factor = 1.0 if scale is None else float(scale)
            host.cycle.add_norm(norm.item() / factor, factor, within_step=within)
            return
        arriving: list[float] = []
        parts = self._under_way.setdefault(host.cycle.step + 1, [])
        if within:
            parts.clear()
        if host.device.take(norm if scale is None else norm / scale, arriving.append):
            parts.append(arriving)


def _gradients(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
