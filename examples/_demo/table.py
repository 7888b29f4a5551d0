"""Show the rows as text: a table that is redrawn on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from examples._demo.page import Row
from examples._demo.prometheus import Alert
from torchobs import catalog

LOG_INTERVAL_S = 10.0
PHASE_HEADINGS = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "other": "other", "between": "betw"}
HEADER = (
    f"{'rank':>4}  {'state':<12} {'step':>6} {'loss':>8} {'norm':>8} {'ms/step':>8} "
    f"{' '.join(f'{PHASE_HEADINGS[phase]:>5}' for phase in catalog.PHASES)} {'tokens/s':>9}  anomalies"
)


class Screen:
    """The demo's output: on a terminal a live table below what was printed, elsewhere plain lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._drawn = 0
        self._logged_at = -math.inf

    def print(self, text: str = "") -> None:
        """Print for good, above the table."""
        self._erase()
        print(text, file=self._out, flush=True)

    def show(self, rows: Sequence[Row], alerts: Sequence[Alert], printed: Sequence[str]) -> None:
        """Draw the ranks, the alerts and the last line that the job printed; in a log, a line every `LOG_INTERVAL_S`."""
        if self._is_terminal:
            self._draw(["", *table(rows), "", f"alerts: {alerts_text(alerts)}", *printed[-1:]])
        elif rows and time.monotonic() - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            self.print(f"{summary(rows)}  alerts: {alerts_text(alerts)}")

    def _draw(self, lines: Sequence[str]) -> None:
        columns = shutil.get_terminal_size().columns
        self._erase()
        self._out.write("".join(f"{line[: columns - 1]}\n" for line in lines))  # a wrapped line would not be erased
        self._out.flush()
        self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            self._out.write(f"\x1b[{self._drawn}F\x1b[J")
        self._drawn = 0


def table(rows: Sequence[Row]) -> list[str]:
    """Return a header and a line per rank."""
    return [HEADER, *(_line(row) for row in rows)]


def summary(rows: Sequence[Row]) -> str:
    """Return all ranks in one line; the loss is their mean, the speed their sum."""
    states = {row.state: sum(other.state == row.state for other in rows) for row in rows}
    steps = sorted({row.steps for row in rows})
    return (
        f"{', '.join(f'{count} {state}' for state, count in states.items())}"
        f"  step {'-'.join(map(str, (steps[0], steps[-1]) if len(steps) > 1 else steps))}"
        f"  loss {_number(_mean([row.loss for row in rows]), '.3f')}"
        f"  norm {_number(_mean([row.grad_norm for row in rows]), '.3f')}"
        f"  {_number(1e3 * _mean([row.step_time for row in rows]), '.1f')} ms/step"
        f"  {_number(sum(row.tokens_rate for row in rows), ',.0f')} tokens/s"
        f"  anomalies {anomalies_text(total_anomalies(rows))}"
    )


def total_anomalies(rows: Sequence[Row]) -> dict[str, int]:
    """Add up the ranks' anomalies by kind."""
    kinds = {kind: sum(row.anomalies.get(kind, 0) for row in rows) for kind in catalog.ANOMALY_KINDS}
    return {kind: number for kind, number in kinds.items() if number}


def anomalies_text(anomalies: Mapping[str, int]) -> str:
    """Return `loss_spike 3, gradient_explosion 1`, or `none`."""
    return ", ".join(f"{kind} {number}" for kind, number in anomalies.items()) or "none"


def alerts_text(alerts: Sequence[Alert]) -> str:
    """Return `LossSpike firing, GradientNotFinite pending`, or `none`."""
    return ", ".join(sorted({f"{alert.name} {alert.state}" for alert in alerts})) or "none"


def _line(row: Row) -> str:
    shares = " ".join(f"{_number(row.phases[phase], '.0%'):>5}" for phase in catalog.PHASES)
    return (
        f"{row.rank:>4}  {row.state:<12} {row.steps:>6} {_number(row.loss, '.3f'):>8} {_number(row.grad_norm, '.3f'):>8} "
        f"{_number(1e3 * row.step_time, '.1f'):>8} {shares} {_number(row.tokens_rate, ',.0f'):>9}  "
        f"{anomalies_text(row.anomalies)}"
    )


def _number(value: float, style: str) -> str:
    return "-" if math.isnan(value) else format(value, style)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
