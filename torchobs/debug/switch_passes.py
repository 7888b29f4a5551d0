"""Switches that look at the forward and the backward pass, and at the loss."""

from __future__ import annotations

import functools
import sys
import time
from threading import Lock
from typing import TYPE_CHECKING, Any

from torchobs.debug.findings import found, told
from torchobs.debug.module_values import Collector, activations
from torchobs.debug.stopping import Validation, early_stopping, finish
from torchobs.debug.switch_checks import Check, ModelHooks
from torchobs.probes.core.patch import Patch
from torchobs.support.after_fork import renew_in_child
from torchobs.support.model_calls import walk

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torchobs.debug.switch_checks import Guard

_lock = Lock()
renew_in_child(sys.modules[__name__], _lock=Lock)


class ForwardPass(ModelHooks):
    """Inputs, outputs of all modules, and output: statistics and what is not finite. Of a compiled model no modules within."""

    def __init__(self) -> None:
        super().__init__()
        self._collector: Collector | None = None
        self._inside: AbstractContextManager[None] | None = None

    def before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        if not self._is_due or not model.training or self._inside is not None:
            return
        self._is_due, self._collector = False, Collector()
        self._collector.add("inputs", "input", [*args, *kwargs.values()])
        is_compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
        self._inside = activations(model, self._collector, wanted=not is_compiled)
        self._inside.__enter__()

    def after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._inside is not None and self._collector is not None:
            self._leave()
            self._collector.add("outputs", "output", output)

    def _leave(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)

    def before_step(self, model: Any, optimizer: Any) -> None:
        """Read what the step's forward pass left on the device."""
        self._leave()  # where the forward pass raised
        collector, self._collector = self._collector, None
        if collector is None:
            return
        rows = [row for group in collector.read().values() for row in group]
        odd = [row for row in rows if row.anomaly]
        told("enable", [("nonfinite_activation", row.name, row.anomaly) for row in odd])
        self.last = f"{len(rows)} tensors, {len(odd)} not finite"

    def remove(self) -> None:
        self._leave()
        super().remove()


class _BackwardTap:
    """One patch of ``torch.autograd.backward`` for all that listen, in front of nothing when nobody does."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Any, float], Any]] = []
        self._patch: Patch | None = None
        self._depth = 0

    def add(self, listener: Callable[[Any, float], Any]) -> None:
        import torch

        with _lock:
            self._listeners.append(listener)
            if self._patch is None:
                self._patch = Patch(torch.autograd, "backward", self._watched)

    def remove(self, listener: Callable[[Any, float], Any]) -> None:
        with _lock:
            self._listeners.remove(listener)
            if not self._listeners and self._patch is not None:
                self._patch.undo()
                self._patch = None

    def _watched(self, original: Any) -> Any:
        import torch

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._depth:
                return original(*args, **kwargs)
            self._depth += 1
            begun = time.perf_counter()
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            tensors = args[0] if args else kwargs.get("tensors")
            for listener in list(self._listeners):
                listener(tensors, time.perf_counter() - begun)
            return result

        return backward


_tap = _BackwardTap()


class _LossWatch(Check):
    """Hears of each backward pass with its loss."""

    def install(self, guard: Guard) -> None:
        self._listener = guard(self._hear)
        _tap.add(self._listener)

    def remove(self) -> None:
        _tap.remove(self._listener)

    def _hear(self, tensors: Any, seconds: float) -> None:
        import torch

        loss = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.hear(loss.detach().reshape(()), seconds)

    def hear(self, loss: Any, seconds: float) -> None:
        """Take a loss, on its device, and the time of its backward pass."""


class BackwardPass(_LossWatch):
    """Loss and time of the backward pass, and the gradients that it left, by ``monitor_step``."""

    def __init__(self) -> None:
        self._loss: Any = None
        self._seconds = 0.0

    def hear(self, loss: Any, seconds: float) -> None:
        self._loss, self._seconds = loss, seconds

    def before_step(self, model: Any, optimizer: Any) -> None:
        from torchobs.debug.monitor import monitor_step

        loss, self._loss = self._loss, None
        if loss is None or model is None:
            return
        check = monitor_step(model, loss)
        self.last = f"loss {check.loss:.4g}, norm {check.gradient_norm:.4g}, {self._seconds:.3g} s"


class Stopping(_LossWatch):
    """The mean training loss between two looks, given to ``early_stopping``: told, never acted on."""

    def __init__(self) -> None:
        self._stopper = early_stopping("training_loss", patience=10, mode="min")
        self._sum: Any = 0.0
        self._count = 0

    def hear(self, loss: Any, seconds: float) -> None:
        self._sum, self._count = self._sum + loss, self._count + 1

    def after_step(self, model: Any, optimizer: Any) -> None:
        if self._count:
            decision = self._stopper(self._sum / self._count)
            self._sum, self._count = 0.0, 0
            self.last = f"loss {decision.value:.4g}, best {decision.best or 0:.4g}, patience left {decision.patience_left}"


class Placement(ModelHooks):
    """``devices`` of model and optimizer, and of what the model is given."""

    def before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        if not self._is_due:
            return
        self._is_due = False
        home = {x.device for x in model.parameters()}
        for name, x in walk([*args, *kwargs.values()], "input") if len(home) == 1 else ():
            if x.device not in home:
                text = f"{name} is on {x.device}, the model on {next(iter(home))}"
                found("misplaced_input", text, function="enable", name=name)

    def before_step(self, model: Any, optimizer: Any) -> None:
        from torchobs.debug.placement import devices

        if model is not None:
            check = devices(model, optimizer=optimizer)
            self.last = f"on {check.device}, {len(check.misplaced)} elsewhere"


class Precision(ModelHooks):
    """What autocast computes in, the output's type, weights in float16, and the loss scale where a session knows it."""

    def after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        import torch

        if not self._is_due or not model.training:
            return
        self._is_due = False
        kind = next((x.device.type for x in model.parameters()), "cpu")
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
        types = sorted({str(x.dtype) for _, x in walk(output, "output")})
        self.last = f"autocast {autocast}, output {', '.join(types)}".replace("torch.", "")
        half = [name for name, x in model.named_parameters() if x.dtype is torch.float16 and x.requires_grad]
        if half:
            text = f"{len(half)} trained parameters are float16, where small updates are lost: keep float32 and use autocast"
            found("half_weights", text, function="enable", name=half[0])

    def before_step(self, model: Any, optimizer: Any) -> None:
        from torchobs.debug.gradients import scale_in_use

        scale = scale_in_use(None)
        if scale is not None:
            self.last += f", loss scale {float(scale):g}"


class Validations(ModelHooks):
    """Forward passes in eval mode between two steps are a validation: samples and time, as ``validation`` records them."""

    def __init__(self) -> None:
        super().__init__()
        self._current: Validation | None = None
        self._begun = self._ended = 0.0

    def before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        if model.training:
            self._close()
        elif self._current is None:
            self._current, self._begun = Validation("validation"), time.perf_counter()
        if self._current is not None:
            first = next((x for _, x in walk([*args, *kwargs.values()], "input") if x.dim()), None)
            self._current.add(int(first.shape[0]) if first is not None else 1)

    def after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._ended = time.perf_counter()

    def _close(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            finish(current, max(0.0, self._ended - self._begun), None)
            self.last = f"{current.samples} samples in {current.time or 0:.3g} s"

    def before_step(self, model: Any, optimizer: Any) -> None:
        self._close()

    def remove(self) -> None:
        self._close()
        super().remove()
