"""A hung run of two real gloo ranks: who waits, and for whom, on the page, for Prometheus, and in `inspect`."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from tests import support
from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.diagnosis.health import health
from torchobs.exporter import exporter_metrics
from torchobs.exporter.commands import ArtifactStore, CommandService
from torchobs.exporter.config import ExporterConfig
from torchobs.ranks import state
from torchobs.ranks.live import RunsReader
from torchobs.ranks.runs import load
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from pathlib import Path

    from torchobs.ranks.snapshot import Snapshot

QUIET_S = 1.5


def train(start: Any, flight_dir: Path, place: str, *often: str, **variables: str) -> None:
    """Start both ranks."""
    port = support.free_port()
    for rank in range(2):
        given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {**support.clean_environment(), **{name: str(value) for name, value in given.items()}}
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TORCHOBS_RUN_ID": "hung",
            "TORCHOBS_GRAD_INTERVAL": "1",
            **variables,
        }
        command = (sys.executable, "-m", "tests.distributed_rank", "hang", str(flight_dir), place, *often)
        start(*command, torch=True, env=environment, cwd=support.ROOT)


def positions(snapshot: Snapshot) -> dict[str, tuple[str, float]]:
    """What Prometheus is told of where each rank is."""
    samples = {rank.rank: list(exporter_metrics.of_rank(rank)) for rank in snapshot.ranks}
    return {
        rank: (one.attributes["phase"], round(one.value, 3))
        for rank, found in samples.items()
        for one in found
        if one.metric is catalog.RANK_STALL_POSITION
    }


@pytest.mark.parametrize(
    ("place", "culprit", "told"),
    [
        ("forward", ("forward", 5.4), "Rank 1 stays in forward of step 6, and the other rank waits in backward of step 6."),
        ("data", ("data", 5.2), "Rank 1 fetches data of step 6, and the other rank waits in backward of step 6."),
        ("skip", ("idle", 20.0), "Rank 1 has left its training loop, and the other rank waits in backward of step 20."),
    ],
)
def test_the_rank_that_sleeps_is_named(
    start: Any, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, place: str, culprit: tuple[str, float], told: str
) -> None:
    """Not rank 0, which waits in backward's all-reduce."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_S)
    monkeypatch.setattr(state, "PATIENT_PHASES", frozenset({"idle"}))  # who left the loop is waited for half an hour else
    monkeypatch.setattr(state, "FIRST_STEP_S", QUIET_S)
    train(start, flight_dir, place)
    with closing(Scanner(ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=QUIET_S))) as scanner:

        def hung() -> list[Snapshot]:
            snapshot = scanner.scan()
            at = positions(snapshot)
            return [snapshot] if at.get("0", ("", 0.0))[0] == "backward" and at.get("1") == culprit else []

        (snapshot,) = support.wait_until(hung, 60.0, 0.2)
        assert positions(snapshot)["0"] == ("backward", culprit[1] - 1 + 0.6 if place == "skip" else 5.6)
        (run,) = RunsReader().runs(snapshot, {})
        assert told in health(run).text
    support.wait_until(lambda: any(text.startswith(told) for text in findings(flight_dir)), 30.0, 0.5)
    reports, _ = load(sorted(flight_dir.glob("*.flight")))
    assert reports[diagnose_run(reports).principal].rank == "1"


def findings(flight_dir: Path) -> list[str]:
    """What `torchobs inspect` finds of the ranks together."""
    reports, _ = load(sorted(flight_dir.glob("*.flight")))
    return [one.long for one in diagnose_run(reports).together]


def test_stacks_name_the_rank_that_sleeps_in_the_same_phase(
    start: Any, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in backward of step 6; the exporter asks all ranks of a hung run for stacks, and inspect reads them."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_S)
    train(start, flight_dir, "hook", TORCHOBS_DISABLE_PROBES="collectives")  # which would name it after half a minute
    support.wait_until(lambda: len(list(flight_dir.glob("*.flight"))) == 2)
    config = ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=QUIET_S)
    with closing(Scanner(config)) as scanner:
        places = {"0": ("backward", 5.6), "1": ("backward", 5.6)}
        support.wait_until(lambda: positions(scanner.scan()) == places, 60.0, 0.2)
        assert not any("Rank 1 " in text for text in findings(flight_dir))
        CommandService(config, ArtifactStore(config)).look(scanner.scan())
    (text,) = support.wait_until(lambda: [one for one in findings(flight_dir) if one.startswith("Rank 1 runs")], 30.0, 0.5)
    assert "distributed_rank.py:" in text
    assert text.endswith("in backward of step 6, and the other rank waits in backward of step 6.")


def test_torch_s_flight_recorder_names_the_rank_that_sleeps_in_the_same_phase(
    start: Any, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without stacks: both are in backward of step 6, and rank 1 did not come to the all-reduce of its gradients."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_S)
    train(start, flight_dir, "hook", "0.3")
    told = re.compile(
        r"Rank 1 stays in backward of step 6, and the other rank waits in backward of step 6\. Rank 1 has not come to"
        r" all_reduce number (\d+) of group default \(gloo\), in which 1 rank waits \(the last called there is number (\d+)\)\."
    )
    with closing(Scanner(ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=QUIET_S))) as scanner:

        def named() -> list[re.Match[str]]:
            runs = RunsReader().runs(scanner.scan(), {})
            return [found for run in runs if (found := told.search(health(run).text))]

        (found,) = support.wait_until(named, 180.0, 0.2)
        assert int(found[1]) == int(found[2]) + 1
    support.wait_until(lambda: [text for text in findings(flight_dir) if told.fullmatch(text)], 90.0, 0.5)


def test_a_recorder_that_is_off_is_said_once_and_leaves_counts_alone(start: Any, flight_dir: Path) -> None:
    """Process groups count their collectives themselves; the other ways to name a hung rank are at work, too."""
    train(start, flight_dir, "hook", "0.3", TORCH_FR_BUFFER_SIZE="0")

    def told() -> list[list[str]]:
        reports, _ = load(sorted(flight_dir.glob("*.flight")))
        reasons = [[fact.text("reason") for fact in one.events_named(catalog.EVENT_COLLECTIVES_UNKNOWN)] for one in reports]
        counted = [metric for metric in catalog.METRICS if metric.name.startswith("torchobs.collective.")]
        assert {metric for one in reports for metric in counted if one.of(metric)} <= {catalog.COLLECTIVE_ENQUEUED}
        return reasons if len(reasons) == 2 and all(reasons) else []

    reasons = support.wait_until(told, 180.0, 0.3)
    assert [len(of_one) for of_one in reasons] == [1, 1]
    assert "TORCH_FR_BUFFER_SIZE is 0" in reasons[0][0]


def test_ranks_that_go_around_ddp_are_said_to_disagree(start: Any, flight_dir: Path) -> None:
    """Each trains on its own data from step 6 on, by `model.module`: of two neither is the odd one."""
    train(start, flight_dir, "bypass")
    support.wait_until(lambda: len(list(flight_dir.glob("*.flight"))) == 2)
    (text,) = support.wait_until(
        lambda: [one for one in findings(flight_dir) if one.startswith("Ranks do not agree")], 60.0, 0.5
    )
    assert "(rank 0: " in text
    assert " 1: " in text
