"""A wall clock that jumps by a day, ahead or back: ages, graces and times go on as if it had not."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.rank_files import BOOT, BORN_WALL_NS, Clock, File
from tests.scanners import scanner_of
from torchobs import catalog
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.otlp.metrics import Metrics
from torchobs.exporter.prometheus import text_format
from torchobs.exporter.prometheus.exposition import Exposition
from torchobs.exporter.prometheus.text_format import Style
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator


DAY_S = 86_400.0
JUMPS = pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
GRACE_S = 300.0


@pytest.fixture
def clock() -> Clock:
    """The exporter's."""
    return Clock(1.0)


@pytest.fixture
def scanner(flight_dir: Path, clock: Clock) -> Iterator[Scanner]:
    """Of the flight directory."""
    with closing(scanner_of(flight_dir, clock, grace_s=GRACE_S)) as made:
        yield made


@pytest.fixture
def ranks(flight_dir: Path) -> Iterator[tuple[File, File]]:
    """One that trains, and one that is dead."""
    files = File(flight_dir), File(flight_dir, rank=1, seed=2)
    for file in files:
        file.set(catalog.CHECKPOINT_DURATION, 0.5)
        file.step(1, 0.5)
        file.beat(0.9)
        file.save()
    yield files[0].hold(), files[1]
    files[0].release()


def samples(snapshot: Snapshot) -> dict[tuple[str, str], float]:
    """What a page of it says, by name and labels."""
    style = Style(openmetrics=False)
    page = b"".join(text_format.pieces(style, b"", Exposition(created=True).families(ScrapeInput(snapshot), style)))
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name != "torchobs_exporter_scan_duration_seconds"
    }


@JUMPS
def test_a_page_is_the_same_after_a_jump(scanner: Scanner, ranks: tuple[File, File], clock: Clock, jump_s: float) -> None:
    """Every age, duration, timestamp and `_created`, of the living and of the dead; none is below zero."""
    assert ranks
    scanner.scan()
    clock.seconds = 2.0
    before = samples(scanner.scan())
    clock.wall_jump_s = jump_s
    after = samples(scanner.scan())
    assert after == before
    assert min(after.values()) >= 0
    born_s = BORN_WALL_NS / 1e9
    moments = {name: value for (name, _), value in after.items() if name.endswith(("_created", "_timestamp_seconds"))}
    assert len(moments) > 10
    assert all(born_s <= value <= born_s + 2 for value in moments.values()), moments


@JUMPS
def test_a_grace_is_as_long_as_it_was(scanner: Scanner, ranks: tuple[File, File], clock: Clock, jump_s: float) -> None:
    """A rank that is dead when the clock jumps is there to the end of its grace, and not longer."""
    living, _ = ranks

    def served() -> list[str]:
        living.beat(clock.seconds)
        living.save()
        return [rank.rank for rank in scanner.scan().ranks]

    assert served() == ["0", "1"]
    clock.wall_jump_s = jump_s
    clock.seconds = GRACE_S - 1
    assert served() == ["0", "1"]
    clock.seconds = GRACE_S + 1
    assert served() == ["0"]


@pytest.mark.parametrize(("jump_s", "shown_s"), [(DAY_S, 0.0), (-DAY_S, GRACE_S)])
def test_what_an_earlier_boot_left_does_not_stay_for_ever(
    scanner: Scanner, flight_dir: Path, clock: Clock, jump_s: float, shown_s: float
) -> None:
    """Only the wall clock tells how old it is: ahead it is over, behind (it is of tomorrow then) its grace begins now."""
    File(flight_dir, boot=BOOT[::-1]).save()
    clock.wall_jump_s = jump_s
    begun = clock.seconds
    assert len(scanner.scan().ranks) == (1 if shown_s else 0)
    clock.seconds = begun + shown_s - 1
    assert len(scanner.scan().ranks) == (1 if shown_s else 0)
    clock.seconds = begun + shown_s + 1
    assert not scanner.scan().ranks


@JUMPS
@pytest.mark.parametrize("delta", [False, True])
def test_what_is_pushed_has_begun_before_it_ends(
    scanner: Scanner,
    ranks: tuple[File, File],
    clock: Clock,
    jump_s: float,
    delta: bool,  # noqa: FBT001  # a case
) -> None:
    """No point's interval is negative, before, at and after a jump; and intervals of deltas do not overlap the future."""
    living, _ = ranks
    metrics = Metrics(delta=delta, series_limit=10_000, born_ns=clock().wall_ns)
    points = 0
    for step, jumped_s in enumerate((0.0, 0.0, jump_s, jump_s, 0.0), start=2):
        clock.seconds, clock.wall_jump_s = float(step), jumped_s
        living.step(step, clock.seconds)
        living.beat(clock.seconds)
        living.save()
        snapshot = scanner.scan()
        for _, point, _ in metrics.collect(snapshot.ranks, (), clock().wall_ns, ScrapeInput(snapshot)):
            points += 1
            assert point.start_time_unix_nano <= point.time_unix_nano
            assert point.time_unix_nano <= max(clock().wall_ns, BORN_WALL_NS + 10**10)
    assert points > 100
