"""The shipped scripts for Slurm, run by a real slurmctld and slurmd, and looked at by a real Prometheus."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.launchers import PROGRAMS, SlurmCluster
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.support import ROOT, wait_until, why_missing

SHIPPED = ROOT / "deploy" / "slurm"
RULES = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("torchobs-*.yml"))
LONG_S = 11 * 60
"""Later than every `for:` and range of the alerts that page over a run that is down."""

TRAIN = """
import os, pathlib, sys, time
import torchobs

steps, stop = int(sys.argv[1]), pathlib.Path(sys.argv[2])
for step in range(1, 1 << 30):
    torchobs.log(loss=1.0 / step)
    torchobs.step()
    time.sleep(0.02)
    if step >= steps and stop.exists():
        break
"""
"""Steps by hand: what Slurm does to ranks is the subject, and importing torch is not. It ends when it is told to, by a file."""

pytestmark = [
    pytest.mark.skipif(not SHIPPED.is_dir(), reason="needs the source checkout"),
    *(pytest.mark.skipif(bool(why_missing(name)), reason=str(why_missing(name))) for name in PROGRAMS),
]


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The variables of a job: this environment's programs, and where Prometheus looks for targets."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "targets").mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "PROMETHEUS_TARGETS": str(tmp_path / "targets")}


@pytest.fixture
def prometheus(tmp_path: Path, program: Callable[[str], str]) -> Iterator[PrometheusServer]:
    """A Prometheus with the shipped rules and the shipped scrape job, but for the place of its files and its pace."""
    (scrape,) = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())["scrape_configs"]
    (discovery,) = scrape["file_sd_configs"]
    (pattern,) = discovery["files"]
    discovery["files"] = [str(tmp_path / "targets" / Path(pattern).name)]
    config = {"scrape_configs": [scrape | {"scrape_interval": "1s", "scrape_timeout": "1s"}]}
    with PrometheusServer(newest_prometheus(2) or program("prometheus"), rules=RULES, settings=config) as server:
        yield server


def target(folder: Path) -> str:
    """The address of the only target; empty while there is none."""
    files = list((folder / "targets").glob("torchobs-*.json"))
    groups = json.loads(files[0].read_text()) if files else []
    return str(groups[0]["targets"][0]) if groups else ""


def ranks_of(prometheus: PrometheusServer, job: str, **labels: str) -> set[str]:
    """The ranks that Prometheus sees alive in the run that is this job."""
    more = "".join(f',{name}="{value}"' for name, value in labels.items())
    return {series.labels["rank"] for series in prometheus.query(f'torchobs_rank_info{{run_id="{job}"{more}}}')}


def restarts(prometheus: PrometheusServer, job: str) -> dict[str, float]:
    """How often the ranks of the run have begun anew, by rank."""
    return {rank.labels["rank"]: rank.value for rank in prometheus.query(f'torchobs_rank_restarts_total{{run_id="{job}"}}')}


def exits(prometheus: PrometheusServer, job: str) -> dict[str, str]:
    """How the ranks of the run ended, by rank."""
    ended = prometheus.query(f'last_over_time(torchobs_rank_exit{{run_id="{job}"}}[10m]) == 1')
    return {series.labels["rank"]: series.labels["reason"] for series in ended}


def paging(prometheus: PrometheusServer) -> list[str]:
    """The alerts that page: those that do now, and those that would in eleven minutes if nothing else happened."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    rules = [rule for group in groups for rule in group["rules"] if rule.get("labels", {}).get("severity") == "page"]
    assert len(rules) > 3
    later = prometheus.query("time()")[0].value + LONG_S
    now = [alert.name for alert in prometheus.alerts() if alert.labels["severity"] == "page"]
    return now + [rule["alert"] for rule in rules if prometheus.query(rule["expr"], at=later)]


def test_a_job_is_one_run_until_it_is_cancelled(tmp_path: Path, job: dict[str, str], prometheus: PrometheusServer) -> None:
    """Two tasks: the run is the job, also requeued; the exporter lives as long as it; `scancel` is no fault, pages nobody."""
    with SlurmCluster() as slurm:
        options = ("--ntasks=2", "--ntasks-per-node=2", f"--chdir={tmp_path}", f"--output={tmp_path / 'job.log'}")
        number = slurm.submit(*options, SHIPPED / "train.sbatch", "train.py", "5", "never", **job)
        wait_until(lambda: ranks_of(prometheus, number) == {"0", "1"}, 60)
        first, flight = target(tmp_path), Path(f"/dev/shm/torchobs-{number}")
        assert flight.stat().st_mode & 0o777 == 0o700
        assert ranks_of(prometheus, number, local_world_size="2", node_rank="0", job_name="train") == {"0", "1"}

        slurm.call("scontrol", "requeue", number)
        wait_until(lambda: slurm.state(number) == "PENDING", 60)
        wait_until(lambda: not target(tmp_path) and not flight.exists(), 60)
        slurm.call("scontrol", "update", f"jobid={number}", "StartTime=now")
        assert wait_until(lambda: target(tmp_path), 90) != first
        # by Prometheus alone: an exporter waits at its end for everyone who has scraped it
        wait_until(lambda: restarts(prometheus, number) == {"0": 1.0, "1": 1.0}, 60)
        assert ranks_of(prometheus, number) == {"0", "1"}

        slurm.call("scancel", number)
        wait_until(lambda: slurm.state(number) == "CANCELLED", 60)
        assert exits(prometheus, number) == {"0": "terminated", "1": "terminated"}
        wait_until(lambda: not target(tmp_path) and not flight.exists(), 60)
        assert paging(prometheus) == []


def test_a_job_that_finishes_ends_its_exporter(tmp_path: Path, job: dict[str, str], prometheus: PrometheusServer) -> None:
    """One task: torchrun starts two ranks. Prometheus gets their ends before the job ends, with the training's status."""
    with SlurmCluster() as slurm:
        options = ("--ntasks=1", f"--chdir={tmp_path}", f"--output={tmp_path / 'job.log'}")
        variables = {**job, "RANKS_PER_NODE": "2"}
        number = slurm.submit(*options, SHIPPED / "train.sbatch", "train.py", "5", str(tmp_path / "stop"), **variables)
        wait_until(lambda: ranks_of(prometheus, number, launcher="torchrun") == {"0", "1"}, 90)
        (tmp_path / "stop").touch()
        wait_until(lambda: slurm.state(number) not in {"RUNNING", "COMPLETING"}, 60)
        assert slurm.state(number) == "COMPLETED", (tmp_path / "job.log").read_text()
        assert exits(prometheus, number) == {"0": "finished", "1": "finished"}
        assert not target(tmp_path)
        assert not Path(f"/dev/shm/torchobs-{number}").exists()


def test_the_documented_script_requeues_what_may_go_on(tmp_path: Path, job: dict[str, str], checkout: Path) -> None:
    """What SIGTERM ended is requeued, and not what the program itself raised, which keeps its exit status."""
    (script,) = re.findall(r"```bash\n(#!/usr/bin/env bash.*?)```", (checkout / "docs" / "slurm.md").read_text(), re.DOTALL)
    ends = {"PENDING": "os.kill(os.getpid(), signal.SIGTERM)", "FAILED": "{}['no key']"}
    with SlurmCluster() as slurm:
        numbers = {}
        for state, line in ends.items():
            folder = tmp_path / state
            folder.mkdir()
            (folder / "job.sh").write_text(script)
            (folder / "train.py").write_text(f"import os, signal, torchobs\ntorchobs.step()\n{line}\n")
            options = ("--ntasks=1", f"--chdir={folder}", f"--output={folder / 'job.log'}")
            numbers[state] = slurm.submit(*options, folder / "job.sh", "train.py", HOME=str(folder), **job)

        def settled(state: str, number: str) -> bool:
            return slurm.state(number) in {"PENDING", "FAILED", "COMPLETED"} and (tmp_path / state / "flights").exists()

        for state, number in numbers.items():
            wait_until(partial(settled, state, number), 90)
            assert slurm.state(number) == state, (tmp_path / state / "job.log").read_text()


def test_prolog_and_epilog_watch_every_job(tmp_path: Path, job: dict[str, str], prometheus: PrometheusServer) -> None:
    """A job script that knows nothing of it: torchrun's two ranks are seen, finish, and nothing is left on the node."""
    installed = tmp_path / "slurm"
    installed.mkdir()
    for name in ("prolog.sh", "epilog.sh", "task-prolog.sh"):
        shutil.copy(SHIPPED / name, installed)
    flight = tmp_path / "shm"
    flight.mkdir()
    places = {
        "TORCHOBS": Path(sys.executable).parent / "torchobs", "TARGETS": job["PROMETHEUS_TARGETS"], "FLIGHT": flight,
        "STATE": tmp_path / "state", "EXPORTER_ADDRESS": ":0",
    }  # fmt: skip
    shipped = (SHIPPED / "torchobs.env").read_text()
    assert set(re.findall(r"^(\w+)=", shipped, re.MULTILINE)) == set(places)
    (installed / "torchobs.env").write_text("".join(f"{name}={value}\n" for name, value in places.items()))
    hooks = {"Prolog": "prolog.sh", "Epilog": "epilog.sh", "TaskProlog": "task-prolog.sh"}
    with SlurmCluster([f"{name}={installed / script}" for name, script in hooks.items()]) as slurm:
        script = tmp_path / "job.sh"
        torchrun = "torchrun --standalone --nproc-per-node=2 --no-python torchobs run train.py 5"
        script.write_text(f"#!/bin/sh\nsrun {torchrun} {tmp_path / 'stop'}\n")
        number = slurm.submit("--ntasks=1", f"--chdir={tmp_path}", f"--output={tmp_path / 'job.log'}", script, **job)
        wait_until(lambda: ranks_of(prometheus, number, launcher="torchrun") == {"0", "1"}, 90)
        assert [path.name for path in flight.iterdir()] == [f"torchobs-{number}"]

        (tmp_path / "stop").touch()
        wait_until(lambda: slurm.state(number) == "COMPLETED", 60)
        wait_until(lambda: exits(prometheus, number) == {"0": "finished", "1": "finished"}, 60)
        wait_until(lambda: not any(any(place.iterdir()) for place in (flight, tmp_path / "state", tmp_path / "targets")), 60)
    assert paging(prometheus) == []
