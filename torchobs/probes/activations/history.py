"""Keep the last looks at the layers, and write them beside the flight file when a step was anomalous.

The file is written at once, since the rank may end soon, and once more when two later steps have been looked at. For one cause
at most once in ten minutes.
"""

from __future__ import annotations

import json
import time
from collections import deque
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.flight.files import artifacts
from torchobs.probes.activations.statistics import FIELDS
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.flight.files.artifacts import ArtifactName
    from torchobs.flight.metrics.totals import Anomaly
    from torchobs.probes.activations.statistics import ActivationStats
    from torchobs.probes.core.context import ProbeContext

MOST_STEPS = 16
"""Steps kept. With 64 layers of 32 elements each that is half of 65,536 elements"""
AFTER = 2
"""Steps looked at after the anomaly that are waited for"""
_AGAIN_S = 600.0
_DIGITS = 6


class StepRow(NamedTuple):
    """One step's layers: statistics, and some elements as they were."""

    step: int
    layers: dict[str, tuple[ActivationStats, list[float]]]


class _Wanted(NamedTuple):
    anomaly: Anomaly
    evidence: ArtifactName
    seen: int
    """Number of rows at the time"""


class Around:
    """The last rows, and the history that is being written. In the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._rows: deque[StepRow] = deque(maxlen=MOST_STEPS)
        self._seen = 0
        self._wanted: _Wanted | None = None
        self._limiter = RateLimiter(_AGAIN_S)

    @property
    def waits(self) -> bool:
        """Whether a history waits for more steps."""
        return self._wanted is not None

    def add(self, step: int, layers: dict[str, tuple[ActivationStats, list[float]]]) -> StepRow:
        """Keep a step; what several devices have sent of one step is one row."""
        if self._rows and self._rows[-1].step == step:
            self._rows[-1].layers.update(layers)
        else:
            self._rows.append(StepRow(step, layers))
            self._seen += 1
        return self._rows[-1]

    def note(self, anomaly: Anomaly) -> bool:
        """Write the history of an anomaly; return True if more steps are wanted."""
        place, writer = self._context.writer.place, self._context.writer
        if self._wanted is not None or place is None or not self._limiter.take(time.monotonic(), _cause(anomaly)):
            return False
        evidence = artifacts.named(writer.name, artifacts.LAYERS, time.time_ns() // 1_000_000)
        wanted = _Wanted(anomaly, evidence, self._seen)
        refused = self._write(wanted)
        told: dict[str, object] = {"kind": anomaly.kind, "steps": len(self._rows)}
        told |= {"evidence": evidence.id} if refused is None else refused
        writer.event(catalog.EVENT_LAYER_HISTORY.name, told, anomaly.step)
        self._wanted = wanted if refused is None else None
        return self.waits

    def proceed(self, *, now: bool) -> None:
        """Write the history once more when later steps have come, or ``now`` with what there is."""
        wanted = self._wanted
        if wanted is not None and (now or self._seen >= wanted.seen + AFTER):
            self._wanted = None
            if self._seen > wanted.seen:
                self._write(wanted)

    def _write(self, wanted: _Wanted) -> dict[str, str] | None:
        """Write the file, without the oldest steps where it would be too large; return why it could not be written."""
        rows = list(self._rows)
        texts = [self._text(row) for row in rows]
        while True:
            text = ",\n".join(texts)
            data = f'{self._head(wanted.anomaly)},\n"steps": [\n{text}\n]}}\n'.encode()
            if len(data) <= artifacts.LIMITS[artifacts.LAYERS] or not texts:
                break
            del texts[0]
        place = self._context.writer.place
        return None if place is None else artifacts.write(place, wanted.evidence, data)

    def _head(self, anomaly: Anomaly) -> str:
        """Return the beginning of the document: the anomaly, and the gradient norms of the last steps measured."""
        origin = self._context.origins.get(anomaly.step)
        head = {
            "kind": anomaly.kind,
            "step": anomaly.step,
            "value": _number(anomaly.value),
            "usual": _number(anomaly.baseline),
            "module": origin.module if origin is not None else "",
            "gradient_norms": [
                {"step": step, "layers": {name: _number(norm) for name, norm in norms.items()}} for step, norms in self._norms()
            ],
        }
        return json.dumps(head, allow_nan=False)[:-1]

    def _norms(self) -> Iterator[tuple[int, dict[str, float]]]:
        for recent in self._context.layer_norms:
            for entry in recent(MOST_STEPS):
                self._context.yield_gil()
                yield entry

    def _text(self, row: StepRow) -> str:
        """Return a step as JSON, made layer by layer, since this thread must not keep the GIL."""
        layers = []
        for name, (stats, samples) in row.layers.items():
            fields: dict[str, Any] = {field: _number(value) for field, value in zip(FIELDS, stats, strict=True)}
            if samples:
                fields["samples"] = [_number(value) for value in samples]
            layers.append(f"{json.dumps(name)}: {json.dumps(fields, allow_nan=False)}")
            self._context.yield_gil()
        return f'{{"step": {row.step}, "layers": {{{", ".join(layers)}}}}}'


def _cause(anomaly: Anomaly) -> str:
    """Return what it has in common with others: after a loss that is NaN come gradients that are."""
    return "nonfinite" if anomaly.kind.startswith("nonfinite") else anomaly.kind


def _number(value: float) -> float | int | str:
    """Return a number of six digits, or ``nan``, ``inf`` or ``-inf`` as text, for which JSON has no number."""
    if not isfinite(value):
        return str(value)
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
