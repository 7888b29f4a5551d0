"""The real exporter over real ranks: kills, stops, signals at the worst moment, and a Prometheus that must get the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.exporters import Program, start_program
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.rank_files import live_rank, train
from tests.support import clean_environment, wait_until
from torchobs.cli.exporter import main
from torchobs.config.options import Address
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig, Mode
from torchobs.exporter.daemon import serve

if TYPE_CHECKING:
    from torchobs.node.lifetime import ServiceStatus


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def exporter(start: Start, flight_dir: Path, tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Program]:
    """Start the real exporter of the flight directory."""

    def start_it(*arguments: str, **environ: str) -> Program:
        options = ["--flight-dir", str(flight_dir), *arguments]
        return start_program(start, tmp_path / "exporter.log", free_port(), *options, **environ)

    return start_it


@pytest.fixture
def rank(start: Start, flight_dir: Path, tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[str], Path]]:
    """Start a rank that takes ten steps a second; returns the process and where it prints the steps it has written."""

    def start_it(number: int = 0) -> tuple[subprocess.Popen[str], Path]:
        steps = tmp_path / f"steps-{number}"
        with steps.open("w") as out:
            argv = [sys.executable, "-m", "tests.rank_files", str(flight_dir), str(number)]
            process = start(*argv, stdout=out, env=clean_environment())
        wait_until(lambda: len(steps.read_text().splitlines()) > 2, timeout_s=30)
        return process, steps

    return start_it


def last(steps: Path) -> int:
    """The last step that a rank has said to have written."""
    return int(steps.read_text().splitlines()[-1])


@pytest.mark.serial
def test_a_killed_rank_is_shown_within_two_seconds_with_its_last_step(
    exporter: Callable[..., Program], rank: Callable[..., tuple[subprocess.Popen[str], Path]]
) -> None:
    """SIGKILL: lost, not up, and every step it had acknowledged is counted; the other rank trains on."""
    program = exporter()
    process, steps = rank(0)
    rank(1)
    wait_until(lambda: program.state("1") == "alive")
    assert program.state() == "alive"
    process.kill()
    process.wait()
    killed = time.monotonic()
    wait_until(lambda: program.state() == "lost", interval_s=0.05)
    assert time.monotonic() - killed < 2.0
    assert program.value("torchobs_rank_up", rank="0") == 0
    assert program.value("torchobs_rank_exit", rank="0", reason="lost") == 1
    # it was killed after a step was in the file and before it was printed, at worst
    assert program.value("torchobs_steps_total", rank="0") in {last(steps), last(steps) + 1}
    assert (program.state("1"), program.value("torchobs_rank_up", rank="1")) == ("alive", 1)


def test_a_real_prometheus_gets_the_final_value_before_a_sidecar_leaves(
    exporter: Callable[..., Program], flight_dir: Path, program: Callable[[str], str]
) -> None:
    """SIGTERM right after the last step, with the default drain: the exact end is stored, and the exporter leaves by itself."""
    path = newest_prometheus(2) or program("prometheus")
    sidecar = exporter()
    writer = live_rank(flight_dir)
    train(writer, range(1, 6))
    with PrometheusServer(path, scrape=[sidecar.address], interval="1s") as prometheus:
        prometheus.wait_for_scrapes()
        train(writer, range(6, 1235))
        writer.exit(1, 0)
        writer.close()
        sidecar.process.terminate()
        began = time.monotonic()
        assert sidecar.process.wait(timeout=20) == 0, sidecar.log
        assert time.monotonic() - began < 10
        # it has the final page by now, but may not have stored it yet
        wait_until(lambda: prometheus.value("last_over_time(torchobs_rank_up[5m])") == 0)
        assert prometheus.value("last_over_time(torchobs_steps_total[5m])") == 1234
        assert prometheus.value('last_over_time(torchobs_rank_exit{reason="finished"}[5m])') == 1
    assert "waiting for the final state" in sidecar.log


def test_a_rank_that_failed_waits_for_its_first_scrape(exporter: Callable[..., Program], flight_dir: Path) -> None:
    """A run that ends with an error before any scraper has come would leave no trace."""
    writer = live_rank(flight_dir)
    program = exporter("--drain-timeout", "60s")
    writer.exit(2, 1)
    writer.close()
    program.process.terminate()
    wait_until(lambda: "fetched by: the first scraper" in program.log)
    assert 'reason="exception"' in program.page(X_Prometheus_Scrape_Timeout_Seconds="10")
    assert program.process.wait(timeout=10) == 0, program.log


def test_what_a_training_survived_of_the_grace_is_not_waited_for(
    exporter: Callable[..., Program], rank: Callable[..., tuple[subprocess.Popen[str], Path]], flight_dir: Path
) -> None:
    """Killed at the grace's end, it leaves its exporter two seconds, after which kubelet kills that, too."""
    process, _ = rank()
    program = exporter("--drain-timeout", "40s")
    program.page(X_Prometheus_Scrape_Timeout_Seconds="10")
    process.kill()
    process.wait()
    (lock,) = flight_dir.glob("*.lock")
    lock.write_text("Ended by signal 15\n")
    os.utime(lock, (time.time() - 45, time.time() - 45))
    program.process.terminate()
    assert program.process.wait(timeout=8) == 0, program.log
    assert "not fetched by: 127.0.0.1" in program.log


def test_a_second_signal_ends_the_wait(exporter: Callable[..., Program]) -> None:
    """And the exporter waits no longer than it was told in any case."""
    program = exporter("--drain-timeout", "60")
    program.page(X_Prometheus_Scrape_Timeout_Seconds="10")
    program.process.terminate()
    time.sleep(1.0)
    assert program.process.poll() is None, "a scraper was seen: it is waited for"
    assert program.get().status == 200, "and served meanwhile"
    program.process.terminate()
    assert program.process.wait(timeout=10) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_person_does_not_wait_for_scrapers(
    start: Start, tmp_path: Path, flight_dir: Path, free_port: Callable[[], int], number: int
) -> None:
    """Ctrl-C, or a closed terminal: what the exporter has written for others is gone all the same."""
    unix, targets = tmp_path / "api.sock", tmp_path / "targets.json"
    arguments = ["--flight-dir", str(flight_dir), "--api.socket", str(unix), "--web.file-sd", str(targets)]
    attended = partial(start, "env", "--default-signal=HUP")  # the tests may run under nohup
    program = start_program(attended, tmp_path / "log", free_port(), *arguments)
    wait_until(lambda: unix.exists() and targets.exists())
    program.page(X_Prometheus_Scrape_Timeout_Seconds="10")
    program.process.send_signal(number)
    assert program.process.wait(timeout=10) == 0
    assert not unix.exists()
    assert not targets.exists()


def test_a_sidecar_starts_whatever_is_wrong_with_its_configuration(
    start: Start, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """Unknown options, bad values in both places, no directory: it serves, and says what is wrong in each way it has."""
    log, port, pod = tmp_path / "log", free_port(), {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    arguments = ["--flight-dir", str(tmp_path / "none"), "--grace", "soon", "--no-such-option", "--log.level=loud", "stray"]
    program = start_program(start, log, port, *arguments, TORCHOBS_EXPORTER_HANG_TIMEOUT="never", **pod)
    assert program.value("torchobs_exporter_config_ok") == 0
    named = ("--grace 'soon'", "option: '--no-such-option'", "--log.level 'loud'", "'stray'", "_HANG_TIMEOUT='never'")
    for problem in named:
        assert problem in program.log
    assert "none is not there yet" in program.page("/")


@pytest.mark.serial
def test_the_exporter_is_small_and_quiet(exporter: Callable[..., Program], flight_dir: Path) -> None:
    """With 8 ranks that train: at most 45 MiB, and half a percent of a core while nobody asks."""
    writers = [live_rank(flight_dir, rank=number) for number in range(8)]
    for writer in writers:
        train(writer, range(1, 50))
    program = exporter()
    for _ in range(3):
        assert program.get(Accept="application/openmetrics-text", Accept_Encoding="gzip").status == 200
    process = psutil.Process(program.process.pid)
    shares = []
    for _ in range(5):  # the second best: on a busy machine the same work takes a multiple of its time now and then
        before_s, began = _cpu_s(process.pid), time.monotonic()
        while time.monotonic() - began < 1:
            for writer in writers:
                train(writer, [50])
            time.sleep(0.1)
        shares.append((_cpu_s(process.pid) - before_s) / (time.monotonic() - began))
    assert process.memory_info().rss <= 45 << 20
    assert sorted(shares)[1] <= 0.005, shares
    assert "libtorch" not in "".join(path.path for path in process.memory_maps())
    for writer in writers:
        writer.close()


def _cpu_s(pid: int) -> float:
    """CPU time of all threads, to the nanosecond: the clock ticks of `/proc/PID/stat` are 10 ms each."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


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


@pytest.mark.parametrize("arguments", [("--web.listen-address", "127.0.0.1:109600"), ("--web.listen-adress", ":9000")])
def test_a_sidecar_that_cannot_read_where_to_listen_does_so_on_loopback(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """It serves on, for the pod waits for it, but not to the network."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setattr(daemon, "configure_log", lambda _: None)
    served: list[ExporterConfig] = []
    monkeypatch.setattr(daemon, "serve", served.append)
    main(arguments)
    assert [config.addresses for config in served] == [(Address("127.0.0.1", 10960),)]


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
    exporter: Callable[..., Program], rank: Callable[..., tuple[subprocess.Popen[str], Path]]
) -> None:
    """Both die within milliseconds when a pod is deleted; the scraper's last page has the rank's end all the same."""
    process, _ = rank()
    program = exporter()
    wait_until(lambda: program.state() == "alive", timeout_s=60)
    scraper = {"User_Agent": "scraper", "X_Prometheus_Scrape_Timeout_Seconds": "5"}
    pages = [program.page(**scraper)]
    process.kill()
    process.wait()  # as kubelet does
    program.process.send_signal(signal.SIGTERM)
    while program.process.poll() is None:
        try:
            pages.append(program.page(**scraper))
        except OSError:
            break
        time.sleep(0.02)
    assert 'torchobs_rank_state{job_name="gpt",rank="0",run_id="run-1",state="lost"} 1' in pages[-1]
    assert program.process.wait(timeout=20) == 0
