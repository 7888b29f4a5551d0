"""What the exporter has around its pages: the file for Prometheus, its Unix sockets, its log, and its advice to a pod."""

from __future__ import annotations

import json
import logging
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from torchobs.config.options import Address
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.daemon import LogFormatter
from torchobs.exporter.file_sd import TargetFile
from torchobs.exporter.http import UnixSocket, bind_unix
from torchobs.exporter.metrics_page import ScrapeTracker
from torchobs.exporter.pod_advice import NO_RANK, NO_RANK_S, PodAdvice
from torchobs.ranks.snapshot import EMPTY, Rank

EVERYWHERE = [Address("::", 10960)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A name for the file, in a directory that is made later."""
    return tmp_path / "later" / "torchobs-node-1.json"


@pytest.fixture
def file(path: Path) -> TargetFile:
    """One whose machine is called node-1; what cannot be written is a problem until it can."""
    made = TargetFile(str(path.with_name("torchobs-%h.json")), "node-1")
    made.update(EVERYWHERE, "/metrics", tls=False)
    assert made.problem == f"--web.file-sd {path}: No such file or directory"
    path.parent.mkdir()
    made.update(EVERYWHERE, "/metrics", tls=False)
    assert not made.problem
    return made


def test_an_address_that_was_chosen_is_said_as_it_is(file: TargetFile, path: Path) -> None:
    """With brackets where it is IPv6, each once, and with the scheme that TLS has."""
    chosen = (Address("10.0.0.7", 1), Address("fd00::7", 2), Address("0.0.0.0", 3), Address("::", 3))
    file.update(chosen, "/telemetry", tls=True)
    (group,) = json.loads(path.read_text())
    assert group["targets"] == ["10.0.0.7:1", "[fd00::7]:2", "node-1:3"]
    assert group["labels"] == {"torchobs_host": "node-1", "__metrics_path__": "/telemetry", "__scheme__": "https"}


def test_it_is_written_when_it_changes_and_removed_at_the_end(file: TargetFile, path: Path) -> None:
    """Prometheus reads it again whenever it is touched; an exporter without a port is no target."""
    before = path.stat()
    file.update(EVERYWHERE, "/metrics", tls=False)
    assert path.stat() == before
    file.update([], "/metrics", tls=False)
    assert json.loads(path.read_text()) == []
    file.remove()
    file.remove()
    assert not path.exists()


def test_another_s_file_is_not_removed(file: TargetFile, path: Path) -> None:
    """A successor has written its own meanwhile."""
    other = path.with_name("other")
    other.write_text("[]")
    other.replace(path)
    file.remove()
    assert path.read_text() == "[]"


def answers(path: Path, listening: UnixSocket) -> bool:
    """Whether that path leads to that socket."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(path))
        listening.settimeout(0)
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def test_a_successor_s_socket_keeps_its_name_in_whatever_order(flight_dir: Path) -> None:
    """Who leaves gives its name up while it listens still; a killed exporter leaves it behind, and it is replaced."""
    name = flight_dir / "exporter.sock"
    bind_unix(name).close()
    assert name.is_socket()
    old = bind_unix(name)
    assert answers(name, old)
    with pytest.raises(OSError, match="another process listens there"):
        bind_unix(name)
    old.remove()
    assert not name.exists()
    new = bind_unix(name)
    old.remove()
    assert answers(name, new)
    old.close()
    new.close()


def record(message: str, *arguments: object, level: int = logging.WARNING) -> logging.LogRecord:
    """A record as a logger makes it."""
    made = logging.LogRecord("torchobs.ranks.scanner", level, __file__, 1, message, arguments, None)
    made.created, made.msecs = 1_700_000_000.25, 250
    return made


def test_a_line_of_logfmt() -> None:
    """Time in UTC, level, source, message; quoted where it has to be."""
    line = LogFormatter("logfmt").format(record("cannot listen on %s", ":80"))
    assert line == 'time=2023-11-14T22:13:20.250Z level=warn source=torchobs.ranks.scanner msg="cannot listen on :80"'
    line = LogFormatter("logfmt").format(record("ready", level=logging.INFO))
    assert line.endswith("level=info source=torchobs.ranks.scanner msg=ready")


@pytest.mark.parametrize("text", ['a"b', "a\nb level=error", "a=b", "\x1b[31m", ""])
def test_nothing_in_a_message_makes_a_second_line_or_field(text: str) -> None:
    """File names are whatever somebody chose."""
    line = LogFormatter("logfmt").format(record("%s", text))
    assert len(line.splitlines()) == 1
    assert line.endswith(f"msg={json.dumps(text)}")
    assert json.loads(LogFormatter("json").format(record("%s", text)))["msg"] == text


def test_json_has_the_trace_of_an_exception() -> None:
    """On the same line."""
    problem = record("a scan failed")
    try:
        int("why")
    except ValueError:
        problem.exc_info = sys.exc_info()
    assert "ValueError: invalid literal" in json.loads(LogFormatter("json").format(problem))["trace"]
    assert len(LogFormatter("logfmt").format(problem).splitlines()) == 1


WITH_RANK = replace(EMPTY, ranks=(cast("Rank", object()),))


def test_a_pod_without_a_rank_says_so_after_two_minutes_or_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Once in the log; a rank that came and went is one."""
    pod, scrapers = PodAdvice(ExporterConfig()), ScrapeTracker()
    pod.look(EMPTY, scrapers, 100.0)
    assert not pod.advice
    for _ in range(2):
        pod.look(EMPTY, scrapers, 100.0 + NO_RANK_S)
    assert list(pod.advice) == [NO_RANK]
    assert caplog.text.count(NO_RANK) == 1
    pod.look(WITH_RANK, scrapers, 300.0)
    pod.look(EMPTY, scrapers, 600.0, ends=True)
    assert not pod.advice
    early = PodAdvice(ExporterConfig())
    early.look(EMPTY, scrapers, 1.0, ends=True)
    assert list(early.advice) == [NO_RANK]


def test_a_grace_that_does_not_last_for_a_scrape_is_named() -> None:
    """The interval, the timeout and 5 s; a gap while Prometheus was restarted is no interval."""
    for interval_s, is_short in ((15.0, False), (30.0, False), (31.0, True), (60.0, True)):
        pod, scrapers = PodAdvice(ExporterConfig(drain_timeout_s=40.0)), ScrapeTracker(lambda _: True)
        for at_s in (0.0, interval_s, 2 * interval_s, 2 * interval_s + 200.0):
            scrapers.note(("10.0.0.1", 4000), "Prometheus/3", 1, at_s, timeout_s=10.0)
        pod.look(WITH_RANK, scrapers, 2 * interval_s + 201.0)
        assert ["the pod's grace of 45 s is too short" in words for words in pod.advice] == [True] * is_short
