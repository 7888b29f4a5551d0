"""Find parameters of an optimizer to which no gradient comes: all of them, or a part that never had one.

*All*: nothing is learned. The loss is cut off from the model (``detach``, ``item``, ``no_grad``, a new tensor of its value),
``backward`` is not called or comes before ``zero_grad``, or the optimizer has the parameters of a model that was copied or
replaced since. Healthy, and left alone: an optimizer that changes its parameters without gradients; one whose parameters are
frozen; a dummy for a scheduler, whose parameter belongs to no module; players that train in turn, for one that has had
gradients is reported only where no other one has any meanwhile.

*A part* is information, no warning: it may be unused on purpose (a pooler, a head, a backbone under ``no_grad``). By its
version, or its state, a parameter was not stepped in between either, as an expert that is seldom chosen would be.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchobs.detect.stuck_layers import LASTING_SAMPLES, LASTING_STEPS
from torchobs.probes.gradients.parameter_names import layer_of
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.gradients.layers import Layers
    from torchobs.probes.gradients.stuck_layers import StuckLayersWatch

APART = LASTING_STEPS // LASTING_SAMPLES
"""Steps without a gradient, from the first one on; an optimizer that has had some is waited for longer"""
_MOST_OPTIMIZERS = 16
_CHOSEN, _COMPARED = 3, 16
"""Parameters of an optimizer that must stay as they are, and their elements that are compared"""


class _Optimizer:
    """An optimizer, and since when it has no gradient."""

    __slots__ = ("before", "done", "due", "had", "looks", "optimizer", "resumed", "since", "without")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = ref(optimizer)
        self.done = self.had = False
        """Whether there is a verdict; whether it has had gradients"""
        self.resumed = 0
        """Step in which gradients came after the verdict"""
        self.looks = self.since = 0
        """Looks without a gradient in a row, and the step of the first"""
        self.before: list[tuple[int, Any]] = []
        """Versions and elements of some parameters at the first of these looks"""
        self.without: list[tuple[TensorReference, int]] | None = None
        """Parameters without a gradient at the first look that found some, with their versions"""
        self.due = 0
        """Step of the next look at them; -1 after the last one"""

    def look_again(self) -> None:
        """Forget the verdict, since gradients came after it. In the sampler thread."""
        self.done = False  # first: while it is set, the training thread notes a gradient
        self.resumed = 0


class _Missing(NamedTuple):
    """Parameters to which no gradient comes."""

    known: _Optimizer
    cause: str
    step: int
    parameters: list[TensorReference]


class NoGradients:
    """A part of the gradient probe; the training thread looks, the sampler thread names and reports.

    Once of each kind, and again where gradients came after all and then no longer.
    """

    def __init__(self, context: ProbeContext, stuck_layers: StuckLayersWatch) -> None:
        import torch  # torch is optional until training begins

        self._context, self._torch, self._stuck_layers = context, torch, stuck_layers
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._optimizers: dict[int, _Optimizer] = {}
        self._others_train = False
        self.trained = 0
        """Step in which any optimizer was last seen with a gradient; written by the gradient probe"""
        self._found: list[_Missing] = []
        self._reported = set[str]()
        """Causes, without those taken back"""
        self._open: _Optimizer | None = None
        """The one that is reported to get no gradient, until some come after all"""

    # -- in the training thread --------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, sample: Any) -> None:
        """Look at an optimizer that is about to take a measured step. ``sample``: a parameter of it with a gradient."""
        known, step = self._optimizers.get(id(optimizer)), self._context.recorder.step
        if known is None or known.optimizer() is not optimizer:
            if known is None and len(self._optimizers) >= _MOST_OPTIMIZERS:
                return
            known = self._optimizers[id(optimizer)] = _Optimizer(optimizer)
        if sample is not None:
            self._note_gradient(known, step)
            if 0 <= known.due <= step:
                self._look_at_parts(known, optimizer, step)
        elif not known.done:
            self._look(known, optimizer, step)

    def _note_gradient(self, known: _Optimizer, step: int) -> None:
        if known.done and not known.resumed:
            known.resumed = step + 1
        known.looks = 0
        known.had = self._others_train = True

    def _look_at_parts(self, known: _Optimizer, optimizer: Any, step: int) -> None:
        without = [one for one in parameters_of(optimizer) if one.grad is None and one.requires_grad]
        if known.without is None:
            known.without = [(TensorReference(one), one._version) for one in without]
            known.due = step + LASTING_STEPS if without else -1
            return
        versions = {id(one): version for reference, version in known.without if (one := reference()) is not None}
        stepped = _possibly_stepped(optimizer)
        without = [one for one in without if id(one) not in stepped]
        never = [TensorReference(one) for one in without if versions.get(id(one)) == one._version]
        known.due, known.without = -1, []
        if never:
            self._found.append(_Missing(known, "unused", step + 1, never))

    def _look(self, known: _Optimizer, optimizer: Any, step: int) -> None:
        known.looks += 1
        if known.looks == 1:
            known.since, known.before = step, self._chosen(optimizer)
        if known.had and self.trained >= known.since:  # this one now and then, or others, in turn
            known.looks = 0
            return
        if known.looks <= LASTING_SAMPLES or step - known.since < (LASTING_STEPS if known.had else APART):
            return
        before, known.before, now = known.before, [], self._chosen(optimizer)
        if [version for version, _ in now] != [version for version, _ in before]:
            known.looks, known.done = 0, not known.had  # gradients in steps that were not measured, or it needs none
            return
        known.done = True
        trained = [TensorReference(one) for one in parameters_of(optimizer) if one.requires_grad]
        if not trained:
            return
        note = partial(self._note, _Missing(known, "no_gradient", known.since + 1, trained))
        with self._torch.no_grad():
            pairs = [(old, new) for (_, old), (_, new) in zip(before, now, strict=True) if old is not None]
            differ = [(old != new).any().float() for old, new in pairs]
            if not differ:
                note(0.0)
            elif len({one.device for one in differ}) == 1:
                self._context.device.take(self._torch.stack(differ).sum(), note)

    def _note(self, found: _Missing, differ: float) -> None:
        if not differ:
            self._found.append(found)

    def _chosen(self, optimizer: Any) -> list[tuple[int, Any]]:
        """Return versions of some parameters, and copies of some of their elements."""
        owned = parameters_of(optimizer)
        chosen = [owned[len(owned) * index // _CHOSEN] for index in range(_CHOSEN)] if owned else []
        with self._torch.no_grad():
            return [(one._version, self._elements(one)) for one in chosen]

    def _elements(self, one: Any) -> Any:
        plain = type(one) in self._plain and one.layout is self._torch.strided and not one.is_meta
        return one.detach().reshape(-1)[:_COMPARED].clone() if plain else None

    # -- in the sampler thread ---------------------------------------------------------------------------------------------

    def sample(self, layers: Layers, *, last: bool) -> None:
        """Name and report what was found, or take it back. ``last``: do not wait for names."""
        if self._open is not None and self._open.resumed:
            self._stuck_layers.report_missing("no_gradient", (), self._open.resumed)
            self._reported.discard("no_gradient")
            self._open.look_again()
            self._open = None
        if not self._found:
            return
        found = self._found[0]
        parameters = [one for reference in found.parameters if (one := reference()) is not None]
        if not layers.names.look_for(parameters, now=last):
            return
        self._found.pop(0)
        names = list(dict.fromkeys(layer_of(name) for one in parameters if (name := layers.names.get(one)) is not None))
        if found.cause in self._reported or self._is_meant(found, named=bool(names)):
            if found.known.resumed and found.known is not self._open:
                found.known.look_again()
            return
        self._reported.add(found.cause)
        self._open = found.known if found.cause == "no_gradient" else self._open
        names = names or [f"parameter{number}" for number in range(len(found.parameters))]  # all may be gone when a rank ends
        self._stuck_layers.report_missing(found.cause, names, found.step, set(map(id, parameters)))

    def _is_meant(self, found: _Missing, *, named: bool) -> bool:
        """Return whether these may be without a gradient on purpose, or have got one since."""
        if found.cause == "unused":
            return not named
        is_dummy = not named and (len(found.parameters) == 1 or (self._others_train and not found.known.had))
        return is_dummy or bool(found.known.resumed)


def _possibly_stepped(optimizer: Any) -> set[int]:
    """Return ids of parameters whose version does not say whether they were stepped: a fused step raises none.

    By their state they were, or by the others' of their group if none has a state: such an optimizer keeps none.
    """
    found = set[int]()
    for group in optimizer.param_groups:
        if group.get("fused"):
            stateful = {id(one) for one in group["params"] if optimizer.state.get(one)}
            found |= stateful or set(map(id, group["params"]))
    return found


def parameters_of(optimizer: Any) -> list[Any]:
    """Return all parameters of an optimizer that have elements: of a sharded one a rank may have none."""
    return [one for group in optimizer.param_groups for one in group["params"] if one.numel()]
