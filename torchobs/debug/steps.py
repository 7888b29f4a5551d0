"""``training_step``, its parts, and ``monitor_step``: what goes in and comes out, loss, gradients, update, time, memory."""

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
from torchobs.tensors.losses import compute_loss, parameters_of
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
    """Not finite, far above the losses of this model before, or grown without end since its first"""
    problems: tuple[Problem, ...]
    gradients: GradientCheck


class _Steps:
    """What is known of one model so far."""

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

    Call it between ``backward()`` and ``zero_grad()``, before ``scaler.update()``. The loss is compared with those of the same
    model before, by :mod:`torchobs.detect.spikes`: from the 20th on with those before it, and before that with its first
    ones: one that has been a thousand times as large for 50 steps has diverged, however smoothly it grew.

    Args:
        model: the module.
        loss: a tensor with one element, or a number; without it the gradients alone are checked.
        step: its number; without one, calls for this model are counted. With the same one as before it is the same step.
        scaler: as for :func:`torchobs.debug.check_gradients`.
        exploding: gradient norm, in total or of one parameter, above which it explodes. Without one: 10; from the 20th step of
            this model on also far above its own norms (eight times, and 6 standard deviations on the log scale) or a thousand
            times those of its start, since the norm of a loss that is a sum is as large as the batch.
        vanishing: gradient norm, in total or of one weight, below which it vanishes.

    Raises:
        TypeError: ``model`` is no module, or ``loss`` not one number.
        ValueError: a threshold is not above 0.
    """
    tensors.require_model(model, "monitor_step")
    exploding = _explodes_above(model) if exploding is None else exploding
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


def _explodes_above(model: Any) -> float:
    """Return the gradient norm above which the model's next step explodes, by those of its steps before."""
    steps = _models.get(model)
    return EXPLODING if steps is None else max(EXPLODING, steps.norms.limit)


def _judge(
    model: Any, check: GradientCheck, function: str, exploding: float, vanishing: float
) -> tuple[set[str], tuple[Problem, ...]]:
    """Return the kinds of what is wrong with a step as a whole, and that with what is wrong with its gradients.

    A loss scaler skips a step whose gradients overflow: that is how it finds its scale, and no anomaly.
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
    # of a loss that is not finite the check of the gradients has said it
    rest = ((kind, name, text) for kind, text in texts.items() if isfinite(loss) or kind != "loss_anomaly")
    return set(texts), (*in_gradients, *record_findings(function, rest))


MOST_TENSORS = 64
"""Most tensors of a batch, or of an output, that are looked at"""


@dataclass(frozen=True, slots=True)
class ForwardPass(Checked):
    """A forward pass. ``output`` is what the model returned."""

    model: str
    time_s: float
    """Seconds; on a CUDA device until it had computed"""
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
    """L2 norm of what the step changed; 0 where a loss scaler skipped it"""
    update_ratio: float | None
    """Update over parameter norm before it: about 1e-3 in a training that goes well (Karpathy, "makemore" part 3)"""
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
    """The last one; ``None`` if ``loss_fn`` calls another model"""
    backward: BackwardPass
    optimization: OptimizationStep
    weights: tensors.ParameterInspection | None


def forward_pass(model: Any, batch: Any, *, activations: bool = False) -> ForwardPass:
    """Call a model with a batch and check what goes in and comes out.

    Args:
        model: the module, in the mode (train, eval) that it is in; gradients are recorded if they are on.
        batch: a dict is given by keywords, a tuple or list by position, anything else as the only argument.
        activations: also the output of every module without children, by hooks that are gone afterwards.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``. What the model raises goes on.
    """
    tensors.require_model(model, "forward_pass")
    watched = _Watched(model, "forward_pass", wanted=activations)
    call(watched, batch)
    return watched.passes[0]


class _Watched:
    """In place of a model: its calls are forward passes that are measured and checked, all else is the model's."""

    def __init__(self, model: Any, function: str, *, wanted: bool) -> None:
        self._model, self._function, self._wanted = model, function, wanted
        self.passes: list[ForwardPass] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows, groups = Rows(), list[str]()

        def take(group: str, name: str, values: Any) -> None:
            for path, tensor in islice(walk(values, name), MOST_TENSORS):
                rows.add(path, tensor)
                groups.append(group)

        take("inputs", "input", kwargs or (args[0] if len(args) == 1 else args))
        leaves = {name: x for name, x in self._model.named_modules() if self._wanted and not any(True for _ in x.children())}
        with ExitStack() as hooks:
            for name, module in leaves.items():
                if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks: what passes between them is not seen
                    hook = partial(take, "activations", name or type(module).__name__)
                    hooks.enter_context(module.register_forward_hook(lambda _module, _given, output, hook=hook: hook(output)))
            with _measured() as part:
                output = self._model(*args, **kwargs)
        take("outputs", "output", output)
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
    """Call ``loss.backward()``, of the scaled loss where there is a scaler, and check the gradients of ``model``.

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
    """Call ``optimizer.step()``, by the scaler where there is one (and its ``update()``), and measure what it changed.

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
    """Do one training step and check it in turn: inputs, outputs, loss, gradients, update.

    ``zero_grad()``, the model, the loss, ``backward()`` and ``step()`` are called as in any training loop, and the weights
    afterwards are the same to the bit. The step counts in ``debug.training_summary()``. It waits for a device a few times.

    Args:
        model: the module, in train mode or not.
        batch: a tensor, a mapping of keyword arguments, or a tuple of arguments, the last of which ``loss_fn`` may want.
        loss_fn: ``loss_fn(model, batch)``, which calls the model, or ``loss_fn(output, target)``, or ``loss_fn(output)``; its
            first parameter's name tells which. ``None``: the output's own ``loss``, or the sum of its tensors.
        optimizer: of the model's parameters. One that needs a closure (LBFGS) raises.
        target: for ``loss_fn(output, target)``; without it, the last item of a batch that is a tuple, else the batch.
        scaler: a ``torch.amp.GradScaler`` to scale, step and update by.
        amp: autocast of forward and loss: ``"bf16"``, ``"fp16"``, ``"off"``, ``"auto"`` (bf16 where the device has it, else
            fp16), or a dtype.
        activations: also the output of every module without children.
        weights: also the statistics of every parameter after the step.
        exploding: as for :func:`torchobs.debug.monitor_step`.

    Raises:
        TypeError: an argument is of the wrong kind. What model, loss and optimizer raise goes on.
        ValueError: the loss has more than one element, or nothing to differentiate; a threshold is not above 0; the optimizer
            is of other parameters; the model is on the device meta.
    """
    tensors.require_model(model, "training_step")
    tensors.require_optimizer(optimizer, model, "training_step")
    tensors.require_scaler(scaler, "training_step", "scale")
    if loss_fn is not None:
        parameters_of(loss_fn)
    limit = _explodes_above(model) if exploding is None else exploding
    require_positive(limit)
    autocast = _autocast(model, amp)
    begun = time.perf_counter()
    optimizer.zero_grad()
    watched: Any = _Watched(model, "training_step", wanted=activations)
    with autocast:
        loss = compute_loss(watched, batch, loss_fn, target=target)
    backward = _backward(model, loss, scaler, limit, VANISHING)
    optimization = optimization_step(optimizer, scaler=scaler)
    kinds, in_gradients = _judge(model, backward.gradients, "training_step", limit, VANISHING)
    in_passes = [problem for each in watched.passes for problem in each.problems]
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
    """Call a model in eval mode, without gradients, and check what goes in and comes out.

    Each module is in its own mode again afterwards, also after an exception; a ``train()`` of its own is called for it.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``. What the model raises goes on.
    """
    tensors.require_model(model, "inference")
    # tables that a first pass makes would stay in inference mode, and the training that comes after refuses those
    watched = _Watched(model, "inference", wanted=activations)
    with evaluating(model), torch.no_grad():
        call(watched, batch)
    return watched.passes[0]


@contextmanager
def _measured() -> Iterator[Any]:
    """Yield a part whose ``time_s``, ``host`` and ``device`` are there at its end."""
    part, before = SimpleNamespace(), operations.read()
    operations.wait_for_devices()
    begun = time.perf_counter()
    yield part
    operations.wait_for_devices()
    part.time_s = time.perf_counter() - begun
    part.host, part.device = operations.use(before, operations.read())
