"""This process's rank and run, and the process itself: host, pid, start time.

A **run** is one training as a person counts it: all its ranks have the same ``run_id``, and keep it when elastic training,
Slurm or Kubernetes restarts the run. Sources of the id, best first:

1. ``TORCHOBS_RUN_ID``; ``TORCHOBS_K8S_JOB_UID`` from the downward API;
2. the Slurm job, written as ``squeue`` writes it (``1234``, in an array ``1234_7``): one job is one run, also requeued;
3. torchrun's ``--rdzv-id`` unless it is the default, ``none``; Open MPI's job name;
4. ranks on several nodes that a launcher other than torchrun gives the same ``MASTER_ADDR``, as the Kubeflow training operator
   and Volcano's pytorch plugin do: that address, its port and the namespace. Reported as weaker: the next run there has it too;
5. several ranks without any of these: the host and an id that the ranks of one node share (:func:`_shared`). Nodes differ
   then, which is reported, because nothing can join the parts of a run that has two ids;
6. one process: host, start time and pid.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePath

from torchobs.config.launchers import RankPlacement, count, locate
from torchobs.config.settings import Settings, SettingsProblem
from torchobs.support.cgroup import read

_START_TICKS = 19


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Facts of a process. ``start_ns``: its start in Unix time (ns), or the time of the first call without /proc.

    ``key`` identifies the process among all, ``parent`` its parent: by pid, start and boot. ``None``: unknown.
    """

    host: str
    pid: int
    start_ns: int
    parent: str | None
    argv0: str
    key: str | None = None


def this_process() -> ProcessInfo:
    """Return the facts of the calling process: the same at every call, new ones in a forked child."""
    return _facts(os.getpid(), sys.argv[0] if sys.argv else "")


def begun_ms() -> int | None:
    """Return when this process began, in Unix time (ms); None in an interactive interpreter, which may have been idle since."""
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    return None if interactive else this_process().start_ns // 1_000_000


def boot_id() -> bytes:
    """Return the 16-byte random id of this boot; zeros where the system has none."""
    try:
        return bytes.fromhex(read("/proc/sys/kernel/random/boot_id").strip().replace("-", "")) or bytes(16)
    except ValueError:
        return bytes(16)


def exit_status(code: object) -> int:
    """Return Python's exit status after ``sys.exit(code)``: 0 for None, 1 for a message on standard error."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def parse_start_ticks(stat: str) -> int:
    """Return the start of a process in clock ticks since boot: field 22 of ``/proc/<pid>/stat`` (proc(5)).

    Raises:
        ValueError: the text is not such a line.
    """
    # The second field is the program's name in parentheses, and the name may hold spaces and parentheses itself.
    after_name = stat.rpartition(")")[2].split()
    if len(after_name) <= _START_TICKS:
        raise ValueError(f"no line of /proc/<pid>/stat: {stat[:40]!r}")
    return int(after_name[_START_TICKS])


@lru_cache(maxsize=1)
def _facts(pid: int, argv0: str) -> ProcessInfo:
    ticks = _start_ticks(pid)
    start_ns = time.time_ns() if ticks is None else _unix_time_ns(ticks)
    return ProcessInfo(os.uname().nodename, pid, start_ns, _key(os.getppid()), argv0, _key(pid))


def _key(pid: int) -> str | None:
    # Ticks and not Unix time: the boot time read before and after a correction of the clock differs, and
    # the ranks of one run read it at different times, restarted ones hours later.
    ticks, boot = _start_ticks(pid), boot_id()
    return f"{pid}-{ticks}-{boot.hex()[:8]}" if ticks is not None and any(boot) else None


def _start_ticks(pid: int) -> int | None:
    stat = read(f"/proc/{pid}/stat")  # nothing on another system, of pid 0, and in a /proc mounted with `hidepid`
    return parse_start_ticks(stat) if stat else None


def _unix_time_ns(ticks: int) -> int:
    since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    readings = []
    for _ in range(3):  # the quickest one counts: a thread may be preempted between two clocks
        started = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        now = time.time_ns()
        ended = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        readings.append((ended - started, now - ended))
    return min(readings)[1] + since_boot_ns


_MAX_NAME_LENGTH = 128
# The flight file's header has 3,804 bytes for the whole description of a rank; this part is for ``resource``.
_RESOURCE_LIMIT = 1536

_KUBERNETES = {
    "k8s.pod.name": ("POD_NAME", "K8S_POD_NAME"),
    "k8s.pod.uid": ("POD_UID", "K8S_POD_UID"),
    "k8s.namespace.name": ("POD_NAMESPACE", "K8S_NAMESPACE_NAME"),
    "k8s.node.name": ("NODE_NAME", "K8S_NODE_NAME"),
}
# Slurm's names of unnamed jobs: an interactive shell, `sbatch --wrap`, the program that `srun` starts.
_DEFAULT_JOB_NAMES = frozenset({"bash", "sh", "zsh", "interactive", "wrap", "python", "python3", "torchrun"})
# torchrun makes one directory per launch, with a random name, for all its workers and all their restarts.
_ERROR_FILE = r".*/[^/]*_([a-z0-9_]{8})/attempt_\d+/\d+/error\.json"
_NODES_DIFFER = SettingsProblem(
    "TORCHOBS_RUN_ID",
    None,
    "is not set and the launcher names no run, so that every node reports a run of its own;"
    " give all of them the same one, or torchrun the same --rdzv-id",
)
_WEAKER = SettingsProblem(
    "TORCHOBS_RUN_ID",
    None,
    "is not set and nothing names the run, so that it is named after MASTER_ADDR and MASTER_PORT:"
    " a later run at the same address has the same id; set it, or label the pod torchobs.io/inject",
)
# Kubeflow's training operator: NAME-master-0; Volcano's pytorch plugin: NAME-master-0.NAME.
_MASTER = r"(.+)-master-0(?:\..*)?"


@dataclass(frozen=True, slots=True)
class Identity:
    """A rank's identity. Names are printable and at most 128 characters long; ``None``: unknown.

    ``restart`` counts the restarts of the run; ``resource`` holds further attributes by OpenTelemetry names.
    """

    job_name: str
    run_id: str
    rank: int
    local_rank: int
    world_size: int | None
    local_world_size: int | None
    node_rank: int | None
    restart: int
    launcher: str
    host: str
    resource: tuple[tuple[str, str], ...] = ()
    launch: str | None = None
    """an id that the ranks of one launcher on this node share, also after a restart"""
    replica_group: int | None = None
    """the replica group (torchft), with ranks that are counted from 0"""

    def described(self) -> dict[str, str | int]:
        """Return all known values as one flat mapping, at most 3,300 bytes as JSON; fields win over ``resource``."""
        values = ((name, getattr(self, name)) for name in self.__slots__ if name != "resource")
        return dict(self.resource) | {name: value for name, value in values if value is not None}


def discover(
    environ: Mapping[str, str], settings: Settings, process: ProcessInfo
) -> tuple[Identity, tuple[SettingsProblem, ...]]:
    """Return this process's identity, and the environment values that were ignored. No environment makes it raise."""
    process = replace(process, host=_clean(process.host) or "localhost")
    problems: list[SettingsProblem] = []
    place = _with_overrides(locate(environ, problems), settings, problems)
    identity = Identity(
        job_name=_first_name(_job_names(environ, settings, process)) or "torch",
        run_id=_run_id(environ, settings, process, place, problems),
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        restart=_restarts(environ, problems) if settings.restart is None else settings.restart,
        launcher=place.launcher,
        host=process.host,
        resource=_resource(environ, settings, problems),
        launch=_shared(environ, process, place),
        replica_group=count(("REPLICA_GROUP_ID",), environ, problems),
    )
    return identity, tuple(dict.fromkeys(problems))


def _with_overrides(place: RankPlacement, settings: Settings, problems: list[SettingsProblem]) -> RankPlacement:
    if settings.rank is not None and place.launcher == "python":
        place = RankPlacement("python")  # ranks are started by hand: the world is larger than this process
    rank = place.rank if settings.rank is None else settings.rank
    world_size = place.world_size if settings.world_size is None else settings.world_size
    if world_size is not None and rank >= world_size:
        problems.append(SettingsProblem("rank", str(rank), f"must be less than the world size, {world_size}"))
        rank, world_size = place.rank, place.world_size
    local_rank = place.local_rank if settings.local_rank is None else settings.local_rank
    return place._replace(rank=rank, world_size=world_size, local_rank=local_rank)


def _restarts(environ: Mapping[str, str], problems: list[SettingsProblem]) -> int:
    """Return torchrun's restarts plus Slurm's: in a requeued job torchrun counts from 0 again."""
    variables = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return sum(count((variable,), environ, problems) or 0 for variable in variables)


def _job_names(environ: Mapping[str, str], settings: Settings, process: ProcessInfo) -> Iterator[str | None]:
    yield settings.job_name
    yield dict(settings.resource_attributes).get("service.name")
    yield settings.kubernetes_job_name
    # The host name of an indexed Job's pod is the Job's name, a dash and the index.
    stem, _, index = process.host.rpartition("-")
    yield stem if index == environ.get("JOB_COMPLETION_INDEX") else None
    master = re.fullmatch(_MASTER, environ.get("MASTER_ADDR", ""))
    yield master[1] if master else None
    slurm = environ.get("SLURM_JOB_NAME")
    yield slurm if slurm not in _DEFAULT_JOB_NAMES else None
    yield _script(process.argv0)


def _script(argv0: str) -> str | None:
    path = PurePath(argv0)
    if argv0.startswith("-"):
        return None  # `python -c`, `python -`
    if path.name == "__main__.py":
        return path.parent.name
    return "notebook" if path.stem == "ipykernel_launcher" else path.stem


def _run_id(
    environ: Mapping[str, str], settings: Settings, process: ProcessInfo, place: RankPlacement, problems: list[SettingsProblem]
) -> str:
    if named := _first_name(_run_names(environ, settings, place)):
        return named
    if address := _address(environ, place):
        problems.append(_WEAKER)
        return _clean(address)
    if place.world_size is None or place.world_size not in {1, place.local_world_size}:
        problems.append(_NODES_DIFFER)
    start = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(process.start_ns // 1_000_000_000))
    return _clean(f"{process.host}-{_shared(environ, process, place) or f'{start}-{process.pid}'}")


def _run_names(environ: Mapping[str, str], settings: Settings, place: RankPlacement) -> Iterator[str | None]:
    yield settings.run_id
    yield settings.kubernetes_job_uid
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    yield f"{array}_{task}" if array and task else None
    yield environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    elastic = environ.get("TORCHELASTIC_RUN_ID")
    yield elastic if elastic != "none" else None
    yield environ.get("PMIX_NAMESPACE") if place.launcher == "openmpi" else None


def _address(environ: Mapping[str, str], place: RankPlacement) -> str | None:
    """Return an id made of the address that all ranks get; ``None``: there is none, or it is local to a node.

    Not under torchrun, which chooses another port at each restart unless it is given one.
    """
    host, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    several_nodes = place.world_size is not None and place.world_size not in {1, place.local_world_size}
    if place.launcher != "env" or not several_nodes or not host or host == "localhost" or host.startswith(("127.", "::1")):
        return None
    # The namespace is no part of the operators' host names.
    namespace = next((environ[name] for name in _KUBERNETES["k8s.namespace.name"] if environ.get(name)), "")
    return f"{host.partition('.')[0]}-{hashlib.sha256(f'{namespace}/{host}:{port}'.encode()).hexdigest()[:8]}"


def _shared(environ: Mapping[str, str], process: ProcessInfo, place: RankPlacement) -> str | None:
    """Return an id that exactly the ranks of one launcher on this node share; ``None``: there is none.

    Torchrun's directory rather than its pid, because a shell may run between it and the rank, and rather than ``MASTER_PORT``,
    because a static rendezvous has the same port in the next run.
    """
    if place.launcher == "torchrun":
        directory = re.fullmatch(_ERROR_FILE, environ.get("TORCHELASTIC_ERROR_FILE", ""))
        return directory[1] if directory else process.parent
    if place.launcher == "lightning" and not place.local_rank:
        return process.key  # the parent of the others
    return process.parent if place.world_size != 1 else None


def _resource(environ: Mapping[str, str], settings: Settings, problems: list[SettingsProblem]) -> tuple[tuple[str, str], ...]:
    resource: dict[str, str] = {}
    for key, value in _resource_items(environ, settings):
        extended = resource | {_printable(key): _printable(value)}
        if len(json.dumps(extended, ensure_ascii=False).encode()) > _RESOURCE_LIMIT:
            reason = f"is too long: {_clean(key)} is left out, at most {_RESOURCE_LIMIT} bytes fit"
            problems.append(SettingsProblem("OTEL_RESOURCE_ATTRIBUTES", None, reason))
        else:
            resource = extended
    return tuple(resource.items())


def _resource_items(environ: Mapping[str, str], settings: Settings) -> Iterator[tuple[str, str]]:
    for key, variables in _KUBERNETES.items():
        if values := [environ[variable] for variable in variables if environ.get(variable)]:
            yield key, values[0]
    if settings.kubernetes_job_name:
        yield "k8s.job.name", settings.kubernetes_job_name
    if settings.kubernetes_job_uid:
        yield "k8s.job.uid", settings.kubernetes_job_uid
    yield from settings.resource_attributes


def _first_name(candidates: Iterable[str | None]) -> str | None:
    return next((name for candidate in candidates if candidate and (name := _clean(candidate))), None)


def _clean(text: str) -> str:
    """Return a printable name; a long one is cut and ends in its checksum, so that two of them stay different."""
    name = _printable(text)
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[: _MAX_NAME_LENGTH - 9]}~{zlib.crc32(name.encode()):08x}"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "_" for character in text).strip()
