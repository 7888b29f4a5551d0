"""Find parameters that get gradients and are in no optimizer: a head, an adapter or a whole model that was forgotten.

A model that leaves a part out on purpose has its gradients computed for nothing; ``requires_grad_(False)`` says that it is
frozen. Ignored: a model as a whole in evaluation mode (a teacher, a perceptual loss), what changes by
other means, and parameters of another type than those that are trained beside them (copies of master weights). Those of an
optimizer that has not stepped yet are told after some hundred steps, at the last look, and taken back if it steps later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_SAMPLES, LASTING_STEPS
from torchobs.probes.gradients.parameter_names import clean
from torchobs.support.living_objects import living_optimizers
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchobs.probes.core.context import ProbeContext

_NAMED = 8
_APART = LASTING_STEPS // LASTING_SAMPLES
"""Steps between two looks: of each parameter more than ``LASTING_SAMPLES`` are made"""
_MOST_LOOKS = 12
"""Looks that end without a result; one takes 1 µs for each parameter"""
_MOST_SCANS = 3
"""Scans for optimizers, each of which holds the GIL for some 100 ms: one, and others for parameters that are new by then"""
_LOOKED_AT = 16
"""Elements of a parameter on the CPU that must stay as they are"""
_SHARDS = "FullyShardedDataParallel"
"""Its parameters are views of others, anew in each step"""


class _Candidate(NamedTuple):
    """A parameter that is in no optimizer.

    Its gradient is read in the training thread alone: a backward pass, which does not hold the GIL, replaces it meanwhile, and
    another thread that reads it then crashes the process.
    """

    parameter: TensorReference
    name: str


class _Seen(NamedTuple):
    candidate: _Candidate
    state: tuple[int, list[float]]
    """version and some elements of the parameter"""
    gradient: tuple[int, int]
    """id and version of its gradient"""
    looks: int


class _Owners:
    """Knows which optimizers have parameters that are not trained: found by a scan, for which the training has to wait."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._known: dict[int, tuple[TensorReference, ref[Any]]] = {}
        self._scans = 0

    def of(self, parameters: list[Any]) -> list[Any] | None:
        """Return each parameter's optimizer, ``None`` where none has it; ``None`` at all if it is not known any more."""
        owners = [self._owner(each) for each in parameters]
        if None not in owners:
            return owners
        if self._scans >= _MOST_SCANS:
            return None
        self._scan({id(each): each for each in parameters})
        return [self._owner(each) for each in parameters]

    def _owner(self, parameter: Any) -> Any:
        known, owner = self._known.get(id(parameter), (None, None))
        return owner() if known is not None and owner is not None and known() is parameter else None

    def _scan(self, wanted: dict[int, Any]) -> None:
        self._scans += 1
        self._context.yield_gil()
        for one in living_optimizers():
            for each in _parameters_of([one]):
                if id(each) in wanted:
                    self._known[id(each)] = TensorReference(each), ref(one)


class LeftOutParameters:
    """A part of the gradient probe; the sampler thread finds the candidates, the training thread looks at them. Told once."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._seen: dict[int, _Seen] = {}
        self._candidates: list[_Candidate] = []
        self.due = False
        """Whether the next step is to be looked at, be it measured or not; set by the sampler thread"""
        self._found = False
        self._looks, self._next_step = 0, _APART
        self._owners, self._kind = _Owners(context), ""
        self._told: list[_Candidate] | None = None
        """What was told and is not trained; ``None`` before"""
        self._trained_by: list[tuple[int, int]] = []

    def before_step(self) -> None:
        """Look at the candidates, if that is due; a step is about to be done. In the training thread."""
        if not self.due:
            return
        self.due, seen = False, dict[int, _Seen]()
        for candidate in self._candidates:
            each = candidate.parameter()
            gradient: Any = each.grad if each is not None else None
            if gradient is None:
                continue
            before, state, now = self._seen.get(id(each)), _state(each), (id(gradient), gradient._version)
            known = before is not None and before.candidate.parameter() is each and before.state == state
            looks = before.looks + (before.gradient != now) if before is not None and known else 1
            seen[id(each)] = _Seen(candidate, state, now, looks)
        self._seen = seen
        # of others a gradient may have looked the same twice, for memory is used again
        self._found = any(one.looks > LASTING_SAMPLES for one in seen.values())

    def sample(self, modules: Callable[[], Iterable[Any]]) -> None:
        """Find the candidates anew every thirty-third step, until something is found. ``modules``: the outermost ones known."""
        if self._found and self._told is None:
            self._tell([one.candidate for one in self._seen.values() if one.looks > 1])
        if self._told is not None:
            self._take_back(self._told)
            return
        step = self._context.recorder.step
        if self.due or self._looks >= _MOST_LOOKS or step < self._next_step:
            return
        roots = list(modules())
        self._looks += bool(roots)  # models that were built before init() are found by a scan, later
        self._next_step = step + _APART
        trained = {id(each): each.dtype for each in _parameters_of(self._context.recorder.optimizers())}
        try:
            self._candidates = [one for module in roots for one in self._left_out(module, trained)]
        except RuntimeError:  # a dictionary changed size
            return
        self.due = bool(self._candidates)

    def _left_out(self, module: Any, trained: dict[int, Any]) -> Iterator[_Candidate]:
        """Yield a module's parameters that are to be trained and are in no optimizer."""
        if any(kind.__name__ == _SHARDS for each in module.modules() for kind in type(each).__mro__):
            return
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        types = {trained[id(each)] for _, each in named if id(each) in trained}
        if not types and not any(each.training for each in module.modules()):
            return
        self._context.yield_gil()
        title = "" if types else f"{type(module).__name__}."
        for name, each in named:
            if id(each) not in trained and (not types or each.dtype in types):
                yield _Candidate(TensorReference(each), title + clean(name))

    def _tell(self, found: list[_Candidate]) -> None:
        """Tell what no optimizer has that exists, or at last what one has that never steps."""
        self._found, self._trained_by = False, self._stepping()
        # some may be trained, or gone, since they were found
        found = [one for one in self._untrained(found) if one.parameter() is not None]
        owners = self._owners.of([one.parameter() for one in found])
        if not owners:
            return
        kinds = [type(owner).__name__ if owner is not None else "" for owner in owners]
        self._kind = "" if "" in kinds else kinds[0]
        if not self._kind or self._looks >= _MOST_LOOKS:
            self._write([one for one, kind in zip(found, kinds, strict=True) if kind == self._kind])

    def _take_back(self, told: list[_Candidate]) -> None:
        """Write which are still not trained, if others are by an optimizer that has begun to step, or was given them."""
        stepping = self._stepping() if told else self._trained_by
        if stepping != self._trained_by:
            self._trained_by, left = stepping, self._untrained(told)
            if len(left) < len(told):
                self._write(left)

    def _stepping(self) -> list[tuple[int, int]]:
        """Return what changes when an optimizer begins to step, or gets parameters."""
        return [(id(one), len(getattr(one, "param_groups", ()))) for one in self._context.recorder.optimizers()]

    def _untrained(self, found: list[_Candidate]) -> list[_Candidate]:
        trained = set(map(id, _parameters_of(self._context.recorder.optimizers())))
        return [one for one in found if id(one.parameter()) not in trained]

    def _write(self, left: list[_Candidate]) -> None:
        self._told = left
        trained = sum(1 for _ in _parameters_of(self._context.recorder.optimizers()))
        names = [one.name for one in left[:_NAMED]]
        attributes = {"parameters": names, "parameters_affected": len(left), "parameters_trained": trained}
        self._context.event(catalog.EVENT_LEFT_OUT_PARAMETERS, attributes | ({"optimizer": self._kind} if self._kind else {}))


def _parameters_of(optimizers: Iterable[Any]) -> Iterator[Any]:
    return (each for one in optimizers for group in list(getattr(one, "param_groups", ())) for each in group["params"])


def _state(parameter: Any) -> tuple[int, list[float]]:
    """Return what changes when a parameter does; on a device its version alone, for nobody waits for values there."""
    import torch  # torch is optional until training begins

    is_dense = parameter.layout is torch.strided  # a sparse one has no order in memory to ask for
    plain = parameter.is_cpu and is_dense and parameter.is_contiguous() and parameter.is_floating_point()
    return parameter._version, parameter.detach().view(-1)[:_LOOKED_AT].tolist() if plain else []
