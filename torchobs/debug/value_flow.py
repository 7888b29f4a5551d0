"""Follow values that are not finite through the operators of one forward pass, to the one that made them.

The graph of a loss knows nothing of what has no gradient: a feature made of the data alone, a constant, the inside of a
function of the user's. A dispatch mode sees every operator. One whose result is not finite although its inputs are has made it;
any other was given it by an input, and so on back. Negative infinity that masks attention is handed on in the same way, and a
softmax that gives NaN of it has made that NaN.
"""

# mypy: disable-error-code="no-untyped-call"
# torch has no types for its dispatch modes

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchobs.debug.operator_watch import UNWRITTEN, user_line
from torchobs.probes.nonfinite.forward import MASKABLE, RESHAPING
from torchobs.probes.nonfinite.locate import Place, memory_of
from torchobs.probes.nonfinite.values import Condition, TensorStatistics, bad_elements, condition, statistics
from torchobs.support.model_calls import walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.debug.call_sites import CallSites

CONSTANT = "an operand is a constant that is not finite"
UNREADABLE = "not all inputs of this operator can be read: it may have been given them, or have made them"
"""Of a nested tensor, for one; a sentence that follows"""
_ALL_MASKED = "a row in which everything is masked (negative infinity) gives NaN"
_ATTENTION = "scaled_dot_product"
_PARTS = frozenset({
    "select", "slice", "narrow", "expand", "unbind", "split", "split_with_sizes", "chunk", "as_strided", "diagonal", "unfold",
    "lift_fresh",
})  # fmt: skip
"""Besides ``RESHAPING``, operators that only hand on what they were given"""
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_RUNNING = ("running_mean", "running_var")
_MOST_INPUTS = 6


class Source(NamedTuple):
    """Where values that are not finite came from."""

    order: int
    """Number of the operator in the forward pass; 0 for what was there before any"""
    operator: str
    """The operator that made them, or the first that was given them"""
    place: Place
    given: Any
    """The tensor that held them before any operator did; ``None`` if the operator made them"""
    inputs: tuple[TensorStatistics, ...]
    elements: tuple[tuple[int, ...], ...]
    """Of the result, if the operator made them"""
    note: str


class _Input(NamedTuple):
    """A tensor that an operator was given, and what it held before."""

    name: str
    tensor: Any
    held: Condition
    is_overwritten: bool


class ValueFlow(TorchDispatchMode):
    """Notes the :class:`Source` of every tensor that is not finite, by its memory. It waits for a device at each operator."""

    supports_higher_order_operators = True

    def __init__(self, sites: CallSites) -> None:
        """``sites``: knows the module that is running."""
        super().__init__()
        self._sites, self._number = sites, 0
        self._sources: dict[int, Source] = {}

    def source_of(self, tensor: Any) -> Source | None:
        """Return where the values of a tensor that is not finite came from; ``None`` if no operator was seen to write it."""
        return self._sources.get(memory_of(tensor) or -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and look at what it returns."""
        kwargs = kwargs or {}
        self._number += 1
        name = _name(func)
        written = [(path, x) for path, x, is_written in _arguments(func, args, kwargs) if is_written]
        overwritten = [_Input(path, x, self._held(x), is_overwritten=True) for path, x in written]
        result = func(*args, **kwargs)
        made = [_stored(x) for _, x in walk(result)]
        results = made[:1] if name.startswith(_ATTENTION) else made  # the others are for its derivative alone
        for x in {id(x): x for x in [*results, *(x for _, x in written)]}.values():
            if name in UNWRITTEN or _condition(x) is not Condition.FINITE:
                self._note(name, x, func, (args, kwargs), overwritten)
            elif not written and not _is_view(func):  # memory that was freed may be used again
                self._sources.pop(memory_of(x), None)
        return result

    def _held(self, x: Any) -> Condition:
        """Return what a tensor holds that is to be overwritten; nothing odd if nobody has written to it yet."""
        source = self.source_of(x)
        return Condition.FINITE if source is not None and source.operator in UNWRITTEN else _condition(x)

    def _note(self, name: str, result: Any, func: Any, given: Any, overwritten: list[_Input]) -> None:
        key = memory_of(result)
        if not key:
            return
        args, kwargs = given
        inputs = overwritten + [
            _Input(path, x, _condition(x), is_overwritten=False)
            for path, x, is_written in _arguments(func, args, kwargs) if not is_written
        ]  # fmt: skip
        sources = [self._handed_on(each.tensor, name, inputs) for each in _culprits(name, result, inputs)]
        if sources:
            self._sources[key] = min(sources, key=lambda source: source.order)
            return
        note = _ALL_MASKED if any(each.held is Condition.MASKED for each in inputs) else ""
        note = CONSTANT if any(isinstance(x, float) and not isfinite(x) for x in [*args, *kwargs.values()]) else note
        note = UNREADABLE if any(each.held is Condition.UNKNOWN for each in inputs) else note
        made = Source(self._number, name, self._place(), None, _described(inputs), bad_elements(result), note)
        self._sources[key] = made

    def _handed_on(self, x: Any, name: str, inputs: list[_Input]) -> Source:
        """Return where an input that is not finite came from. Of what was there before, the first use is told, not a view."""
        known = self.source_of(x)
        if known is None or (known.given is not None and known.operator in RESHAPING | _PARTS):
            given = x if known is None else known.given
            return Source(0, name, self._place(), given, _described(inputs), (), "")
        return known

    def _place(self) -> Place:
        return Place(*self._sites.running, user_line())


def _described(inputs: list[_Input]) -> tuple[TensorStatistics, ...]:
    found = (statistics(each.name, each.tensor) for each in inputs if not each.is_overwritten)
    return tuple(each for each in found if each is not None)[:_MOST_INPUTS]


def _culprits(name: str, result: Any, inputs: list[_Input]) -> list[_Input]:
    """Return the inputs that the result has its values from."""
    if name in UNWRITTEN:
        return []
    bad = [each for each in inputs if each.held is Condition.BAD]
    masked = [each for each in inputs if each.held is Condition.MASKED]
    makes_nan = (name in MASKABLE or name.startswith(_ATTENTION)) and _condition(result) is not Condition.MASKED
    return bad or ([] if makes_nan else masked)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield name and value of each tensor argument, and whether the operator writes to it."""
    schema = getattr(func, "_schema", None)
    known = list(schema.arguments) if schema is not None else []
    by_name = {argument.name: argument for argument in known}
    given = {argument.name: value for argument, value in zip(known, args, strict=False)} | kwargs
    # batch normalisation in training writes its running statistics, and goes by the batch's own
    unread = _RUNNING if given.get("training", _name(func) == "batch_norm_with_update") else ()
    pairs = [(known[place] if place < len(known) else None, str(place), value) for place, value in enumerate(args)]
    pairs += [(by_name.get(name), name, value) for name, value in kwargs.items()]
    for argument, name, value in pairs:
        if argument is not None and argument.name in unread:
            continue
        is_written = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        for path, x in walk(value, name if argument is None else argument.name):
            yield path, _stored(x), is_written


def _stored(x: Any) -> Any:
    """Return the tensor whose values are looked at: of a sparse one, that of its stored elements."""
    if x.layout == torch.sparse_coo:
        return x.detach()._values()  # values() takes coalesced ones alone
    return x.detach().values() if x.layout in _COMPRESSED else x


def _name(func: Any) -> str:
    """Return an operator's name as the graph's nodes have it."""
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", packet)).strip("_")


def _is_view(func: Any) -> bool:
    return bool(getattr(func, "is_view", False))


def _condition(x: Any) -> Condition:
    """Return what a tensor holds; integers are finite."""
    return condition(x) if x.is_floating_point() or x.is_complex() else Condition.FINITE
