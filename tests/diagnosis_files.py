"""Facts of ranks for tests of what is said about them: no file, every number the test's own."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from tests.rank_files import BOOT, BORN_NS, BORN_WALL_NS, RESOURCE, S
from torchobs.catalog import EVENT_LOOP_MISTAKE, Event, Metric
from torchobs.diagnosis.health import diagnose
from torchobs.exporter import daemon, page
from torchobs.flight import events as flight_events
from torchobs.flight.layout import DEFAULT_SIZE, PHASE_NAMES, Header, plan
from torchobs.flight.reader import Distribution
from torchobs.flight.throughput import Throughput
from torchobs.ranks import labels, live
from torchobs.ranks.events import Events
from torchobs.ranks.rank_view import RankView, RunView, Step
from torchobs.ranks.snapshot import Readings

if TYPE_CHECKING:
    import pytest
    from typing_extensions import Self

    from tests.exporters import Client
    from torchobs.detect.hangs import Standstill
    from torchobs.detect.speed import Slowness

START_S = BORN_WALL_NS / S
PHASES = {"data": 0.01, "forward": 0.02, "backward": 0.05, "optimizer": 0.01, "other": 0.01}


def step(number: int, loss: float | None = 2.0, norm: float | None = 1.0, **more: Any) -> Step:
    """A step that ended as many tenths of a second after the start as its number says."""
    phase_s = more.pop("phase_s", PHASES)
    fields = {
        "end_s": START_S + number / 10, "duration_s": 0.1, "learning_rate": 1e-3, "tokens": 0, "skipped": False,
        "clipped": False, "phases": tuple(phase_s.get(name, math.nan) for name in PHASE_NAMES),
    }  # fmt: skip
    return Step(step=number, loss=loss, grad_norm=norm, **{**fields, **more})


def steps(count: int) -> list[Step]:
    """Steps of a healthy run, from 1."""
    return [step(number, 2.0 + 0.01 * math.sin(number)) for number in range(1, count + 1)]


def fact(event: Event, seconds: float, number: int | None = None, **attributes: Any) -> flight_events.Event:
    """An event so many seconds after the start; `exception_type` is `exception.type`."""
    named = {name.replace("__", "."): value for name, value in attributes.items()}
    return flight_events.Event(event.name, BORN_WALL_NS + round(seconds * S), number, named)


def facts(
    history: Sequence[Step] = (),
    *,
    state: str = "lost",
    reason: str = "lost",
    events: Sequence[flight_events.Event] = (),
    values: Mapping[Any, Any] | None = None,
    resource: Mapping[str, str | int] | None = None,
    **more: Any,
) -> RankView:
    """A rank that is dead unless the test says otherwise."""
    header = Header(
        DEFAULT_SIZE, bytes(range(16)), BOOT, BORN_NS, BORN_WALL_NS, 1, 0, plan(DEFAULT_SIZE), {**RESOURCE, **(resource or {})}
    )
    numbers: dict[str, dict[tuple[str, ...], float]] = {}
    distributions: dict[str, Distribution] = {}
    for key, value in (values or {}).items():
        metric, *attributes = (key,) if isinstance(key, Metric) else key
        if isinstance(value, Distribution):
            distributions[metric.name] = value
        else:
            numbers.setdefault(metric.name, {})[tuple(attributes)] = value
    last_s = more.get("last_s", history[-1].end_s if history else START_S)
    since_s = max(0.0, last_s - (history[-1].end_s if history else START_S))
    fields = {
        "source": "r0.flight", "up": False, "last_s": last_s, "phase": "forward", "phase_begun_s": last_s,
        "progress_age_s": since_s,
    }  # fmt: skip
    job_name, run_id, rank = labels.identity(header.resource)
    return RankView(
        header=header, job_name=job_name, run_id=run_id, rank=rank, state=state, reason=reason, steps=tuple(history),
        events=Events(tuple(events)),
        readings=Readings(numbers, distributions), **{**fields, **more},
    )  # fmt: skip


def origin_told(event: flight_events.Event) -> str:
    """What is said of where a NaN was born, by its event."""
    findings = diagnose(facts(steps(3), events=[event]))
    return next(finding.long for finding in findings if finding.kind.startswith("nonfinite_origin"))


def told(of: RankView) -> dict[str, str]:
    """The diagnosis by kind."""
    return {finding.kind: finding.long for finding in diagnose(of)}


PACE = Throughput(
    steps=64, step_s=0.5, mean_s=0.52, phases_s=(0.05, 0.15, 0.2, 0.08, 0.02, 0.0), window_s=33.0, per_s=1.9,
    tokens_per_s=31_000.0, samples_per_s=None,
)  # fmt: skip


Values = dict[str, dict[tuple[str, ...], float]]
"""Of a rank, by metric and attribute values"""


def row(  # noqa: PLR0913  # each is what some test is about
    rank: int = 0,
    state: str = "alive",
    *,
    reason: str = "",
    age_s: float = 0.1,
    slow: Slowness | None = None,
    phase: str = "backward",
    anomalies: tuple[str, ...] = (),
    recorded: bool = True,
    events: Sequence[flight_events.Event] = (),
    mistakes: tuple[str, ...] = (),
    ran_s: float = 0.0,
    still: Standstill | None = None,
    values: Values | None = None,
    run_id: str = "run-1",
    derived: Mapping[str, object] | None = None,
    **numbers: float | None,
) -> RankView:
    """A rank 12,400 steps into its training, or as a test wants it; ``derived``: what it would make of records and events."""
    plain: dict[str, float | None] = {"steps": 12_400, "loss": 2.313, **numbers}
    shown: Values = {f"torchobs.{name}": {(): value} for name, value in plain.items() if value is not None}
    resource: dict[str, str | int] = {"job_name": "gpt", "run_id": run_id, "rank": rank}
    header = Header(DEFAULT_SIZE, rank.to_bytes(16, "big"), BOOT, BORN_NS, BORN_WALL_NS, 1, 0, plan(DEFAULT_SIZE), resource)
    lint_events = [fact(EVENT_LOOP_MISTAKE, 0.0, 3, kind=kind) for kind in mistakes]
    view = RankView(
        header=header, job_name="gpt", run_id=run_id, rank=str(rank), state=state, reason=reason,
        up=not reason, phase=phase, recorded=recorded, beat_age_s=age_s,
        readings=Readings({**shown, "torchobs.anomaly.active": {(kind,): 1.0 for kind in anomalies}, **(values or {})}),
        last_s=START_S + ran_s, progress_age_s=None if reason else age_s, standstill=still, slowness=slow,
        pace=None if reason else PACE, events=Events((*lint_events, *events)),
    )  # fmt: skip
    vars(view).update(derived or {})
    return view


def run(*rows: RankView, expected: int = 0, world_size: int = 0) -> RunView:
    """A run of these ranks."""
    expected = max(expected, len(rows))
    return RunView(rows, expected, max(world_size, expected))


class Parsed(HTMLParser):
    """The tags of a page, its text, and the exact values of its numbers."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[float] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"href", "src", "action"}]
        self.values += [float(value or "nan") for name, value in attrs if tag == "data" and name == "value"]

    def handle_data(self, data: str) -> None:
        self.text += data


class Stream:
    """A viewer's stream, inside a `with` block."""

    def __init__(self, exporter: Client) -> None:
        self._connection = http.client.HTTPConnection(exporter.address, timeout=10)
        self._connection.request("GET", "/live/stream")
        self.answer = self._connection.getresponse()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.answer.close()

    def next(self) -> tuple[str, dict[str, object]]:
        lines = [self.answer.readline().decode() for _ in range(3)]
        assert lines[2] == "\n", lines
        return lines[0].removeprefix("event: ").strip(), json.loads(lines[1].removeprefix("data: "))

    def until(self, name: str, part: str = "", words: str = "") -> dict[str, object]:
        """The data of the next event of that name, in which that part has these words."""
        while True:
            event, data = self.next()
            if event == name and words in str(data.get(part)):
                return data


def shorten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test need not wait for whole ones; and files have all the time that they take on a machine that is busy."""
    monkeypatch.setattr(daemon, "TICK_S", 0.1)
    monkeypatch.setattr(page, "TICK_S", 0.1)
    monkeypatch.setattr(page, "DEADLINE_S", 20.0)
    monkeypatch.setattr(live, "EVENTS_S", 20.0)
