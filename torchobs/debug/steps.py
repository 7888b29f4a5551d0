"""``training_step``, its parts, and ``monitor_step``: inputs, outputs, loss, gradients, update, time and memory of a step."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import isfinite, nan
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from torchobs.debug import operations, tensors
from torchobs.debug.findings import record_findings, record_step
from torchobs.debug.gradients import EXPLODING, VANISHING, GradientCheck, check_gradients, gradients_of, require_positive
from torchobs.detect.spikes import Divergence, NormBaseline, UsualValues
from torchobs.support.result import Checked, Problem
from torchobs.tensors.batches import call, walk
from torchobs.tensors.losses import check_trained, compute_loss
from torchobs.tensors.running import evaluating
from torchobs.tensors.statistics import Rows, TensorRow, norm_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.debug.operations import MemoryUse


@dataclass(frozen=True, slots=True)
class StepCheck(Checked):
    """One step of a training loop."""

    step: int
    loss: float | None
    gradient_norm: float | None
    """L2 norm of all gradients, unscaled; ``None`` without any"""
    gradient_explosion: bool
    gradient_vanishing: bool
    loss_anomaly: bool
    """Not finite, far above earlier losses of this model, or diverged from its first ones"""
    problems: tuple[Problem, ...]
    gradients: GradientCheck


class _Steps:
    """The course of one model's steps so far."""

    __slots__ = ("baseline", "divergence", "latest", "norms", "number")

    def __init__(self) -> None:
        self.baseline, self.divergence = UsualValues(), Divergence()
        self.norms, self.number = NormBaseline(), 0
        self.latest: int | None = None


_models: WeakKeyDictionary[Any, _Steps] = WeakKeyDictionary()


def monitor_step(
    model: Any, loss: Any = None, step: int | None = None, *, scaler: Any = None, exploding: float | None = None,
    vanishing: float = VANISHING,
) -> StepCheck:  # fmt: skip
    """Check loss and gradients of the step in progress, after one transfer from each device, and count it.

    Call it between ``backward()`` and ``zero_grad()``, before ``scaler.update()``. The loss is compared with earlier ones of
    the same model, by :mod:`torchobs.detect.spikes`: from the 20th step on with the steps before, and always with the first
    ones: a loss that is a thousand times as large for 50 steps has diverged, however smoothly it grew.

    Args:
        model: the module.
        loss: a tensor with one element, or a number; without it the gradients alone are checked.
        step: its number; by default calls for this model are counted. A second call with the same number does not count.
        scaler: as for :func:`torchobs.debug.check_gradients`.
        exploding: gradient norm, in total or of one parameter, above which it explodes. By default 10; from the 20th step of
            this model on also far above its own norms (eight times, and 6 standard deviations on the log scale) or a thousand
            times its first ones, since a loss that is a sum has a norm that grows with the batch size.
        vanishing: gradient norm, in total or of one weight, below which it vanishes.

    Raises:
        TypeError: ``model`` is no module, or ``loss`` not one number.
        ValueError: a threshold is not above 0.
    """
    tensors.require_model(model, "monitor_step")
    exploding = _exploding_norm(model) if exploding is None else exploding
    check = gradients_of(model, loss, scaler, "monitor_step", exploding, vanishing)
    kinds, problems = _judge(model, check, "monitor_step", exploding, vanishing)
    steps = _models[model]
    if step is None or step != steps.latest:
        record_step(kinds, anomalous=bool(problems))
    steps.latest = step
    return StepCheck(
        step=steps.number if step is None else step, loss=check.loss,
        gradient_norm=check.gradient_norm, gradient_explosion="gradient_explosion" in kinds,
        gradient_vanishing="gradient_vanishing" in kinds, loss_anomaly="loss_anomaly" in kinds, problems=problems,
        gradients=check,
    )  # fmt: skip


def _exploding_norm(model: Any) -> float:
    """Return the gradient norm above which the model's next step explodes, by its earlier norms."""
    steps = _models.get(model)
    return EXPLODING if steps is None else max(EXPLODING, steps.norms.limit)


def _judge(
    model: Any, check: GradientCheck, function: str, exploding: float, vanishing: float
) -> tuple[set[str], tuple[Problem, ...]]:
    """Return the kinds of a step's anomalies as a whole, and all its problems, those of single gradients included.

    A step that a loss scaler skips because of an overflow is no anomaly: so the scaler finds its scale.
    """
    loss, norm = 0.0 if check.loss is None else check.loss, nan if check.gradient_norm is None else check.gradient_norm
    texts = dict[str, str]()
    is_skipped = check.loss_scale != 1.0 and not isfinite(norm)
    steps = _models.setdefault(model, _Steps())
    steps.number += 1
    steps.norms.add(norm)
    is_finite = check.loss is not None and isfinite(loss)
    is_spike, has_diverged = is_finite and steps.baseline.judge(loss), is_finite and steps.divergence.add(loss)
    if not isfinite(loss):
        texts["loss_anomaly"] = f"the loss is {loss}"
    elif has_diverged:
        texts["loss_anomaly"] = f"the loss {loss:.4g} stays far above the first ones, {steps.divergence.start:.4g} (diverged)"
    elif is_spike:
        texts["loss_anomaly"] = f"the loss {loss:.4g} is far above the usual {steps.baseline.mean:.4g}"
    if norm > exploding and isfinite(norm):
        texts["gradient_explosion"] = f"the total gradient norm {norm:.3g} is above {exploding:.3g} (exploding)"
    elif not isfinite(norm) and not is_skipped and check.parameters:
        texts["gradient_explosion"] = f"the total gradient norm is {norm}"
    elif norm < vanishing:
        texts["gradient_vanishing"] = f"the total gradient norm {norm:.3g} is below {vanishing:.3g} (vanishing)"
    name = type(model).__name__
    in_gradients = () if is_skipped and isfinite(loss) else check.problems
    # a loss that is not finite is among the problems of the gradients already
    rest = ((kind, name, text) for kind, text in texts.items() if isfinite(loss) or kind != "loss_anomaly")
    return set(texts), (*in_gradients, *record_findings(function, rest))


MOST_TENSORS = 64
"""Most tensors of a batch or an output that are checked"""


@dataclass(frozen=True, slots=True)
class ForwardPass(Checked):
    """A forward pass."""

    model: str
    time_s: float
    """Seconds, until a CUDA device had finished"""
    inputs: tuple[TensorRow, ...]
    outputs: tuple[TensorRow, ...]
    activations: tuple[TensorRow, ...]
    memory: MemoryUse
    gpu_memory: MemoryUse | None
    problems: tuple[Problem, ...]
    _output: Any = field(default=None, repr=False, compare=False)

    @property
    def output(self) -> Any:
        """What the model returned, with its graph."""
        return self._output


@dataclass(frozen=True, slots=True)
class BackwardPass(Checked):
    """A backward pass."""

    loss: float
    time_s: float
    gradients: GradientCheck
    memory: MemoryUse
    gpu_memory: MemoryUse | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class OptimizationStep(Checked):
    """A step of an optimizer."""

    optimizer: str
    time_s: float
    learning_rates: tuple[float, ...]
    parameter_norm: float | None
    """L2 norm of its parameters after the step"""
    update_norm: float | None
    """L2 norm of the change by the step; 0 if a loss scaler skipped it"""
    update_ratio: float | None
    """Update norm by parameter norm before: about 1e-3 in a training that goes well (Karpathy, "makemore" part 3)"""
    skipped: bool
    memory: MemoryUse
    gpu_memory: MemoryUse | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class TrainingStep(Checked):
    """A whole step."""

    loss: float
    time_s: float
    gradient_norm: float | None
    problems: tuple[Problem, ...]
    forward: ForwardPass | None
    """The last forward pass; ``None`` if ``loss_fn`` calls another model"""
    backward: BackwardPass
    optimization: OptimizationStep
    weights: tensors.ParameterInspection | None


def forward_pass(model: Any, batch: Any, *, activations: bool = False) -> ForwardPass:
    """Call a model with a batch and check inputs and outputs.

    Args:
        model: the module; its mode (train, eval) stays, and so does whether gradients are on.
        batch: a dict is passed by keywords, a tuple or list by position, anything else as the only argument.
        activations: also the output of every module without children, by hooks that are gone afterwards.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``. The model's own errors go on.
    """
    tensors.require_model(model, "forward_pass")
    watched = _WatchedModel(model, "forward_pass", activations=activations)
    call(watched, batch)
    return watched.passes[0]


class _WatchedModel:
    """Stands in for a model: its calls are measured and checked forward passes, all else is the model's."""

    def __init__(self, model: Any, function: str, *, activations: bool) -> None:
        self._model, self._function, self._activations = model, function, activations
        self.passes: list[ForwardPass] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows, groups = Rows(), list[str]()

        def add_tensors(group: str, name: str, values: Any) -> None:
            for path, tensor in islice(walk(values, name), MOST_TENSORS):
                rows.add(path, tensor)
                groups.append(group)

        add_tensors("inputs", "input", kwargs or (args[0] if len(args) == 1 else args))
        modules = self._model.named_modules() if self._activations else ()
        leaves = {name: x for name, x in modules if not any(True for _ in x.children())}
        with ExitStack() as hooks:
            for name, module in leaves.items():
                if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    hook = partial(add_tensors, "activations", name or type(module).__name__)
                    hooks.enter_context(module.register_forward_hook(lambda _module, _inputs, output, hook=hook: hook(output)))
            with _measured() as part:
                output = self._model(*args, **kwargs)
        add_tensors("outputs", "output", output)
        described = list(zip(groups, rows.described(), strict=True))
        inputs, inside, outputs = (
            tuple(row for group, row in described if group == name) for name in ("inputs", "activations", "outputs")
        )
        odd = [("nonfinite_tensor", row.name, row.defect) for row in (*inputs, *inside, *outputs) if row.defect]
        problems, kind = record_findings(self._function, odd), type(self._model).__name__
        self.passes.append(
            ForwardPass(kind, part.time_s, inputs, outputs, inside, part.host, part.device, problems, _output=output)
        )
        return output


def backward_pass(model: Any, loss: Any, *, scaler: Any = None) -> BackwardPass:
    """Call ``loss.backward()``, with a scaler that of the scaled loss, and check the gradients of ``model``.

    Raises:
        TypeError: ``loss`` is no tensor, or ``model`` no module.
        ValueError: ``loss`` has more than one element, or nothing to differentiate.
    """
    return _backward(model, loss, scaler, EXPLODING, VANISHING)


def _backward(model: Any, loss: Any, scaler: Any, exploding: float, vanishing: float) -> BackwardPass:
    tensors.require_model(model, "backward_pass")
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"a loss is a tensor, not {type(loss).__name__}: return what loss_fn computes, before item()")
    if loss.numel() != 1:
        raise ValueError(f"a loss has one element, not the shape {tuple(loss.shape)}: reduce it by mean() or sum()")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph: are gradients off, or was it detached?")
    tensors.require_scaler(scaler, "backward_pass", "scale")
    with _measured() as part:
        (loss if scaler is None else scaler.scale(loss)).backward()
    gradients = check_gradients(model, loss, scaler=scaler, exploding=exploding, vanishing=vanishing)
    value = nan if gradients.loss is None else gradients.loss
    return BackwardPass(value, part.time_s, gradients, part.host, part.device, gradients.problems)


def optimization_step(optimizer: Any, *, scaler: Any = None) -> OptimizationStep:
    """Call ``optimizer.step()``, or the scaler's ``step()`` and ``update()``, and measure the change.

    A copy of the parameters is kept meanwhile. An optimizer that needs a closure (LBFGS) raises.

    Raises:
        TypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
    """
    tensors.require(optimizer, "optim.Optimizer", "optimization_step")
    tensors.require_scaler(scaler, "optimization_step", "scale")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        before = [parameter.detach().clone() for parameter in parameters]
    rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
    scale = scaler.get_scale() if scaler is not None else 1.0
    with _measured() as part:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    taken, count = Rows(), len(parameters)
    with torch.no_grad():
        changes = [after.detach() - old for after, old in zip(parameters, before, strict=True)]
    for x in (*parameters, *changes, *before):
        taken.add("", x)
    rows = taken.described()
    norm, update, old = (norm_of(rows[count * i : count * (i + 1)]) for i in range(3))
    odd = [(what, value) for what, value in (("parameters", norm), ("update", update)) if not isfinite(value or 0.0)]
    texts = [f"the norm of the {what} is {value} after the step" for what, value in odd]
    kind, name = "nonfinite_parameter", type(optimizer).__name__
    skipped = scaler is not None and scaler.get_scale() < scale
    return OptimizationStep(
        optimizer=name, time_s=part.time_s, learning_rates=rates, parameter_norm=norm, update_norm=update,
        update_ratio=update / old if old and update is not None else None, skipped=skipped, memory=part.host,
        gpu_memory=part.device, problems=record_findings("optimization_step", [(kind, name, text) for text in texts]),
    )  # fmt: skip


def training_step(  # noqa: PLR0913  # what a training loop is made of
    model: Any, batch: Any, loss_fn: Callable[..., Any] | None, optimizer: Any, *, target: Any = None, scaler: Any = None,
    amp: Any = "off", activations: bool = False, weights: bool = False, exploding: float | None = None,
) -> TrainingStep:  # fmt: skip
    """Do one training step, and check inputs, outputs, loss, gradients and update.

    ``zero_grad()``, the model, the loss, ``backward()`` and ``step()`` are called as in any training loop; the weights become
    the same, to the bit. The step counts in ``debug.training_summary()``. It waits for a device a few times.

    Args:
        model: the module, in train mode or not.
        batch: a tensor, a mapping of keyword arguments, or a tuple of arguments; the last may be the target for ``loss_fn``.
        loss_fn: ``loss_fn(model, batch)``, which calls the model, or ``loss_fn(output, target)``, or ``loss_fn(output)``, by
            the name of its first parameter. ``None``: the output's own ``loss``, or the sum of its tensors.
        optimizer: one with the model's parameters; LBFGS, which needs a closure, is refused.
        target: for ``loss_fn(output, target)``; without it, the last item of a batch that is a tuple, else the batch.
        scaler: a ``torch.amp.GradScaler`` that scales, steps and updates.
        amp: autocast of forward and loss: ``"bf16"``, ``"fp16"``, ``"off"``, ``"auto"`` (bf16 where the device has it, else
            fp16), or a dtype.
        activations: also the output of every module without children.
        weights: also the statistics of every parameter after the step.
        exploding: as for :func:`torchobs.debug.monitor_step`.

    Raises:
        TypeError: an argument is of the wrong kind. Errors of model, loss and optimizer go on.
        ValueError: the loss has more than one element, or nothing to differentiate; a threshold is not above 0; the optimizer
            has other parameters; the model is on the device meta.
    """
    check_trained(model, optimizer=optimizer, **({} if loss_fn is None else {"loss_fn": loss_fn}))
    tensors.require_scaler(scaler, "training_step", "scale")
    limit = _exploding_norm(model) if exploding is None else exploding
    require_positive(limit)
    autocast = _autocast(model, amp)
    begun = time.perf_counter()
    optimizer.zero_grad()
    watched: Any = _WatchedModel(model, "training_step", activations=activations)
    with autocast:
        loss = compute_loss(watched, batch, loss_fn, target=target)
    backward = _backward(model, loss, scaler, limit, VANISHING)
    optimization = optimization_step(optimizer, scaler=scaler)
    kinds, in_gradients = _judge(model, backward.gradients, "training_step", limit, VANISHING)
    in_passes = [problem for forward in watched.passes for problem in forward.problems]
    problems = (*in_passes, *in_gradients, *optimization.problems)
    record_step(kinds, anomalous=bool(problems))
    return TrainingStep(
        loss=backward.loss, time_s=time.perf_counter() - begun, gradient_norm=backward.gradients.gradient_norm,
        problems=problems, forward=watched.passes[-1] if watched.passes else None, backward=backward, optimization=optimization,
        weights=tensors.inspect_parameters(model) if weights else None,
    )  # fmt: skip


def _autocast(model: Any, amp: Any) -> Any:
    """Return the context for a precision, on the device of the model's first parameter."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    is_new = device != "cuda" or torch.cuda.is_bf16_supported()
    named = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16, "auto": torch.bfloat16 if is_new else torch.float16}
    if amp not in named and not isinstance(amp, torch.dtype):
        raise ValueError(f"amp is one of {', '.join(map(repr, named))}, or a dtype, not {amp!r}")
    dtype = named.get(amp, amp)
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


def inference(model: Any, batch: Any, *, activations: bool = False) -> ForwardPass:
    """Call a model in eval mode, without gradients, and check inputs and outputs.

    Afterwards, also after an exception, each module has its mode again; if it overrides ``train()``, that is called.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``. The model's own errors go on.
    """
    tensors.require_model(model, "inference")
    # no inference mode: tables that a model caches in its first pass would be refused by the training afterwards
    watched = _WatchedModel(model, "inference", activations=activations)
    with evaluating(model), torch.no_grad():
        call(watched, batch)
    return watched.passes[0]


@contextmanager
def _measured() -> Iterator[Any]:
    """Yield an object that has ``time_s``, ``host`` and ``device`` after the block."""
    part, before = SimpleNamespace(), operations.read()
    operations.wait_for_devices()
    begun = time.perf_counter()
    yield part
    operations.wait_for_devices()
    part.time_s = time.perf_counter() - begun
    part.host, part.device = operations.use(before, operations.read())
