"""What the daemon has to survive (no temp directory, a terminal, signals at the worst moment), and its garbage collection."""

import gc
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.exporters import EXPORTER, Client, frozen_gc, start_program
from tests.support import clean_environment, freeze, wait_until
from torchobs.config.options import Address
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig, Mode
from torchobs.exporter.daemon import serve
from torchobs.node.lifetime import ServiceStatus

Start = Callable[..., subprocess.Popen[str]]

LOADING = """
import sys
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "uvicorn":
            print("loading", flush=True)
            sys.stdin.readline()
sys.meta_path.insert(0, Slow())
from torchobs.cli.__main__ import main
sys.exit(main())
"""
"""The program, which loads its web server for as long as nothing is written to it."""


def keeps_back(number: signal.Signals, pid: int) -> bool:
    """Whether a process has the signal blocked."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_signal_while_it_loads_is_kept_until_it_listens(start: Start, flight_dir: Path) -> None:
    """As a container's first process it would never hear of it, and the pod would stay for its whole grace period."""
    arguments = ("exporter", "--web.listen-address", "127.0.0.1:0", "--flight-dir", str(flight_dir))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = start(sys.executable, "-c", LOADING, *arguments, env=clean_environment(), **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    assert keeps_back(signal.SIGTERM, process.pid)
    process.send_signal(signal.SIGTERM)
    process.stdin.close()
    assert process.wait(timeout=30) == 0


def test_it_needs_no_argument(start: Start, flight_dir: Path, free_port: Callable[[], int]) -> None:
    """A container without `args`: all that there is to say stands in variables, or is the default."""
    port = free_port()
    variables = {"FLIGHT_DIR": str(flight_dir), "WEB_LISTEN_ADDRESS": f"127.0.0.1:{port}"}
    environ = clean_environment() | {f"TORCHOBS_EXPORTER_{name}": text for name, text in variables.items()}
    process, client = start(*EXPORTER, env=environ), Client(f"127.0.0.1:{port}")
    wait_until(lambda: process.poll() is not None or _answers(client), timeout_s=60)
    assert client.value("torchobs_exporter_config_ok") == 1


def test_it_hears_signals_while_it_serves(start: Start, tmp_path: Path, flight_dir: Path, free_port: Callable[[], int]) -> None:
    """What was kept back is not kept back any more."""
    program = start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir))
    assert not keeps_back(signal.SIGTERM, program.process.pid)


def _answers(client: Client) -> bool:
    try:
        return client.get("/-/ready").status == 200
    except OSError:
        return False


@pytest.mark.serial
@pytest.mark.parametrize("arguments", [("--web.listen-address", "127.0.0.1:109600"), ("--web.listen-adress", ":9000")])
def test_a_sidecar_that_cannot_read_where_to_listen_does_so_on_loopback(
    start: Start, flight_dir: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """It serves on, for the pod waits for it, but not to the network. The port is the default one, or retried."""
    environ = {**clean_environment(), "KUBERNETES_SERVICE_HOST": "10.96.0.1", "TORCHOBS_EXPORTER_FLIGHT_DIR": str(flight_dir)}
    log = tmp_path / "log"
    with log.open("w") as out:
        process = start(*EXPORTER, *arguments, stderr=out, env=environ)
    wait_until(lambda: process.poll() is not None or re.search("listen(ing)? on", log.read_text()), timeout_s=60)
    assert process.poll() is None
    assert re.search(r"listen(ing)? on 127\.0\.0\.1:10960", log.read_text()), log.read_text()


@pytest.mark.parametrize("mode", ["sidecar", "node"])
def test_a_mistake_of_ours_ends_no_sidecar(
    mode: Mode, flight_dir: Path, caplog: pytest.LogCaptureFixture, free_port: Callable[[], int]
) -> None:
    """It is logged, and the next look is a new one; a node's exporter ends, for its trainings start another."""
    asked: list[ServiceStatus] = []

    def finished(fleet: ServiceStatus) -> bool:
        asked.append(fleet)
        if len(asked) == 1:
            raise RuntimeError("a mistake")
        return True

    config = ExporterConfig(flight_dir=str(flight_dir), listen=(Address("127.0.0.1", free_port()),), mode=mode)
    if mode == "node":
        with pytest.raises(RuntimeError, match="a mistake"):
            serve(config, finished=finished)
    else:
        assert serve(config, finished=finished) == 0
        assert [record.exc_info is not None for record in caplog.records if "a mistake" in record.message] == [True]


def test_a_rank_that_was_killed_a_moment_ago_is_not_left_alive(
    start: Start, tmp_path: Path, flight_dir: Path, free_port: Callable[[], int]
) -> None:
    """Both die within milliseconds when a pod is deleted; the scraper's last page has the rank's end all the same."""
    steps = tmp_path / "steps"
    with steps.open("w") as out:
        rank = start(sys.executable, "-m", "tests.rank_files", str(flight_dir), stdout=out, env=clean_environment())
    program = start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir))
    wait_until(lambda: program.state() == "alive", timeout_s=60)
    scraper = {"User_Agent": "scraper", "X_Prometheus_Scrape_Timeout_Seconds": "5"}
    pages = [program.page(**scraper)]
    rank.kill()
    rank.wait()  # as kubelet does
    program.process.send_signal(signal.SIGTERM)
    while program.process.poll() is None:
        try:
            pages.append(program.page(**scraper))
        except OSError:
            break
        time.sleep(0.02)
    assert 'torchobs_rank_state{job_name="gpt",rank="0",run_id="run-1",state="lost"} 1' in pages[-1]
    assert program.process.wait(timeout=20) == 0


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


class Clock:
    """Seconds, as a test sets them."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Iterator[Clock]:
    """That of the keeping; nothing is kept before, nor afterwards."""
    gc.unfreeze()
    made = Clock()
    yield made
    assert gc.get_freeze_count() == 0
    freeze()


def test_what_has_survived_is_not_looked_at_again_for_an_hour(clock: Clock) -> None:
    """Young garbage goes at once; what was alive at a full collection goes an hour later, should it be garbage by then."""
    with frozen_gc(clock):
        old = Loop()
        gc.collect()
        assert gc.get_freeze_count() > 0
        young, forgotten = Loop(), weakref.ref(old)
        gone = weakref.ref(young)
        del young, old
        gc.collect()
        assert gone() is None
        assert forgotten() is not None
        clock.seconds = daemon.THOROUGH_S
        gc.collect()
        assert forgotten() is None
        assert gc.get_freeze_count() > 0
