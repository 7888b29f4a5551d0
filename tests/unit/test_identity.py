"""The rank and the run that this process is, under every launcher; its command line without secrets, and its git commit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import for_each
from torchobs.config.identity import Identity, ProcessInfo, discover, this_process
from torchobs.config.provenance import HIDDEN, Checkout, checkout, is_secret_name, redacted, redacted_text, redacted_value
from torchobs.config.settings import SettingsProblem, resolve
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


PROCESS = ProcessInfo(
    "node7", 4242, 1_763_680_000_123_456_789, parent="4000-88-0f1e2d3c", argv0="/home/me/train.py", key="4242-99-0f1e2d3c"
)


def variables(words: str) -> dict[str, str]:
    """Variables as a shell sets them."""
    return dict(word.split("=", 1) for word in words.split())


ELASTIC = variables(
    "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=node6 MASTER_PORT=29500"
    " TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=gpt-42"
    " TORCHELASTIC_ERROR_FILE=/tmp/torchelastic_grzndjlf/gpt-42_v8tm0dnr/attempt_2/1/error.json"
)
UNNAMED = ELASTIC | {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_aek_zb3s/none_juw2_885/attempt_0/1/error.json",
}
SRUN = variables(
    "SLURM_JOB_ID=1234 SLURM_JOB_NAME=gpt SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=2(x2),1"
    " SLURM_NTASKS=8 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1"
)
# What a batch script finds, and the torchrun in it inherits: one process, although PROCID and NTASKS are set.
SBATCH = variables("SLURM_JOB_ID=1234 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0")
OPENMPI = variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
    " OMPI_COMM_WORLD_NODE_RANK=1 PMIX_NAMESPACE=prterun-node6-311@1"
)
PMI = variables("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
LIGHTNING = {"WORLD_SIZE": "4", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40123"}
INDEXED = {"JOB_COMPLETION_INDEX": "3"}


def _discover(
    environ: Mapping[str, str], process: ProcessInfo = PROCESS, **overrides: object
) -> tuple[Identity, list[SettingsProblem]]:
    settings, _ = resolve(overrides, environ)
    identity, problems = discover(environ, settings, process)
    return identity, list(problems)


def _place(of: Identity) -> tuple[object, ...]:
    return of.launcher, of.rank, of.world_size, of.local_rank, of.local_world_size, of.node_rank, of.restart


ARRAY = variables("SLURM_ARRAY_JOB_ID=1200 SLURM_ARRAY_TASK_ID=7 SLURM_RESTART_COUNT=2")
DEEPSPEED = variables("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_SIZE=4")
JOB = INDEXED | {"WORLD_SIZE": "4", "TORCHOBS_K8S_JOB_UID": "c9948307"}
LAUNCHERS: dict[str, tuple[dict[str, str], str, tuple[object, ...]]] = {
    "torchrun": (ELASTIC, "gpt-42", ("torchrun", 5, 8, 1, 4, 1, 2)),
    "torchrun in sbatch": (SBATCH | ELASTIC, "1234", ("torchrun", 5, 8, 1, 4, 1, 2)),
    "deepspeed": (DEEPSPEED, "node7-4000-88-0f1e2d3c", ("env", 1, 4, 1, 4, None, 0)),
    "srun": (SRUN, "1234", ("slurm", 3, 5, 1, 2, 1, 0)),
    "srun in a requeued array": (SRUN | ARRAY, "1200_7", ("slurm", 3, 5, 1, 2, 1, 2)),
    "sbatch without srun": (SBATCH, "1234", ("python", 0, 1, 0, 1, 0, 0)),
    "mpirun": (OPENMPI, "prterun-node6-311@1", ("openmpi", 3, 4, 1, 2, None, 0)),
    "mpiexec": (PMI, "node7-4000-88-0f1e2d3c", ("pmi", 3, 4, 1, 2, None, 0)),
    "indexed job": (JOB, "c9948307", ("kubernetes", 3, 4, 0, None, None, 0)),
    "lightning": (LIGHTNING | {"LOCAL_RANK": "0"}, "node7-4242-99-0f1e2d3c", ("lightning", 0, 4, 0, None, 0, 0)),
    "lightning, child": (LIGHTNING | {"LOCAL_RANK": "3"}, "node7-4000-88-0f1e2d3c", ("lightning", 3, 4, 3, None, 0, 0)),
    "bare python": ({}, "node7-20251120T230640Z-4242", ("python", 0, 1, 0, 1, 0, 0)),
}


@for_each(LAUNCHERS)
def test_every_launcher_is_understood(environ: Mapping[str, str], run_id: str, place: tuple[object, ...]) -> None:
    """Launcher, rank, world size, local rank, local world size, node rank, restarts and run id, as each launcher says."""
    identity, _ = _discover(environ)
    assert (_place(identity), identity.run_id) == (place, run_id)


def test_nonsense_is_reported_once_and_the_next_launcher_asked() -> None:
    """A value that does not parse, or a rank outside its world, never raises and names its variable."""
    cases: list[tuple[dict[str, str], str, str]] = [
        (ELASTIC | {"RANK": "abc"}, "python", "RANK"),
        (ELASTIC | {"RANK": "8"}, "python", "RANK"),
        (SRUN | {"RANK": "٣"}, "slurm", "RANK"),
        (INDEXED | OPENMPI | {"OMPI_COMM_WORLD_SIZE": "3"}, "kubernetes", "OMPI_COMM_WORLD_RANK"),
        (ELASTIC | {"WORLD_SIZE": "many"}, "torchrun", "WORLD_SIZE"),
        (ELASTIC | {"TORCHELASTIC_RESTART_COUNT": "twice"}, "torchrun", "TORCHELASTIC_RESTART_COUNT"),
    ]
    for environ, launcher, named in cases:
        identity, problems = _discover(environ | {"TORCHOBS_RUN_ID": "run"})
        assert identity.launcher == launcher
        assert [problem.name for problem in problems] == [named]
        assert problems[0].value == environ[named]


def test_settings_beat_the_launcher() -> None:
    """Rank, local rank, world size, restart, run id and job name can be set, by argument or variable."""
    chosen = variables("TORCHOBS_RANK=6 TORCHOBS_RUN_ID=mine OTEL_SERVICE_NAME=gpt")
    identity, problems = _discover(ELASTIC | chosen, local_rank=2, world_size=16, restart=9)
    assert _place(identity) == ("torchrun", 6, 16, 2, 4, 1, 9)
    assert (identity.run_id, identity.job_name, problems) == ("mine", "gpt", [])


def test_a_rank_by_setting_alone_leaves_the_world_unknown() -> None:
    """Somebody who starts rank 2 by hand has more than one process, and torchobs does not know how many."""
    identity, _ = _discover({"TORCHOBS_RANK": "2"})
    assert (identity.rank, identity.world_size, identity.local_world_size) == (2, None, None)


SOURCES: list[tuple[dict[str, str], str]] = [
    ({"TORCHOBS_RUN_ID": "chosen"}, "chosen"),
    ({"TORCHOBS_K8S_JOB_UID": "c9948307"}, "c9948307"),
    ({"SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}, "1200_7"),
    ({"SLURM_JOB_ID": "1234"}, "1234"),
    ({"TORCHELASTIC_RUN_ID": "gpt-42"}, "gpt-42"),
    ({"TORCHELASTIC_ERROR_FILE": UNNAMED["TORCHELASTIC_ERROR_FILE"]}, "node7-juw2_885"),
    ({}, "node7-4000-88-0f1e2d3c"),
]


def test_the_better_source_of_the_run_id_wins() -> None:
    """Each source beats all that are listed after it."""
    environ = {name: value for name, value in UNNAMED.items() if name != "TORCHELASTIC_ERROR_FILE"}
    for variables, run_id in reversed(SOURCES):
        environ |= variables
        assert _discover(environ)[0].run_id == run_id


def test_an_unnamed_torchrun_gives_its_ranks_and_restarts_one_run() -> None:
    """Two ranks and a restart of one launch agree, although a shell of its own started each; the next launch differs."""
    ids: dict[str, set[str]] = {"juw2a885": set(), "w2fr259u": set()}
    for launch, run_ids in ids.items():
        for rank, attempt, parent in (("0", 0, "51"), ("1", 0, "52"), ("1", 1, "53")):
            file = f"/logs/none_{launch}/attempt_{attempt}/{rank}/error.json"
            worker = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_ERROR_FILE": file}
            run_ids.add(_discover(UNNAMED | worker, dataclasses.replace(PROCESS, parent=parent))[0].run_id)
    assert ids == {launch: {f"node7-{launch}"} for launch in ids}


def test_nodes_that_cannot_agree_on_a_run_id_are_reported() -> None:
    """Half of a run under another id is a defect that only the user can cure: say how."""
    by_rank = ({"RANK": "1", "WORLD_SIZE": "2"}, {"TORCHOBS_RANK": "1"})
    for environ in (UNNAMED, PMI, INDEXED, INDEXED | {"WORLD_SIZE": "4"}, *by_rank):
        [problem] = _discover(environ)[1]
        assert str(problem).startswith("TORCHOBS_RUN_ID is not set")
        assert _discover(environ | {"TORCHOBS_RUN_ID": "mine"})[1] == []


def test_the_job_name_is_the_best_that_is_known() -> None:
    """Told, else the scheduler's, else the script's."""
    cases: list[tuple[Mapping[str, str], str, str, str]] = [
        ({"TORCHOBS_JOB_NAME": "a", "OTEL_SERVICE_NAME": "b"}, "node7", "train.py", "a"),
        ({"OTEL_SERVICE_NAME": "b", "OTEL_RESOURCE_ATTRIBUTES": "service.name=c"}, "node7", "train.py", "b"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=c", "TORCHOBS_K8S_JOB_NAME": "d"}, "node7", "train.py", "c"),
        ({"TORCHOBS_K8S_JOB_NAME": "d", "JOB_COMPLETION_INDEX": "3"}, "gpt-3", "train.py", "d"),
        ({"JOB_COMPLETION_INDEX": "3"}, "gpt-3", "train.py", "gpt"),
        ({"SLURM_JOB_NAME": "gpt"}, "node7", "train.py", "gpt"),
        ({}, "node7", "/site-packages/ipykernel_launcher.py", "notebook"),
        ({}, "node7", "/src/gpt/__main__.py", "gpt"),
        ({}, "node7", "-c", "torch"),
    ]
    for environ, host, argv0, name in cases:
        assert _discover(environ, dataclasses.replace(PROCESS, host=host, argv0=argv0))[0].job_name == name


def test_names_are_printable_and_bounded_and_stay_apart() -> None:
    """A label never holds a line break, an invisible character or more than 128 characters."""
    assert _discover({"TORCHOBS_RUN_ID": "a\nb\u202ec\udcffd"})[0].run_id == "a_b_c_d"
    long, longer = (_discover({"TORCHOBS_RUN_ID": "x" * length})[0].run_id for length in (200, 201))
    assert len(long) == len(longer) == 128
    assert long != longer
    assert _discover({"TORCHOBS_RUN_ID": "x" * 128})[0].run_id == "x" * 128


def test_what_else_describes_the_process_is_kept() -> None:
    """The pod by its downward API, the Job, and what the user says, which wins."""
    identity, problems = _discover(
        variables(
            "POD_NAME=gpt-3-x7k K8S_POD_UID=0f1e POD_NAMESPACE=research NODE_NAME= TORCHOBS_K8S_JOB_NAME=gpt"
            " TORCHOBS_K8S_JOB_UID=c994 OTEL_RESOURCE_ATTRIBUTES=team=nlp,k8s.namespace.name=mine"
        )
    )
    pod = variables("k8s.pod.name=gpt-3-x7k k8s.pod.uid=0f1e k8s.namespace.name=mine k8s.job.name=gpt k8s.job.uid=c994")
    assert dict(identity.resource) == pod | {"team": "nlp"}
    assert problems == []


def test_a_description_leaves_out_what_is_unknown_and_cannot_be_forged() -> None:
    """Fields win over resource attributes of the same name."""
    described = _discover({"JOB_COMPLETION_INDEX": "3", "OTEL_RESOURCE_ATTRIBUTES": "rank=9,team=nlp"})[0].described()
    words = "team=nlp job_name=train run_id=node7-4000-88-0f1e2d3c launcher=kubernetes host=node7 launch=4000-88-0f1e2d3c"
    assert described == {**variables(words), "rank": 3, "local_rank": 0, "restart": 0}


def test_a_replica_group_is_part_of_the_identity() -> None:
    """Each group of torchft counts its ranks from 0; what is no number is reported."""
    identity, problems = _discover(ELASTIC | {"REPLICA_GROUP_ID": "3"})
    assert (identity.rank, identity.described()["replica_group"], problems) == (5, 3, [])
    assert labels.identity(identity.described())[2] == "5-g3"
    identity, problems = _discover(ELASTIC | {"REPLICA_GROUP_ID": "left"})
    assert (identity.replica_group, [problem.name for problem in problems]) == (None, ["REPLICA_GROUP_ID"])
    assert _discover(ELASTIC)[0].replica_group is None


def test_the_longest_description_fits_the_flight_file() -> None:
    """Whatever the environment holds, the header's JSON has room; what was left out is reported."""
    wide = "\N{GRINNING FACE}" * 1000
    attributes = ",".join(f"key{number}={wide[:20]}" for number in range(100))
    environ = ELASTIC | {"TORCHOBS_JOB_NAME": wide, "TORCHOBS_RUN_ID": wide, "OTEL_RESOURCE_ATTRIBUTES": attributes}
    identity, problems = _discover(environ, dataclasses.replace(PROCESS, host=wide))
    assert len(json.dumps(identity.described(), ensure_ascii=False, separators=(",", ":")).encode()) <= 3300
    assert len(identity.resource) + len(problems) == 100


VARIABLES = sorted(
    {*ELASTIC, *SRUN, *OPENMPI, *PMI, *INDEXED, "SLURM_RESTART_COUNT", "SLURM_JOBID", "SLURM_TASKS_PER_NODE", "POD_NAME"}
)
TEXTS = st.one_of(st.sampled_from(["0", "1", "2", "8", "-1", "none", "", "2(x2)"]), st.text(max_size=12))


@given(st.dictionaries(st.sampled_from(VARIABLES), TEXTS), st.text(max_size=8), st.text(max_size=8))
def test_no_environment_makes_it_raise(environ: dict[str, str], host: str, argv0: str) -> None:
    """Always an identity, and always one that makes sense: names that are there, a rank within its world."""
    identity, problems = _discover(environ, dataclasses.replace(PROCESS, host=host, argv0=argv0))
    assert identity.job_name
    assert identity.run_id
    assert identity.host
    assert 0 <= identity.rank < (identity.world_size or identity.rank + 1)
    assert len(set(problems)) == len(problems)


def test_a_forked_child_is_another_process_of_this_parent() -> None:
    """Forked ranks do not inherit the facts of the process that forked them, and share their parent."""
    this_process()
    read, write = os.pipe()
    for _ in range(2):
        if (pid := os.fork()) == 0:
            os.write(write, json.dumps(dataclasses.asdict(this_process())).encode() + b"\n")
            os._exit(0)
        os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as lines:
        children = [ProcessInfo(**json.loads(line)) for line in lines]
    assert len({child.pid for child in children} | {os.getpid()}) == 3
    assert all(a.parent == b.parent == this_process().key != this_process().parent for a, b in pairwise(children))
    assert all(child.start_ns >= this_process().start_ns for child in children)


def _in_pod(host: str, environ: Mapping[str, str]) -> tuple[Identity, tuple[SettingsProblem, ...]]:
    """The identity of a container's first process: nothing is known of its parent, and hosts differ between pods."""
    return discover(environ, resolve({}, environ)[0], ProcessInfo(host, 1, 1_763_680_000_000_000_000, None, "/src/train.py"))


def _pytorchjob(rank: int, name: str = "gpt", namespace: str = "ml") -> tuple[str, dict[str, str]]:
    """`setPodEnv` of a PyTorchJob with a master and three workers."""
    return f"{name}-master-0" if rank == 0 else f"{name}-worker-{rank - 1}", variables(
        f"MASTER_PORT=23456 PET_MASTER_PORT=23456 MASTER_ADDR={name}-master-0 PET_MASTER_ADDR={name}-master-0 WORLD_SIZE=4"
        f" RANK={rank} PET_NPROC_PER_NODE=auto PET_NODE_RANK={rank} PET_NNODES=4 POD_NAMESPACE={namespace}"
    )


def test_ranks_that_share_an_address_are_one_run_and_it_is_said_that_the_next_one_is_it_too() -> None:
    """A pod of its own for each rank, torchrun in none of them, and no rendezvous id."""
    identities = [_in_pod(*_pytorchjob(rank)) for rank in range(4)]
    assert [identity.rank for identity, _ in identities] == [0, 1, 2, 3]
    assert len({identity.run_id for identity, _ in identities}) == 1
    assert {(identity.job_name, identity.launcher, identity.world_size) for identity, _ in identities} == {("gpt", "env", 4)}
    for _, (problem,) in identities:
        assert str(problem).startswith("TORCHOBS_RUN_ID is not set")
        assert "a later run at the same address has the same id" in str(problem)


def test_another_address_port_or_namespace_is_another_run() -> None:
    """Two teams may have a job of one name."""
    pods = (_pytorchjob(1), _pytorchjob(1, name="bert"), _pytorchjob(1, namespace="nlp"))
    ids = {_in_pod(host, environ)[0].run_id for host, environ in pods}
    assert len(ids | {_in_pod("gpt-worker-0", _pytorchjob(1)[1] | {"MASTER_PORT": "29500"})[0].run_id}) == 4


@for_each(
    {
        "DeepSpeed on one node has a parent, which no later run has": (DEEPSPEED | {"MASTER_ADDR": "10.0.0.7"},),
        "torchrun's port is another after each restart": (UNNAMED | {"MASTER_ADDR": "gpt-node-0-0.gpt"},),
        **{
            f"{address or 'no address'}: of the node itself": (
                variables(f"RANK=1 WORLD_SIZE=2 MASTER_PORT=29500 MASTER_ADDR={address}"),
            )
            for address in ("127.0.0.1", "localhost", "::1", "")
        },
    }
)
def test_an_address_that_others_share_or_that_changes_names_no_run(environ: dict[str, str]) -> None:
    """It would merge what has nothing to do with each other, or take apart what belongs together."""
    process = ProcessInfo("node7", 1, 1_763_680_000_000_000_000, "9-1-a", "train.py")
    environ = {name: value for name, value in environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    assert discover(environ, resolve({}, environ)[0], process)[0].run_id == "node7-9-1-a"


SECRET = "s3cr3t-Value"


def test_a_named_secret_is_gone() -> None:
    """By its name: as a flag, a pair, a header, a query, JSON, or code."""
    cases: list[list[str]] = [
        ["--api-key", SECRET],
        *([f"{name}={SECRET}"] for name in ("--password", "AWS_SECRET_ACCESS_KEY", "trainer.logger.apiKey", "+logger.token")),
        *([f"{name}={SECRET}"] for name in ("--env=WANDB_API_KEY", "--args=--password", "--launch=env=WANDB_API_KEY")),
        *(["--header", header + SECRET] for header in ("Authorization: Bearer ", "X-Api-Key: ")),
        *(["-H", header + SECRET] for header in ("Authorization: ApiKey ", "Cookie: a=b; session=")),
        ["--url", f"https://user:{SECRET}@host/path"],
        ["--url", f"postgresql://{SECRET}@host/db"],
        ["--url", f"https://host/path?access_token={SECRET}&page=2"],
        [f"--url=https://host/path?api_key={SECRET}"],
        [f"--db=postgres://u:p@host/db?password={SECRET}"],
        [f"--db=postgres://u:a/{SECRET}@host/db"],
        ["--config", f'{{"lr": 0.1, "api_key": "{SECRET}"}}'],
        ["--config", f"{{'password': '{SECRET}'}}"],
        ["--config", f"{{'auth': ['first', '{SECRET}']}}"],
        ["--config", f'{{"password": "a\\"{SECRET}"}}'],
        ["--secret=two words " + SECRET],
        ["-c", f"import wandb; wandb.login(key='{SECRET}')"],
        ["-uc", f"login('{SECRET}')"],
        ["--env", f"HF_TOKEN={SECRET}"],
        [f"wandb={{api_key:{SECRET}}}"],
        [f"wandb: {{api_key: {SECRET}}}"],
        [f"+env={{a:{{api_key:{SECRET}}},b:2}}"],
        ["--api_keys", "first", SECRET],
        ["++wandb.key", SECRET],
        [f"python x.py --api-key {SECRET} --lr 1"],
        [f"--args=--api-key {SECRET}"],
        ["--user", f"admin:{SECRET}"],
        [f"--header=Cookie: a=b; session={SECRET}"],
        ["-b", f"a=b; session={SECRET}"],
    ]
    for arguments in cases:
        assert SECRET not in " ".join(redacted(["python", *arguments, "--lr", "0.1"]))
        assert redacted(["python", *arguments, "--lr", "0.1"])[-2:] == ["--lr", "0.1"]


def test_a_token_of_a_known_form_is_gone_under_any_name() -> None:
    """Also as an argument of its own."""
    cases: list[str] = [
        "hf_abcdefghijklmnopqrstuv", "ghp_" + "a1" * 18, "github_pat_" + "a1" * 20, "glpat-" + "a1" * 10, "sk-" + "a1" * 20,
        "AKIAABCDEFGHIJKLMNOP", "xoxb-1234567890-abc", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc",
        "0123456789" * 4, "npm_" + "a1" * 18, "dapi" + "0a" * 16, "sk_live_" + "a1" * 12,
        "https://hooks.slack.com/services/T0/B0/abc",
        "-----BEGIN RSA PRIVATE KEY-----abc",
        "hf_oauth_abcdefghijklmnopqrst", "api_org_abcdefghijklmnopqrstuvwxyz1234", "xapp-1-A123-456-abcdef0123456789",
        "xoxe.xoxp-1-abcdefghijk", "ghs_16C7e42F292c6912E7710c838347Ae178B4a", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzEXAMPLEKE",
        "wandb_v1_abcdefghijklmnopqrstuvwxyz0123", "ya29.a0AfH6SMBabcdefghijklmnop", "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.",
        "run_ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    ]  # fmt: skip
    for token in cases:
        hidden = f"run_{HIDDEN}" if token.startswith("run_") else f"{HIDDEN}." if token.endswith(".") else HIDDEN
        assert redacted(["train.py", token, f"--name={token}"]) == ["train.py", hidden, f"--name={hidden}"]


def test_what_is_no_secret_stays() -> None:
    """Numbers of tokens, tokenizers, monkeys, times of day, paths, models and URLs; a flag behind one named as a secret."""
    text = (
        "python -m x train.py --max-tokens 4096 --num_tokens=2M --tokenizer gpt2 --monkey x --lr 3e-4 model.keypoints=17"
        " --start=12:30:00 --data /data/keys/train.bin --url https://host/path?page=2 --author me --betas 0.9,0.95 -b 32"
        " /data/imagenet/train/Experiment2012 --model=meta-llama/Llama-3.1-8B-Instruct hf_hub --use-auth-token --lr 0.1"
    )
    assert redacted(text.split()) == text.split()
    assert [redacted_text(word) for word in text.split()] == text.split()


def test_names_and_settings() -> None:
    """Names in any spelling; settings by their names."""
    names = ("token", "HF_TOKEN", "hfToken", "x-api-key", "apikey", "DB_PASSWORD", "accessKey", "client_secret", "credentials")
    assert all(map(is_secret_name, (*names, "passphrase", "auth", "encryptionkey")))
    assert not any(map(is_secret_name, ("tokenizer", "keyboard", "monkey", "lr", "secretary", "authors", "compass")))
    assert (redacted_value("api_key", "abc"), redacted_value("max_tokens", "512")) == (HIDDEN, "512")
    assert redacted_text("mysql://u:p@h/d") == f"mysql://{HIDDEN}@h/d"


@pytest.mark.parametrize("part", ["a", "a ", "aGVsbG8x", "a=b ", " ", "a.b-"])
def test_a_long_argument_takes_time_by_its_length_alone(part: str) -> None:
    """A configuration in base64 of 20 KB held the training's start up for 20 s: time by the square of its length."""

    def least_s(length: int) -> float:
        text, times = (part * length)[:length], []
        for _ in range(3):
            begun = time.thread_time()
            redacted_text(text)
            times.append(time.thread_time() - begun)
        return min(times)

    assert least_s(16_000) < 64 * least_s(1_000)  # in proportion 16 times as long, by the square 256 times


Git = Callable[..., str]


@pytest.fixture
def git(program: Callable[[str], str], tmp_path: Path) -> Git:
    """Run git in a repository with one commit of two files."""
    name, user = program("git"), ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=trunk"]

    def run(*arguments: str, where: Path = tmp_path) -> str:
        return subprocess.run([name, *user, *arguments], cwd=where, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "-q")
    for file in ("train.py", "sub/ümlaut.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("one\n")
    run("add", ".")
    run("commit", "-qm", "first")
    return run


def test_packed_references_detached_heads_and_worktrees(git: Git, tmp_path: Path) -> None:
    """After `git gc`, at a commit without a branch, and in a worktree, with its files elsewhere."""
    git("pack-refs", "--all")
    head = git("rev-parse", "HEAD")
    assert checkout(tmp_path) == Checkout(head, "trunk")
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    assert checkout(tmp_path / "tree") == Checkout(head, "other")
    git("checkout", "-q", "--detach")
    assert checkout(tmp_path) == Checkout(head, None)


def test_no_checkout(tmp_path: Path) -> None:
    """Outside of one, and before the first commit."""
    assert checkout(tmp_path) is None
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/trunk\n")
    assert checkout(tmp_path) is None
