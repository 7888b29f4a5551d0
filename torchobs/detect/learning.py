"""Layers that learn nothing, a learning rate of zero, a stuck loss scaler, recompilations without end.

:mod:`torchobs.detect.spikes` compares a gradient with its own past, which a stuck layer does not have: here it is compared
with what can move a weight, and with its peers. There are three findings:

*Lost*: a step so small that adding it leaves a float32 weight unchanged (half a unit in the last place: 2^-24 of the weight),
in a layer that is a million times slower than the fastest. Gradients of healthy layers are within a factor of 100 of
each other (Glorot & Bengio 2010, section 4.2; Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture",
section 3); an embedding of rare tokens and a gate that begins at zero differ somewhat more. Both conditions are needed:
with a rate near zero nothing moves, and Adam moves weights with small gradients as fast as any, down to its eps.

*Unfed*: the gradients of a layer's weights are exactly zero, and that of its bias is not. Then its input is all zeros: the
units before it are dead (Lu et al. 2019, "Dying ReLU and Initialization").

*Cut off*: the gradients of the first layers of an optimizer, in its order, are exactly zero, and that of a later layer is not.
Units between them are saturated (tanh at 30 has a slope of exactly 0 in float32), or the layers are cut off from the loss.
A single layer counts if it had a gradient before: the first of several inputs may be unused.

A gradient of exactly zero elsewhere means nothing: an unused part, a loss term with the weight 0, parameters included for DDP.
It belongs to the finding in a layer before a lost or unfed one, which blocks the gradient.

*A learning rate* next to zero is one below float32's rounding of the highest one of the same model: a step that doubled a
weight at that does not change its last bit. It may change others (small ones, or in float64), which is unknown here.
A scheduler that counts epochs and is stepped in each batch gets there within some hundred steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import NamedTuple

from torchobs.support.rate_limit import RateLimiter

LEAST_SKIPPED = 20
"""Steps in a row that a loss scaler skips before it is stuck: from 65,536, where torch's begins, 16 halvings lead to 1, and a
starting job may need some of them."""
LONGEST_SEARCH = 128
"""Halvings from float32's largest number to 1: no scaler needs more to find its scale, wherever it begins."""


def is_stuck(streak: float, scale: float | None) -> bool:
    """Return whether a scaler that has skipped so many steps in a row finds no scale; ``scale``: the present one, if known.

    One that was made with a large scale, or has grown it, may skip many steps in good health on its way down.
    """
    return streak >= LEAST_SKIPPED and (scale is None or scale <= 1 or streak >= LONGEST_SEARCH)


STORM = 4
"""Recompilations of one function within the window. Up to three are usual: a size that turns out to be dynamic, training and
evaluation, a second dtype. torch stops at eight (``torch._dynamo.config.recompile_limit``) with a warning."""

APART, WITHIN_ONE = 3, 7
"""Steps of the training that a storm is spread over at least, or else the number that is one anyway: an optimizer that compiles
one function for each kind of parameter (torchao's) recompiles it four times in its first step and never again. Seven are all
that torch allows by default."""
WINDOW_S = 600.0
QUIET_S = 60.0
_MOST = 256


class Recompiles:
    """Recent recompilations by function name."""

    __slots__ = ("_report_limit", "_times")

    def __init__(self) -> None:
        self._times: dict[str, deque[tuple[float, int]]] = {}
        self._report_limit = RateLimiter(QUIET_S)

    def note(self, function: str, now_s: float, step: int) -> int:
        """Add a recompilation; return how many there were within ten minutes if that is to be reported now, else 0.

        The fourth is reported and, while they continue, one a minute. ``step``: the training's number of steps so far.
        """
        if function not in self._times and len(self._times) >= _MOST:
            self._times.clear()
        times = self._times.setdefault(function, deque(maxlen=_MOST))
        times.append((now_s, step))
        while times[0][0] < now_s - WINDOW_S:
            times.popleft()
        spread = len(times) >= WITHIN_ONE or len({step for _, step in times}) >= APART
        return len(times) if len(times) >= STORM and spread and self._report_limit.take(now_s, function) else 0


RESOLUTION = 2.0**-24
FAR = 1e-6
LEAST_CUT = 2
"""Least number of layers cut off, of those that never had a gradient."""
LASTING_SAMPLES, LASTING_STEPS = 3, 100
"""Least measurements in a row and steps between the first and the last of them: weights behind a matrix or gate that begins at
zero (LoRA's, ReZero's, a zero-initialised residual branch) have no gradient, or hardly any, in the first steps."""
WAKING, WITHIN = 10.0, FAR / 1000
"""A layer recovers if its step relative to the fastest has grown by this factor since it was first lost, to near the limit.
Far below the limit, values that pass through twenty layers vary by more than that from batch to batch."""


class LayerSample(NamedTuple):
    """One layer in a measured step."""

    move: float | None
    """How far the step moves its weights, relative to their usual size; ``None`` if unknown"""
    unfed: bool
    zero: bool
    """Whether all its gradients are exactly zero"""
    leading: bool = False
    """Whether also those of all layers before it are, and that of a later one is not (:func:`leading`)"""


class StuckLayers(NamedTuple):
    """The layers that have learned nothing for a while, in the model's order."""

    lost: tuple[str, ...]
    unfed: tuple[str, ...]
    before: tuple[str, ...]
    """Layers with zero gradients before the last of those"""
    cut: tuple[str, ...] = ()
    """First layers with zero gradients, where none of those is behind them"""

    @property
    def all(self) -> tuple[str, ...]:
        """All of them, in the order ``before``, ``cut``, ``lost``, ``unfed``."""
        return (*self.before, *self.cut, *self.lost, *self.unfed)

    def by_cause(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield each cause that there is, its layers, and the one that it is seen at. What blocks the gradient comes first."""
        if self.unfed:
            yield "dead_units", self.unfed, self.unfed[0]
        if self.lost:
            yield "vanishing", self.lost, self.lost[-1]
        blocked = (*self.before, *self.cut)
        if blocked:
            yield "cut_off", blocked, blocked[-1]


class _Low(NamedTuple):
    step: int
    samples: int
    part: float


class StuckLayerDetector:
    """Judges consecutive measurements of all layers."""

    def __init__(self) -> None:
        self._low: dict[str, _Low] = {}
        self._fed: set[str] = set()
        """Layers that had a gradient"""
        self.samples = 0
        self.doubts = False
        """Whether the last measurement has a lost or unfed layer, or layers cut off, lasting or not"""

    def judge(self, step: int, layers: Mapping[str, LayerSample], whole: float = -inf) -> StuckLayers:
        """Process the layers of a measured step, in the model's order; return those that learn nothing.

        ``whole``: the last measured step, judged or not, in which no first layer had a gradient of zero. A gradient that is
        zero by chance in all steps that are judged (an expert that few tokens come to) is not in those between.
        """
        fastest = max((sample.move for sample in layers.values() if sample.move is not None), default=0.0)
        states = ((name, self._next(name, sample, step, fastest)) for name, sample in layers.items())
        self._low = {name: low for name, low in states if low is not None}
        self.samples += 1
        self.doubts = any(not layers[name].zero or layers[name].leading for name in self._low)
        self._fed.update(name for name, sample in layers.items() if not sample.zero)
        lasting = [
            name for name, low in self._low.items() if low.samples >= LASTING_SAMPLES and step - low.step >= LASTING_STEPS
        ]
        unfed = tuple(name for name in lasting if layers[name].unfed)
        lost = tuple(name for name in lasting if not (layers[name].unfed or layers[name].zero))
        order = list(layers)
        last = max((order.index(name) for name in (*lost, *unfed)), default=0)
        before = tuple(name for name in lasting if layers[name].zero and order.index(name) < last)
        cut = tuple(name for name in lasting if layers[name].leading and name not in before and step - whole >= LASTING_STEPS)
        return StuckLayers(lost, unfed, before, cut if len(cut) >= LEAST_CUT or self._fed.intersection(cut) else ())

    def _next(self, name: str, sample: LayerSample, step: int, fastest: float) -> _Low | None:
        """Return the state of a layer that is low in this measurement; ``None`` if it is not."""
        part = sample.move / fastest if sample.move and fastest else 0.0
        lost = sample.move is not None and 0.0 < sample.move < RESOLUTION and part < FAR
        if not (lost or sample.unfed or sample.zero):
            return None
        low = self._low.get(name)
        if low is None or (low.part and part > max(WAKING * low.part, WITHIN)):
            return _Low(step, 1, part)
        return _Low(low.step, low.samples + 1, low.part or part)


def leading(zeros: Sequence[bool]) -> int:
    """Return the number of first layers of an optimizer with a zero gradient; 0 if all have. ``zeros``: in its order."""
    return zeros.index(False) if False in zeros else 0


LEAST_ZEROS, ZEROS_SHARE = 20, 0.05
"""Steps, and their share of all, with a rate of zero at the end: a schedule may end there, and its last steps are few"""
ENOUGH = 200
"""Steps that suffice, where the ones before them are unknown"""
NEGLIGIBLE = 2.0**-24
"""Of the highest rate: half of the distance between float32 numbers near 1"""
OTHER_GROUPS = 7
"""Most parameter groups that have their rate recorded, besides the first (``catalog.GROUP``): there may be more"""


class ZeroRate(NamedTuple):
    """Steps in a row, up to the last one, with a rate of zero, or a negligible one."""

    first: int
    steps: int
    is_begun_before: bool
    """Whether the steps before the first one are unknown"""
    highest: float = 0.0
    """The highest rate that is known, if that of the steps is negligible beside it and not zero"""


def zero_rate(rates: Sequence[tuple[int, float | None]], began: int = 0) -> ZeroRate | None:
    """Return since when the rate is zero, or negligible; ``None`` if the last one's is not, or for too short a time.

    ``rates``: of steps, oldest first, the rate of the first parameter group; ``None`` where it is unknown. ``began``: the
    step in which the training of the last model began, or 0: what is negligible for it has no measure in another one's rates.
    """
    highest = max([rate for step, rate in rates if step >= began and rate is not None and isfinite(rate)], default=0.0)
    return _at_most(0.0, rates, 0.0) or _at_most(NEGLIGIBLE * highest, rates, highest)


def _at_most(limit: float, rates: Sequence[tuple[int, float | None]], highest: float) -> ZeroRate | None:
    begins = None
    for index in range(len(rates) - 1, -1, -1):
        rate = rates[index][1]
        if rate is not None and not 0.0 <= rate <= limit:
            break
        begins = index if rate is not None else begins
    if begins is None:
        return None
    first, last = rates[begins][0], rates[-1][0]
    count, is_begun_before = last - first + 1, begins == 0 and first > 1
    if count < LEAST_ZEROS or count < min(ZEROS_SHARE * last, ENOUGH if is_begun_before else last):
        return None
    return ZeroRate(first, count, is_begun_before, highest)
