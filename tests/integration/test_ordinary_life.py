"""What happens in a cluster every day wakes nobody up: all shipped rules over runs as a scrape sees them, by promtool."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

from tests import rule_cases
from torchobs.rules.files import alert_groups, rendered
from torchobs.rules.rule_file import Alert

SCRAPE_S = 15
MINUTES = 110
PAGES = [rule.alert for group in alert_groups() for rule in group.rules if isinstance(rule, Alert) and rule.severity == "page"]
Timeline = dict[int, str]
Series = dict[str, Timeline]


def series(metric: str, **labels: object) -> str:
    """A series' name."""
    of = {"job_name": "gpt", "namespace": "ml", "run_id": "a", "rank": "0", "instance": "n0:1"} | labels
    return f"{metric}{{{','.join(f'{name}={str(text)!r}' for name, text in of.items())}}}".replace("'", '"')


def life(at: int, scrapes: int, ended: str = "", *, steps: bool = True, world: int = 1, **labels: object) -> Series:
    """A rank from a scrape on, for so many; `ended`: how, which four more scrapes show. Without it its series just end."""
    alive = range(at, at + scrapes)
    shown = range(at, at + scrapes + (4 if ended else 0))
    found = {
        series("torchobs_rank_up", **labels): {one: str(int(one in alive)) for one in shown},
        series("torchobs_rank_start_time_seconds", **labels): dict.fromkeys(shown, str(at * SCRAPE_S)),
        series("torchobs_world_size", **labels): dict.fromkeys(shown, str(world)),
        series("torchobs_rank_info", host="n", torch_version="2", **labels): dict.fromkeys(shown, "1"),
        series("torchobs_rank_state", state="alive", **labels): dict.fromkeys(alive, "1"),
        series("torchobs_rank_progress_age_seconds", **labels): dict.fromkeys(alive, "1"),
        series("torchobs_steps_total", **labels): {one: str((min(one, alive[-1]) - at) * 30 * steps) for one in shown},
    }
    if ended:
        found[series("torchobs_rank_exit", reason=ended, **labels)] = dict.fromkeys(shown[scrapes:], "1")
    return found


def together(*lives: Series) -> Series:
    """All of them; of a series that several have, what the later one says."""
    found: Series = {}
    for one in lives:
        for name, points in one.items():
            found.setdefault(name, {}).update(points)
    return found


def pair(at: int, scrapes: int, *ended: str, **places: str) -> Iterator[Series]:
    """Two ranks of one training, on two nodes."""
    for rank, (place, how) in enumerate(zip(places.values(), ended or repeat(""), strict=False)):
        yield life(at, scrapes + 3 * rank, how, world=2, rank=rank, instance=place)


ORDINARY = {
    "a sweep, four at a time, under one run id": [
        life(12 * (number // 4) + number % 4, 11, "finished", instance=f"p{number}:1") for number in range(24)
    ],
    "a drained node; the other rank fails for it; both come back": [
        *pair(0, 80, "terminated", "exception", first="n0:1", second="n1:1"),
        *pair(110, 120, first="n2:1", second="n3:1"),
    ],
    "preempted, and queued for most of an hour": [life(0, 80, "terminated"), life(290, 60, instance="n2:1")],
    "an evaluation of an hour": [life(0, 240, "finished", steps=False)],
    "over within one scrape": [life(10, 1, "finished")],
    "deleted with no grace, after one scrape": [life(10, 1)],
    "a Job with a mistake, which Kubernetes tries seven times": [
        life(at, 2, "exception", steps=False, instance=f"p{at}:1") for at in (1, 6, 12, 20, 32, 52, 84)
    ],
    "no scrape for five minutes": [life(0, 100), life(120, 200)],
    "replicas of a StatefulSet, one after the other": [life(4 * number, 300, instance=f"s{number}:1") for number in range(4)],
    "a notebook, in which a script is started six times": [
        life(14 * number, 8, ("exception", "interrupted", "finished")[number % 3]) for number in range(6)
    ],
    "elastic, from four nodes to two": [
        *(life(0, 80, "terminated", world=4, rank=rank, instance=f"n{rank}:1") for rank in range(4)),
        *(life(90, 200, world=2, rank=rank, instance=f"m{rank}:1") for rank in range(2)),
    ],
}


def values(points: Timeline) -> str:
    """A series in promtool's notation: stale where it ends."""
    marked = {one + 1: "stale" for one in points} | points
    return " ".join(marked.get(one, "_") for one in range(max(marked) + 1))


def said_of(promtool: str, folder: Path, cases: dict[str, list[Series]], checks: list[dict[str, object]]) -> str:
    """What promtool says of the rules that page, and those that record; nothing if all is as the checks expect it."""
    for name, text in rendered().items():
        if name.startswith("rules/"):
            groups = rule_cases.load(text)["groups"]
            for group in groups:
                group["rules"] = [rule for rule in group["rules"] if rule.get("alert") in {None, *PAGES}]
            (folder / Path(name).name).write_text(json.dumps({"groups": groups}))
    tests = [
        {
            "name": name,
            "interval": f"{SCRAPE_S}s",
            "input_series": [{"series": one, "values": values(points)} for one, points in together(*lives).items()],
            "alert_rule_test": checks,
        }
        for name, lives in cases.items()
    ]
    document = {"rule_files": ["torchobs-*.yml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "cases.json").write_text(json.dumps(document))
    argv = [promtool, "test", "rules", str(folder / "cases.json")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def test_ordinary_life_wakes_nobody_up(program: Callable[[str], str], tmp_path: Path) -> None:
    """No page in any minute, of any of these."""
    checks: list[dict[str, object]] = [
        {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []} for minute in range(MINUTES) for alert in PAGES
    ]
    said = said_of(program("promtool"), tmp_path, ORDINARY, checks)
    fired = sorted(set(re.findall(r"name: (.+),\n\s+alertname: (\w+),", said)))
    assert (fired, said) == ([], "")


def test_a_run_that_is_lost_does(program: Callable[[str], str], tmp_path: Path) -> None:
    """The rules see runs such as those above: one that trained and then failed for good pages."""
    checks: list[dict[str, object]] = [{"eval_time": "45m", "alertname": "TorchobsRunDown", "exp_alerts": []}]
    said = said_of(program("promtool"), tmp_path, {"lost": [life(0, 80, "exception")]}, checks)
    assert "Training run a of gpt in namespace ml is down." in said
