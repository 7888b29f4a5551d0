"""Find single parameters of an optimizer to which no gradient has come since the first step: a part is unused, or cut off.

It is information, no warning, for parts may be unused on purpose: a pooler, a head, a backbone under ``no_grad``. A parameter's
version tells that it was not stepped between two looks either, in which an expert would have been. Where a peer before it, of
the same name but for its number, has gradients, it is waited for longer: an expert that is seldom chosen looks like that,
while of layers before a ``detach`` the first ones have none.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchobs import catalog
from torchobs.probes.gradients.no_gradients import APART, NAMED, parameters_of
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.gradients.parameter_names import ParameterNames

_RARE = 10
"""How many times as long it is waited for an expert"""
_MOST_OPTIMIZERS = 16
_NUMBERED = re.compile(r"(?:(.*)\.)?(\d+)((?:\.[^.\d][^.]*)*)")


class _Optimizer:
    """Parameters of an optimizer that have had no gradient so far."""

    __slots__ = ("due", "optimizer", "rare", "without")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = ref(optimizer)
        self.due = 0
        """Number of the ended step after which it is looked next; -1: not any more"""
        self.without: list[tuple[TensorReference, int]] | None = None
        """With their versions; ``None`` before the first look"""
        self.rare = False
        """Whether experts were waited for"""


class _Found(NamedTuple):
    known: _Optimizer
    kind: str
    step: int
    without: list[TensorReference]
    trained: list[TensorReference]


class UnreachedParameters:
    """A part of the gradient probe; the training thread looks, the sampler thread names and tells. Once for an optimizer."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._optimizers: dict[int, _Optimizer] = {}
        self._found: list[_Found] = []

    def before_step(self, optimizer: Any, sample: Any) -> None:
        """Look at an optimizer that is about to take a measured step. ``sample``: a parameter of it with a gradient."""
        known, step = self._optimizers.get(id(optimizer)), self._context.recorder.step
        if known is None or known.optimizer() is not optimizer:
            if sample is None or (known is None and len(self._optimizers) >= _MOST_OPTIMIZERS):
                return
            known = self._optimizers[id(optimizer)] = _Optimizer(optimizer)
        if known.due < 0 or step < known.due or sample is None:
            return
        owned, before = parameters_of(optimizer), known.without
        without = [one for one in owned if one.grad is None and one.requires_grad]
        if before is None:
            known.without = [(TensorReference(one), one._version) for one in without]
            known.due = step + APART if without else -1
            return
        versions = {id(one): version for each, version in before if (one := each()) is not None}
        without = [one for one in without if versions.get(id(one)) == one._version]
        known.due = -1
        if without:
            trained = [TensorReference(one) for one in owned if one.grad is not None]
            missing = [TensorReference(one) for one in without]
            self._found.append(_Found(known, type(optimizer).__name__, step + 1, missing, trained))

    def sample(self, names: ParameterNames, *, last: bool) -> None:
        """Name and tell what was found. ``last``: do not wait for names. In the sampler thread."""
        if not self._found:
            return
        known, kind, step, *both = self._found[0]
        without, trained = ([one for each in some if (one := each()) is not None] for some in both)
        if not names.look_for([*without, *trained], now=last):
            return
        self._found.pop(0)
        named = [name for one in without if (name := names.get(one)) is not None]
        if not known.rare:
            experts = _experts(named, [name for one in trained if (name := names.get(one)) is not None])
            if len(experts) == len(named):
                known.rare, known.due = True, step + _RARE * APART
                return
            named = [name for name in named if name not in experts]
        if named:
            told = {"parameters": named[:NAMED], "parameters_affected": len(named), "optimizer": kind}
            self._context.writer.event(catalog.EVENT_NO_GRADIENT.name, told, step)


def _experts(without: Iterable[str], trained: Iterable[str]) -> set[str]:
    """Return those that may be experts that are seldom chosen: a peer with a smaller number is trained."""
    least: dict[tuple[str, str], int] = {}
    for name in trained:
        peers, number = _peers(name)
        least[peers] = min(number, least.get(peers, number))
    return {name for name in without for peers, number in [_peers(name)] if least.get(peers, number) < number}


def _peers(name: str) -> tuple[tuple[str, str], int]:
    """Return what a parameter's name has in common with those of its peers, and its number among them; 0 without one."""
    found = _NUMBERED.fullmatch(name)
    return ((name, ""), 0) if found is None else ((found[1] or "", found[3]), int(found[2]))
