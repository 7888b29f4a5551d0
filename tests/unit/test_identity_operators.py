"""One run under each Kubernetes operator: from the variables and labels that its release really sets.

Sources, read for this test: Kubeflow training-operator v1.8 (`pkg/controller.v1/pytorch/{envvar,master}.go`), Volcano 1.8
(`distributed-framework/pytorch/pytorch.go`), Kubeflow Trainer 2.0 (`plugins/torch/torch.go`), JobSet 0.8 (`jobset_types.go`).
Which label names the run, and the injection that reads it, is tested on a cluster (`tests/e2e/test_injection.py`).
"""

from collections.abc import Callable, Mapping

import pytest

from torchobs.config.settings import SettingsProblem, resolve
from torchobs.identity.identity import Identity, discover
from torchobs.identity.process import ProcessInfo


def _in_pod(host: str, environ: Mapping[str, str]) -> tuple[Identity, tuple[SettingsProblem, ...]]:
    """The identity of a container's first process: nothing is known of its parent, and hosts differ between pods."""
    return discover(environ, resolve({}, environ)[0], ProcessInfo(host, 1, 1_763_680_000_000_000_000, None, "/src/train.py"))


def _pytorchjob(rank: int, name: str = "gpt", namespace: str = "ml") -> tuple[str, dict[str, str]]:
    """`setPodEnv` of a PyTorchJob with a master and three workers."""
    host = f"{name}-master-0" if rank == 0 else f"{name}-worker-{rank - 1}"
    variables = {"PYTHONUNBUFFERED": "1", "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "MASTER_ADDR": f"{name}-master-0"}
    variables |= {"PET_MASTER_ADDR": f"{name}-master-0", "WORLD_SIZE": "4", "RANK": str(rank), "PET_NPROC_PER_NODE": "auto"}
    return host, variables | {"PET_NODE_RANK": str(rank), "PET_NNODES": "4", "POD_NAMESPACE": namespace}


def _volcano(rank: int, name: str = "gpt") -> tuple[str, dict[str, str]]:
    """`OnPodCreate` of the pytorch plugin, and the env and svc plugins' variables."""
    host = f"{name}-master-0" if rank == 0 else f"{name}-worker-{rank - 1}"
    variables = {"MASTER_ADDR": f"{name}-master-0.{name}", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": str(rank)}
    return host, variables | {"VC_TASK_INDEX": str(max(0, rank - 1)), "VK_TASK_INDEX": str(max(0, rank - 1))}


@pytest.mark.parametrize("pod", [_pytorchjob, _volcano])
def test_ranks_that_share_an_address_are_one_run_and_it_is_said_that_the_next_one_is_it_too(
    pod: Callable[[int], tuple[str, dict[str, str]]],
) -> None:
    """A pod of its own for each rank, torchrun in none of them, and no rendezvous id."""
    found = [_in_pod(*pod(rank)) for rank in range(4)]
    assert [identity.rank for identity, _ in found] == [0, 1, 2, 3]
    assert len({identity.run_id for identity, _ in found}) == 1
    assert {(identity.job_name, identity.launcher, identity.world_size) for identity, _ in found} == {("gpt", "env", 4)}
    for _, (problem,) in found:
        assert str(problem).startswith("TORCHOBS_RUN_ID is not set")
        assert "a later run at the same address has the same id" in str(problem)


def test_another_address_port_or_namespace_is_another_run() -> None:
    """Two teams may have a job of one name."""
    pods = (_pytorchjob(1), _pytorchjob(1, name="bert"), _pytorchjob(1, namespace="nlp"))
    ids = {_in_pod(host, environ)[0].run_id for host, environ in pods}
    assert len(ids | {_in_pod("gpt-worker-0", _pytorchjob(1)[1] | {"MASTER_PORT": "29500"})[0].run_id}) == 4


@pytest.mark.parametrize("pod", [_pytorchjob, _volcano])
def test_the_owners_uid_beats_the_address_and_nothing_is_said(pod: Callable[[int], tuple[str, dict[str, str]]]) -> None:
    """What the injection adds to each pod."""
    owner = {"TORCHOBS_K8S_JOB_NAME": "gpt-large", "TORCHOBS_K8S_JOB_UID": "0a7f8c1e-5a0e-4d0c-8c57-0c1a5c1f2b3d"}
    for rank in range(4):
        host, environ = pod(rank)
        identity, problems = _in_pod(host, environ | owner)
        assert (identity.job_name, identity.run_id, problems) == ("gpt-large", owner["TORCHOBS_K8S_JOB_UID"], ())


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", ""])
def test_an_address_of_the_node_itself_is_shared_by_every_run_there(address: str) -> None:
    """It would merge what has nothing to do with each other."""
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    process = ProcessInfo("node7", 1, 1_763_680_000_000_000_000, "9-1-a", "train.py")
    assert discover(environ, resolve({}, environ)[0], process)[0].run_id == "node7-9-1-a"


def test_one_nodes_ranks_and_torchruns_do_not_go_by_the_address() -> None:
    """DeepSpeed on one node has a parent, which no later run has; torchrun's port is another after each restart."""
    process = ProcessInfo("node7", 1, 1_763_680_000_000_000_000, "9-1-a", "train.py")
    deepspeed = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "MASTER_ADDR": "10.0.0.7"}
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
    for environ in (deepspeed, torchrun | {"MASTER_ADDR": "gpt-node-0-0.gpt", "MASTER_PORT": "29500"}):
        assert discover(environ, resolve({}, environ)[0], process)[0].run_id == "node7-9-1-a"


def test_a_trainjobs_pods_are_one_run_by_the_jobsets_label() -> None:
    """Trainer v2: torchrun with PET_ variables and no rendezvous id, in an indexed Job of a JobSet; its label is a variable."""
    runs = set()
    for node in range(2):
        for local in range(2):
            environ = {
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "2",
                "PET_NODE_RANK": str(node),
                "JOB_COMPLETION_INDEX": str(node),
                "PET_MASTER_ADDR": "gpt-node-0-0.gpt",
                "PET_MASTER_PORT": "29400",
                "MASTER_ADDR": "gpt-node-0-0.gpt",
                "RANK": str(2 * node + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(node),
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHOBS_K8S_JOB_NAME": "gpt",
                "TORCHOBS_K8S_JOB_UID": "b1e2",
            }
            identity, problems = _in_pod(f"gpt-node-0-{node}", environ)
            assert (identity.rank, problems) == (2 * node + local, ())
            runs.add((identity.job_name, identity.run_id))
    assert runs == {("gpt", "b1e2")}
