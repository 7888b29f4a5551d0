"""Detect an optimizer that steps, and of whose parameters none gets a gradient, ever or any more: nothing is learned.

The loss is cut off from the model (``detach``, ``item``, ``no_grad``, a new tensor of its value), ``backward`` is not called,
or the optimizer has the parameters of a model that was replaced since (by a copy, a checkpoint loaded as a whole). Or
gradients come in the last backward pass and are gone before the step (``zero_grad`` in between), which is seen by hooks on the
nodes that accumulate those of a few parameters; what an earlier pass brought, as of a loss whose path leads through them, is
rightly cleared. Left alone are an optimizer that changes its parameters without gradients, one that begins to step while its
parameters are frozen and others are trained, and one of a parameter that belongs to no module: a dummy for a scheduler. One
that has had gradients is told only where no other one has any meanwhile, and only if it could have some: players that train in
turn, and parts that are frozen, are no mistake. Gradients that came in few of its steps are waited for longer, and if they
come again that is told, too.
"""

from __future__ import annotations

from functools import partial
from math import inf
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_SAMPLES, LASTING_STEPS
from torchobs.probes.core.boundaries import BACKWARD_BEGINS
from torchobs.probes.nonfinite.graph import accumulator_of
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.gradients.parameter_names import ParameterNames
    from torchobs.support.error_guard import CircuitBreaker

APART = LASTING_STEPS // LASTING_SAMPLES
"""Steps without a gradient; as many as between two looks for parameters that are in no optimizer"""
NAMED = 8
_SELDOM, _PAUSES = 10, 2
"""How many times as long it is waited for gradients that have not come in several looks in a row, and how many of the longest
pauses so far: some loops step in each micro-batch, and have a gradient in every fortieth"""
_MOST_OPTIMIZERS = 16
_CHOSEN, _LOOKED_AT = 3, 16
"""Parameters of an optimizer that must stay as they are, and their elements that are compared"""


class _Optimizer:
    """An optimizer, and since when it has no gradient."""

    __slots__ = (
        "again", "before", "came_ns", "cleared", "done", "had", "in_a_row", "looks", "optimizer", "pause", "since", "watched",
    )  # fmt: skip

    def __init__(self, optimizer: Any, gone: Callable[[Any], None]) -> None:
        self.optimizer = ref(optimizer, gone)
        self.done = False
        """Whether that it has none is known"""
        self.had = False
        """Whether it has had one"""
        self.again = 0
        """Step in which gradients came after that"""
        self.in_a_row = self.pause = 0
        """Looks with a gradient one after the other, and steps of the longest pause between two"""
        self.looks = self.since = 0
        self.before: list[tuple[int, Any]] = []
        self.cleared = False
        """Whether gradients came in the last backward pass before a look that found none"""
        self.came_ns = 0
        """When the last one came since the look before; 0 if none did"""
        self.watched: list[tuple[Any, Any]] = []
        """Nodes that accumulate gradients, which live as long as they are held, and the hooks on them"""

    def release(self) -> None:
        """Remove the hooks."""
        while self.watched:
            self.watched.pop()[1].remove()

    def resume(self, step: int) -> None:
        """Note that a pause without gradients is over."""
        self.pause = max(self.pause, step - self.since)
        self.in_a_row = self.looks = 0
        self.cleared = False
        self.release()

    @property
    def patience(self) -> int:
        """Least number of steps without a gradient."""
        seldom = self.had and self.in_a_row < LASTING_SAMPLES
        return max(APART * (_SELDOM if seldom else 1), _PAUSES * self.pause)


class _Found(NamedTuple):
    known: _Optimizer
    kind: str
    step: int
    parameters: list[TensorReference]
    frozen: bool
    """Whether none of them requires a gradient"""
    stopped: bool
    """Whether there were gradients before"""

    @property
    def mistake(self) -> str:
        """Its kind, of ``catalog.LOOP_MISTAKES``."""
        return "gradients_cleared" if self.known.cleared else "gradients_stopped" if self.stopped else "no_gradients"


class NoGradients:
    """A part of the gradient probe; the training thread looks, the sampler thread names and tells. Told once."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        import torch  # torch is optional until training begins

        self._context, self._torch, self._guard = context, torch, breaker.guard
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._optimizers: dict[int, _Optimizer] = {}
        self._others_train = self._told = False
        self.trained = 0
        """Step in which any optimizer was last seen with a gradient; written by the gradient probe"""
        self._found: list[_Found] = []
        self._told_of: tuple[_Found, str] | None = None
        """Until its gradients come after all; what it was called"""

    def remove(self) -> None:
        """Remove all hooks."""
        for known in self._optimizers.values():
            known.release()

    def _gone(self, dead: Any) -> None:
        """Let go of the parameters of an optimizer that nobody has any more: their nodes own them. In any thread."""
        for known in list(self._optimizers.values()):
            if known.optimizer is dead:
                known.release()

    # -- in the training thread --------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, sample: Any) -> None:
        """Look at an optimizer that is about to take a measured step. ``sample``: a parameter of it with a gradient."""
        known = self._optimizers.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            if known is None and len(self._optimizers) >= _MOST_OPTIMIZERS:
                return
            known = self._optimizers[id(optimizer)] = _Optimizer(optimizer, self._guard(self._gone))
        if sample is not None:
            self._note_gradient(known, self._context.recorder.step)
        elif not known.done:
            self._look(known, optimizer, self._context.recorder.step)

    def _note_gradient(self, known: _Optimizer, step: int) -> None:
        if known.done and not known.again:
            known.again = step + 1
        if known.looks:
            known.resume(step)
        known.in_a_row += 1
        known.had = self._others_train = True

    def _watch(self, known: _Optimizer) -> None:
        """Note whether the backward pass that begins brings gradients."""
        optimizer, capturing = known.optimizer(), self._context.device.cuda.capturing()
        if optimizer is None or known.watched or capturing or self._torch.compiler.is_compiling():
            return

        def note(_: object, given: tuple[Any, ...]) -> None:
            if any(one is not None for one in given):  # it also runs where a function of the user's gives none
                known.came_ns = monotonic_ns()

        for parameter in _chosen_of([one for one in parameters_of(optimizer) if one.requires_grad]):
            node = accumulator_of(parameter)
            if node is not None:
                known.watched.append((node, node.register_hook(self._guard(note))))

    def _last_backward_ns(self) -> float:
        """Return when the latest backward pass before this step began; infinite where that is not known."""
        trace = self._context.recorder.trace
        return next((stamp >> 4 for stamp in reversed(trace) if stamp & 15 == BACKWARD_BEGINS), inf)

    def _look(self, known: _Optimizer, optimizer: Any, step: int) -> None:
        known.cleared = known.came_ns > self._last_backward_ns()
        known.came_ns = 0
        known.release()
        known.looks += 1
        self._context.at_backward(self._guard(partial(self._watch, known)))
        if known.looks == 1:
            known.since, known.before = step, self._chosen(optimizer)
        if known.had and self.trained >= known.since:
            known.resume(self.trained)  # this one has gradients now and then, or others do, in turn
            return
        if known.looks <= LASTING_SAMPLES or step - known.since < known.patience:
            return
        known.done, before, now = True, known.before, self._chosen(optimizer)
        known.before = []
        if [version for version, _ in now] != [version for version, _ in before]:
            if known.had:  # in steps that were not looked at
                known.done = False
                known.resume(step)
            return
        owned = parameters_of(optimizer)
        trained = [one for one in owned if one.requires_grad]
        kind = type(optimizer).__name__
        if not owned or (known.had and not trained):
            return
        began = known.since if known.had else step
        parameters = [TensorReference(one) for one in trained or owned]
        note = partial(self._note, _Found(known, kind, began + 1, parameters, frozen=not trained, stopped=known.had))
        with self._torch.no_grad():
            pairs = [(old, new) for (_, old), (_, new) in zip(before, now, strict=True) if old is not None]
            differ = [(old != new).any().float() for old, new in pairs]
            if not differ:
                note(0.0)
            elif len({one.device for one in differ}) == 1:
                self._context.device.take(self._torch.stack(differ).sum(), note)

    def _note(self, found: _Found, differ: float) -> None:
        if not differ:
            self._found.append(found)

    def _chosen(self, optimizer: Any) -> list[tuple[int, Any]]:
        """Return versions of some parameters, and copies of some of their elements."""
        with self._torch.no_grad():
            return [(one._version, self._elements(one)) for one in _chosen_of(parameters_of(optimizer))]

    def _elements(self, one: Any) -> Any:
        plain = type(one) in self._plain and one.layout is self._torch.strided and not one.is_meta
        return one.detach().reshape(-1)[:_LOOKED_AT].clone() if plain else None

    # -- in the sampler thread ---------------------------------------------------------------------------------------------

    def sample(self, names: ParameterNames, *, last: bool) -> None:
        """Name and tell what was found. ``last``: do not wait for names."""
        self._take_back()
        if not self._found or self._told:
            return
        found = self._found[0]
        parameters = [one for each in found.parameters if (one := each()) is not None]
        if not names.look_for(parameters, now=last):
            return
        self._found.pop(0)
        if found.known.again:
            return
        named = [name for one in parameters if (name := names.get(one)) is not None]
        if self._others_train and (found.frozen or not named) and not found.stopped:
            return
        count = len(found.parameters)  # of which none may be left when the rank ends
        if not named and count == 1:
            return
        mistake = found.mistake
        self._told, self._told_of = True, (found, mistake)
        told = {"parameters": named[:NAMED], "parameters_affected": count, "optimizer": found.kind}
        self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, {"kind": mistake, **told}, found.step)
        since = f" since step {found.step:,}" if found.stopped else ""
        more = f" any more{since}" if since else ""
        text = f"no gradient comes to the parameters of the optimizer ({found.kind}){more}: nothing is learned"
        if mistake == "gradients_cleared":
            have_been = "have been" if since else "are"
            text = f"gradients {have_been} gone before each step of the optimizer ({found.kind}){since}"
            text += ": is zero_grad() between backward and it, or its own loss cut off, and they are another's?"
        self._context.warn_limited(f"loop {mistake}", text)

    def _take_back(self) -> None:
        """Write the event again, of no parameter, once gradients have come after all."""
        if self._told_of is not None and self._told_of[0].known.again:
            (found, mistake), self._told_of = self._told_of, None
            told = {"kind": mistake, "parameters": [], "parameters_affected": 0, "optimizer": found.kind}
            self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, told, found.known.again)


def _chosen_of(parameters: list[Any]) -> list[Any]:
    return [parameters[len(parameters) * index // _CHOSEN] for index in range(_CHOSEN)] if parameters else []


def parameters_of(optimizer: Any) -> list[Any]:
    """Return all parameters of an optimizer that have elements: of a sharded one a rank may have none."""
    return [one for group in optimizer.param_groups for one in group["params"] if one.numel()]
