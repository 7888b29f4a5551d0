"""Memory and the container as a session sees them on this machine: what it shows, and which training it calls a leak."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch

from tests.faults.test_flight_files import mounted
from tests.support import ROOT, wait_until
from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.detect.growth import LEAST
from torchobs.probes.process_memory import Machine, MemoryLimits, MemoryProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1024**2
LINUX = sys.platform == "linux"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that spin for each other make small steps take seconds where others work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def watched(flight_dir: Path) -> Iterator[Watched]:
    """A recording whose memory probe is the test's."""
    for run in recording(flight_dir, disable_probes="memory"):
        yield Watched(run)


class Watched:
    """A memory probe on a clock of its own: ten looks and a point every ten seconds of it."""

    def __init__(self, run: Recording, shared: str = "/dev/shm") -> None:
        self.run, self.seconds = run, 0.0
        assert run.session.context is not None
        self.probe = MemoryProbe(shared=shared, clock=lambda: self.seconds)
        self.probe.install(run.session.context)

    def limit(self, left: float, total: float = 64 * 1024**3) -> None:
        """From now on this machine has so many bytes left, and no cgroup."""
        context, machine = self.run.session.context, Machine(int(total), int(left), 0, 0)
        assert context is not None
        self.probe._limits = MemoryLimits(context.writer, lambda: machine, root="/nowhere")

    def train(self, step: Callable[[], None], points: int, steps: int) -> None:
        """Make so many points, each over so many steps."""
        for _ in range(points):
            for index in range(steps):
                step()
                if index % max(1, steps // 10) == 0:
                    self.probe._read(thorough=False)
            self.seconds += 10.0
            self.probe.observe()

    def value(self, metric: catalog.Metric, *attributes: str) -> float | None:
        """What the file holds."""
        writer = self.run.session.writer
        assert writer is not None
        writer.publish()
        value = self.run.values().get((metric.name, *attributes))
        return None if value is None else float(value)


def wait_for_a_look(run: Recording) -> None:
    """The sampler's own, a second after the start."""
    wait_until(lambda: (catalog.MEMORY_HOST_RSS.name,) in run.values())


def test_the_proportional_set_is_for_the_advanced_level(watched: Watched) -> None:
    """It takes milliseconds; and it goes when the level does."""
    context = watched.run.session.context
    assert context is not None
    watched.probe.observe()
    assert watched.value(catalog.MEMORY_HOST_PSS) is None
    context.hooks.level.value = 2
    watched.probe.observe()
    share, all_of_it = watched.value(catalog.MEMORY_HOST_PSS), watched.value(catalog.MEMORY_HOST_RSS)
    assert share is not None
    assert all_of_it is not None
    assert 0 < share <= all_of_it * 1.02
    context.hooks.level.value = 1
    watched.probe.observe()
    assert watched.value(catalog.MEMORY_HOST_PSS) is None


@pytest.mark.serial  # another test's cgroup lies in this one, which counts its OOM kills as well
@pytest.mark.skipif(not LINUX, reason="cgroups are Linux's")
def test_this_machine_s_own_groups_are_read(run: Recording) -> None:
    """Whatever they are here: a working set is never more than the usage, and a limit never less than what is taken."""
    wait_for_a_look(run)
    values = run.look()
    working_set, limit = (
        values.get((metric.name,)) for metric in (catalog.CGROUP_MEMORY_WORKING_SET, catalog.CGROUP_MEMORY_LIMIT)
    )
    if limit is not None:
        assert working_set is not None
        assert 0 < working_set <= limit
        assert 0 < values[catalog.MEMORY_HOST_UTILIZATION.name, "cgroup"] <= 1
    if working_set is not None:
        assert values[catalog.CGROUP_MEMORY_PEAK.name,] >= working_set * 0.5
        assert values[catalog.CGROUP_MEMORY_OOM_KILLS.name,] == 0


def test_shared_memory_that_is_nearly_full_is_an_event(
    flight_dir: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """64 MiB is a container's default: at nine tenths it is said, once, and again after there was room."""
    shared = tmp_path / "shm"
    shared.mkdir()
    arguments = (*mounted("size=4m", "true", shared), sys.executable, "-m", "tests.cgroups", str(flight_dir), str(shared))
    output, _ = start(*arguments, stdout=subprocess.PIPE, cwd=ROOT).communicate(timeout=60)
    told = json.loads(output)
    assert [(size, used) for size, used, _ in told] == [
        (4 * MIB, used * MIB) for used in (0.0, 3.0, 3.75, 3.875, 3.5, 2.0, 3.75)
    ]
    assert [count for *_, count in told] == [0, 0, 1, 1, 1, 1, 2]


def mlp_step() -> Callable[[], None]:
    """A step of plain training."""
    model = mlp(width=64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def keeps_arrays() -> Callable[[], None]:
    """A step that collects predictions as numpy arrays for a metric at the epoch's end, and never comes there."""
    step, kept = mlp_step(), list[Any]()

    def leaking() -> None:
        step()
        kept.append(np.ones(MIB // 8))

    return leaking


def test_a_leak_is_measured_and_its_end_foretold(watched: Watched) -> None:
    """A mebibyte a step or so, a step a second: so many bytes a step as psutil sees, and the limit after so many seconds."""
    step = keeps_arrays()
    if LINUX:
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier test gave back to malloc would be taken again without growing
    watched.limit(2e9, total=3e9)
    watched.train(step, 10, 10)
    before = psutil.Process().memory_info().rss
    watched.train(step, LEAST - 11, 10)
    assert watched.value(catalog.MEMORY_GROWTH_PER_STEP, "host") is None
    watched.train(step, 2, 10)
    grown = (psutil.Process().memory_info().rss - before) / (10 * (LEAST - 9))
    assert grown > 0.9 * MIB
    growth = watched.value(catalog.MEMORY_GROWTH_PER_STEP, "host")
    assert growth == pytest.approx(grown, rel=0.15)
    assert watched.value(catalog.MEMORY_TIME_TO_LIMIT, "host") == pytest.approx(2e9 / grown, rel=0.15)
    (told,) = watched.run.frames(catalog.EVENT_MEMORY_GROWTH.name)
    assert told["attrs"]["space"] == "host"


@pytest.mark.parametrize(("make", "leaks"), [(keeps_arrays, True), (mlp_step, False)])
def test_a_leak_that_leaves_a_minute_is_told_of_within_half_a_minute(
    watched: Watched, make: Callable[[], Callable[[], None]], caplog: pytest.LogCaptureFixture, *, leaks: bool
) -> None:
    """Four mebibytes a second and room for a minute of it: said in the file, as an event and in the log; else nothing is."""
    step = make()
    if LINUX:
        ctypes.CDLL(None).malloc_trim(0)
    watched.limit(240 * MIB)
    for _ in range(LEAST + 2):
        for _ in range(4):
            step()
        watched.probe._read(thorough=False)
        watched.seconds += 1.0
    seconds = watched.value(catalog.MEMORY_TIME_TO_LIMIT, "host")
    told = [frame["attrs"]["space"] for frame in watched.run.frames(catalog.EVENT_MEMORY_GROWTH.name)]
    said = [record.getMessage() for record in caplog.records if "Host memory grows by" in record.getMessage()]
    assert told == ["host"] * leaks
    assert len(said) == leaks
    assert (seconds == pytest.approx(60, rel=0.2)) if leaks else seconds is None
