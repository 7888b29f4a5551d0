"""The probes behind ``debug.enable``, one for each switch. All run in the training thread, within a circuit breaker each."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from torchobs import catalog
from torchobs.debug import resources
from torchobs.debug.findings import found, record_series, told
from torchobs.debug.gradients import check_gradients, scale_in_use
from torchobs.debug.monitor import monitor_step
from torchobs.debug.operations import entered
from torchobs.debug.placement import devices
from torchobs.debug.profiles import Recorder
from torchobs.debug.steps import Collector, activations
from torchobs.debug.stopping import Validation, early_stopping, finish
from torchobs.detect.starvation import BEGINS
from torchobs.flight.metrics.totals import Word
from torchobs.probes.core.torch_profiler import ProfilerBusyError
from torchobs.runtime.session import current
from torchobs.support.model_calls import walk

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

MOST_TRACES = 8
"""Trace files that one ``enable`` writes"""
LEAST_STEPS = 5
"""Steps between two looks before the wait for data is judged"""
GROWING_LOOKS = 8
LEAST_GROWTH = 64 << 20
"""Memory that rose at each of so many looks, by so many bytes in all, is reported"""
RATE_JUMP = 10.0
"""Factor by which a learning rate exceeds all that it is to reach, or falls between two looks, from which it is reported"""
_ROUNDING = 1e-6
"""of a factor: a decay to a tenth is an ordinary one"""


class SwitchProbe:
    """Base of all: nothing to do. ``last`` is what it saw last, in words."""

    last = ""

    def __init__(self, every: int) -> None:
        self.every = every
        """Steps between two looks; 0: it looks at no step"""

    def install(self) -> None:
        """Begin; called once."""

    def begin_step(self) -> None:
        """A step begins at which it is to look."""

    def begin_forward(self, model: Any, inputs: list[Any]) -> None:
        """The model is called."""

    def end_forward(self, model: Any, output: Any) -> None:
        """The model's call has returned."""

    def take_loss(self, loss: Any) -> None:
        """A backward pass begins from this loss, on its device, without the loss scale."""

    def before_step(self, model: Any, optimizer: Any) -> None:
        """Look, before the optimizer of such a step. The model is ``None`` while it is unknown."""

    def after_step(self) -> None:
        """Look after it."""

    def stop_for_threads(self) -> None:
        """Optimizers step in several threads, one of which is the session's."""

    def remove(self) -> None:
        """Put everything back."""


class AnomalyMode(SwitchProbe):
    """Torch's anomaly mode."""

    def install(self) -> None:
        self._undo = ExitStack()
        self._undo.enter_context(entered("raise", lambda _: None))
        self.last = "torch raises at NaN in a backward function"

    def remove(self) -> None:
        self._undo.close()


class StepProfile(SwitchProbe):
    """A profile of one step. One recording serves both switches, since torch allows one profiler."""

    _on: ClassVar[list[StepProfile]] = []
    _recorder: ClassVar[Recorder | None] = None
    _just_ended: ClassVar[bool] = False
    """Whether this optimizer step ended a recording: it runs in a ``record_function`` whose end another must not see"""
    _several_train: ClassVar[bool] = False

    def __init__(self, every: int, directory: str | None = None) -> None:
        super().__init__(every)
        self._directory, self._written = directory, 0

    def install(self) -> None:
        self._on.append(self)

    def begin_step(self) -> None:
        """Start to record, unless a profiler runs. With an interval of 1 it is every second step."""
        if self._several_train or StepProfile._recorder is not None or (StepProfile._just_ended and self.every == 1):
            return
        directories = [x._directory for x in self._on if x._directory is not None and x._written < MOST_TRACES]
        options = dict.fromkeys(("record_shapes", "with_stack", "profile_memory", "with_flops"), False)
        # in all threads, so that a profiler of the script's that begins in another one can end it
        recorder = Recorder("step", options, tensorboard=directories[0] if directories else None, all_threads=True)
        try:
            recorder.prepare()
        except ProfilerBusyError as problem:
            self.last = f"no profile: {problem}"
            return
        recorder.record()
        StepProfile._recorder = recorder

    def before_step(self, model: Any, optimizer: Any) -> None:
        """Begin another step."""
        StepProfile._just_ended = False

    def after_step(self) -> None:
        """End it."""
        recorder = StepProfile._recorder
        if recorder is None:
            return
        StepProfile._recorder, StepProfile._just_ended = None, True
        recorder.finish(1)
        result = recorder.result
        text = f"{result.time:.3g} s, top operator {result.top_operator}" if result.time else "; ".join(result.anomalies)
        for each in self._on:
            each.last = text
            if result.tensorboard is not None and each._directory is not None:
                each._written += 1
                each.last = f"{text}, trace in {result.tensorboard}"

    def stop_for_threads(self) -> None:
        StepProfile._several_train = True
        self.last = "no profile: steps come from several threads, beside which torch's profiler crashes"
        self._cancel()

    def remove(self) -> None:
        self._on.remove(self)
        if not self._on:
            self._cancel()
            StepProfile._several_train = False

    @staticmethod
    def _cancel() -> None:
        recorder, StepProfile._recorder = StepProfile._recorder, None
        if recorder is not None:
            recorder.cancel()


class Memory(SwitchProbe):
    """Memory of process and devices, and whether it only rises."""

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self._looks: dict[str, deque[int]] = {name: deque(maxlen=GROWING_LOOKS) for name in ("host", "device")}

    def after_step(self) -> None:
        reading = resources.read()
        sizes = {"host": reading.host} | ({} if reading.device is None else {"device": reading.device})
        record_series({f"debug.memory.{name}": size for name, size in sizes.items()})
        self.last = ", ".join(f"{size / 2**20:.0f} MiB on the {name}" for name, size in sizes.items())
        for name, size in sizes.items():
            looks = self._looks[name]
            looks.append(size)
            growth, rises = looks[-1] - looks[0], all(x < y for x, y in zip(looks, list(looks)[1:], strict=False))
            if len(looks) == GROWING_LOOKS and rises and growth >= LEAST_GROWTH:
                text = f"{name} memory rose by {growth / 2**20:.0f} MiB in {GROWING_LOOKS} looks, each time"
                found("memory_growth", text, function="enable", name=name)


class GradientNorms(SwitchProbe):
    """``check_gradients``."""

    def before_step(self, model: Any, optimizer: Any) -> None:
        if model is not None:
            norm = check_gradients(model).total_norm
            self.last = f"norm {norm:.4g}"
            record_series({"debug.gradient_norm": norm})


class ForwardPass(SwitchProbe):
    """Inputs, outputs of all modules, and output: statistics and what is not finite. Of a compiled model no modules within."""

    _collector: Collector | None = None
    _inside: AbstractContextManager[None] | None = None

    def begin_forward(self, model: Any, inputs: list[Any]) -> None:
        if self._collector is None and model.training:
            self._collector = Collector()
            self._collector.add("inputs", "input", inputs)
            is_compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
            self._inside = activations(model, self._collector, wanted=not is_compiled)
            self._inside.__enter__()

    def end_forward(self, model: Any, output: Any) -> None:
        if self._inside is not None and self._collector is not None:
            self.remove()
            self._collector.add("outputs", "output", output)

    def before_step(self, model: Any, optimizer: Any) -> None:
        """Read what the step's forward pass left on the device."""
        self.remove()  # where the forward pass raised
        collector, self._collector = self._collector, None
        if collector is not None:
            rows = [row for group in collector.read().values() for row in group]
            odd = [row for row in rows if row.anomaly]
            told("enable", [("nonfinite_activation", row.name, row.anomaly) for row in odd])
            self.last = f"{len(rows)} tensors, {len(odd)} not finite"

    def remove(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)


class BackwardPass(SwitchProbe):
    """``monitor_step`` of the loss that the backward pass began from."""

    _loss: Any = None

    def take_loss(self, loss: Any) -> None:
        self._loss = loss

    def before_step(self, model: Any, optimizer: Any) -> None:
        loss, self._loss = self._loss, None
        if loss is not None and model is not None:
            check = monitor_step(model, loss)
            self.last = f"loss {check.loss:.4g}, norm {check.gradient_norm:.4g}"


class Placement(SwitchProbe):
    """``devices`` of model and optimizer."""

    def before_step(self, model: Any, optimizer: Any) -> None:
        if model is not None:
            check = devices(model, optimizer=optimizer)
            self.last = f"on {check.device}, {len(check.misplaced)} elsewhere"


class Precision(SwitchProbe):
    """What autocast computes in, the output's type, weights in float16, and the loss scale."""

    def end_forward(self, model: Any, output: Any) -> None:
        import torch

        kind = next((x.device.type for x in model.parameters()), "cpu")
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
        types = sorted({str(x.dtype) for _, x in walk(output, "output")})
        scale = scale_in_use(None)
        scaled = f", loss scale {float(scale):g}" if scale is not None else ""
        self.last = f"autocast {autocast}, output {', '.join(types)}{scaled}".replace("torch.", "")
        half = [name for name, x in model.named_parameters() if x.dtype is torch.float16 and x.requires_grad]
        if half:
            text = f"{len(half)} trained parameters are float16, where small updates are lost: keep float32 and use autocast"
            found("half_weights", text, function="enable", name=half[0])


class DataWait(SwitchProbe):
    """Share of the steps' time between two looks that the session counts as waiting for data."""

    _before: tuple[int, float, float] | None = None

    def after_step(self) -> None:
        session = current()
        if session is None or session.context is None:
            return
        totals = session.context.writer.table.core.totals
        phases = totals.floats[Word.PHASE_TIME : Word.PHASE_TIME + len(catalog.PHASES)].tolist()
        now = totals.ints[Word.STEPS], phases[catalog.PHASES.index("data")], sum(phases)
        before = self._before or now
        steps, waited, passed = (after - start for after, start in zip(now, before, strict=True))
        if self._before is not None and not passed:
            return  # the sampler has folded no step since
        self._before = now
        share = waited / passed if passed else 0.0
        self.last = f"{share:.0%} of the time of {steps} steps waiting for batches"
        record_series({"debug.data_wait_share": share})
        if share >= BEGINS and steps >= LEAST_STEPS:
            found("data_wait", f"training waits for data {share:.0%} of the time", function="enable", name="data_loading")


class Validations(SwitchProbe):
    """Forward passes in eval mode between two steps are a validation: samples and time, as ``validation`` records them."""

    _current: Validation | None = None

    def begin_forward(self, model: Any, inputs: list[Any]) -> None:
        if model.training:
            self.remove()
            return
        if self._current is None:
            self._current, self._begun = Validation("validation"), time.perf_counter()
            self._ended = self._begun  # in case the model raises
        first = next((x for _, x in walk(inputs, "input") if x.dim()), None)
        self._current.add(int(first.shape[0]) if first is not None else 1)

    def end_forward(self, model: Any, output: Any) -> None:
        self._ended = time.perf_counter()

    def before_step(self, model: Any, optimizer: Any) -> None:
        self.remove()

    def remove(self) -> None:
        """Record it."""
        validation, self._current = self._current, None
        if validation is not None:
            finish(validation, max(0.0, self._ended - self._begun), None)
            self.last = f"{validation.samples} samples in {validation.time or 0:.3g} s"


class Stopping(SwitchProbe):
    """The mean training loss between two looks, given to ``early_stopping``: reported, never acted on."""

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self._stopper = early_stopping("training_loss", patience=10, mode="min")
        self._losses: list[Any] = []

    def take_loss(self, loss: Any) -> None:
        self._losses = [sum(self._losses[:1], loss), sum(self._losses[1:], 1)]

    def after_step(self) -> None:
        if self._losses:
            decision = self._stopper(self._losses[0] / self._losses[1])
            self._losses = []
            self.last = f"loss {decision.value:.4g}, best {decision.best or 0:.4g}, patience left {decision.patience_left}"


class Rates(SwitchProbe):
    """Learning rates of each optimizer's groups.

    A rise is a jump if it exceeds the highest rate so far, and those that optimizer and scheduler are to reach: a warm-up from
    near 0, or a restart, does not. A linear warm-up from one of its own increments grows by at most the number of steps, plus
    one. A fall is a jump from a rate within a tenth of the highest: a decay to 0 ends with large factors of tiny rates.
    """

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self._rates: weakref.WeakKeyDictionary[Any, list[tuple[float, float]]] = weakref.WeakKeyDictionary()
        """Of each group the rate at the last look, and the highest"""

    def before_step(self, model: Any, optimizer: Any) -> None:
        groups = [group for group in optimizer.param_groups if "lr" in group]
        rates = [float(group["lr"]) for group in groups]
        before = self._rates.get(optimizer, [])
        if len(before) != len(groups):
            before = [(rate, _peak(group, optimizer)) for group, rate in zip(groups, rates, strict=True)]
        for index, (rate, (last, highest)) in enumerate(zip(rates, before, strict=True)):
            text = "" if math.isfinite(rate) and rate >= 0 else f"the learning rate is {rate}"
            if not text and _jumps(last, rate, highest, max(RATE_JUMP, 1 + self.every)):
                text = f"the learning rate went from {last:.3g} to {rate:.3g}"
            if text:
                found("learning_rate", text, function="enable", name=f"group {index}")
        self._rates[optimizer] = [
            (rate, max(rate, highest)) if math.isfinite(rate) else (last, highest)
            for rate, (last, highest) in zip(rates, before, strict=True)
        ]
        self.last = "lr " + ", ".join(f"{rate:.3g}" for rate in rates)
        record_series({f"debug.learning_rate.{index}": rate for index, rate in enumerate(rates)})


def _jumps(last: float, rate: float, highest: float, rise: float) -> bool:
    """Return whether the next rate, a look later, is neither a warm-up's nor a decay's."""
    if not (last > 0 and rate > 0):
        return False
    falls = rate * RATE_JUMP < last * (1 - _ROUNDING) and last * RATE_JUMP >= highest
    return falls or rate > highest * rise * (1 + _ROUNDING)


def _peak(group: dict[str, Any], optimizer: Any) -> float:
    """Return the highest rate that a group is to reach: the scheduler's, or else that which the optimizer was made with."""
    peaks = [group[name] for name in ("initial_lr", "max_lr") if name in group] or [optimizer.defaults.get("lr", 0.0)]
    return max(float(rate) for rate in (*peaks, group["lr"]))
