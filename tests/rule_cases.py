"""Cases of an alert in tests/rules, made ready for `promtool test rules`.

A case is promtool's, with three differences: it is run at several evaluation intervals, up to Prometheus' default of a minute,
where times to look at are rounded up to the next evaluation; the link to the runbook is left out; and of a rank's state set
only what matters is there, which is completed. Real runs, recorded as an exporter showed them, are cases, too.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

from tests.support import ROOT, clean_environment
from torchobs import catalog
from torchobs.catalog import Kind
from torchobs.rules import values

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from tests.exporters import Program

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where it is: a rule file takes PyYAML's own half a second"""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+)([smhd])")


def seconds(duration: str) -> int:
    """`1h10m` as 4200."""
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION.findall(duration))


def load(text: str) -> Any:
    """A YAML document."""
    return yaml.load(text, _LOADER)  # noqa: S506  # it is a safe one


def document(cases: Path, interval: str) -> dict[str, Any]:
    """The file for promtool, whose rules are `rules.yml` beside it."""
    content = load(cases.read_text())
    tests = [_test(case, seconds(interval)) for case in content["tests"]]
    return {"rule_files": ["rules.yml"], "evaluation_interval": interval, "tests": tests}


def groups_of(files: list[str], *alerts: str) -> dict[str, Any]:
    """A rule file with the rules of these alerts and those that record what they ask for, in the order of their evaluation.

    The other rules of these groups change nothing for it, and cost most of the time.
    """
    groups = [group for text in files for group in _groups(text)]
    needed = [rule for group in groups for rule in group["rules"] if rule.get("alert") in alerts]
    assert len(needed) == len(alerts)
    for rule in needed:  # grows meanwhile
        asked = _records(rule)
        needed += [item for group in groups for item in group["rules"] if item.get("record") in asked and item not in needed]
    kept = [{**group, "rules": [rule for rule in group["rules"] if rule in needed]} for group in groups]
    return {"groups": _in_order([group for group in kept if group["rules"]])}


@cache
def _groups(text: str) -> list[dict[str, Any]]:
    """The groups of a rule file, which nobody changes."""
    groups: list[dict[str, Any]] = load(text)["groups"]
    return groups


def _records(rule: dict[str, Any]) -> set[str]:
    """The recorded series that a rule asks for, in its expression or its texts."""
    text = " ".join(map(str, (rule["expr"], *rule.get("annotations", {}).values())))
    return set(re.findall(r"[a-z_]+:[a-z_0-9]+:[a-z_0-9]+", text))


def _in_order(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group after those that record what it asks for; groups that ask for each other keep their order."""
    ordered: list[dict[str, Any]] = []

    def add(group: dict[str, Any], above: tuple[str, ...]) -> None:
        if group in ordered or group["name"] in above:
            return
        asked = {name for rule in group["rules"] for name in _records(rule)}
        for other in groups:
            if asked & {rule.get("record") for rule in other["rules"]}:
                add(other, (*above, group["name"]))
        ordered.append(group)

    for group in groups:
        add(group, ())
    return ordered


def _test(case: dict[str, Any], interval_s: int) -> dict[str, Any]:
    checks = []
    for check in case["alert_rule_test"]:
        at_s = -(-seconds(check["eval_time"]) // interval_s) * interval_s
        expected = [_alert(alert, check["alertname"]) for alert in check["exp_alerts"]]
        checks.append({**check, "eval_time": f"{at_s}s", "exp_alerts": expected})
    return {**case, "input_series": [*case["input_series"], *_states(case)], "alert_rule_test": checks}


def _states(case: dict[str, Any]) -> list[dict[str, str]]:
    """The rest of each rank's state set, of which a case has the states that it is about: the exporter serves all of them."""
    ranks: dict[str, dict[str, list[str]]] = {}
    for series in case["input_series"]:
        state = re.search(r'state="(\w+)"', series["series"])
        if series["series"].startswith("torchobs_rank_state{") and state is not None:
            ranks.setdefault(rank_of(series["series"]), {})[state[1]] = samples_of(series["values"])
    return [
        {"series": f'torchobs_rank_state{{{labels}, state="{state}"}}', "values": " ".join(samples)}
        for labels, states in ranks.items()
        for state, samples in _completed(states).items()
    ]


def _completed(states: dict[str, list[str]]) -> dict[str, list[str]]:
    """The states that are not given: a rank that is in none of those that are lives, if that is not given."""
    scrapes = list(itertools.zip_longest(*states.values(), fillvalue="_"))
    shown = [next((sample for sample in scrape if sample not in {"_", STALE}), None) for scrape in scrapes]
    ended = [STALE if STALE in scrape else "_" for scrape in scrapes]
    zeros = [end if sample is None else "0" for sample, end in zip(shown, ended, strict=True)]
    alive = [zero if zero != "0" or "1" in scrape else "1" for zero, scrape in zip(zeros, scrapes, strict=True)]
    return {state: alive if state == "alive" else zeros for state in catalog.RANK_STATES if state not in states}


def _alert(alert: dict[str, Any], name: str) -> dict[str, Any]:
    labels = alert["exp_labels"]
    links = {"runbook_url": f"{values.RUNBOOKS}/{name}.md"}
    return {"exp_labels": labels, "exp_annotations": {**alert["exp_annotations"], **links}}


STALE = "stale"
_SAMPLES = re.compile(r"(?P<first>_|stale|-?[0-9.]+(?:e[+-]?\d+)?|NaN|[+-]?Inf)(?P<step>[+-][0-9.]+)?(?:x(?P<times>\d+))?$")


def samples_of(values: str) -> list[str]:
    """A series in promtool's notation as one text for each scrape: a number, `_` (none), or `stale`."""
    samples: list[str] = []
    for part in values.split():
        match = _SAMPLES.match(part)
        assert match is not None, part
        first, times = match["first"], int(match["times"] or 0)
        if first in {"_", STALE}:
            samples += [first] * max(times, 1)
        else:
            step = float(match["step"] or 0)
            samples += [f"{float(first) + number * step:g}" if step else first for number in range(times + 1)]
    return samples


def lasts_s(case: dict[str, Any]) -> int:
    """How long the series of a case last."""
    return (max(len(samples_of(series["values"])) for series in case["input_series"]) - 1) * seconds(case["interval"])


def ending(case: dict[str, Any], at_s: int, reason: str = "finished") -> list[dict[str, str]]:
    """The series of a case whose ranks end at a time, in order, as one more scrape sees; then their exporters have left."""
    last = at_s // seconds(case["interval"])
    ended: dict[str, list[str]] = {}
    ranks: dict[str, list[str]] = {}
    for series in case["input_series"]:
        samples = samples_of(series["values"])[: last + 1]
        ended[series["series"]] = samples
        if len(samples) > last and samples[last] not in {"_", STALE}:
            labels = rank_of(series["series"])
            if labels:
                ranks.setdefault(labels, samples)
            samples += [samples[last], STALE]
    dead = {rank_of(name) for name in ended if name.startswith("torchobs_rank_exit{") and len(ended[name]) > last + 1}
    for labels in ranks.keys() - dead:
        up = next((name for name in ended if name.startswith("torchobs_rank_up{") and rank_of(name) == labels), None)
        alive = ended[up] if up else [text if text in {"_", STALE} else "1" for text in ranks[labels]]
        ended[up or f"torchobs_rank_up{{{labels}}}"] = [*alive[: last + 1], "0", STALE]
        ended[f'torchobs_rank_exit{{{labels}, reason="{reason}"}}'] = [*["_"] * (last + 1), "1", STALE]
    return [{"series": name, "values": " ".join(samples)} for name, samples in ended.items()]


def seen_once(case: dict[str, Any], at_s: int, counted_s: int) -> list[dict[str, str]]:
    """The series of a case as they were ten minutes before a time, and how they then are in one last scrape only, at `at_s`.

    None of a case in which series have ended by then.
    """
    interval_s = seconds(case["interval"])
    last, counted, before = at_s // interval_s, counted_s // interval_s, max(0, counted_s - 600) // interval_s
    series = []
    for item in case["input_series"]:
        samples = samples_of(item["values"])
        if STALE in samples[: counted + 1]:
            return []
        series.append({"series": item["series"], "values": " ".join([*[samples[before]] * last, samples[counted], STALE])})
    return series


def rank_of(series: str) -> str:
    """The labels of the rank that a series is of, as they stand there; nothing for a series of no rank."""
    labels = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', series)
    named = {"cluster", "namespace", "job_name", "run_id", "rank", "instance"}
    if not {"run_id", "rank", "instance"} <= {name for name, _ in labels}:
        return ""
    return ", ".join(f'{name}="{value}"' for name, value in sorted(labels) if name in named)


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
        saved = json.loads(gzip.decompress(path.read_bytes()))
        loaded = cls(saved["times"], spans={name: (began_s, ended_s) for name, (began_s, ended_s) in saved["spans"].items()})
        for series, changes in saved["changes"].items():
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
    for series, shown_values in recording.values.items():
        match = _RUN_ID.search(series)
        if match is None or match[1] != run.name:
            continue
        name = series.partition("{")[0]
        samples = [
            _slowed(name, shown_values[number], began_s, run.stretch) if number in shown_values else "" for number in shown
        ]
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
    series = [item for run in runs for item in input_series(recording, run)]
    lasts_s = max(len(item["values"].split()) for item in series) * SCRAPE_S
    checks = [
        {"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": []} for at_s in range(60, lasts_s, 60) for alert in alerts
    ]
    test = {"interval": f"{SCRAPE_S}s", "input_series": series, "alert_rule_test": checks}
    return json.dumps({"rule_files": [str(path) for path in rules], "evaluation_interval": "1m", "tests": [test]})


def told(output: str) -> list[Told]:
    """The alerts that promtool says it got instead of none, in order of time."""
    alerts, at_s, labels = [], 0, {}
    for line in output.splitlines():
        if head := re.match(r"\s+alertname: \w+, time: (\S+),", line):
            at_s = _seconds(head[1])
        elif "Labels:{" in line:
            labels = _pairs(line)
        elif "Annotations:{" in line:
            alerts.append(Told(at_s, labels, _pairs(line)))
    return sorted(alerts, key=lambda alert: alert.at_s)


def _seconds(duration: str) -> int:
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def _pairs(line: str) -> dict[str, str]:
    return {name: json.loads(value) for name, value in _PAIR.findall(line)}
