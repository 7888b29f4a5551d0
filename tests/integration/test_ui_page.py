"""The live page: the run that it shows, who may see it, and its stream."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.diagnosis_files import Parsed, Stream, shorten_seconds
from tests.exporters import Service
from tests.rank_files import Clock, File, live_rank, train
from tests.support import clean_environment, free_port, wait_until
from torchobs.document import live
from torchobs.document.live import Choice, Model, model, page_document
from torchobs.exporter import access, page
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.page import PARTS, focused, rendered
from torchobs.flight import artifacts
from torchobs.flight.directory import open_directory
from torchobs.flight.layout import Exit
from torchobs.node import election
from torchobs.ranks.live import KEPT, RunsReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torchobs.flight.writer import FlightWriter
    from torchobs.ranks.scanner import Scanner
    from torchobs.ranks.snapshot import Snapshot


@pytest.fixture(autouse=True)
def _shorter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test need not wait for whole ones; and files have all the time that they take on a machine that is busy."""
    shorten_seconds(monkeypatch)


def test_numbers_are_those_of_the_metrics(writer: FlightWriter, exporter: Service) -> None:
    """Rounded for the eye, exact beside it."""
    page = Parsed(exporter.page("/"))
    for name, labels in (
        ("torchobs_steps_total", {}),
        ("torchobs_loss", {}),
        ("torchobs_grad_norm", {}),
        ("torchobs_learning_rate", {"group": "0"}),
        ("torchobs_goodput_time_seconds_total", {"state": "productive"}),
    ):
        assert exporter.value(name, **labels) in page.values, name
    assert "step 3, loss 0.333" in page.text
    assert writer.name


def test_a_loss_that_is_not_finite_any_more_is_not_shown_as_if_it_were(writer: FlightWriter, exporter: Service) -> None:
    """Long after the last finite one has left the ring it is shown as what it is, and the chart does not say "yet"."""
    for first in range(4, KEPT + 104, 100):
        train(writer, range(first, first + 100), loss=math.nan)
    wait_until(lambda: "step 4,203, loss NaN" in exporter.page("/"))
    page = Parsed(exporter.page("/")).text
    assert "LossNaNNo finite value lately." in page
    assert "0.333" not in page
    assert "The loss is not finite" in page


HERE = (("127.0.0.1", 1), ("127.8.8.8", 1), ("::1", 1), ("::ffff:127.0.0.1", 1), ("/run/torchobs.sock", None), None)
ELSEWHERE = (("10.0.0.7", 1), ("::ffff:10.0.0.7", 1), ("fe80::1%eth0", 1), ("2001:db8::1", 1), ("localhost.evil.example", 1))


def test_whom_the_page_is_shown_to() -> None:
    """To this machine, by the connection's own address."""
    assert [address for address in HERE + ELSEWHERE if access.is_local({"type": "http", "server": address})] == list(HERE)


def test_elsewhere_the_page_is_refused(exporter: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words that say what to do; metrics and health are served."""
    monkeypatch.setattr(access, "is_local", lambda _: False)
    for path in ("/", "/live/stream", "/live/live.js", "/live/live.css"):
        answer = exporter.get(path)
        assert (answer.status, b"kubectl port-forward" in answer.body) == (403, True)
    assert (exporter.get("/metrics").status, exporter.get("/-/healthy").status) == (200, 200)


def test_a_page_of_another_site_learns_nothing(exporter: Service) -> None:
    """Not by a name of its own that it resolves to this machine (DNS rebinding), and not by asking from there."""
    for path in ("/", "/live/stream"):
        assert exporter.get(path, Origin="https://evil.example").status == 403
        assert exporter.get(path, Host="evil.example:10960").status == 421


def test_the_stream_brings_everything_and_then_what_has_changed(writer: FlightWriter, exporter: Service) -> None:
    """Parts that are as they were are not sent again."""
    with Stream(exporter) as stream:
        assert stream.answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert stream.until("parts").keys() == {*PARTS, "heading", "title", "stream"}
        train(writer, [4])
        changed = stream.until("parts", "health", "step 4")
        assert "layers" not in changed
        assert "runs" not in changed


def test_one_too_many_is_told_so(exporter: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a place is free as soon as somebody leaves."""
    monkeypatch.setattr(page, "MOST_VIEWERS", 2)
    with Stream(exporter) as first, Stream(exporter) as second:
        assert (first.next()[0], second.next()[0]) == ("parts", "parts")
        with Stream(exporter) as third:
            assert third.next() == ("end", {"full": True})

    def admitted() -> bool:
        with Stream(exporter) as again:
            return again.next()[0] == "parts"

    wait_until(admitted)


def test_an_exporter_that_ends_does_not_wait_for_who_watches(flight_dir: Path) -> None:
    """It says goodbye."""
    with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node")) as exporter, Stream(exporter) as stream:
        stream.next()
        began = time.monotonic()
        stopping = threading.Thread(target=exporter.stop)
        stopping.start()
        assert stream.until("end") == {"gone": True}
        stopping.join()
        assert time.monotonic() - began < 5


A, B, C = "jobs/a", "jobs/b", "jobs/c"


@pytest.fixture
def started(flight_dir: Path, clock: Clock) -> Iterator[Callable[..., File]]:
    """Start runs of one living rank at moments of the clock."""
    files: list[File] = []

    def start(run_id: str, born_s: float) -> File:
        files.append(File(flight_dir, seed=len(files) + 1, born_s=born_s, job_name="jobs", run_id=run_id).save().hold())
        clock.seconds = max(clock.seconds, born_s)
        return files[-1]

    yield start
    for file in files:
        file.release()


@pytest.fixture
def served(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FlightWriter]]:
    """Start runs of one living rank by the machine's clocks, and let them train."""
    shorten_seconds(monkeypatch)
    writers: list[FlightWriter] = []

    def start(run_id: str, steps: int = 3, **fields: str | int) -> FlightWriter:
        writers.append(live_rank(flight_dir, **{"job_name": "jobs", "run_id": run_id, "world_size": 1, **fields}))
        train(writers[-1], range(1, steps + 1))
        return writers[-1]

    yield start
    for writer in writers:
        writer.close()


def shown(snapshot: Snapshot, choice: Choice) -> Model:
    """What the page is of for that choice."""
    return model(RunsReader().runs(snapshot, {}, {choice.run}), choice, (), 0.0)


def order(snapshot: Snapshot) -> list[str]:
    """The runs as the page lists them."""
    return [run.key for run in RunsReader().runs(snapshot, {})]


def test_runs_keep_their_order_whoever_steps(started: Callable[..., File], scanner: Scanner, clock: Clock) -> None:
    """The newest first; and what has ended comes last, however new it is."""
    first, second = started("a", 0.0), started("b", 1.0)

    def look() -> list[str]:
        for file in (first, second):
            file.beat(clock.seconds)
            file.save()
        return order(scanner.scan())

    for number in range(1, 7):
        clock.seconds = 1.0 + number
        (first, second)[number % 2].step(number, clock.seconds)
        assert look() == [B, A]
    third, fourth = started("c", clock.seconds), started("a0", clock.seconds)  # together: in the order of their names
    assert order(scanner.scan()) == ["jobs/a0", C, B, A]
    for ended in (third, fourth):
        ended.writer.exit(Exit.FINISHED, 0)
        ended.save().release()
    clock.seconds += 1.0
    assert look() == [B, A, "jobs/a0", C]


def test_a_run_that_is_not_there_is_never_another(started: Callable[..., File], scanner: Scanner, clock: Clock) -> None:
    """Before it begins, and once its grace is over: it says so, lists the others, and keeps what was chosen."""
    started("a", 0.0)
    choice = Choice(run=B, rank="3", sort="loss", page=2)
    missing = shown(scanner.scan(), choice)
    assert (missing.run, missing.focus, missing.ranks, missing.choice) == (None, None, (), choice)
    assert focused(scanner.scan().ranks, choice) is None
    parts = rendered(page_document(missing))
    page = {name: Parsed(part) for name, part in parts.items()}
    assert "No such run (any more)" in page["health"].text
    assert page["runs"].links == ["./?run=jobs%2Fa#health"]
    assert parts["heading"] == f"<bdi>{B}</bdi>"
    file = started("b", 1.0)
    begun = shown(scanner.scan(), choice)
    assert begun.run is not None
    assert "none for 0 s" in Parsed(rendered(page_document(begun))["ranks"]).text  # its first step is still to come
    file.writer.exit(Exit.FINISHED, 0)
    file.save().release()
    assert shown(scanner.scan(), choice).run is not None
    clock.seconds += 301.0
    assert shown(scanner.scan(), choice).run is None


def left_by(exporter: Service, run: str) -> list[tuple[str, ...]]:
    """The rank and the link of what is listed as left by that run's ranks."""
    page = exporter.page(f"/?run={run}").partition('<section id="evidence"')[2].partition("</section>")[0]
    return re.findall(r'<td class="n">([^<]*)</td><td class="words"><a href="\.([^"]*)">', page)


def test_what_ranks_have_left_is_on_the_page_of_their_run(
    served: Callable[..., FlightWriter], exporter: Service, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name that the rank has there, and the link leads to it; also what one left that was started again since."""
    first, other = served("a"), served("b")
    before = leave_stacks(flight_dir, first, 1)
    first.exit(Exit.EXIT_CODE, 1)
    first.close()
    again = leave_stacks(flight_dir, served("a", 5, restart=1), 2)
    others = [leave_stacks(flight_dir, other, number) for number in range(3, 3 + 8)]
    wait_until(lambda: "step 5" in exporter.page("/?run=jobs/a"))
    renamed = f"0-{first.header.incarnation.hex()[:8]}"
    assert sorted(left_by(exporter, "jobs/a")) == [("0", again), (renamed, before)]
    assert sorted(left_by(exporter, "jobs/b")) == sorted(("0", link) for link in others)
    assert left_by(exporter, "jobs/c") == []
    assert exporter.page(again) == STACKS
    monkeypatch.setattr(live, "MOST_EVIDENCE", 1)  # that of others takes no room, however much newer it is
    assert left_by(exporter, "jobs/a") == [("0", again)]


STACKS = "Thread 0x1 (most recent call first)\n"


def leave_stacks(flight_dir: Path, writer: FlightWriter, number: int) -> str:
    """Stacks that a rank was asked for; where they are to be had."""
    artifact = artifacts.named(writer.name, artifacts.STACKS, number)
    (flight_dir / artifact.name).write_text(STACKS)
    os.utime(flight_dir / artifact.name, (1_700_000_000 + number,) * 2)
    return f"/api/v1/evidence/{artifact.id}"


TRAINING = """
import sys
import torchobs
session = torchobs.init(exporter=True, exporter_address=sys.argv[1])
sys.stdin.readline()
print(repr(session))
"""


def test_a_script_says_where_its_page_is(flight_dir: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    """Rank 0 logs it once, as soon as the exporter listens, over ssh with a tunnel; the session has it, too."""
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
    environ = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}
    with log.open("w") as out:
        process = start(
            sys.executable, "-c", TRAINING, address, torch=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=out, env=environ,
        )  # fmt: skip
    directory = open_directory(str(flight_dir))
    announced = wait_until(lambda: election.read(directory), timeout_s=60)
    assert announced is not None
    url = announced.url
    assert address in url
    port = address.rpartition(":")[2]
    tunnel = f"; from your own machine: ssh -L {port}:localhost:{port} {os.uname().nodename}"
    line = f"torchobs: this run is shown live on {url}{tunnel}\n"
    assert process.stdin is not None
    assert process.stdout is not None
    wait_until(lambda: line in log.read_text(), timeout_s=60)
    process.stdin.close()
    said = process.stdout.read()
    assert process.wait(timeout=60) == 0, log.read_text()
    assert log.read_text().count("shown live") == 1
    assert re.search(rf"run \S+, rank 0, step 0, live on {re.escape(url)}>", said), said
