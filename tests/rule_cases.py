"""Cases of an alert in tests/rules, made ready for `promtool test rules`.

A case is promtool's, with three differences: it is run at several evaluation intervals, up to Prometheus' default of a minute,
where times to look at are rounded up to the next evaluation; the link to the runbook is left out; and of a rank's state set
only what matters is there, which is completed.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

from torchobs import catalog
from torchobs.rules import values

if TYPE_CHECKING:
    from pathlib import Path

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
    given = load(cases.read_text())
    tests = [_test(case, seconds(interval)) for case in given["tests"]]
    return {"rule_files": ["rules.yml"], "evaluation_interval": interval, "tests": tests}


def groups_of(files: list[str], alert: str) -> dict[str, Any]:
    """A rule file with the rule of that alert and those that record what it asks for, in the order of their evaluation.

    The other rules of these groups change nothing for it, and cost most of the time.
    """
    groups = [group for text in files for group in _groups(text)]
    (wanted,) = (rule for group in groups for rule in group["rules"] if rule.get("alert") == alert)
    needed = [wanted]
    for rule in needed:  # grows meanwhile
        asked = _records(rule)
        needed += [one for group in groups for one in group["rules"] if one.get("record") in asked and one not in needed]
    found = [{**group, "rules": [rule for rule in group["rules"] if rule in needed]} for group in groups]
    return {"groups": _in_order([group for group in found if group["rules"]])}


@cache
def _groups(text: str) -> list[dict[str, Any]]:
    """The groups of a rule file, which nobody changes."""
    found: list[dict[str, Any]] = load(text)["groups"]
    return found


def _records(rule: dict[str, Any]) -> set[str]:
    """The recorded series that a rule asks for, in its expression or its texts."""
    text = " ".join(map(str, (rule["expr"], *rule.get("annotations", {}).values())))
    return set(re.findall(r"[a-z_]+:[a-z_0-9]+:[a-z_0-9]+", text))


def _in_order(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group after those that record what it asks for; groups that ask for each other keep their order."""
    found: list[dict[str, Any]] = []

    def add(group: dict[str, Any], above: tuple[str, ...]) -> None:
        if group in found or group["name"] in above:
            return
        asked = {name for rule in group["rules"] for name in _records(rule)}
        for other in groups:
            if asked & {rule.get("record") for rule in other["rules"]}:
                add(other, (*above, group["name"]))
        found.append(group)

    for group in groups:
        add(group, ())
    return found


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
        for labels, given in ranks.items()
        for state, samples in _completed(given).items()
    ]


def _completed(given: dict[str, list[str]]) -> dict[str, list[str]]:
    """The states that are not given: a rank that is in none of those that are lives, if that is not given."""
    scrapes = list(itertools.zip_longest(*given.values(), fillvalue="_"))
    seen = [next((sample for sample in scrape if sample not in {"_", STALE}), None) for scrape in scrapes]
    ended = [STALE if STALE in scrape else "_" for scrape in scrapes]
    zeros = [end if sample is None else "0" for sample, end in zip(seen, ended, strict=True)]
    alive = [zero if zero != "0" or "1" in scrape else "1" for zero, scrape in zip(zeros, scrapes, strict=True)]
    return {state: alive if state == "alive" else zeros for state in catalog.RANK_STATES if state not in given}


def _alert(given: dict[str, Any], name: str) -> dict[str, Any]:
    labels = given["exp_labels"]
    links = {"runbook_url": f"{values.RUNBOOKS}/{name}.md"}
    return {"exp_labels": labels, "exp_annotations": {**given["exp_annotations"], **links}}


STALE = "stale"
_SAMPLES = re.compile(r"(?P<first>_|stale|-?[0-9.]+(?:e[+-]?\d+)?|NaN|[+-]?Inf)(?P<step>[+-][0-9.]+)?(?:x(?P<times>\d+))?$")


def samples_of(values: str) -> list[str]:
    """A series in promtool's notation as one text for each scrape: a number, `_` (none), or `stale`."""
    samples: list[str] = []
    for part in values.split():
        found = _SAMPLES.match(part)
        assert found is not None, part
        first, times = found["first"], int(found["times"] or 0)
        if first in {"_", STALE}:
            samples += [first] * max(times, 1)
        else:
            step = float(found["step"] or 0)
            samples += [f"{float(first) + number * step:g}" if step else first for number in range(times + 1)]
    return samples


def lasts_s(case: dict[str, Any]) -> int:
    """How long the series of a case last."""
    return (max(len(samples_of(one["values"])) for one in case["input_series"]) - 1) * seconds(case["interval"])


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
    for one in case["input_series"]:
        samples = samples_of(one["values"])
        if STALE in samples[: counted + 1]:
            return []
        series.append({"series": one["series"], "values": " ".join([*[samples[before]] * last, samples[counted], STALE])})
    return series


def rank_of(series: str) -> str:
    """The labels of the rank that a series is of, as they stand there; nothing for a series of no rank."""
    labels = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', series)
    named = {"cluster", "namespace", "job_name", "run_id", "rank", "instance"}
    if not {"run_id", "rank", "instance"} <= {name for name, _ in labels}:
        return ""
    return ", ".join(f'{name}="{value}"' for name, value in sorted(labels) if name in named)
