"""Statistics of what goes into a model, comes out of it and passes between its modules, read by one transfer."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchobs.debug.statistics import UNKNOWN, Moments
from torchobs.debug.tensors import start_moments
from torchobs.debug.transfer import Numbers
from torchobs.debug.values import elements_of, shape_of
from torchobs.support.model_calls import call, walk
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_TENSORS = 64
"""Most tensors of a batch, or of an output, that are looked at"""
RAISED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a model raises, or the compiler"""


@dataclass(frozen=True, slots=True)
class ValueStats(Result):
    """One tensor: an input, an output or a module's output. Statistics are of the finite elements, the norm of all."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    device: str
    numel: int
    mean: float
    std: float
    min: float
    max: float
    norm: float
    zero_count: int
    nan_count: int
    inf_count: int

    @property
    def anomaly(self) -> str:
        """What is wrong with it in words, or nothing."""
        counts = " and ".join(f"{n} {kind}" for n, kind in ((self.nan_count, "NaN"), (self.inf_count, "Inf")) if n)
        return f"{self.name}: {counts} of {self.numel} elements" if counts else ""


class Collector:
    """Starts the statistics of tensors where they are; ``read`` waits for them once."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._taken: list[tuple[str, str, Any, int | None]] = []

    def add(self, group: str, name: str, values: Any) -> None:
        """Take all tensors of a value: a tensor, or any nesting of tuples, lists, dicts and dataclass-like outputs."""
        import torch

        with torch.no_grad():
            for path, tensor in _tensors(values, name):
                dtype = str(tensor.dtype).removeprefix("torch.")
                known = shape_of(tensor), dtype, str(tensor.device), elements_of(tensor)
                self._taken.append((group, path, known, start_moments(tensor, self._numbers)))

    def read(self) -> dict[str, tuple[ValueStats, ...]]:
        """Return the statistics by group, in the order in which they were taken."""
        numbers = self._numbers.read()
        found: dict[str, list[ValueStats]] = {}
        for group, name, (shape, dtype, device, numel), index in self._taken:
            m = UNKNOWN if index is None else Moments(*numbers[index])
            row = ValueStats(name=name, shape=shape, dtype=dtype, device=device, numel=numel, **m.described())
            found.setdefault(group, []).append(row)
        return {group: tuple(rows) for group, rows in found.items()}


def _tensors(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    for count, pair in enumerate(walk(values, name)):
        if count == MOST_TENSORS:
            return
        yield pair


@contextmanager
def activations(model: Any, collector: Collector, *, wanted: bool) -> Iterator[None]:
    """Take the output of every module without children during the block, by hooks that are gone afterwards.

    Scripted modules take no hooks: what passes between them is not seen.
    """
    import torch

    handles = []
    try:
        for name, module in model.named_modules() if wanted else ():
            if not any(True for _ in module.children()) and not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_hook(_take(collector, name or type(module).__name__)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _take(collector: Collector, name: str) -> Any:
    def take(module: Any, given: Any, output: Any) -> None:
        del module, given
        collector.add("activations", name, output)

    return take


def raised_by(model: Any, batch: Any) -> str | None:
    """Call a model with a batch; return class and first line of what it raised, ``None`` if nothing."""
    try:
        call(model, batch)
    except RAISED as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """Return class and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
