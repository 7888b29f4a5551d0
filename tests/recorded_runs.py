"""Real trainings, recorded from the pages of a real exporter, and told to promtool's rule engine in slow motion.

What is real: the processes, what happens to them, torchobs within them, the exporter's judgement, and every sample.

What is not: the time. In a run's slow motion each second lasts `stretch` seconds: timestamps move apart, and everything that
has the unit of a second is multiplied, as if the same training had run on slower machines. Counts stay as they are. After the
end of a recording its last page is scraped on for some time, as an exporter goes on showing ended ranks. Left out is what is
said of the machine or of its containers, which is the state of whoever runs the tests, and histograms, whose bounds are in
seconds; no alert asks for them.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support import ROOT, clean_environment
from torchobs import catalog
from torchobs.catalog import Kind

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from tests.exporters import Program

POLL_S = 0.2
AT_ONCE = 9
"""More would wait for each other's imports, which is no part of what is recorded"""
SEEN_S = 5.0
SCRAPE_S = 15
"""Between two samples in slow motion"""
HELD_S = 1800
"""How long the last page is scraped on: longer than any alert goes on firing by itself"""
JOB = "recorded"
_TIMES = re.compile(r"_(timestamp|start_time)_seconds$")
_SHOWN = {one.prometheus: one for one in catalog.METRICS if not one.shared and one.kind is not Kind.HISTOGRAM}
_RUN_ID = re.compile(r'run_id="([^"]*)"')
_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True)
class Life:
    """A process that is `rank`: begun a second after the one before it has ended, told to end by SIGTERM after `lasts_s`."""

    behaviour: str
    lasts_s: float = 600.0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run of these processes. A second of it lasts `stretch` seconds in slow motion."""

    name: str
    lives: Sequence[Life]
    stretch: int = 60
    ranks: int = 1
    port: int = 0
    """of a process group"""


@dataclass(slots=True)
class Recording:
    """What was scraped: Unix times, and the values of each series by the number of the scrape."""

    times: list[float] = field(default_factory=list)
    values: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """When each run's recording begins and ends"""

    def add(self, pages: Mapping[str, str], names: Container[str]) -> None:
        """The pages of all exporters, by their `instance`; kept are metrics of these names."""
        number = len(self.times)
        self.times.append(time.time())
        for instance, page in pages.items():
            for line in page.splitlines():
                name, _, rest = line.partition("{")
                if rest and name in names and name in _SHOWN and "run_id=" in rest:
                    series, _, value = rest.rpartition(" ")
                    self.values[f'{name}{{instance="{instance}",{series}'][number] = value

    def save(self, path: Path) -> None:
        """As JSON, of each series only where it changes."""
        changes = {series: list(self._changes(values)) for series, values in sorted(self.values.items())}
        text = json.dumps({"times": self.times, "spans": self.spans, "changes": changes}, separators=(",", ":"))
        path.write_bytes(gzip.compress(text.encode(), mtime=0))

    def _changes(self, values: Mapping[int, str]) -> Iterator[tuple[int, str]]:
        before = ""
        for number in range(len(self.times)):
            if (now := values.get(number, "")) != before:
                yield number, now
                before = now

    @classmethod
    def load(cls, path: Path) -> Self:
        """What was saved."""
        given = json.loads(gzip.decompress(path.read_bytes()))
        loaded = cls(given["times"], spans={name: (began_s, ended_s) for name, (began_s, ended_s) in given["spans"].items()})
        for series, changes in given["changes"].items():
            ends = [*(number for number, _ in changes[1:]), len(loaded.times)]
            for (number, value), end in zip(changes, ends, strict=True):
                if value:
                    loaded.values[series] |= dict.fromkeys(range(number, end), value)
        return loaded


class _Running:
    """A run that is going on."""

    def __init__(self, run: RecordedRun, start: Callable[[Life, RecordedRun], subprocess.Popen[str]]) -> None:
        self._run, self._start = run, start
        self._waiting = {rank: [life for life in run.lives if life.rank == rank] for rank in range(run.ranks)}
        self._living: dict[int, tuple[subprocess.Popen[str], float]] = {}
        self._ended_s: dict[int, float] = {}
        for rank in range(run.ranks):
            self._begin(rank)
        self.began_s = time.time()

    def _begin(self, rank: int) -> None:
        life = self._waiting[rank].pop(0)
        self._living[rank] = self._start(life, self._run), time.time() + life.lasts_s

    def step(self) -> bool:
        """Do what is due; return False when all is over for some seconds, in which the exporter has seen it."""
        now_s = time.time()
        for rank, (process, ends_s) in list(self._living.items()):
            if process.poll() is not None:
                del self._living[rank]
                self._ended_s[rank] = now_s
            elif now_s > ends_s:
                process.terminate()
        for rank, at_s in list(self._ended_s.items()):
            if self._waiting[rank] and now_s > at_s + 1.0:
                del self._ended_s[rank]
                self._begin(rank)
        return bool(self._living) or any(self._waiting.values()) or now_s < max(self._ended_s.values()) + SEEN_S


def record(
    runs: Sequence[RecordedRun],
    nodes: Sequence[tuple[Path, Program]],
    start: Callable[..., subprocess.Popen[str]],
    names: Container[str],
) -> Recording:
    """Let all runs happen at once, each one's third rank on the second node, and scrape both until all have ended."""
    recording, waiting = Recording(), list(reversed(runs))
    going: list[tuple[str, _Running]] = []
    while waiting or going:
        if waiting and len(going) < AT_ONCE:
            run = waiting.pop()
            going.append((run.name, _Running(run, lambda life, run: _started(life, run, nodes, start))))
        recording.add({f"node-{number}:10960": program.page() for number, (_, program) in enumerate(nodes)}, names)
        for name, running in list(going):
            if not running.step():
                going.remove((name, running))
                recording.spans[name] = (running.began_s, recording.times[-1])
        time.sleep(POLL_S)
    return recording


def _started(
    life: Life, run: RecordedRun, nodes: Sequence[tuple[Path, Program]], start: Callable[..., subprocess.Popen[str]]
) -> subprocess.Popen[str]:
    node = int(life.rank == 2)  # as `record` says
    environ = {
        **clean_environment(),
        "TORCHOBS_DIR": str(nodes[node][0]), "TORCHOBS_RUN_ID": run.name, "TORCHOBS_JOB_NAME": JOB,
        "TORCHOBS_GRAD_INTERVAL": "1", "TORCHOBS_EXPORTER": "off", "NODE_NAME": f"node-{node}", "OMP_NUM_THREADS": "1",
        "RANK": str(life.rank), "WORLD_SIZE": str(run.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run.port),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    script = ROOT / "tests" / "scripts" / "alert_run.py"
    return start(sys.executable, str(script), life.behaviour, torch=True, env=environ)


def input_series(recording: Recording, run: RecordedRun) -> Iterator[dict[str, str]]:
    """The run's series for promtool, a sample every `SCRAPE_S` of its slow motion: what the page then last said."""
    began_s, ended_s = recording.spans[run.name]
    seconds = range(0, int((ended_s - began_s) * run.stretch), SCRAPE_S)
    shown = [bisect_right(recording.times, began_s + at_s / run.stretch) - 1 for at_s in seconds]
    for series, values in recording.values.items():
        found = _RUN_ID.search(series)
        if found is None or found[1] != run.name:
            continue
        name = series.partition("{")[0]
        samples = [_slowed(name, values[number], began_s, run.stretch) if number in values else "" for number in shown]
        if any(samples):
            yield {"series": series, "values": " ".join(_written(samples + samples[-1:] * (HELD_S // SCRAPE_S)))}


def _slowed(name: str, value: str, began_s: float, stretch: int) -> str:
    if _TIMES.search(name):
        return repr((float(value) - began_s) * stretch)
    return repr(float(value) * stretch) if _SHOWN[name].unit == "s" else value


def _written(samples: Sequence[str]) -> Iterator[str]:
    """Promtool's notation: a series that has left the page ends at once, as in a real Prometheus."""
    before = ""
    for sample in samples:
        yield sample or ("stale" if before else "_")
        before = sample


@dataclass(frozen=True, slots=True)
class Told:
    """An alert that the rule engine has active, at some second of the slow motion."""

    at_s: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def cases(recording: Recording, runs: Sequence[RecordedRun], alerts: Sequence[str], rules: Sequence[Path]) -> str:
    """A file for `promtool test rules` that expects no alert in any minute of all of these runs."""
    series = [one for run in runs for one in input_series(recording, run)]
    lasts_s = max(len(one["values"].split()) for one in series) * SCRAPE_S
    checks = [
        {"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": []} for at_s in range(60, lasts_s, 60) for alert in alerts
    ]
    test = {"interval": f"{SCRAPE_S}s", "input_series": series, "alert_rule_test": checks}
    return json.dumps({"rule_files": [str(path) for path in rules], "evaluation_interval": "1m", "tests": [test]})


def told(output: str) -> list[Told]:
    """The alerts that promtool says it got instead of none, in order of time."""
    found, at_s, labels = [], 0, {}
    for line in output.splitlines():
        if head := re.match(r"\s+alertname: \w+, time: (\S+),", line):
            at_s = _seconds(head[1])
        elif "Labels:{" in line:
            labels = _pairs(line)
        elif "Annotations:{" in line:
            found.append(Told(at_s, labels, _pairs(line)))
    return sorted(found, key=lambda one: one.at_s)


def _seconds(duration: str) -> int:
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def _pairs(line: str) -> dict[str, str]:
    return {name: json.loads(value) for name, value in _PAIR.findall(line)}
