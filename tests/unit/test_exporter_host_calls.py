"""A question that is not answered holds nobody up, is asked only once, and is told of."""

import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

import pytest

from tests.support import wait_until
from torchobs import catalog
from torchobs.exporter import host as host_module
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import Sample
from torchobs.exporter.host import FILE_SYSTEM_FRESH_S, KEEP_S, STUCK_AFTER_S, DetachedCall, HostMetrics

SAID = Sample(catalog.SYSTEM_FILESYSTEM_LIMIT, {catalog.MOUNTPOINT.name: "/lustre"}, 1.0)


class Server:
    """A file server: questions hang while it is down."""

    def __init__(self) -> None:
        self.asked = 0
        self._up = threading.Event()
        self._up.set()

    def down(self) -> None:
        self._up.clear()

    def up(self) -> None:
        self._up.set()

    def collect(self, path: str = "/lustre/checkpoints") -> Iterable[Sample]:
        """As `host.filesystem` does."""
        self.asked += 1
        assert path == "/lustre/checkpoints"
        self._up.wait()
        return (SAID,)


@pytest.fixture
def server() -> Iterator[Server]:
    """One that answers in the end, so that no thread outlives its test."""
    made = Server()
    yield made
    made.up()


@pytest.fixture
def clock() -> list[float]:
    """Seconds, moved by hand."""
    return [100.0]


def test_a_call_asks_no_second_time_while_it_waits(server: Server, clock: list[float]) -> None:
    """One thread hangs, not one per scrape; the last answer stands, and after seconds it is called stuck."""
    call = DetachedCall(server.collect, lambda: clock[0], FILE_SYSTEM_FRESH_S)
    call.begin()
    first = call.wait(10)
    assert first is not None
    assert first.samples == (SAID,)
    call.begin()
    assert server.asked == 1  # an answer this young is not asked for again
    clock[0] += FILE_SYSTEM_FRESH_S
    server.down()
    for _ in range(3):
        call.begin()
        assert call.wait(0) is first
    wait_until(lambda: server.asked > 1)
    assert (server.asked, call.is_stuck) == (2, False)
    clock[0] += STUCK_AFTER_S
    assert call.is_stuck
    server.up()
    assert call.wait(30) is not first
    assert (server.asked, call.is_stuck) == (2, False)


def test_what_cannot_be_asked_is_an_answer(clock: list[float]) -> None:
    """The failure is told once by who asked, and the next question is asked."""

    def fail() -> Iterable[Sample]:
        raise FileNotFoundError(2, "No such file or directory", "/lustre")

    call = DetachedCall(fail, lambda: clock[0])
    for _ in range(2):
        call.begin()
        answer = call.wait(10)
        assert answer is not None
        assert (answer.samples, type(answer.failure), answer.at_s) == ((), FileNotFoundError, clock[0])
        clock[0] += FILE_SYSTEM_FRESH_S


def stuck(host: HostMetrics) -> dict[str, float]:
    """By mount point, of file systems."""
    assert host.latest is not None
    return {
        one.attributes[catalog.MOUNTPOINT.name]: one.value
        for one in host.latest.own
        if one.metric is catalog.EXPORTER_HOST_STUCK
    }


def test_a_dead_file_server_holds_up_nothing_and_is_told_of(
    server: Server, clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last numbers stand for a minute, then end; the page says that it is stuck, the log says so once."""
    monkeypatch.setattr(host_module, "filesystem", server.collect)
    monkeypatch.setattr(host_module, "find_existing", lambda *_: None)
    monkeypatch.setattr(host_module, "DEADLINE_S", 5.0)
    config = ExporterConfig(collect_host=("filesystem",), host_paths=("/lustre/checkpoints",))
    host = HostMetrics(config, lambda: clock[0])
    host.take()
    assert (SAID in host.latest.said, stuck(host)["/lustre"]) == (True, 0.0) if host.latest else False
    server.down()
    clock[0] += FILE_SYSTEM_FRESH_S
    monkeypatch.setattr(host_module, "DEADLINE_S", 0.0)
    of_flight_files = host._sources[0].call  # which nothing waits for now, and nothing may call stuck
    for _ in range(3):
        host.take()
        of_flight_files.wait(30)
    wait_until(lambda: server.asked > 1)
    clock[0] += STUCK_AFTER_S
    for _ in range(3):
        host.take()
        of_flight_files.wait(30)
    assert host.latest is not None
    assert (SAID in host.latest.said, stuck(host)["/lustre"]) == (True, 1.0)
    clock[0] += KEEP_S
    host.take()
    assert SAID not in host.latest.said
    assert server.asked == 2
    assert [record.getMessage() for record in caplog.records] == [
        "host: file system of /lustre/checkpoints: no answer for seconds, and it is not asked again until there is one"
    ]
    server.up()
    monkeypatch.setattr(host_module, "DEADLINE_S", 5.0)
    host.take()
    assert (SAID in host.latest.said, stuck(host)["/lustre"]) == (True, 0.0)


HANGING = """
import threading
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter import host as module
module.filesystem = lambda path: threading.Event().wait()
host = module.HostMetrics(ExporterConfig(collect_host=("filesystem", "cpu"), host_paths=("/lustre",)))
host.take()
print(sorted({said.metric.name.partition(".")[2].partition(".")[0] for said in host.latest.said}))
"""


def test_a_dead_file_server_does_not_hold_up_the_exporter_s_end() -> None:
    """The thread that asks it is left behind, for ever if need be."""
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['cpu', 'host']\n"
