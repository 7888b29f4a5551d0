"""Several runs in one directory: which of them the live page shows, and that it stays with it."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.exporters import Service
from tests.rank_files import Clock, File, live_rank, train
from tests.support import wait_until
from tests.ui import Parsed, Stream, shorten_seconds
from torchobs.exporter.ui import view_model as models
from torchobs.exporter.ui.page import heading, rendered
from torchobs.exporter.ui.urls import choice_of
from torchobs.exporter.ui.view_model import Choice, Model, Modeller, focused, model
from torchobs.flight.files import artifacts
from torchobs.flight.format.layout import Exit
from torchobs.flight.writer.writer import FlightWriter
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import Snapshot

A, B, C = "jobs/a", "jobs/b", "jobs/c"


@pytest.fixture
def started(flight_dir: Path, clock: Clock) -> Iterator[Callable[..., File]]:
    """Start runs of one living rank at moments of the clock."""
    made: list[File] = []

    def start(run_id: str, born_s: float) -> File:
        made.append(File(flight_dir, seed=len(made) + 1, born_s=born_s, job_name="jobs", run_id=run_id).save().hold())
        clock.seconds = max(clock.seconds, born_s)
        return made[-1]

    yield start
    for file in made:
        file.release()


@pytest.fixture
def served(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FlightWriter]]:
    """Start runs of one living rank by the machine's clocks, and let them train."""
    shorten_seconds(monkeypatch)
    made: list[FlightWriter] = []

    def start(run_id: str, steps: int = 3, **given: str | int) -> FlightWriter:
        made.append(live_rank(flight_dir, **{"job_name": "jobs", "run_id": run_id, "world_size": 1, **given}))
        train(made[-1], range(1, steps + 1))
        return made[-1]

    yield start
    for writer in made:
        writer.close()


def shown(snapshot: Snapshot, choice: Choice) -> Model:
    """What the page is of for that choice."""
    return model(Modeller().runs(snapshot, {}, {choice.run}), choice, {}, (), 0.0)


def order(snapshot: Snapshot) -> list[str]:
    """The runs as the page lists them."""
    return [run.key for run in Modeller().runs(snapshot, {})]


def test_runs_keep_their_order_whoever_steps(started: Callable[..., File], scanner: Scanner, clock: Clock) -> None:
    """The newest first; and what has ended comes last, however new it is."""
    first, second = started("a", 0.0), started("b", 1.0)
    for number in range(1, 7):
        clock.seconds = 1.0 + number
        (first, second)[number % 2].step(number, clock.seconds)
        for file in (first, second):
            file.beat(clock.seconds)
            file.save()
        assert order(scanner.scan()) == [B, A]
    third = started("c", clock.seconds)
    assert order(scanner.scan()) == [C, B, A]
    third.writer.exit(Exit.FINISHED, 0)
    third.save().release()
    clock.seconds += 1.0
    for file in (first, second):
        file.beat(clock.seconds)
        file.save()
    assert order(scanner.scan()) == [B, A, C]


def test_runs_that_began_together_are_in_the_order_of_their_names(started: Callable[..., File], scanner: Scanner) -> None:
    """Not in that of a directory."""
    for run_id in ("c", "a", "b"):
        started(run_id, 0.0)
    assert order(scanner.scan()) == [A, B, C]


def test_a_run_that_is_not_there_is_never_another(started: Callable[..., File], scanner: Scanner, clock: Clock) -> None:
    """Before it begins, and once its grace is over: it says so, lists the others, and keeps what was chosen."""
    started("a", 0.0)
    choice = Choice(run=B, rank="3", sort="loss", page=2)
    missing = shown(scanner.scan(), choice)
    assert (missing.run, missing.focus, missing.rows, missing.choice) == (None, None, (), choice)
    assert focused(scanner.scan().ranks, choice) is None
    page = {name: Parsed(part) for name, part in rendered(missing).items()}
    assert "No such run (any more)" in page["health"].text
    assert page["runs"].links == ["./?run=jobs%2Fa#health"]
    assert heading(missing) == f"<bdi>{B}</bdi>"
    file = started("b", 1.0)
    assert shown(scanner.scan(), choice).run is not None
    file.writer.exit(Exit.FINISHED, 0)
    file.save().release()
    assert shown(scanner.scan(), choice).run is not None
    clock.seconds += 301.0
    assert shown(scanner.scan(), choice).run is None


def test_a_run_that_is_asked_for_is_there_however_many_are_newer(
    started: Callable[..., File], scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not in the list for those who look at another."""
    monkeypatch.setattr(models, "MOST_RUNS", 1)
    started("a", 0.0)
    started("b", 1.0)
    snapshot = scanner.scan()
    assert [run.key for run in shown(snapshot, Choice(run=A)).runs] == [B, A]
    assert [run.key for run in shown(snapshot, Choice(run=B)).runs] == [B]
    assert shown(snapshot, Choice(run=A)).run is not None


def test_every_link_of_a_page_leads_to_the_run_that_it_shows(served: Callable[..., FlightWriter], exporter: Service) -> None:
    """Also where nobody has chosen one; and so does the stream."""
    served("a")
    for newest in ("b", "c"):
        served(newest)
        page = Parsed(wait_until(lambda newest=newest: has(exporter, "/", f'<span class="run"><bdi>{newest}')))  # type: ignore[misc]  # bound in the loop
        own = [link for link in page.links if link.startswith("./?") and not link.endswith("#health")]
        assert len(own) > 5
        assert {choice_of(link.partition("?")[2].partition("#")[0]).run for link in own} == {f"jobs/{newest}"}
        assert f'data-stream="./live/stream?run=jobs%2F{newest}"' in exporter.page("/")


def has(exporter: Service, path: str, words: str) -> str:
    """The page, once it has these words."""
    page = exporter.page(path)
    return page if words in page else ""


def test_a_page_of_no_run_stays_with_the_first_that_comes(served: Callable[..., FlightWriter], exporter: Service) -> None:
    """Its stream tells it where to go on; there it hears of that run only, and of the heading, too."""
    assert 'data-stream="./live/stream?sort=loss"' in exporter.page("/?sort=loss")
    with Stream(exporter, "?sort=loss") as stream:
        first = stream.until("parts")
        assert "stream" not in first
        assert first["heading"] == "torchobs exporter"
        served("a")
        parts = first
        while "stream" not in parts:
            parts = stream.until("parts")
    assert parts["stream"] == "./live/stream?run=jobs%2Fa&sort=loss"
    served("b")
    wait_until(lambda: "<bdi>b</bdi>" in exporter.page("/"))
    with Stream(exporter, "?run=jobs%2Fa&sort=loss") as stream:
        parts = stream.until("parts")
        assert "stream" not in parts
        assert parts["heading"] == '<bdi>jobs</bdi> <span class="run"><bdi>a</bdi></span>'


def test_a_stream_of_a_run_that_is_not_there_yet_waits_for_it(served: Callable[..., FlightWriter], exporter: Service) -> None:
    """A page that is opened before its job asks for it all the same."""
    served("a")
    query = "?run=jobs%2Fb&rank=0"
    page = wait_until(lambda: has(exporter, f"/{query}", "<h2>Runs</h2>"))
    assert f'data-stream="./live/stream{html.escape(query)}"' in page
    assert '<h1 id="heading"><bdi>jobs/b</bdi></h1>' in page
    with Stream(exporter, query) as stream:
        parts = stream.until("parts")
        assert "No such run (any more)" in str(parts["health"])
        served("b", 5)
        while "step 5" not in str(parts.get("health")):
            parts = stream.until("parts")
        assert parts["heading"] == '<bdi>jobs</bdi> <span class="run"><bdi>b</bdi></span>'


def test_each_run_in_the_list_begins_with_how_it_is(served: Callable[..., FlightWriter], exporter: Service) -> None:
    """Who has thirty of them looks for the sick ones; in words, too, for who does not see the sign."""
    served("a")
    failed = served("b", 5)
    failed.exit(Exit.EXIT_CODE, 1)
    failed.close()

    def signs() -> dict[str, str]:
        listed = exporter.page("/").partition("<h2>Runs</h2>")[2].partition("</ul>")[0]
        return dict(re.findall(r'<li class="\w+"><span class="sign" role="img" aria-label="([^"]*):">(.)</span>', listed))

    wait_until(lambda: signs() == {"Worth a look": "▲", "Trouble": "✕"})  # a rank of it has not appeared


def left_by(exporter: Service, run: str) -> list[tuple[str, ...]]:
    """The rank and the link of what is listed as left by that run's ranks."""
    page = exporter.page(f"/?run={run}").partition('<section id="evidence"')[2].partition("</section>")[0]
    return re.findall(r'<td class="n"><bdi>([^<]*)</bdi></td><td><a href="\.([^"]*)">', page)


def test_what_ranks_have_left_is_on_the_page_of_their_run(
    served: Callable[..., FlightWriter], exporter: Service, flight_dir: Path
) -> None:
    """Under the name that the rank has there; also what one has left that was started again since."""
    first, other = served("a"), served("b")
    before = leave_stacks(flight_dir, first, 1)
    first.exit(Exit.EXIT_CODE, 1)
    first.close()
    again = leave_stacks(flight_dir, served("a", 5, restart=1), 2)
    others = [leave_stacks(flight_dir, other, number) for number in range(3, 3 + 8)]
    wait_until(lambda: has(exporter, "/?run=jobs/a", "step 5"))
    renamed = f"0-{first.header.incarnation.hex()[:8]}"
    assert sorted(left_by(exporter, "jobs/a")) == [("0", again), (renamed, before)]
    assert sorted(left_by(exporter, "jobs/b")) == sorted(("0", link) for link in others)
    assert left_by(exporter, "jobs/c") == []


def test_others_evidence_takes_no_room_on_a_page(
    served: Callable[..., FlightWriter], exporter: Service, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much newer it is."""
    monkeypatch.setattr(models, "MOST_EVIDENCE", 1)
    own = leave_stacks(flight_dir, served("a"), 1)
    leave_stacks(flight_dir, served("b"), 2)
    assert wait_until(lambda: left_by(exporter, "jobs/a")) == [("0", own)]


def leave_stacks(flight_dir: Path, writer: FlightWriter, number: int) -> str:
    """Stacks that a rank was asked for; where they are to be had."""
    one = artifacts.named(writer.name, artifacts.STACKS, number)
    (flight_dir / one.name).write_text("Thread 0x1 (most recent call first)\n")
    os.utime(flight_dir / one.name, (1_700_000_000 + number,) * 2)
    return f"/api/v1/evidence/{one.id}"


def test_the_longest_name_of_a_run_is_found_by_its_link(served: Callable[..., FlightWriter], exporter: Service) -> None:
    """A query is cut, but not within that."""
    served("長" * 900)
    page = wait_until(lambda: has(exporter, "/", "step 3"))
    link = next(link for link in Parsed(page).links if link.endswith("#curves"))
    assert len(link) > 8000
    assert "step 3" in exporter.page(link.removeprefix(".").partition("#")[0])
