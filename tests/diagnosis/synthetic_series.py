"""Healthy series of losses and gradient norms, and how often the fold of step records raises a false alarm on them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator

from torchobs.flight.fold import fold
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.totals import SIZE, Anomaly, Totals

Series = Callable[[random.Random, int], Iterator[float]]
_BATCH = 500


def converging(chance: random.Random, count: int) -> Iterator[float]:
    """A power law with noise in proportion."""
    start, floor, power, noise = (
        chance.uniform(1, 10),
        chance.uniform(0.1, 2),
        chance.uniform(0.2, 0.7),
        chance.uniform(0.01, 0.2),
    )
    for number in range(count):
        yield (floor + start * (1 + number / 50) ** -power) * (1 + noise * chance.gauss(0.0, 1.0))


def heavy_tailed(chance: random.Random, count: int) -> Iterator[float]:
    """Log-normal: a loss near its floor, or a norm of small batches."""
    level, spread = 10 ** chance.uniform(-3, 1), chance.uniform(0.3, 0.8)
    for _ in range(count):
        yield level * math.exp(spread * chance.gauss(0.0, 1.0))


def drifting(chance: random.Random, count: int) -> Iterator[float]:
    """A slow random walk on the log scale, with noise around it."""
    level, walk, noise = chance.uniform(-1, 2), chance.uniform(0.001, 0.02), chance.uniform(0.02, 0.3)
    for _ in range(count):
        level += walk * chance.gauss(0.0, 1.0) - 0.001 * level
        yield math.exp(level + noise * chance.gauss(0.0, 1.0))


def seasonal(chance: random.Random, count: int) -> Iterator[float]:
    """Up and down with the epochs, or with restarts of the learning rate."""
    period, height, noise = chance.randrange(50, 2000), chance.uniform(0.05, 0.5), chance.uniform(0.02, 0.2)
    for number in range(count):
        yield 2.0 * (1 + height * math.sin(2 * math.pi * number / period)) * math.exp(noise * chance.gauss(0.0, 1.0))


def correlated(chance: random.Random, count: int) -> Iterator[float]:
    """Each value resembles the one before, as with data in order."""
    state, memory, noise = 0.0, chance.uniform(0.5, 0.98), chance.uniform(0.05, 0.3)
    for _ in range(count):
        state = memory * state + noise * math.sqrt(1 - memory * memory) * chance.gauss(0.0, 1.0)
        yield 2.5 * math.exp(state)


def signed(chance: random.Random, count: int) -> Iterator[float]:
    """Both signs and heavy tails: Student's t with five degrees of freedom, as of a policy gradient."""
    level, scale = chance.uniform(-0.5, 0.5), 10 ** chance.uniform(-1, 1)
    for _ in range(count):
        yield level + scale * chance.gauss(0.0, 1.0) / math.sqrt(chance.gammavariate(2.5, 2.0) / 5)


def mixed(chance: random.Random, count: int) -> Iterator[float]:
    """Tasks of several difficulties by turns."""
    levels, noise = [chance.uniform(0.5, 6.0) for _ in range(chance.randrange(2, 6))], chance.uniform(0.02, 0.2)
    for _ in range(count):
        yield chance.choice(levels) * math.exp(noise * chance.gauss(0.0, 1.0))


LOSSES: dict[str, Series] = {
    one.__name__: one for one in (converging, heavy_tailed, drifting, seasonal, correlated, signed, mixed)
}
NORMS = {name: series for name, series in LOSSES.items() if name != "signed"}
STEPS = 20_000
"""Steps of a run; each has a baseline of its own"""


def false_alarms(name: str, seed: int, steps: int = STEPS) -> Counter[str]:
    """Fold one healthy run with that series as loss, and as norm if it has one sign; return its anomalies by kind."""
    chance, totals, anomalies = random.Random(f"{name} {seed}"), Totals(bytearray(SIZE)), list[Anomaly]()
    losses = LOSSES[name](chance, steps)
    norms = NORMS[name](chance, steps) if name in NORMS else heavy_tailed(chance, steps)
    flags, records, phases = int(StepFlag.LOSS | StepFlag.GRAD_NORM), list[StepRecord](), (0.0,) * 9
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        records.append(
            StepRecord(
                number, number * 1_000_000, number, RecordKind.STEP, flags, 1, 0.001, loss, abs(norm), 1e-3, phases, 0, 0, 1.0
            )
        )
        if len(records) >= _BATCH or number == steps:
            fold(totals, records, anomalies)
            records = []
    return Counter(anomaly.kind for anomaly in anomalies)
