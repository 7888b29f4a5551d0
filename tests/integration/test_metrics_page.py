"""The metrics page of flight files: what is on it, in which format, with which exemplars, within which limits, and how much."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Timestamp

from tests import support
from tests.exporters import Service
from tests.fork_server import Python
from tests.page import USER, Exporter, parse_openmetrics, user
from tests.rank_files import BORN_WALL_NS, File, S
from torchobs import catalog
from torchobs.catalog import Kind
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exposition import SeriesLimits
from torchobs.flight.events import SpanIds
from torchobs.flight.layout import Exit
from torchobs.flight.series import Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from prometheus_client.metrics_core import Metric as Family


@pytest.fixture
def exporter(flight_dir: Path) -> Iterator[Exporter]:
    """An exporter of the flight directory."""
    opened = Exporter(flight_dir)
    yield opened
    opened.close()


def values(exporter: Exporter, name: str) -> list[float]:
    """The values of the samples of that name."""
    return [float(sample.value) for sample in exporter.samples(name)]


def test_the_page_is_the_golden_one(exporter: Exporter, flight_dir: Path, golden: Callable[[str, str], None]) -> None:
    """Three ranks: one training, with instruments of its user; one that crashed; one killed. Every byte of it."""
    alive = File(flight_dir, seed=1).hold()
    for step in range(1, 5):
        alive.step(step, step / 10, loss=3.0 / step, norm=4.0**step)
        alive.span(step, step / 10, attrs={"reason": "sampled", "duration_s": 0.1, "loss": 3.0 / step, "grad_norm": 4.0**step})
    alive.step(5, 0.5, loss=math.nan, norm=math.inf)
    alive.set(catalog.OVERHEAD, 0.001, probe="step")
    alive.set(user("my.requests", unit="{request}", brief="Requests.\nAll of them."), 7, USER, route='/a"b\\c\n')
    alive.set(user("my.latency", Kind.HISTOGRAM, "s", "Latency.", (0.5, 1.0)), 0.75, USER)
    alive.set(user("my.level", Kind.UPDOWN), -3, USER, rank="mine")
    alive.set(user("my.share", Kind.GAUGE, "1"), 0.25, USER)
    alive.beat(0.9)
    alive.save()
    crashed = File(flight_dir, seed=2, rank=1, restart=2)
    crashed.step(1, 0.1)
    crashed.writer.exit(Exit.EXCEPTION, 1)
    crashed.save()
    killed = File(flight_dir, seed=3, rank=10)
    killed.set(user("my.share", Kind.GAUGE, "1"), 0.5, USER)
    killed.save()
    (flight_dir / f"r4-{4:032x}.flight").write_text("garbage")
    exporter.scan(1.0)
    page = re.sub(r'python="[^"]*",version="[^"]*"', 'python="…",version="…"', exporter.openmetrics())
    golden("exporter_page.txt", re.sub(r"(scan_duration_seconds) [\d.e-]+\n", r"\1 …\n", page))
    alive.release()


class Families(Collector):
    """The families of a parsed page, for prometheus-client to write again."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Family]:
        return self._families


def test_the_page_is_what_prometheus_client_would_write(exporter: Exporter, file: File) -> None:
    """In both formats, every kind of series, number and label; only numbers may have other digits."""
    for step in range(1, 20):
        file.step(step, step / 20, norm=10.0**step, loss=-1.5)
        file.span(step, step / 20, attrs={"duration_s": 0.1, "grad_norm": 10.0**step})
    for which, value in enumerate((0, -1, 0.1, 1e6, 999999.5, 1e15, 1e16, 1e300, -1e300, 1e-7, 5e-324, 2**53)):
        file.set(user("my.gauge", Kind.GAUGE, "1"), value, Scope("a"), which=which, text='back\\slash "quote"\nnew line é ☃')
        file.set(user("my.requests", Kind.COUNTER, "s"), abs(value), Scope("a"), which=which)
    file.save()
    exporter.scan()
    families = Families(parse_openmetrics(exporter.openmetrics()))
    expected: bytes = openmetrics.generate_latest(families)  # type: ignore[no-untyped-call]
    assert with_same_numbers(exporter.openmetrics()) == with_same_numbers(expected.decode())
    assert with_same_numbers(exporter.text()) == with_same_numbers(generate_latest(families).decode())


def with_same_numbers(page: str) -> str:
    """The page with Python's own text of each number behind a space."""
    return re.sub(
        r"(?<= )-?\d[-+.\de]*$|(?<=} )-?\d[-+.\de]*(?= )", lambda number: repr(float(number[0])), page, flags=re.MULTILINE
    )


def test_what_is_not_finite_is_absent(exporter: Exporter, file: File) -> None:
    """A NaN is counted where it arises; on the page it would be a value."""
    for number, value in enumerate((math.nan, math.inf, -math.inf), 1):
        file.step(number, 0.1 * number, loss=value, norm=value)
        file.set(user("my.gauge", Kind.GAUGE), value, USER, which=number)
    exporter.scan(1.0, file)
    assert all(math.isfinite(sample.value) for family in exporter.families().values() for sample in family.samples)
    assert not exporter.samples("my_gauge")
    assert values(exporter, "torchobs_grad_nonfinite_steps_total") == [3.0]


ERRORS = "torchobs_probe_errors_total"


def test_a_quiet_counter_is_scraped_at_zero_before_it_counts(exporter: Exporter, flight_dir: Path, file: File) -> None:
    """Absent while it is zero; at zero until every scraper that is expected has seen that; then what it has counted.

    One that counts already is shown as it is: a counter that steps back is a reset. So does no gauge wait.
    """
    other = File(flight_dir, seed=2, rank=1).hold()
    other.set(catalog.PROBE_ERRORS, 3, probe="data")
    file.set(catalog.PROBE_ERRORS, 0, probe="loss")
    file.set(catalog.PROBE_DISABLED, 0, probe="loss")
    exporter.scan(1.0, file, other)
    assert values(exporter, ERRORS) == [3.0]
    file.set(catalog.PROBE_ERRORS, 3, probe="loss")
    file.set(catalog.PROBE_DISABLED, 1, probe="loss")
    exporter.scan(2.0, file)
    assert values(exporter, "torchobs_probe_disabled") == [1.0]
    for acknowledged in (0, exporter.number - 1):  # nobody, or somebody before it began
        exporter.acknowledged = acknowledged
        assert values(exporter, ERRORS) == [0.0, 3.0]
        assert exporter.holding
    exporter.acknowledged = exporter.number
    for _ in range(2):
        assert values(exporter, ERRORS) == [3.0, 3.0]
        assert not exporter.holding
        exporter.scan(3.0)
    other.release()


KILLS = "torchobs_cgroup_memory_oom_kills_total"


def test_what_all_ranks_share_is_said_once(exporter: Exporter, flight_dir: Path) -> None:
    """By the first rank of the run that lives: over eight ranks, `sum()` was eight times too high."""
    ranks = [File(flight_dir, seed=seed, rank=rank).hold() for seed, rank in ((1, 10), (2, 2), (3, 9))]
    for kills, rank in enumerate(ranks, 1):
        rank.set(catalog.CGROUP_MEMORY_OOM_KILLS, kills)
        rank.set(catalog.MEMORY_SHARED_SIZE, 4096)
        rank.beat(0.9)
        rank.save()
    exporter.scan(1.0)
    assert values(exporter, KILLS) == [2.0]
    assert [sample.labels.get("rank") for sample in exporter.samples("torchobs_memory_shared_size_bytes")] == [None]
    ranks[1].release()
    exporter.scan(9.0)
    assert values(exporter, KILLS) == [3.0]
    for rank in (ranks[0], ranks[2]):
        rank.release()
    exporter.scan(17.0)
    assert values(exporter, KILLS) == [2.0], "the first of the dead keeps the counters"


def test_a_dead_rank_keeps_what_means_something_and_nothing_else(exporter: Exporter, file: File) -> None:
    """Counters, histograms, its last loss and how it ended stay; levels and ages end at once."""
    file.step(1, 0.1, loss=1.5)
    file.set(catalog.PROBE_DISABLED, 1, probe="loss")
    file.set(user("my.requests"), 7, USER)
    file.set(user("my.level", Kind.GAUGE), 7, USER)
    file.set(user("my.balance", Kind.UPDOWN), 7, USER)
    file.writer.exit(Exit.EXIT_CODE, 3)
    exporter.scan(1.0, file)
    alive = exporter.families().keys()
    file.release()
    exporter.scan(2.0)
    dead = exporter.families()
    assert {name for name in alive - dead.keys() if not name.startswith("torchobs_exporter")} == {
        *("my_level", "my_balance", "torchobs_probe_disabled", "torchobs_rank_progress_age_seconds"),
    }
    assert values(exporter, "torchobs_loss") == [1.5]
    assert values(exporter, "torchobs_rank_up") == [0.0]
    assert [sample.labels["reason"] for sample in exporter.samples("torchobs_rank_exit") if sample.value] == ["exit_code"]
    assert [sample.labels["state"] for sample in exporter.samples("torchobs_rank_state") if sample.value] == ["failed"]


RAISED: dict[str, object] = {
    "exception.type": "builtins.ValueError", "exception.message": 'a "bad"\nlabel', "location": "/lib/json.py:3 in loads",
    "caller": "/home/me/train.py:7 in main",
}  # fmt: skip


def test_the_exception_that_ended_a_rank_is_served(exporter: Exporter, flight_dir: Path, file: File) -> None:
    """Type, message and the user's own line, from the rank's end on: not while it lives, and not a thread's.

    One that somebody caught, or of a notebook's cell, did not end the rank.
    """
    other = File(flight_dir, seed=2, rank=1)
    other.writer.event(catalog.EVENT_EXCEPTION.name, RAISED, 5)
    other.writer.exit(Exit.EXIT_CODE, 3)
    other.save()
    exception = catalog.EVENT_EXCEPTION.name
    file.writer.event(exception, {**RAISED, "exception.type": "builtins.KeyError"}, 3)  # one that the script has handled
    file.writer.event(exception, RAISED, 5)
    file.writer.event(exception, {**RAISED, "exception.type": "builtins.OSError", "thread": "loader"}, 5)
    exporter.scan(1.0, file)
    assert exporter.samples("torchobs_rank_exception") == []
    file.writer.exit(Exit.EXCEPTION, 1)
    file.save()
    file.release()
    for seconds in (2.0, 3.0):
        exporter.scan(seconds)
        (sample,) = exporter.samples("torchobs_rank_exception")
        labels = {name: sample.labels[name] for name in ("rank", "exception_type", "message", "location")}
        assert labels == {
            "rank": "0", "exception_type": "ValueError", "message": 'a "bad"label', "location": "/home/me/train.py:7 in main",
        }  # fmt: skip


TAKEN = (
    *(("torchobs.steps", Kind.GAUGE), ("torchobs.steps", Kind.COUNTER), ("torchobs.rank.up", Kind.GAUGE)),
    *(("torchobs_rank_up", Kind.GAUGE), ("torchobs.exporter.config_ok", Kind.GAUGE), ("up", Kind.GAUGE)),
    *(("scrape.duration_seconds", Kind.GAUGE), ("target.info", Kind.GAUGE), ("my.own.counter", Kind.GAUGE)),
    ("torchobs.step.duration_seconds_count", Kind.GAUGE),
)


def test_no_instrument_of_a_user_takes_another_s_name(exporter: Exporter, file: File) -> None:
    """Not ours, not Prometheus' own, not another instrument's of another kind; it is dropped and counted."""
    file.set(user("my.own.counter", unit=""), 1, USER)
    file.step(1, 0.1)
    exporter.scan(1.0, file)
    conflicts = 'torchobs_exporter_series_dropped_total{reason="conflict"}'
    assert f"{conflicts} 0.0" in exporter.text()
    for name, kind in TAKEN:
        file.set(user(name, kind), 666, USER, forged="yes")
    for _ in range(2):  # counted once, not at every scrape
        exporter.scan(1.0, file)
        page = exporter.text()
        assert f"{conflicts} {len(TAKEN)}.0" in page
        assert " 666.0" not in page
        assert "forged" not in page


def test_ranks_that_disagree_about_a_name_do_not_break_each_other(exporter: Exporter, flight_dir: Path) -> None:
    """The first has it, until it is gone."""
    first, second = File(flight_dir, seed=1), File(flight_dir, seed=2, rank=1)
    first.set(user("my.thing", Kind.COUNTER, "s"), 1, USER)
    second.set(user("my.thing", Kind.HISTOGRAM, "s", bounds=(1.0,)), 1, USER)
    second.set(user("my.thing.seconds", Kind.COUNTER, ""), 1, USER)
    for file in (first, second):
        file.save()
    exporter.scan()
    assert [sample.labels["rank"] for sample in exporter.samples("my_thing_seconds_total")] == ["0"]
    assert 'reason="conflict"} 2.0' in exporter.text()
    first.path.unlink()
    third = File(flight_dir, seed=3, rank=2)
    third.set(user("my.thing", Kind.HISTOGRAM, "s", bounds=(1.0,)), 1, USER)
    third.save()
    exporter.scan()
    assert [sample.labels["rank"] for sample in exporter.samples("my_thing_seconds_count")] == ["2"]


HOSTILE = (
    *('"', "\\", "\n", '"} 1\nforged{x="', "\r\nforged 1", "# EOF", "\x00", "\ud800", "é" * 200, "{}", "le", "\u2028"),
    " 1 #",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_is_text_everywhere(exporter: Exporter, flight_dir: Path, text: str) -> None:
    """As instrument, unit, help, attribute, value, job, run and host: the page parses, and no series is forged."""
    names: dict[str, Any] = dict.fromkeys(("job_name", "run_id", "host", "script", text), text)
    file = File(flight_dir, **names).hold()
    for kind, bounds in ((Kind.COUNTER, ()), (Kind.GAUGE, ()), (Kind.UPDOWN, ()), (Kind.HISTOGRAM, (1.0,))):
        file.set(user(f"{kind.name}{text}", kind, text, text, bounds), 5, USER, **{text: text})
    exporter.scan(1.0, file)
    families = exporter.families()
    assert "forged" not in families
    assert not exporter.samples("forged")
    (up,) = exporter.samples("torchobs_rank_up")
    assert up.labels["job_name"] == text.encode("utf-8", "replace").decode()
    assert sum(name.upper().startswith(("COUNTER", "GAUGE", "UPDOWN", "HISTOGRAM")) for name in families) == 4
    assert {family.name for family in text_string_to_metric_families(exporter.text())} == {*families}
    file.release()


def test_histograms_are_cumulative_and_end_at_infinity(exporter: Exporter, file: File) -> None:
    """Buckets, count and sum agree; with negative bounds or a negative sum there is neither sum nor count."""
    file.set(user("my.fall", Kind.HISTOGRAM, "", "", (1.0,)), -5, USER)
    for value in (0.1, 0.7, 0.7, 5.0):
        file.set(user("my.size", Kind.HISTOGRAM, "", "", (0.5, 1.0)), value, USER)
        file.set(user("my.shift", Kind.HISTOGRAM, "", "", (-1.0, 1.0)), value, USER)
    exporter.scan(1.0, file)
    assert {one.labels["le"]: one.value for one in exporter.samples("my_size_bucket")} == {"0.5": 1.0, "1.0": 3.0, "+Inf": 4.0}
    assert values(exporter, "my_size_count") == [4.0]
    assert values(exporter, "my_size_sum") == [pytest.approx(6.5)]
    for name in ("my_shift", "my_fall"):
        assert exporter.samples(f"{name}_bucket")
        assert not exporter.samples(f"{name}_sum")
        assert not exporter.samples(f"{name}_count")


DURATION, NORM = "torchobs_step_duration_seconds_bucket", "torchobs_grad_norm_distribution_bucket"


def shown(exporter: Exporter, name: str = DURATION) -> dict[str, int]:
    """The step that each bucket shows, by its upper bound."""
    return {sample.labels["le"]: int(sample.exemplar.labels["step"]) for sample in exporter.samples(name) if sample.exemplar}


def test_each_bucket_shows_its_newest_step_that_has_a_span(exporter: Exporter, file: File) -> None:
    """With the span's identifiers, what was observed, and when the step ended; the classic format has no exemplars."""
    for step, duration_s in enumerate((0.1, 0.11, 0.6, 0.1), start=1):
        file.step(step, step / 4, duration_s=duration_s, norm=3.0 * step)
        if step != 4:
            file.span(step, step / 4, attrs={"duration_s": duration_s, "grad_norm": 3.0 * step})
    exporter.scan(1.0, file)
    assert shown(exporter) == {"0.125": 2, "1.0": 3}
    assert shown(exporter, NORM) == {"4.0": 1, "16.0": 3}
    (slow,) = [sample.exemplar for sample in exporter.samples(DURATION) if sample.labels["le"] == "1.0"]
    ids = SpanIds(file.header).step(3)
    assert slow is not None
    assert slow.labels == {"trace_id": ids.trace, "span_id": ids.span, "step": "3"}
    assert (slow.value, slow.timestamp) == (0.6, Timestamp(BORN_WALL_NS // S, 750_000_000))
    assert " # {" not in exporter.text()


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


SMALL_LIMIT, OWN_LIMIT = 99, 60
"""The budgets of a rank of a small DDP job on a CPU and of the exporter itself, without hardware (there is none here)"""


SMALL = """
import time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import torchobs

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), 8)
for epoch in range(4):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(parallel(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        time.sleep(0.1)  # the slow sensors are first asked after a second, and DDP's timings read at the backward after that
print("trained", flush=True)
input()
"""


def test_a_rank_of_a_small_job_has_few_series(flight_dir: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """What never happens in this run (a scaler, a compilation, a failing probe) takes no series; nor does the exporter many.

    Six are the states of the rank, which are all there (a state set).
    """
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    (tmp_path / "train.py").write_text(SMALL)
    command = [sys.executable, "-m", "torchobs", "run", "--no-exporter", "--dir", str(flight_dir), "train.py"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        Python(command, cwd=tmp_path, env={**support.clean_environment(), **job}, **pipes) as rank,
        Service(ExporterConfig(flight_dir=str(flight_dir))) as exporter,
    ):
        assert rank.stdout is not None
        assert rank.stdout.readline() == "trained\n"
        support.wait_until(lambda: exporter.value("torchobs_steps_total") == 32)
        support.wait_until(lambda: exporter.value("torchobs_ddp_time_seconds") is not None)
        page = exporter.page()
        rank.communicate("\n", timeout=30)
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    # whether it was idle, and which probe took time at all, is the machine's doing
    by_chance = {"torchobs_goodput_time_seconds_total", "torchobs_overhead_seconds_total"}
    of_the_rank = sorted(sample.name for sample in samples if "rank" in sample.labels and sample.name not in by_chance)
    assert {"torchobs_loss", "torchobs_grad_norm", "torchobs_ddp_time_seconds"} <= {*of_the_rank}
    assert len(of_the_rank) <= SMALL_LIMIT, of_the_rank
    of_the_exporter = [sample.name for sample in samples if not sample.labels.get("run_id")]
    assert len(of_the_exporter) <= OWN_LIMIT, of_the_exporter
