"""What starts trainings on machines of users: podman-compose with deploy/compose, and a real Slurm of one node."""

from __future__ import annotations

import json
import os
import pwd
import resource
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tests.support import NEEDS_CONTAINERS, clean_environment, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self


_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
HELPERS = ("netavark", "aardvark-dns")
"""What podman makes networks with, in which services find each other by name."""


def why_not() -> str | None:
    """None if containers can be run here, else the reason for a skip."""
    programs = [shutil.which(name, path=_PATH) for name in ("podman", "podman-compose", "iptables")]
    helpers = all((Path("/usr/lib/podman") / name).exists() for name in HELPERS)
    namespaces = ["unshare", "--mount", "--net", "true"]
    if not all(programs) or not helpers or subprocess.run(namespaces, capture_output=True, check=False).returncode:
        packages = f"podman runc iptables {' '.join(HELPERS)}"
        return f"{NEEDS_CONTAINERS}: as root, `apt-get install {packages}`, `pip install podman-compose`"
    return None


class Podman:
    """A podman that knows only what it has made itself, inside a `with` block: nothing of it is left."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="podman-", dir="/var/tmp"))  # short: names of Unix sockets are
        self._chains_before = _port_chains()
        self.project = f"torchobs-{uuid4().hex[:8]}"
        self.environ = clean_environment() | {
            "PATH": _PATH,
            "CONTAINERS_STORAGE_CONF": str(self._toml("storage", {
                "storage": {"driver": "overlay", "runroot": self.home / "run", "graphroot": self.home / "storage"},
            })),
            "CONTAINERS_CONF": str(self._toml("containers", {
                "engine": {
                    "cgroup_manager": "cgroupfs", "events_logger": "file", "tmp_dir": self.home / "tmp",
                    "static_dir": self.home / "libpod", "volume_path": self.home / "volumes",
                },
                "network": {"network_backend": "netavark", "network_config_dir": self.home / "networks"},
                "containers": {"default_ulimits": _limits()},
            })),
        }  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        names = self.run("ps", "--all", "--format", "{{.Names}}").split()
        for name in names:
            print(f"--- {name}", self.run("logs", "--tail", "30", name), sep="\n")  # noqa: T201  # pytest shows it of a failure
        if names:
            self.run("rm", "--force", "--time", "0", *names)
        self.run("volume", "prune", "--force")
        self.run("network", "prune", "--force")
        for chain in _port_chains() - self._chains_before:
            subprocess.run(["iptables", "--table", "nat", "--delete-chain", chain], capture_output=True, check=False)
        shutil.rmtree(self.home, ignore_errors=True)

    def run(self, *arguments: str | Path, program: str = "podman") -> str:
        done = subprocess.run([program, *arguments], env=self.environ, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def image(self, name: str, *instructions: str) -> None:
        """Make an image by the name that a compose file has: a root of nothing but places for what is mounted.

        No registry is asked. ``instructions`` are those of a Containerfile: entry point, user, variables.
        """
        file = self.home / "image.tar"
        with tarfile.open(file, mode="w") as archive:
            for path, mode in (("tmp", 0o1777), ("etc", 0o755), ("run", 0o755), ("usr", 0o755)):
                folder = tarfile.TarInfo(path)
                folder.type, folder.mode = tarfile.DIRTYPE, mode
                archive.addfile(folder)
            for path in ("bin", "lib", "lib64"):
                link = tarfile.TarInfo(path)
                link.type, link.linkname = tarfile.SYMTYPE, f"usr/{path}"
                archive.addfile(link)
        changes = [word for instruction in instructions for word in ("--change", instruction)]
        self.run("import", *changes, file, name)

    def compose(self, files: Sequence[Path], *arguments: str) -> str:
        """The same of podman-compose."""
        named = [word for file in files for word in ("--file", str(file))]
        return self.run("--project-name", self.project, *named, *arguments, program="podman-compose")

    def _toml(self, name: str, tables: Mapping[str, Mapping[str, Any]]) -> Path:
        path = self.home / f"{name}.conf"
        lines = []
        for table, values in tables.items():
            lines.append(f"[{table}]")
            lines += [f"{key} = {json.dumps(value, default=str)}" for key, value in values.items()]
        path.write_text("\n".join(lines) + "\n")
        return path


def _port_chains() -> set[str]:
    """The chains of published ports: netavark 1.4 leaves them behind, empty."""
    rules = subprocess.run(["iptables", "--table", "nat", "--list-rules"], capture_output=True, text=True, check=False).stdout
    return {rule.removeprefix("-N ") for rule in rules.splitlines() if rule.startswith("-N NETAVARK-DN-")}


def _limits() -> list[str]:
    """No more than this process may have itself: without CAP_SYS_RESOURCE nobody may raise them."""
    files, processes = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    return [f"nofile={files}:{files}", f"nproc={min(processes, 4096) if processes > 0 else 4096}"]


PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
"""Debian: `apt-get install munge slurmctld slurmd slurm-client`."""

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
FirstJobId={first}
SchedulerParameters=batch_sched_delay=0
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
{more}
"""
"""`FirstJobId`: the job's number is in the name of its directory in /dev/shm, which other tests share.
`CPUs=2` whatever the machine has: a job asks for that many tasks. A requeued job waits for `cred_expire`, 120 s by default."""


class SlurmCluster:
    """Runs inside a `with` block; all jobs are cancelled at its end."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        """`more`: further lines of slurm.conf."""
        self.home = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: Unix sockets' names are
        self.home.chmod(0o755)  # munged insists
        self.environ = clean_environment() | {"SLURM_CONF": str(self.home / "slurm.conf")}
        self._more = more
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def submit(self, *options: str | Path, **environ: str) -> str:
        """`sbatch` with these options and further variables: the job's id."""
        return self.call("sbatch", "--parsable", *options, **environ).strip()

    def call(self, *argv: str | Path, **environ: str) -> str:
        """Run a program of Slurm: what it has printed."""
        done = subprocess.run(argv, env=self.environ | environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (argv, done.stdout, done.stderr, self.log)
        return done.stdout

    def state(self, job: str) -> str:
        """The job's state, such as `RUNNING` or `COMPLETED`; a job that has ended is remembered for five minutes."""
        return self.call("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    @property
    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.home.glob("*.log")))

    def _start(self) -> None:
        host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
        ports = (free_port(), free_port())
        config = CONFIG.format(
            host=host, user=user, ports=ports, first=free_port() * 10, home=self.home, more="\n".join(self._more)
        )
        (self.home / "slurm.conf").write_text(config)
        (self.home / "state").mkdir()
        (self.home / "spool").mkdir()
        (self.home / "munge.key").write_bytes(os.urandom(64))
        (self.home / "munge.key").chmod(0o600)
        files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        self._daemon("munged", "--foreground", *(f"--{option}={self.home / name}" for option, name in files.items()))
        wait_until((self.home / "munge.sock").exists)
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", host)
        wait_until(lambda: self._nodes() == "idle", timeout_s=60, interval_s=0.1)

    def _nodes(self) -> str:
        assert all(daemon.poll() is None for daemon in self._daemons), self.log
        asked = ("sinfo", "--noheader", "--format=%t")
        return subprocess.run(asked, env=self.environ, capture_output=True, text=True, timeout=60, check=False).stdout.strip()

    def _daemon(self, program: str, *options: str) -> None:
        with (self.home / f"{program}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen([program, *options], env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _stop(self) -> None:
        if len(self._daemons) == len(PROGRAMS) - 1:
            user = pwd.getpwuid(os.getuid()).pw_name
            subprocess.run(["scancel", f"--user={user}"], env=self.environ, capture_output=True, timeout=60, check=False)
            subprocess.run(["scancel", "--signal=KILL", "--full", f"--user={user}"], env=self.environ, check=False, timeout=60)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=5)
        shutil.rmtree(self.home, ignore_errors=True)
