"""Mistakes of a training loop, detected while it runs: each kind is a small class.

An optimizer's lints look at it in measured steps alone, those of the loop at some of its backward passes. A look is sound or
suspect: :class:`Lint` counts them, and :class:`Lints` reports each kind once, by an event and a line in the log.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import ref

from torchobs import catalog
from torchobs.detect.learning import LASTING_SAMPLES, LASTING_STEPS
from torchobs.probes.step_recorder import parameters_of
from torchobs.probes.timeline import BACKWARD_ENDS
from torchobs.tensors.graph import accumulator_of
from torchobs.tensors.names import clean
from torchobs.tensors.references import ObjectIndex, TensorReference, living_optimizers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from torchobs.probes.clipping import ClipWatch
    from torchobs.probes.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker
    from torchobs.tensors.names import ParameterNames

MAX_SOUND_LOOKS = 3
"""Sound looks after which a lint that can be refuted ends"""
MAX_OPTIMIZERS = 16
MAX_SCANS, SCAN_S = 30, 1.0
"""Most searches for the models of optimizers, and the time between two"""
_APART = LASTING_STEPS // LASTING_SAMPLES
"""Steps between two looks that the sampler thread requests"""


class Measured(NamedTuple):
    """An optimizer that is about to take a step."""

    step: int
    optimizer: Any
    sample: torch.Tensor | None
    """Its last parameter with a gradient; ``None`` in a step that is not measured"""


class Lint:
    """One kind of mistake, at one optimizer or in the loop as a whole."""

    kind: ClassVar[str]
    lasting_steps: ClassVar[int] = 0
    """Steps from the first to the last suspect look in a row, beside ``LASTING_SAMPLES`` looks"""

    def __init__(self, runner: Lints) -> None:
        self.runner, self.context, self.guard = runner, runner.context, runner.breaker.guard
        self.done = False
        self._since = self._suspect = self._sound = 0

    def observe(self, measured: Measured) -> bool | None:
        """Return whether an optimizer that is about to step is suspect; ``None``: unknown. In the training thread."""
        del measured
        return None

    def confirm(self) -> bool:
        """Return whether a suspicion that has lasted holds at a closer look. In the training thread."""
        return True

    def sample(self) -> None:
        """Ask for the next look, or judge the ones before. In the sampler thread."""

    def release(self) -> None:
        """Remove the hooks."""

    def count(self, is_suspect: bool | None, step: int) -> None:  # noqa: FBT001  # the result of a look
        """Count a look; report the mistake once it is certain."""
        if is_suspect is False:
            self._suspect, self._sound = 0, self._sound + 1
            self.done = self._sound >= MAX_SOUND_LOOKS
        elif is_suspect:
            self._since = self._since if self._suspect else step
            self._suspect += 1
            if self._suspect >= LASTING_SAMPLES and step - self._since >= self.lasting_steps:
                self._suspect = 0
                if self.confirm():
                    self.report(self._since)

    def report(self, step: int) -> None:
        """Have the mistake reported, dated to that step. In any thread."""
        self.done = True
        self.runner.mistakes.append((self, step))


class Lints:
    """The runner: a part of the gradient probe."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker, names: ParameterNames, clip: ClipWatch) -> None:
        self.context, self.breaker, self._names = context, breaker, names
        self.mistakes: list[tuple[Lint, int]] = []
        """Mistakes that are certain but not reported, and the steps that they are dated to"""
        self._reported: set[str] = set()
        self._optimizers = ObjectIndex(MAX_OPTIMIZERS, lambda _: _Optimizer())
        self._loop: list[Lint] = [KeptLosses(self), LateClipping(self, clip)]
        self._not_in_optimizer = NotInOptimizer(context)
        self._scans, self._due_s, self._next_step = 0, 0.0, 0
        self.due = False
        """Whether the next step is to be examined, be it measured or not; set by the sampler thread"""

    def remove(self) -> None:
        """Remove all hooks."""
        for _, state in self._optimizers.living():
            for lint in state.lints:
                lint.release()

    # -- in the training thread --------------------------------------------------------------------------------------------

    def before_step(self, measured: Measured, *, within: bool) -> None:
        """Judge an optimizer in a measured step. ``within``: after a closure's backward pass."""
        if within:
            self._not_in_optimizer.before_step()
        state = self._optimizers.of(measured.optimizer)
        if state is None:
            return
        if state.began is None and measured.sample is not None:
            # now: a short first epoch may end before the sampler thread has looked for the models
            tables = ((module, vars(module).get("_parameters", {})) for module in self._names.built_modules.modules())
            owners = [module for module, table in tables if any(member is measured.sample for member in table.values())]
            state.began = any(owner.training for owner in owners)
            state.lints.append(KeptGradients(self))
        self._observe(state, measured, EvaluationMode if within else None)

    def before_any_step(self, optimizer: Any, step: int) -> None:
        """Judge lints that need no measured step, if the sampler thread has requested it."""
        self._not_in_optimizer.before_step()
        state = self._optimizers.of(optimizer)
        if state is not None and state.due:
            self._observe(state, Measured(step, optimizer, None), EvaluationMode)

    def _observe(self, state: _Optimizer, measured: Measured, only: type[Lint] | None) -> None:
        state.due = False
        for lint in state.lints:
            if not lint.done and lint.kind not in self._reported and only in {None, type(lint)}:
                lint.count(lint.observe(measured), measured.step)

    # -- in the sampler thread ---------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Request the next looks, and report mistakes, each kind once."""
        for lint in self._loop:
            if not lint.done:
                lint.sample()
        self._not_in_optimizer.sample(self._names.outermost)
        while self.mistakes:
            lint, step = self.mistakes.pop(0)
            if lint.kind not in self._reported:
                self._reported.add(lint.kind)
                self.context.report(lint.kind, step)
        if EvaluationMode.kind not in self._reported:
            self._find_models(self._optimizers.living())
        self.due = self._not_in_optimizer.due or any(state.due for _, state in self._optimizers.living())

    def _find_models(self, optimizers: list[tuple[Any, _Optimizer]]) -> None:
        """Have doubtful models examined in the next step, and search for those of new optimizers."""
        if self.context.recorder.step >= self._next_step:
            self._next_step = self.context.recorder.step + _APART
            for _, state in optimizers:
                state.due = any(isinstance(lint, EvaluationMode) and lint.is_in_doubt() for lint in state.lints)
        new = [(optimizer, state) for optimizer, state in optimizers if state.began is not None and not state.has_models]
        if not new or self._scans >= MAX_SCANS or monotonic() < self._due_s:
            return
        roots = self._names.outermost()
        self._scans += bool(roots)  # models that were built before init() are found by a scan, later
        self._due_s = monotonic() + SCAN_S
        for optimizer, state in new:
            trained = set(map(id, parameters_of(optimizer)))
            with suppress(RuntimeError):  # a dictionary changed size
                models = [root for root in roots if any(id(parameter) in trained for parameter in root.parameters())]
                modal = [model for model in models if any(map(_has_modes, model.modules()))]
                state.lints += [EvaluationMode(self, model, began=bool(state.began)) for model in modal]
                state.has_models = bool(models)


class _Optimizer:
    """The lints of one optimizer."""

    __slots__ = ("began", "due", "has_models", "lints")

    def __init__(self) -> None:
        self.lints: list[Lint] = []
        self.began: bool | None = None
        """Whether the module of its last parameter was in training mode in its first measured step; ``None`` before"""
        self.has_models = False
        self.due = False
        """Whether its models are to be examined in the next step, measured or not; set by the sampler thread"""


class KeptGradients(Lint):
    """Gradients that are never set to zero: a backward pass begins with those that the last step has used.

    The last parameter's gradient must be the same tensor as in the measured step before, changed since. Only then the next
    backward pass is watched, by a hook on that parameter's node: torch counts the changes of a tensor in place
    (``_version``), so that as many changes as accumulations leave no room for a ``zero_``. A gradient that is copied in, as
    master weights get it, is no accumulation.
    """

    kind = "gradients_kept"
    _COMPARED = 1024
    """Elements of a gradient on the CPU that are compared with zero"""

    def __init__(self, runner: Lints) -> None:
        super().__init__(runner)
        self._parameter: Callable[[], Any] = lambda: None
        self._fused = False
        self._key = self._version = 0
        """id and version of the gradient in the last measured step"""
        self._first = self._last = self._accumulated = 0
        """Versions when the watch began and after the last accumulation within the step, and their number"""
        self._node: Any = None
        self._handle: Any = None

    def observe(self, measured: Measured) -> bool | None:
        """Judge the watch, and have the next backward pass watched."""
        sample, is_suspect = measured.sample, None
        if sample is None:
            return None
        gradient: Any = sample.grad
        if self._parameter() is not sample:
            self.release()
            self._suspect = 0
            self._parameter, self._key = TensorReference(sample), 0
            self._fused = any(group.get("fused") for group in measured.optimizer.param_groups)
        elif self._handle is not None:
            accumulated = self._accumulated
            is_suspect = accumulated > 0 and self._key == id(gradient) and self._last == self._first + accumulated
            self.release()
        if self._key == id(gradient) and gradient._version > self._version:
            self.context.at_backward(self.guard(self._watch))
        self._key, self._version = id(gradient), gradient._version
        return is_suspect

    def release(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
        self._node = self._handle = None

    def _watch(self) -> None:
        """Count the additions of the next backward passes to a gradient, if it is still that of the last step."""
        import torch  # torch is optional until training begins

        sample, recorder = self._parameter(), self.context.recorder
        if self.done or sample is None or self._handle is not None or torch.compiler.is_compiling():
            return
        if self.context.device.cuda.capturing():
            return
        gradient = sample.grad
        plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
        with torch.no_grad():
            if self._key != id(gradient) or not plain or (gradient._version != self._version and not self._is_left(gradient)):
                self.count(False, recorder.step)
                return
        self._node = accumulator_of(sample)
        self._first = self._last = gradient._version
        self._accumulated, step, weights = 0, recorder.step, sample._version
        lint_of = ref(self)  # the node would keep this one alive, which keeps the node and with it the parameter

        def add(*_: object) -> None:
            lint = lint_of()
            sample = lint._parameter() if lint is not None else None
            if lint is None or sample is None or sample.grad is None:
                return
            # up to its optimizer's next step, for clipping changes the gradient, too; a fused step raises no version
            within = recorder.step == step if lint._fused else sample._version == weights
            if id(sample.grad) == lint._key and within:
                lint._accumulated += 1
                lint._last = sample.grad._version

        if self._node is not None:
            self._handle = self._node.register_hook(self.guard(add))

    def _is_left(self, gradient: Any) -> bool:
        """Return whether a gradient that changed since the step is not zero, as after clipping in place."""
        return gradient.is_cpu and bool(gradient.reshape(-1)[: self._COMPARED].any())


class EvaluationMode(Lint):
    """A model with dropout or batch normalisation that was trained in training mode and is trained in evaluation mode since.

    As a whole: ``model.train()`` was forgotten after an evaluation. A model that never was in training mode may be meant so,
    and one with other trained parameters than before is in another phase of its training.
    """

    kind = "evaluation_mode"
    lasting_steps = LASTING_STEPS

    def __init__(self, runner: Lints, module: Any, *, began: bool) -> None:
        super().__init__(runner)
        self._module = ref(module)
        self._trained = _trained(module) if began else -1
        """Number of parameters that required a gradient in training mode; -1: it has not been in that mode yet"""

    def observe(self, measured: Measured) -> bool | None:
        """Judge the model's mode."""
        del measured
        module = self._module()
        if module is None:
            return None
        if module.training:
            self._suspect = 0
            self._trained = _trained(module) if self._trained < 0 else self._trained
        return self.is_in_doubt() or None

    def is_in_doubt(self) -> bool:
        """Return whether a model that was trained is in evaluation mode now."""
        module = self._module()
        return module is not None and not module.training and self._trained >= 0

    def confirm(self) -> bool:
        """Return whether the same parameters are trained, and no part is in training mode."""
        module = self._module()
        return module is not None and _trained(module) == self._trained and not any(part.training for part in module.modules())


_MODAL = {"_DropoutNd": "p", "_BatchNorm": "track_running_stats", "RNNBase": "dropout", "MultiheadAttention": "dropout"}
"""Classes that compute differently in evaluation mode, and an attribute that is false if they do not"""


def _trained(module: Any) -> int:
    return sum(parameter.requires_grad for parameter in module.parameters())


def _has_modes(module: Any) -> bool:
    """Return whether it computes differently in evaluation mode; by the names of its classes, without ``isinstance``."""
    return any(getattr(module, _MODAL[kind.__name__], False) for kind in type(module).__mro__ if kind.__name__ in _MODAL)


class KeptLosses(Lint):
    """Losses that are kept with their graphs: ``losses.append(loss)``, ``total += loss``. Memory grows with each step.

    A node of the graph of each of the first losses is marked in its ``metadata``, which lives as long as the node: whatever
    keeps the loss, a sum of losses, or the model's outputs with their graph, keeps it. (The values that a backward pass needs
    are freed by it, the nodes are not.) A node that is met twice belongs to a graph that is meant to stay, as of weights that
    are derived once. PyTorch's FAQ, "My model reports cuda runtime error(2): out of memory": no history across the loop.
    """

    kind = "losses_kept"
    _LOOKS, _DOWN, _KEY = 8, 6, "torchobs"
    """Backward passes that are examined; nodes from the loss down to the marked one, since loss scaling and the mean over
    micro-batches come after what a script keeps"""

    def __init__(self, runner: Lints) -> None:
        import torch  # torch is optional until training begins

        super().__init__(runner)
        self._plain, self._looks, self._last = torch.Tensor, 0, 0
        self._marks: list[ref[_Mark]] = []
        runner.context.hooks.takes_loss.register(runner.breaker, self._mark_loss)

    def _mark_loss(self, tensors: Any, gradients: Any, accumulates: bool) -> None:  # noqa: FBT001  # a listener
        """Mark the graph of the loss of a backward pass that begins. In the training thread."""
        del gradients
        if type(tensors) is not self._plain or tensors.grad_fn is None or not accumulates or self._looks >= self._LOOKS:
            return  # a subclass has code of the user's
        self._looks += 1
        self._mark(tensors.grad_fn)
        if self._looks == self._LOOKS:  # not now, while the listeners are called
            takes_loss, probe = self.context.hooks.takes_loss, self.runner.breaker.probe
            self.context.at_backward(self.guard(lambda: takes_loss.unregister(probe)))

    def _mark(self, function: Any) -> None:
        for _ in range(self._DOWN):
            following = next((node for node, _ in function.next_functions if node is not None), None)
            if following is None or "AccumulateGrad" in following.name():
                break
            function = following
        notes = getattr(function, "metadata", None)
        if not isinstance(notes, dict) or self._KEY in notes:
            self.done = True
            return
        notes[self._KEY] = mark = _Mark()
        self._marks.append(ref(mark))
        self._last = self.context.recorder.step

    def sample(self) -> None:
        """Judge the marks: a mark that is gone proves that they are not kept."""
        step, marks = self.context.recorder.step, self._marks
        if any(mark() is None for mark in marks[:-1]):
            self.done = True
        elif len(marks) >= LASTING_SAMPLES and marks[-1]() is not None and step - self._last >= LASTING_STEPS:
            self.report(step)


class _Mark:
    """A mark of a node, which lives as long as the node."""

    __slots__ = ("__weakref__",)


class LateClipping(Lint):
    """Gradients that are clipped after the optimizer's step: it has used them as they were, and nothing will again.

    When the first backward pass of a step begins, no gradient has come since the last step. A clipping by norm in between was
    of gradients that the last step has used: a loop that clips in time has clipped before that step's end. Gradients that are
    never set to zero are another mistake.
    """

    kind = "clipped_late"

    def __init__(self, runner: Lints, clip: ClipWatch) -> None:
        super().__init__(runner)
        self._clip, self._step = clip, 0
        self._check_safely = self.guard(self._check_clipping)

    def sample(self) -> None:
        """Have the next step examined, if there is any clipping."""
        if self._clip.limit is not None:
            self.context.at_backward(self._check_safely)

    def _check_clipping(self) -> None:
        """Check for late clipping, when an outermost backward pass begins. In the training thread."""
        recorder = self.context.recorder
        step, sole = recorder.step, recorder.plain.sole
        if self.done or step == self._step or not sole:  # several, and steps by hand, leave gradients to each other
            return
        if any(stamp & 15 == BACKWARD_ENDS for stamp in recorder.trace):  # in the next step, then
            self.context.at_backward(self._check_safely)
            return
        self._step = step
        self.count(self._clip.has_clipped_since(step), step)


class NotInOptimizer:
    """Parameters that get gradients and are in no optimizer: a head, an adapter or a whole model that was forgotten.

    A model that leaves a part out on purpose computes its gradients for nothing; ``requires_grad_(False)`` says that it is
    frozen. Ignored: a model that is in evaluation mode as a whole (a teacher, a perceptual loss), parameters that change by
    other means, and those of another type than the trained ones beside them (copies of master weights). Those of an optimizer
    that has not stepped yet are reported after some hundred steps, at the last look, and taken back if it steps later.

    The sampler thread finds candidates every thirty-third step, the training thread looks at them: a backward pass, which does
    not hold the GIL, replaces a gradient meanwhile, and another thread that reads it then crashes the process.
    """

    _NAMED = 8
    _LOOKS = 12
    """Looks that end without a result; one takes 1 µs for each parameter"""
    _SHARDS = "FullyShardedDataParallel"
    """Class with parameters that are views of others, new in each step"""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._candidates: dict[int, _Candidate] = {}
        self.due = False
        """Whether the next step is to be examined, be it measured or not; set by the sampler thread"""
        self._is_examined = self._waits = False
        """Whether a finished look is not judged yet; whether an optimizer that may still step has all candidates"""
        self._looks, self._next_step = 0, _APART
        self._optimizer = ""
        """Class of the optimizer that has the reported parameters, if one has"""
        self._reported: list[_Candidate] | None = None
        """Reported parameters that are not trained; ``None`` before"""
        self._trained_by: list[tuple[int, int]] = []

    def before_step(self) -> None:
        """Compare the candidates, if that is due; a step is about to be done. In the training thread."""
        if self.due:
            self.due = False
            self._context.training.others.read(self._examine)

    def _examine(self) -> None:
        self._is_examined = True
        for candidate in list(self._candidates.values()):
            candidate.compare()

    def sample(self, modules: Callable[[], Iterable[Any]]) -> None:
        """Judge the last look, and collect the candidates for the next. ``modules``: the outermost ones known."""
        if self._reported is not None:
            self._take_back(self._reported)
            return
        if self._is_examined:
            self._is_examined = False
            if any(candidate.looks > LASTING_SAMPLES for candidate in self._candidates.values()):
                self._judge([candidate for candidate in self._candidates.values() if candidate.looks > 1])
        step = self._context.recorder.step
        if self.due or self._looks >= self._LOOKS or step < self._next_step:
            return
        roots = list(modules())
        self._looks += bool(roots)  # models that were built before init() are found by a scan, later
        self._next_step = step + _APART
        trained = {id(parameter): parameter.dtype for parameter in self._context.trained()}
        with suppress(RuntimeError):  # a dictionary changed size
            before, candidates = self._candidates, dict[int, _Candidate]()
            for name, parameter in (entry for module in roots for entry in self._left_out(module, trained)):
                same = id(parameter) in before and before[id(parameter)].parameter() is parameter
                candidates[id(parameter)] = before[id(parameter)] if same else _Candidate(parameter, name)
            self._candidates, self.due = candidates, bool(candidates)

    def _left_out(self, module: Any, trained: dict[int, Any]) -> Iterator[tuple[str, Any]]:
        """Yield a module's parameters that are to be trained and are in no optimizer that steps."""
        if any(kind.__name__ == self._SHARDS for part in module.modules() for kind in type(part).__mro__):
            return
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        types = {trained[id(parameter)] for _, parameter in named if id(parameter) in trained}
        if not types and not any(part.training for part in module.modules()):
            return
        self._context.yield_gil()
        title = "" if types else f"{type(module).__name__}."
        for name, parameter in named:
            if id(parameter) not in trained and (not types or parameter.dtype in types):
                yield title + clean(name), parameter

    def _judge(self, suspects: list[_Candidate]) -> None:
        """Report parameters that no existing optimizer has, or at last those of an optimizer that never steps."""
        is_last, self._trained_by = self._looks >= self._LOOKS, self._stepping()
        # some may be trained, or gone, since the look
        untrained = self._untrained(suspects)
        alive = [(suspect, parameter) for suspect in untrained if (parameter := suspect.parameter()) is not None]
        if not alive or (self._waits and not is_last):
            return
        self._context.yield_gil()  # the scan for optimizers holds it for some 100 ms
        optimizers = living_optimizers()
        owners = {id(parameter): type(owner).__name__ for owner in optimizers for parameter in parameters_of(owner)}
        kinds = [owners.get(id(parameter), "") for _, parameter in alive]
        self._waits = "" not in kinds
        if is_last or not self._waits:
            self._optimizer = kinds[0] if self._waits else ""
            self._write([candidate for (candidate, _), kind in zip(alive, kinds, strict=True) if kind == self._optimizer])

    def _take_back(self, reported: list[_Candidate]) -> None:
        """Write the reported parameters that are still untrained, once an optimizer has begun to train others."""
        stepping = self._stepping() if reported else self._trained_by
        if stepping != self._trained_by:
            self._trained_by, left = stepping, self._untrained(reported)
            if len(left) < len(reported):
                self._write(left)

    def _stepping(self) -> list[tuple[int, int]]:
        """Return a value that changes when an optimizer begins to step, or gets parameters."""
        optimizers = self._context.recorder.optimizers()
        return [(id(optimizer), len(getattr(optimizer, "param_groups", ()))) for optimizer in optimizers]

    def _untrained(self, candidates: list[_Candidate]) -> list[_Candidate]:
        trained = set(map(id, self._context.trained()))
        return [candidate for candidate in candidates if id(candidate.parameter()) not in trained]

    def _write(self, left: list[_Candidate]) -> None:
        self._reported = left
        trained = len(self._context.trained())
        names = [candidate.name for candidate in left[: self._NAMED]]
        attributes = {"parameters": names, "parameters_affected": len(left), "parameters_trained": trained}
        attributes |= {"optimizer": self._optimizer} if self._optimizer else {}
        self._context.event(catalog.EVENT_LEFT_OUT_PARAMETERS, attributes)


class _Candidate:
    """A parameter that is in no optimizer, and how often it had another gradient and the same values."""

    __slots__ = ("_gradient", "_state", "looks", "name", "parameter")

    def __init__(self, parameter: Any, name: str) -> None:
        self.parameter, self.name, self.looks = TensorReference(parameter), name, 0
        self._state: tuple[int, list[float]] | None = None
        self._gradient: tuple[TensorReference, int] | None = None
        """Its gradient, by reference since memory is reused, and the version"""

    def compare(self) -> None:
        """Compare its gradient and values with those before. In the training thread."""
        parameter = self.parameter()
        gradient = parameter.grad if parameter is not None else None
        if gradient is None:
            self.looks, self._state = 0, None
            return
        state, before = _state(parameter), self._gradient
        is_same = before is not None and before[0]() is gradient and before[1] == gradient._version  # type: ignore[union-attr]
        self.looks = self.looks + (not is_same) if state == self._state else 1
        self._state, self._gradient = state, (TensorReference(gradient), gradient._version)


_COMPARED = 16
"""Elements of a parameter on the CPU that must stay as they are"""


def _state(parameter: Any) -> tuple[int, list[float]]:
    """Return a value that changes with a parameter; on a device its version alone, since nothing waits for values there."""
    import torch  # torch is optional until training begins

    is_dense = parameter.layout is torch.strided  # a sparse one has no order in memory to ask for
    plain = parameter.is_cpu and is_dense and parameter.is_contiguous() and parameter.is_floating_point()
    return parameter._version, parameter.detach().view(-1)[:_COMPARED].tolist() if plain else []
