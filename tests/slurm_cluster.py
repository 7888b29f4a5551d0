"""A real Slurm of one node: munged, slurmctld and slurmd as this user, in a directory and on ports of their own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import clean_environment, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

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

    def __init__(self, more: Sequence[str] = (), path: str = "") -> None:
        """`more`: further lines of slurm.conf; `path`: PATH of slurmd, and so of a Prolog."""
        self.home = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: Unix sockets' names are
        self.home.chmod(0o755)  # munged insists
        self.environ = clean_environment() | {"SLURM_CONF": str(self.home / "slurm.conf")}
        if path:
            self.environ["PATH"] = path
        self._more = more
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def submit(self, *options: str | Path, **environ: str) -> str:
        """`sbatch` with these options and further variables: the job's id."""
        return self.call("sbatch", "--parsable", *options, **environ).strip()

    def call(self, *argv: str | Path, **environ: str) -> str:
        """Run a program of Slurm: what it has printed.

        Raises:
            subprocess.CalledProcessError: It failed.
        """
        done = subprocess.run(argv, env=self.environ | environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (argv, done.stdout, done.stderr, self.log)
        return done.stdout

    def state(self, job: str) -> str:
        """The job's state, such as `RUNNING` or `COMPLETED`; a job that has ended is remembered for five minutes."""
        return self.call("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    @property
    def log(self) -> str:
        """What the daemons have said."""
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
