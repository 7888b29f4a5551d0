"""Detect two mistakes of a training loop in measured steps: gradients never set to zero, and training in evaluation mode.

*Kept gradients*: a backward pass begins with the gradient that the last step has used, and adds to it. One parameter of each
optimizer is looked at, in measured steps alone: its gradient must be the same tensor as in the measured step before, changed
since. Only then the next backward pass is watched, by a hook on that parameter's node: torch counts the changes of a tensor in
place (``_version``), so that as many changes as accumulations leave no room for a ``zero_``. A gradient that is copied in, as
master weights get it, is no accumulation.

*Evaluation mode*: a model with dropout or batch normalisation that has been trained in training mode and is trained in
evaluation mode as a whole from some step on: ``model.train()`` was forgotten after an evaluation. A model that never was in
training mode may be meant so, and one of which other parameters are trained than before is another phase of a training.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import ref

from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_SAMPLES, LASTING_STEPS
from torchobs.probes.nonfinite.graph import accumulator_of
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from torchobs.probes.core.context import ProbeContext

_MOST_REFUTED = 3
"""Watched backward passes that found a gradient set to zero, after which that optimizer is left alone"""
_MOST_OPTIMIZERS, _MOST_LOOKS, _LOOK_S = 16, 30, 1.0
_LOOKED_AT = 1024
"""Elements of a gradient on the CPU that are compared with zero"""
_MODAL = {"_DropoutNd": "p", "_BatchNorm": "track_running_stats", "RNNBase": "dropout", "MultiheadAttention": "dropout"}
"""Classes that compute something else in evaluation mode, and an attribute that is false if they do not"""


class _Gradient:
    """The gradient of one parameter of an optimizer."""

    __slots__ = (
        "accumulated",
        "first",
        "fused",
        "handle",
        "kept",
        "key",
        "last",
        "node",
        "parameter",
        "refuted",
        "version",
        "weights",
    )

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = TensorReference(parameter)
        self.key = self.version = 0
        """id and version of the gradient in the last measured step"""
        self.first = self.last = self.accumulated = 0
        """Versions when the watch began and after the last accumulation within the step, and their number"""
        self.fused = False
        """Whether its optimizer is a fused one, whose steps raise no parameter's version"""
        self.weights = 0
        """Version of the parameter when the watch began: until its optimizer's step"""
        self.kept = self.refuted = 0
        self.node: Any = None
        self.handle: Any = None

    def release(self) -> None:
        """Remove the hook."""
        if self.handle is not None:
            self.handle.remove()
        self.node = self.handle = None


class _Model:
    """A model that is trained by an optimizer."""

    __slots__ = ("module", "samples", "since", "trained")

    def __init__(self, module: Any, *, began: bool) -> None:
        self.module = ref(module)
        self.trained = _trained(module) if began else -1
        """Number of parameters that required a gradient in training mode; -1: it was never seen in it"""
        self.samples = self.since = 0


class LoopMistakes:
    """A part of the gradient probe. Each mistake is told once."""

    def __init__(
        self,
        context: ProbeContext,
        guard: Callable[[Callable[..., Any]], Callable[..., Any]],
        built: Callable[[], Iterable[Any]],
    ) -> None:
        """``guard``: of the probe. ``built``: all modules known without a scan."""
        self._context, self._guard, self._built = context, guard, built
        self._gradients: dict[int, _Gradient] = {}
        self._optimizers: dict[int, Any] = {}
        """Weak references by id: the next training of a process may get the id of an optimizer that is gone"""
        self._gone: list[int] = []
        """ids of optimizers that were deleted since the last look"""
        self._models: dict[int, list[_Model]] = {}
        self._began: dict[int, bool] = {}
        """By id of an optimizer, whether the module of its last parameter was in training mode in the first measured step: a
        short first epoch may end before the sampler thread has looked for the models"""
        self.due = set[int]()
        """ids of optimizers whose models are to be looked at in the next step, measured or not; set by the sampler thread"""
        self._looks, self._due_s, self._next_step = 0, 0.0, 0
        self._found: list[tuple[str, int]] = []
        self._told: set[str] = set()

    def remove(self) -> None:
        """Remove all hooks."""
        for gradient in self._gradients.values():
            gradient.release()

    # -- in the training thread --------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, sample: torch.Tensor | None, step: int) -> None:
        """Look at an optimizer that is about to take a measured ``step``. ``sample``: its last parameter with a gradient."""
        self.look_at_modes(optimizer, sample, step)
        if "gradients_kept" not in self._told and sample is not None:
            self._look_at_gradient(optimizer, sample, step)

    def look_at_modes(self, optimizer: torch.optim.Optimizer, sample: torch.Tensor | None, step: int) -> None:
        """Look at the modes of the models that an optimizer trains; also within its step, after a closure's backward pass."""
        key = id(optimizer)
        self.due.discard(key)
        if self._gone:
            self._forget()
        if key not in self._began:
            self._begin(optimizer, sample)
        for model in self._models.get(key, ()):
            self._look_at_mode(model, step)

    def _begin(self, optimizer: torch.optim.Optimizer, sample: torch.Tensor | None) -> None:
        key, gone = id(optimizer), self._gone
        if key not in self._optimizers:
            self._optimizers[key] = ref(optimizer, lambda _: gone.append(key))
        if len(self._began) < _MOST_OPTIMIZERS:
            owned = (each for each in self._built() if any(one is sample for one in vars(each).get("_parameters", {}).values()))
            self._began[key] = sample is not None and any(each.training for each in owned)

    def _forget(self) -> None:
        while self._gone:
            key = self._gone.pop()
            self.due.discard(key)
            for known in (self._optimizers, self._began, self._models):
                known.pop(key, None)

    def _look_at_gradient(self, optimizer: torch.optim.Optimizer, sample: torch.Tensor, step: int) -> None:
        key = id(optimizer)
        known = self._gradients.get(key)
        if known is None or known.parameter() is not sample:
            if known is not None:
                known.release()
            elif len(self._gradients) >= _MOST_OPTIMIZERS:
                return
            known = self._gradients[key] = _Gradient(sample)
            known.fused = any(group.get("fused") for group in optimizer.param_groups)
        if known.refuted >= _MOST_REFUTED:
            return
        gradient: Any = sample.grad
        if known.handle is not None:
            self._judge(known, gradient, step)
        if "gradients_kept" not in self._told and known.key == id(gradient) and gradient._version > known.version:
            self._context.at_backward(self._guard(partial(self._watch, known)))
        known.key, known.version = id(gradient), gradient._version

    def _judge(self, known: _Gradient, gradient: Any, step: int) -> None:
        kept = known.key == id(gradient) and known.accumulated and known.last == known.first + known.accumulated
        known.release()
        known.kept = known.kept + 1 if kept else 0
        known.refuted += not kept
        if known.kept >= LASTING_SAMPLES:
            self._find("gradients_kept", step)

    def _watch(self, known: _Gradient) -> None:
        """Count what the next backward passes add to a gradient, if it is still that of the last step."""
        import torch  # torch is optional until training begins

        sample, cuda = known.parameter(), self._context.device.cuda
        gradient: Any = sample.grad if sample is not None else None
        if sample is None or known.handle is not None or cuda.capturing() or torch.compiler.is_compiling():
            return
        if known.key != id(gradient) or type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
            known.refuted += 1
            return
        with torch.no_grad():
            same = gradient._version == known.version
            if not same and not (gradient.is_cpu and bool(gradient.reshape(-1)[:_LOOKED_AT].any())):
                known.refuted += 1
                return
        known.node = accumulator_of(sample)
        known.first = known.last = gradient._version
        known.weights = sample._version
        known.accumulated = 0
        recorder, step = self._context.recorder, self._context.recorder.step

        def add(*_: object) -> None:
            now: Any = sample.grad
            # up to its optimizer's next step: clipping changes the gradient, too
            within = recorder.step == step if known.fused else sample._version == known.weights
            if now is not None and id(now) == known.key and within:
                known.accumulated += 1
                known.last = now._version

        if known.node is not None:
            known.handle = known.node.register_hook(self._guard(add))

    def _look_at_mode(self, model: _Model, step: int) -> None:
        module = model.module()
        if module is None:
            return
        if module.training:
            model.samples = 0
            if model.trained < 0:
                model.trained = _trained(module)
            return
        if model.trained < 0:
            return
        model.since = model.since if model.samples else step
        model.samples += 1
        if model.samples < LASTING_SAMPLES or step - model.since < LASTING_STEPS:
            return
        model.samples = 0
        if _trained(module) == model.trained and not any(each.training for each in module.modules()):
            self._find("evaluation_mode", model.since)

    def _find(self, kind: str, step: int) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._found.append((kind, step))

    # -- in the sampler thread ---------------------------------------------------------------------------------------------

    def sample(self, modules: Callable[[], Iterable[Any]]) -> None:
        """Tell what was found, and look for the models of optimizers that are new. ``modules``: the outermost ones known."""
        while self._found:
            kind, step = self._found.pop(0)
            self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, {"kind": kind}, step)
            self._context.warn_limited(f"loop {kind}", _MEANING[kind])
        if "evaluation_mode" not in self._told and self._context.recorder.step >= self._next_step:
            self._next_step = self._context.recorder.step + LASTING_STEPS // LASTING_SAMPLES
            self.due |= {key for key, models in list(self._models.items()) if any(map(_is_in_doubt, models))}
        optimizers = [one for one in self._context.recorder.optimizers() if id(one) not in self._models]
        if not optimizers or self._looks >= _MOST_LOOKS or monotonic() < self._due_s:
            return
        roots = list(modules())
        self._looks += bool(roots)  # models that were built before init() are found by a scan, later
        self._due_s = monotonic() + _LOOK_S
        for optimizer in optimizers:
            mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            with suppress(RuntimeError):  # a dictionary changed size
                found = [module for module in roots if any(id(each) in mine for each in module.parameters())]
                began = self._began.get(id(optimizer), False)
                modal = [_Model(module, began=began) for module in found if any(map(_has_modes, module.modules()))]
                if found:
                    self._models[id(optimizer)] = modal


def _is_in_doubt(model: _Model) -> bool:
    """Return True for a model that was trained and is in evaluation mode now."""
    module = model.module()
    return module is not None and not module.training and model.trained >= 0


_MEANING = {
    "gradients_kept": "gradients are never set to zero: each backward pass adds to those of all steps before (zero_grad())",
    "evaluation_mode": "the model is trained in evaluation mode, after training mode: was model.train() forgotten?",
}


def _trained(module: Any) -> int:
    return sum(parameter.requires_grad for parameter in module.parameters())


def _has_modes(module: Any) -> bool:
    """Return True if it computes something else in evaluation mode; by the names of its classes, without ``isinstance``."""
    return any(getattr(module, _MODAL[kind.__name__], False) for kind in type(module).__mro__ if kind.__name__ in _MODAL)
