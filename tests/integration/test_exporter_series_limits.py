"""What the exporter leaves out of the page: series beyond the limits of a rank and of all, and those on the drop list."""

from pathlib import Path

from tests.exporter_page import USER, Exporter, user
from tests.rank_files import File
from torchobs.catalog import Kind
from torchobs.exporter.prometheus.rank_series import SeriesLimits


def test_too_many_series_of_one_rank_are_dropped_and_counted(flight_dir: Path, file: File) -> None:
    """One rank cannot fill Prometheus; what every rank has is not lost to it."""
    exporter = Exporter(flight_dir, limits=SeriesLimits(per_rank=100))
    for index in range(150):
        file.set(user("my.layers", Kind.GAUGE), index, USER, layer=str(index))
    file.save()
    exporter.scan()
    kept = len(exporter.samples("my_layers"))
    assert 0 < kept < 100
    assert f'reason="limit"}} {150 - kept}.0' in exporter.text()
    assert exporter.samples("torchobs_steps_total")
    exporter.close()


def test_the_ranks_together_have_a_limit_too(flight_dir: Path, file: File) -> None:
    """Whoever comes last stays outside, is counted, and gets in as soon as another has gone."""
    other = File(flight_dir, seed=2, rank=1).save()
    file.save()
    both = SeriesLimits()
    exporter = Exporter(flight_dir, limits=both)
    exporter.scan()
    exporter.text()
    exporter.close()
    exporter = Exporter(flight_dir, limits=(nothing := SeriesLimits(per_rank=0)))
    exporter.scan()
    exporter.text()
    exporter.close()
    exporter = Exporter(flight_dir, limits=(limits := SeriesLimits(total=both.taken // 2)))
    exporter.scan()
    assert [one.labels["rank"] for one in exporter.samples("torchobs_steps_total")] == ["0"]
    assert limits.dropped["total_limit"] == nothing.dropped["limit"] // 2
    assert {one.labels["rank"] for one in exporter.samples("torchobs_rank_up")} == {"0", "1"}
    file.path.unlink()
    exporter.scan(2.0)
    assert [one.labels["rank"] for one in exporter.samples("torchobs_steps_total")] == ["1"]
    assert limits.taken == both.taken // 2
    exporter.close()
    assert other.path.exists()


def test_a_histogram_takes_the_room_of_its_lines(flight_dir: Path, file: File) -> None:
    """As Prometheus counts series: the last quarter of the room is for torchobs' own, which no application can fill."""
    file.set(user("my.time", Kind.HISTOGRAM, bounds=(1.0, 2.0, 4.0)), 1.0, USER)
    for index in range(200):
        file.set(user("my.size", Kind.GAUGE), index, USER, path=str(index))
    file.save()
    exporter = Exporter(flight_dir, limits=(limits := SeriesLimits(total=160)))
    exporter.scan()
    lines = [line for line in exporter.text().splitlines() if 'rank="0"' in line and not line.startswith("#")]
    assert len([line for line in lines if line.startswith("my_time_")]) == 6
    assert limits.taken <= 160
    assert len([line for line in lines if line.startswith("my_")]) <= 120
    assert limits.dropped["total_limit"] > 0
    assert exporter.samples("torchobs_steps_total")
    exporter.close()


def test_a_series_that_is_left_out_is_counted_once(flight_dir: Path, file: File) -> None:
    """Also where all are placed anew, because a rank has gone and others waited for its room."""
    rest = [File(flight_dir, seed=2, rank=1), File(flight_dir, seed=3, rank=2)]
    for one in (file, *rest):
        one.set(user("my.size", Kind.GAUGE), 1, USER, a="1")
        one.save()
    alone = SeriesLimits(drop=["my_size"])
    exporter = Exporter(flight_dir, limits=alone)
    exporter.scan()
    exporter.text()
    exporter.close()
    exporter = Exporter(flight_dir, limits=(limits := SeriesLimits(total=alone.taken // 3, drop=["my_size"])))
    exporter.scan()
    exporter.text()
    before = dict(limits.dropped)
    assert before["drop_list"] == 3
    assert before["total_limit"] > 0
    file.path.unlink()
    exporter.scan(2.0)
    assert [one.labels["rank"] for one in exporter.samples("torchobs_steps_total")] == ["1"]
    assert limits.dropped == before
    exporter.close()


def test_what_is_on_the_drop_list_is_not_served(flight_dir: Path, file: File) -> None:
    """By the whole name that it has on the page, or by its beginning; what the exporter says of a rank stays."""
    file.save()
    limits = SeriesLimits(drop=["torchobs_steps_total", "torchobs_anomal*", "torchobs_rank_*", "torchobs_step_duration"])
    exporter = Exporter(flight_dir, limits=limits)
    exporter.scan()
    names = {sample.name for family in exporter.families().values() for sample in family.samples}
    assert not {name for name in names if name.startswith(("torchobs_steps_total", "torchobs_anomal"))}
    assert {"torchobs_rank_up", "torchobs_step_duration_seconds_sum"} <= names
    assert f'reason="drop_list"}} {limits.dropped["drop_list"]}.0' in exporter.text()
    assert limits.dropped["drop_list"] > 1
    exporter.close()
