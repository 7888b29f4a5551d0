"""The live page over HTTP: what it says, to whom, and how it is kept up to date."""

from __future__ import annotations

import asyncio
import http.client
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.exporters import Service
from tests.rank_files import live_rank, train
from tests.support import wait_until
from tests.ui import Parsed, Stream, shorten_seconds
from torchobs import catalog
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.http import client_scope
from torchobs.exporter.snapshot_cache import SnapshotCache
from torchobs.exporter.ui import sse
from torchobs.exporter.ui.data import KEPT
from torchobs.exporter.ui.page import PARTS
from torchobs.exporter.ui.sse import Feed
from torchobs.exporter.ui.view_model import Choice
from torchobs.flight.files import artifacts
from torchobs.flight.format.layout import Exit
from torchobs.flight.reader.reader import FlightFile
from torchobs.flight.writer.series_table import CORE
from torchobs.flight.writer.writer import FlightWriter
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import Snapshot

HOSTILE = "</bdi><script>alert(1)</script>"


@pytest.fixture(autouse=True)
def _shorter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test need not wait for whole ones; and files have all the time that they take on a machine that is busy."""
    shorten_seconds(monkeypatch)


@pytest.fixture
def writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """A living rank that has taken three steps and has layers with names that somebody made up."""
    made = live_rank(flight_dir, run_id=HOSTILE)
    for layer, norm in (("blocks.0", 0.123456789), (HOSTILE, 4.5)):
        cell = made.table.open(catalog.GRAD_LAYER_NORM, {"layer": layer}, CORE)
        assert cell is not None
        cell.set(norm)
    made.event(HOSTILE, {"message": HOSTILE}, 2)
    train(made, [1, 2, 3])
    yield made
    made.close()


def test_numbers_are_those_of_the_metrics(writer: FlightWriter, exporter: Service) -> None:
    """Rounded for the eye, exact beside it."""
    page = Parsed(exporter.page("/"))
    for name, labels in (
        ("torchobs_steps_total", {}),
        ("torchobs_loss", {}),
        ("torchobs_grad_norm", {}),
        ("torchobs_learning_rate", {"group": "0"}),
        ("torchobs_grad_layer_norm", {"layer": "blocks.0"}),
        ("torchobs_goodput_time_seconds_total", {"state": "productive"}),
    ):
        assert exporter.value(name, **labels) in page.values, name
    assert "step 3, loss 0.333" in page.text
    assert writer.name


def test_what_layers_put_out_stands_in_their_table(writer: FlightWriter, exporter: Service) -> None:
    """At level extreme, beside the norms."""
    assert "mean output" not in exporter.page("/")
    for metric, value in ((catalog.ACTIVATION_LAYER_MEAN_ABS, 0.71), (catalog.ACTIVATION_LAYER_ZERO, 0.25)):
        cell = writer.table.open(metric, {"layer": "blocks.1"}, CORE)
        assert cell is not None
        cell.set(value)
    train(writer, [4])
    wait_until(lambda: "mean output" in exporter.page("/"))
    page = Parsed(exporter.page("/"))
    assert {0.71, 0.25} <= set(page.values)
    assert "its zeros" in page.text
    assert "its deviation" not in page.text


def test_a_loss_that_is_not_finite_any_more_is_not_shown_as_if_it_were(writer: FlightWriter, exporter: Service) -> None:
    """Long after the last finite one has left the ring it is told as what it is, and the chart does not say "yet"."""
    for first in range(4, KEPT + 104, 100):
        train(writer, range(first, first + 100), loss=math.nan)
    wait_until(lambda: "step 4,203, loss NaN" in exporter.page("/"))
    page = Parsed(exporter.page("/")).text
    assert "LossNaNNo finite value lately." in page
    assert "0.333" not in page
    assert "The loss is not finite" in page


def test_hostile_names_are_text(writer: FlightWriter, exporter: Service) -> None:
    """Of a run, a layer, an event, and in its attributes; on the page and in the stream."""
    page = Parsed(exporter.page("/"))
    assert page.text.count(HOSTILE) >= 4
    assert page.tags.count("script") == 1  # ours
    with Stream(exporter) as stream:
        parts = stream.until("parts")
    assert not [part for name, part in parts.items() if name != "title" and "<script" in str(part)]
    assert writer.name


@pytest.mark.parametrize("query", [f"?rank={'x' * 3000}&sort=nonsense&page=7", "?rank=%00&page=-1&page=%C2%B2", "?%ff=%ff&&&="])
def test_nonsense_in_a_query_is_the_usual_page(writer: FlightWriter, exporter: Service, query: str) -> None:
    """Never an error, and nothing of it comes back."""
    connection = http.client.HTTPConnection(exporter.address, timeout=10)
    connection.request("GET", f"/{query}")
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    assert answer.status == 200
    assert "Training: 1 of 2 ranks alive" in body
    assert "xxx" not in body
    assert writer.name


@pytest.mark.parametrize(
    ("server", "local"),
    [
        (("127.0.0.1", 10960), True),
        (("127.8.8.8", 10960), True),
        (("::1", 10960), True),
        (("::ffff:127.0.0.1", 10960), True),
        (("/run/torchobs.sock", None), True),
        (None, True),
        (("10.0.0.7", 10960), False),
        (("::ffff:10.0.0.7", 10960), False),
        (("fe80::1%eth0", 10960), False),
        (("2001:db8::1", 10960), False),
        (("localhost.evil.example", 10960), False),
    ],
)
def test_whom_the_page_is_shown_to(server: tuple[str, int | None] | None, local: bool) -> None:  # noqa: FBT001  # the table's column
    """To this machine, by the connection's own address."""
    assert client_scope.is_local({"type": "http", "server": server}) is local


@pytest.mark.parametrize("path", ["/", "/live/stream", "/live/live.js", "/live/live.css"])
def test_elsewhere_the_page_is_refused(exporter: Service, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words that say what to do; metrics and health are served."""
    monkeypatch.setattr(client_scope, "is_local", lambda _: False)
    answer = exporter.get(path)
    assert answer.status == 403
    assert b"kubectl port-forward" in answer.body
    assert (exporter.get("/metrics").status, exporter.get("/-/healthy").status) == (200, 200)


@pytest.mark.parametrize("path", ["/", "/live/stream"])
def test_a_page_of_another_site_learns_nothing(exporter: Service, path: str) -> None:
    """Not by a name of its own that it resolves to this machine (DNS rebinding), and not by asking from there."""
    assert exporter.get(path, Host="evil.example:10960").status == 421
    assert exporter.get(path, Origin="https://evil.example").status == 403


@pytest.mark.parametrize("token", ["a-token-of-some-length", "another"])
@pytest.mark.parametrize("header", ["Authorization", "Torchobs-Token"])
def test_a_token_takes_nothing_away(flight_dir: Path, tmp_path: Path, header: str, token: str) -> None:
    """Who sends it with every request sees the page, as without; a page of another site does not."""
    (tmp_path / "token").write_text("a-token-of-some-length")
    config = ExporterConfig(flight_dir=str(flight_dir), mode="node", api_token_file=str(tmp_path / "token"))
    sent = {header: f"Bearer {token}" if header == "Authorization" else token}
    with Service(config) as exporter:
        assert exporter.get("/", **sent).status == 200
        assert exporter.get("/", **sent, Origin="https://evil.example").status == 403
        assert exporter.get("/", **sent, Host="evil.example:10960").status == 421


def test_what_ranks_have_left_is_linked(writer: FlightWriter, exporter: Service, flight_dir: Path) -> None:
    """And the link leads to it."""
    stacks = flight_dir / artifacts.named(writer.name, artifacts.STUCK, 0).name
    stacks.write_text("Thread 0x1 (most recent call first)\n")
    stacks.chmod(0o600)
    page = Parsed(exporter.page("/"))
    (link,) = [link for link in page.links if link.startswith("./api/v1/evidence/")]
    assert exporter.get(link[1:]).body == stacks.read_bytes()


def test_the_stream_brings_everything_and_then_what_has_changed(writer: FlightWriter, exporter: Service) -> None:
    """Parts that are as they were are not sent again."""
    with Stream(exporter) as stream:
        assert stream.answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert stream.until("parts").keys() == {*PARTS, "heading", "title", "stream"}
        train(writer, [4])
        changed = stream.until("parts")
        while "step 4" not in str(changed.get("health")):
            changed = stream.until("parts")
        assert "layers" not in changed
        assert "runs" not in changed


def test_a_stream_shows_what_its_viewer_chose(writer: FlightWriter, exporter: Service, flight_dir: Path) -> None:
    """Another rank's curves, in another order."""
    other = live_rank(flight_dir, run_id=HOSTILE, rank=1)
    train(other, range(1, 8))
    time.sleep(0.11)
    with Stream(exporter, "?rank=1&sort=rank") as stream:
        parts = stream.until("parts")
        while "steps 1–7" not in str(parts.get("curves")):
            parts = stream.until("parts")
        assert re.search(r"Rank <bdi>1</bdi> over its last steps", str(parts["curves"]))
    other.close()
    assert writer.name


def test_one_too_many_is_told_so(exporter: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a place is free as soon as somebody leaves."""
    monkeypatch.setattr(sse, "MOST_VIEWERS", 2)
    with Stream(exporter) as first, Stream(exporter) as second:
        assert (first.next()[0], second.next()[0]) == ("parts", "parts")
        with Stream(exporter) as third:
            assert third.next() == ("end", {"full": True})

    def admitted() -> bool:
        with Stream(exporter) as again:
            return again.next()[0] == "parts"

    wait_until(admitted)


def test_a_stream_ends_before_it_is_taken_for_stuck(exporter: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its viewer asks anew."""
    monkeypatch.setattr(sse, "LIFE_S", 0.5)
    with Stream(exporter) as stream:
        assert stream.until("end") == {"gone": False}
        assert stream.answer.read() == b""


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


def test_who_watches_to_the_end_is_told_that_all_is_over(flight_dir: Path) -> None:
    """An exporter that leaves because the ranks have ended is nothing that is wrong."""
    writer = live_rank(flight_dir)
    train(writer, [1, 2])
    with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node")) as exporter, Stream(exporter) as stream:
        writer.exit(Exit.FINISHED, 0)
        writer.close()
        while "Finished:" not in str(stream.until("parts").get("health")):
            pass
        assert exporter.fleets[-1].viewers == 1
        stopping = threading.Thread(target=exporter.stop)
        stopping.start()
        assert stream.until("end") == {"gone": True, "done": True}
        stopping.join()


async def nothing() -> list[dict[str, object]]:
    """No evidence."""
    return []


class Counting:
    """A scanner that counts the files it lends, and keeps who asks waiting while a test wants it."""

    def __init__(self, directory: Path) -> None:
        self._scanner = Scanner(ExporterConfig(flight_dir=str(directory)))
        self.lent = 0
        self.answers = threading.Event()
        self.answers.set()

    def scan(self) -> Snapshot:
        return self._scanner.scan()

    def flight_file(self, incarnation: str) -> AbstractContextManager[FlightFile]:
        return self._lend(incarnation)

    @contextmanager
    def _lend(self, incarnation: str) -> Iterator[FlightFile]:
        self.lent += 1
        assert self.answers.wait(10)
        with self._scanner.flight_file(incarnation) as file:
            yield file

    def close(self) -> None:
        self._scanner.close()


def test_who_takes_messages_slowly_gets_the_newest_and_nothing_is_queued(writer: FlightWriter, flight_dir: Path) -> None:
    """After many looks one message has it all; and when nobody is left, nobody looks."""
    scanner = Counting(flight_dir)

    async def watching() -> tuple[bytes, int, int]:
        watch = SnapshotCache(scanner)
        watched = Feed(watch, nothing)
        messages = watched.messages(Choice())
        assert b'"health"' in await anext(messages)
        for step in range(4, 9):
            train(writer, [step])
            await asyncio.sleep(0.15)
        newest = await anext(messages)
        while b"step 8" not in newest:  # a machine that is slow to look
            newest = await asyncio.wait_for(anext(messages), 20)
        await messages.aclose()
        assert watched._ticker is not None
        await asyncio.wait_for(watched._ticker, 20)  # the look that was under way
        left = scanner.lent
        train(writer, [9])
        await asyncio.sleep(0.3)
        watched.close()
        watch.close()
        return newest, left, scanner.lent

    newest, left, later = asyncio.run(watching())
    assert b"step 8" in newest
    assert later == left


def test_an_exporter_that_ends_during_a_look_logs_no_error(writer: FlightWriter, flight_dir: Path) -> None:
    """Which would want a thread that has ended."""
    assert writer.name
    scanner = Counting(flight_dir)

    async def ending() -> asyncio.Task[None]:
        watch = SnapshotCache(scanner)
        watched = Feed(watch, nothing)
        scanner.answers.clear()
        messages = watched.messages(Choice())
        first = asyncio.ensure_future(anext(messages))
        while not scanner.lent:  # noqa: ASYNC110  # a thread sets no asyncio.Event
            await asyncio.sleep(0.01)
        watched.close()
        scanner.answers.set()
        assert watched._ticker is not None
        await asyncio.wait({first, watched._ticker})
        await messages.aclose()
        watch.close()
        return watched._ticker

    assert asyncio.run(ending()).cancelled()


def test_files_that_do_not_answer_do_not_hold_the_page_up(
    writer: FlightWriter, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows what the last snapshot says."""
    monkeypatch.setattr(sse, "DEADLINE_S", 0.2)
    scanner = Counting(flight_dir)

    async def look() -> str:
        watch = SnapshotCache(scanner)
        await watch.fresh()
        scanner.answers.clear()
        watched = Feed(watch, nothing)
        shown = await watched.model(Choice())
        scanner.answers.set()
        watched.close()
        watch.close()
        assert shown.curves.loss is None
        return str(shown.run.status.steps if shown.run else None)

    assert asyncio.run(look()) == "3"
    assert writer.name
