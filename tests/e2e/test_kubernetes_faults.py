"""Faults of a training and of its pod, on a real cluster, as the chart's Prometheus and Alertmanager tell of them.

Needs what `make kube-test` gives.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.exporters import value_on
from tests.kubernetes.cluster import OOM_KILLED, PORT, Pod, get, printed_steps
from tests.kubernetes.jobs import ARBITRARY_UID, IN_A_CLUSTER, job, scripts, trainer_of
from tests.kubernetes.stage import ENDS_S, STARTS_S, Stage, monitored, steps, torchrun
from tests.support import wait_until

pytestmark = IN_A_CLUSTER

INCARNATIONS = 5
# The kernel takes the largest process by its score: of the sidecar's its first, and not one of these.
EXHAUST = """
import os, time
open("/proc/1/oom_score_adj", "w").write("1000")
for _ in range(40):
    if not os.fork():
        held = b"x" * (6 << 20)
        time.sleep(30)
time.sleep(30)
"""
FILL = """
with open("/var/run/torchobs/flight/full", "wb", 0) as file:
    while True:
        file.write(bytes(65536))
"""


def hoards() -> dict[str, Any]:
    """Takes memory until the kernel ends it."""
    made = job("hoards", "400", "60", backoffLimit=0)
    trainer_of(made)["resources"]["limits"]["memory"] = "640Mi"
    return made


def fills() -> dict[str, Any]:
    """Its flight volume is full before it trains."""
    made = job("fills", "20")
    trainer_of(made)["command"] = ["sh", "-c", f"python3 -c '{FILL}'; exec python3 /script/pod.py 20"]
    return made


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "hoards": hoards,
    "loops": lambda: torchrun(
        job("loops", "crash", script="sick_pod.py", backoffLimit=0), f"--max-restarts={INCARNATIONS - 1}"
    ),
    "steady": lambda: job("steady", "100000"),
    "killed": lambda: torchrun(job("killed", "100000", backoffLimit=0)),
    "fills": fills,
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """All Jobs at once."""
    folder = tmp_path_factory.mktemp("alertmanager")
    with monitored(folder, scripts("pod.py", "sick_pod.py"), *(make() for make in JOBS.values())) as made:
        yield made


def test_an_out_of_memory_kill_is_told_with_its_reason_and_pod(stage: Stage) -> None:
    """The trainer's limit, which no other container of the pod shares."""
    pod = stage.ended("hoards", "Failed")
    assert pod.ended("trainer")["exitCode"] == OOM_KILLED
    alert = stage.told("hoards", "TorchobsRankFailed")
    assert alert["receiver"] == "tickets"
    assert f"in pod {pod.name}: out_of_memory" in alert["annotations"]["description"]


def test_a_killed_rank_is_lost_with_its_last_step(stage: Stage) -> None:
    """By SIGKILL, which leaves no word of it: the launcher lives, and only its child is gone."""
    before = stage.training("killed")
    seen = steps(before)
    stage.namespace.kubectl("exec", before.name, "-c", "trainer", "--", "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")
    pod = stage.ended("killed", "Failed")
    assert stage.scraped("torchobs_rank_exit", pod, reason="lost") == 1
    last = stage.scraped("torchobs_steps_total", pod)
    assert last >= seen
    assert abs(printed_steps(stage.namespace.logs(pod, "trainer")) - last) <= 1  # the moment may be between step and line
    alert = stage.told("killed", "TorchobsRankFailed")
    assert alert["receiver"] == "tickets"
    assert f"in pod {pod.name}: lost" in alert["annotations"]["description"]


def test_a_killed_sidecar_comes_back_and_has_lost_nothing(stage: Stage) -> None:
    """Out of memory by its own limit: the training does not notice, and the new one has all that the first had."""
    before = stage.training("steady")
    seen = steps(before)
    exhaust = ["kubectl", "-n", stage.namespace.name, "exec", before.name, "-c", "torchobs", "--", "python3", "-c", EXHAUST]
    subprocess.run(exhaust, capture_output=True, check=False)  # what becomes of it is the kernel's choice

    def restarted() -> Pod | None:
        (pod,) = stage.namespace.pods("steady")
        return pod if pod.container("torchobs")["restartCount"] else None

    pod = wait_until(restarted, timeout_s=STARTS_S, interval_s=0.3)
    assert pod is not None
    assert pod.container("torchobs")["lastState"]["terminated"]["exitCode"] == OOM_KILLED

    def has_all() -> bool:  # a page is of the moment before; lost steps would be missing at any moment
        printed = printed_steps(stage.namespace.logs(pod, "trainer"))
        return steps(pod) >= printed > seen

    assert wait_until(has_all, timeout_s=STARTS_S, interval_s=0.2)
    assert pod.container("trainer")["restartCount"] == 0
    page = get(f"{pod.ip}:{PORT}", User_Agent="tests")[1]
    assert value_on(page, "torchobs_rank_state", state="alive") == 1
    assert value_on(page, "torchobs_steps_total", run_id=stage.uid("steady")) is not None


def test_a_full_flight_volume_stops_no_training(stage: Stage) -> None:
    """It trains to its end unobserved, and the log says so."""
    pod = stage.ended("fills", "Complete")
    log = stage.namespace.logs(pod, "trainer")
    assert printed_steps(log) == 20
    assert "torchobs" in log


def test_any_user_trains_on_a_root_file_system_that_is_read_only(stage: Stage) -> None:
    """Both containers of the shipped Job, by a user that no image knows."""
    pod = stage.training("steady")
    assert pod.content["spec"]["securityContext"]["runAsUser"] == ARBITRARY_UID
    for container in (*pod.content["spec"]["initContainers"], *pod.content["spec"]["containers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert value_on(get(f"{pod.ip}:{PORT}", User_Agent="tests")[1], "torchobs_rank_state", state="alive") == 1


def test_a_crash_loop_is_seen_by_rules_evaluated_once_a_minute(stage: Stage) -> None:
    """Four lives within half a minute, of one pod that has trained for a minute before."""
    stage.ended("loops", "Failed")
    run = stage.uid("loops")

    def firing() -> bool:
        return any((one.state, one.labels["run_id"]) == ("firing", run) for one in stage.slow.alerts("TorchobsCrashLoop"))

    wait_until(firing, timeout_s=ENDS_S, interval_s=1.0)
    assert stage.told("loops", "TorchobsCrashLoop")["receiver"] == "pager"
