"""The exporter that a trainer starts on its node: it is nobody's child, inherits little, and leaves after the last rank."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest

import torchobs
from tests.support import clean_environment, wait_until
from torchobs.config.settings import EXPORTER_ADDRESS
from torchobs.flight.directory import open_directory
from torchobs.node import election
from torchobs.node.election import Announcement
from torchobs.node.launch import NAME

TRAINER = """
import logging, os, signal, sys
logging.basicConfig()
from torchobs.flight.directory import open_place
from torchobs.flight.writer import open_writer
from torchobs.node.launch import ensure_exporter

flight_dir, address, hostile = sys.argv[1:]
writer = open_writer(open_place(flight_dir, None), {"rank": 0, "run_id": "r", "job_name": "j"})
exec(hostile)
ensure_exporter(flight_dir, address, logging.getLogger(), 60.0)
print("ready", flush=True)
sys.stdin.readline()
"""

HOSTILE = """
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGRTMIN):
    signal.signal(number, signal.SIG_IGN)
os.umask(0o000)
os.dup2(os.open("/dev/zero", os.O_RDONLY), 77, inheritable=True)
os.mkdir(flight_dir + "/cwd"), os.chdir(flight_dir + "/cwd"), os.rmdir(flight_dir + "/cwd")
os.environ.update(LD_PRELOAD="/gone.so", PYTHONPATH="/gone", PYTHONHOME="/gone", RANK="7", TORCHOBS_RUN_ID="mine", LC_TIME="C")
"""

Trainer = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def trainer(start: Callable[..., subprocess.Popen[str]], flight_dir: Path) -> Iterator[Trainer]:
    """Start a rank that asks for an exporter, and wait until it has; its exporters end with the test."""

    def run(
        address: str = "127.0.0.1:0", *, hostile: str = "", python: str = sys.executable, **options: object
    ) -> subprocess.Popen[str]:
        options = {"env": clean_environment(), "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": "/"} | options
        child = start(python, "-c", TRAINER, flight_dir, address, hostile, **options)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield run
    for process in exporters(flight_dir):
        with suppress(psutil.NoSuchProcess):  # it has left just now
            process.kill()


def exporters(flight_dir: Path) -> list[psutil.Process]:
    """The processes, elected or not, that were started as exporters of this directory."""
    processes = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [process for process, arguments in processes if "-I" in arguments and str(flight_dir) in arguments]


def announced(flight_dir: Path) -> Announcement:
    """What the directory's exporter announces, once it does."""

    def read() -> Announcement | None:
        fd = open_directory(str(flight_dir))
        try:
            return election.read(fd)
        finally:
            os.close(fd)

    announcement = wait_until(read, 20)
    assert announcement is not None
    return announcement


def ups(address: Announcement) -> dict[str, float]:
    """`torchobs_rank_up` by rank, as its page has it."""
    page = httpx.get(f"{address.url}metrics", trust_env=False, timeout=10).text
    samples = re.findall(r'^torchobs_rank_up\{job_name="j",rank="(\d+)",run_id="r"\} (\S+)$', page, re.MULTILINE)
    return {rank: float(value) for rank, value in samples}


def log(flight_dir: Path) -> str:
    """What the exporter has logged."""
    return (flight_dir / "exporter.log").read_text()


def test_a_rank_s_exporter_serves_it_outlives_it_and_leaves(trainer: Trainer, flight_dir: Path) -> None:
    """Within a second or so of `init()`, without anybody having started anything; its files are for this user alone.

    Launchers kill whatever descends from a rank, or its whole group: the end is shown by the one who outlives it. When the last
    state was scraped, nothing is left behind but the lock, the log and the flight files.
    """
    child = trainer(start_new_session=True)
    exporter = announced(flight_dir)
    wait_until(lambda: ups(exporter) == {"0": 1.0})  # whoever asks before its first look has ended waits two seconds at most
    assert exporter.version == torchobs.__version__
    assert exporter.url in log(flight_dir)
    assert psutil.Process(exporter.pid).memory_info().rss < 60 * 2**20
    files = [path for path in flight_dir.glob("exporter.*") if not path.is_socket()]  # which the directory's mode protects
    modes = {path.name: path.stat().st_mode & 0o777 for path in files}
    assert modes == {"exporter.json": 0o600, "exporter.lock": 0o600, "exporter.log": 0o600}
    assert json.loads((flight_dir / "exporter.json").read_text()).keys() == {"pid", "address", "url", "started", "version"}
    assert psutil.Process(child.pid).children(recursive=True) == [], "no zombie is left for the trainer to find"
    assert child.pid not in {process.pid for process in psutil.Process(exporter.pid).parents()}
    assert os.getsid(exporter.pid) not in {os.getsid(child.pid), exporter.pid}
    assert os.getpgid(exporter.pid) != os.getpgid(child.pid)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait(10)
    wait_until(lambda: ups(exporter) == {"0": 0.0})
    wait_until(lambda: not exporters(flight_dir))
    assert {path.suffix for path in flight_dir.iterdir()} == {".lock", ".log", ".flight"}
    assert "has left" in log(flight_dir)


def status_of(pid: int) -> dict[str, str]:
    """What the kernel says of a process's first thread."""
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)


def test_nothing_that_a_trainer_set_for_itself_is_inherited(trainer: Trainer, flight_dir: Path) -> None:
    """Affinity, signals, umask, descriptors, a working directory that is gone, the environment: all its own."""
    child = trainer(hostile=HOSTILE)
    exporter = announced(flight_dir)
    wait_until(lambda: int(status_of(exporter.pid)["SigBlk"], 16) == 0)  # while a thread is started, all signals are blocked
    status = status_of(exporter.pid)
    assert status["Name"] == NAME
    assert status["Umask"] == "0077"
    ignored = {number for number in signal.valid_signals() if int(status["SigIgn"], 16) >> (number - 1) & 1}
    assert ignored <= {signal.SIGPIPE, signal.SIGXFSZ}
    assert status["Cpus_allowed_list"] == Path("/proc/1/status").read_text().split("Cpus_allowed_list:\t")[1].split("\n")[0]
    assert os.getpriority(os.PRIO_PROCESS, exporter.pid) == min(19, os.getpriority(os.PRIO_PROCESS, child.pid) + 5)
    process = Path(f"/proc/{exporter.pid}")
    files = {}
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # a file that it looked at and has closed
            files[int(link.name)] = str(link.readlink())
    assert str((process / "cwd").readlink()) == "/"
    assert "/dev/zero" not in files.values()
    assert files[0] == "/dev/null"
    assert files[1] == files[2] == str(flight_dir / "exporter.log")
    environ = (process / "environ").read_text()
    assert "LC_TIME=C" in environ
    assert not [name for name in ("LD_PRELOAD", "PYTHON", "RANK", "TORCHOBS_RUN_ID") if f"{name}=" in environ]


def test_the_default_port_that_is_taken_is_not_the_end(trainer: Trainer, flight_dir: Path) -> None:
    """The next one is taken, announced, and said to be another one."""

    def bound() -> socket.socket | None:
        with suppress(OSError):
            return socket.create_server((EXPORTER_ADDRESS.host, EXPORTER_ADDRESS.port))
        return None

    with ExitStack() as taken:
        with suppress(TimeoutError):  # another program keeps it: an exporter of another test would go meanwhile
            listener = wait_until(bound, timeout_s=60.0)
            assert listener is not None
            taken.enter_context(listener)
        trainer("")
        exporter = announced(flight_dir)
        assert int(exporter.address.rpartition(":")[2]) > EXPORTER_ADDRESS.port
        wait_until(lambda: ups(exporter) == {"0": 1.0})
        assert f"{EXPORTER_ADDRESS} is taken by another program: listening on {exporter.address}" in log(flight_dir)


def test_an_address_that_was_asked_for_and_is_taken_is_an_error(trainer: Trainer, flight_dir: Path) -> None:
    """Whoever gives one looks there: the training goes on, and says that no exporter does."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        child = trainer(address, stderr=subprocess.PIPE)
        rest = child.communicate("\n", timeout=20)[1]
    assert f"no exporter: it cannot listen on {address}: Address already in use; the training goes on" in rest
    assert not (flight_dir / election.NAME).exists()


def test_it_runs_the_trainer_s_own_torchobs(trainer: Trainer, flight_dir: Path, tmp_path: Path) -> None:
    """One from PYTHONPATH, beside a directory's own queue.py, wins over the installed one in the exporter, too."""
    shutil.copytree(Path(torchobs.__file__).parent, tmp_path / "torchobs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "torchobs" / "_version.py").write_text('__version__ = "9.8.7"\n')
    (tmp_path / "h11.py").write_text("raise SystemExit('shadowed')\n")
    trainer(env=clean_environment() | {"PYTHONPATH": str(tmp_path)})
    assert announced(flight_dir).version == "9.8.7"
