"""Facts of ranks for tests of what is said about them: no file, every number the test's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tests.rank_files import BOOT, BORN_NS, BORN_WALL_NS, RESOURCE, S
from torchobs.catalog import Event, Metric
from torchobs.diagnosis.diagnosis import diagnose
from torchobs.diagnosis.rank_report import Fact, RankReport, Step
from torchobs.flight.layout import DEFAULT_SIZE, Header, plan
from torchobs.ranks.state import MemoryUse

START_S = BORN_WALL_NS / S
PHASES = {"data": 0.01, "forward": 0.02, "backward": 0.05, "optimizer": 0.01, "other": 0.01}


def step(number: int, loss: float | None = 2.0, norm: float | None = 1.0, **given: Any) -> Step:
    """A step that ended as many tenths of a second after the start as its number says."""
    fields = {
        "end_s": START_S + number / 10, "duration_s": 0.1, "learning_rate": 1e-3, "phase_s": PHASES, "tokens": 0,
        "skipped": False, "clipped": False,
    }  # fmt: skip
    return Step(step=number, loss=loss, grad_norm=norm, **{**fields, **given})


def steps(count: int) -> list[Step]:
    """Steps of a healthy run, from 1."""
    return [step(number, 2.0 + 0.01 * math.sin(number)) for number in range(1, count + 1)]


def fact(event: Event, seconds: float, number: int | None = None, **attributes: Any) -> Fact:
    """An event so many seconds after the start; `exception_type` is `exception.type`."""
    return Fact(event.name, START_S + seconds, number, {name.replace("__", "."): value for name, value in attributes.items()})


def facts(
    history: Sequence[Step] = (),
    *,
    state: str = "lost",
    reason: str = "lost",
    events: Sequence[Fact] = (),
    values: Mapping[Any, float] | None = None,
    resource: Mapping[str, str | int] | None = None,
    **given: Any,
) -> RankReport:
    """A rank that is dead unless the test says otherwise."""
    header = Header(
        DEFAULT_SIZE, bytes(range(16)), BOOT, BORN_NS, BORN_WALL_NS, 1, 0, plan(DEFAULT_SIZE), {**RESOURCE, **(resource or {})}
    )
    keyed: dict[tuple[str, ...], Any] = {
        (key.name,) if isinstance(key, Metric) else (key[0].name, *key[1:]): value for key, value in (values or {}).items()
    }
    last_s = history[-1].end_s if history else START_S
    fields = {
        "source": "r0.flight", "problems": (), "up": False, "exit_code": 0, "same_boot": True, "memory": MemoryUse(),
        "last_s": last_s, "phase": "forward", "phase_begun_s": last_s,
    }  # fmt: skip
    return RankReport(
        header=header, state=state, reason=reason, steps=tuple(history), events=tuple(events), values=keyed,
        **{**fields, **given},
    )  # fmt: skip


def origin_told(event: Fact) -> str:
    """What is said of where a NaN was born, by its event."""
    found = diagnose(facts(steps(3), events=[event]))
    return next(one.long for one in found if one.kind.startswith("nonfinite_origin"))


def told(of: RankReport) -> dict[str, str]:
    """The diagnosis by kind."""
    return {finding.kind: finding.long for finding in diagnose(of)}
