"""Device allocators on literal statistics and what an out-of-memory event holds; this process, and its distance to limits."""

from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.rank_files import File
from tests.training import Recording, recording
from tests.unit.test_cgroup import GIB, V2_MOUNT, plant, v2_group
from torchobs import catalog
from torchobs.detect.growth import LEAST
from torchobs.flight.reader import open_path
from torchobs.probes.device_memory import (
    MIN_INTERVAL_S,
    MOST_BLOCKS,
    DeviceMemory,
    DeviceMemoryProbe,
    OomObserver,
    segments_in_time,
    used_devices,
)
from torchobs.probes.process_memory import PAGE, Machine, MemoryLimits, ProcessStats
from torchobs.support.cgroup import read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


MIB = 1024**2
TOTAL = 80 * GIB


def stats(
    allocated: int = 3 * GIB, peak: int = 5 * GIB, reserved: int = 6 * GIB, retries: int = 0, ooms: int = 0
) -> dict[str, Any]:
    """What `torch.cuda.memory_stats_as_nested_dict` returns, as far as it is read."""

    def entry(current: int, highest: int | None = None) -> dict[str, dict[str, int]]:
        return {"all": {"current": current, "peak": highest or current, "allocated": 2 * current, "freed": current}}

    return {
        "allocated_bytes": entry(allocated, peak),
        "reserved_bytes": entry(reserved),
        "active_bytes": entry(allocated + 512),
        "inactive_split_bytes": entry(MIB),
        "allocation": entry(40),
        "num_alloc_retries": retries,
        "num_ooms": ooms,
        "reserved_bytes_by_private_pools": {(0, 1): entry(5)},
    }


class Cuda:
    """A module `torch` of two devices; the second was never used."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.stats = [stats(), stats(0, 0, 0)]
        self.started = True
        self._C = SimpleNamespace(_cuda_getMemoryFraction=lambda index: (0.5, 1.0)[index])
        self.backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False))
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.started,
            device_count=lambda: 2,
            memory_stats_as_nested_dict=self._stats,
            get_device_properties=lambda _: SimpleNamespace(total_memory=TOTAL),
        )

    def _stats(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        return self.stats[index]


def test_a_device_in_use_is_listed_with_what_it_may_take() -> None:
    """An unused one is not, and asking would initialise CUDA; what XPU's and Metal's allocators do not have is absent."""
    module = Cuda()
    module.started = False
    assert (used_devices(module), module.asked) == ([], [])
    module.started = True
    assert used_devices(module) == [
        DeviceMemory("cuda:0", 3 * GIB, 6 * GIB, 3 * GIB + 512, MIB, 5 * GIB, TOTAL // 2, retries=0, ooms=0)
    ]
    other = Cuda()
    other.stats[0] = {name: entry for name, entry in stats().items() if not name.startswith(("inactive_split", "num_"))}
    others: Any = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False), xpu=other.cuda, _C=SimpleNamespace())
    others.mps = SimpleNamespace(
        driver_allocated_memory=lambda: 7, current_allocated_memory=lambda: 5, recommended_max_memory=lambda: 11
    )
    others.backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True))
    assert used_devices(others) == [
        DeviceMemory("xpu:0", 3 * GIB, 6 * GIB, 3 * GIB + 512, None, 5 * GIB, TOTAL),
        DeviceMemory("mps:0", 5, 7, limit=11),
    ]


class Device:
    """A device memory probe in a real session, and the device that it sees."""

    def __init__(self, run: Recording, first: list[DeviceMemory]) -> None:
        self.run, self.memory, self.seconds = run, first, 0.0
        assert run.session.context is not None
        self.probe = DeviceMemoryProbe(lambda: self.memory, lambda: self.seconds)
        self.probe.install(run.session.context)

    def observe(self, allocated: int, peak: int, **more: Any) -> None:
        """Let the device be in that state, and look."""
        self.memory = [DeviceMemory("cuda:0", allocated, 2 * allocated, peak=peak, limit=TOTAL, **more)]
        self.probe.observe()

    def value(self, metric: catalog.Metric, attribute: str = "cuda:0") -> float | None:
        """What the file holds."""
        assert self.run.session.writer is not None
        self.run.session.writer.publish()
        value = self.run.values().get((metric.name, attribute))
        return None if value is None else float(value)


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording without the probe."""
    yield from recording(flight_dir, disable_probes="device_memory")


def test_a_device_is_shown_once_it_is_used(run: Recording) -> None:
    """Absent things have no series; a used one has all, its counters at 0 first."""
    device = Device(run, [])
    device.probe.observe()
    assert not [key for key in run.values() if key[0].startswith("torchobs.memory.device")]
    device.observe(4, 4, active=5, inactive_split=1, retries=0, ooms=0)
    shown = {"allocated": 4, "reserved": 8, "active": 5, "inactive_split": 1, "peak": 4, "limit": TOTAL}
    metrics = {name: catalog.BY_NAME[f"torchobs.memory.device.{name}"] for name in shown}
    assert {name: device.value(metric) for name, metric in metrics.items()} == shown
    assert device.value(catalog.MEMORY_ALLOC_RETRIES) == device.value(catalog.MEMORY_OOMS) == 0


def test_peaks_and_errors_are_those_since_we_look_and_outlive_a_reset(run: Recording) -> None:
    """What was reached before is not ours; what is reached between two looks is; a reset by the user takes nothing away."""
    device = Device(run, [DeviceMemory("cuda:0", 3, 6, peak=50, retries=5, ooms=2)])
    for allocated, peak, expected in ((3, 50, 3), (10, 50, 10), (10, 60, 60), (5, 5, 60), (20, 30, 60), (20, 70, 70)):
        device.observe(allocated, peak, retries=5, ooms=2)
        assert device.value(catalog.MEMORY_DEVICE_PEAK) == expected
    for retries, ooms, counted in ((5, 2, (0, 0)), (7, 3, (2, 1)), (1, 0, (3, 1)), (1, 1, (3, 2))):
        device.observe(3, 3, retries=retries, ooms=ooms)
        assert (device.value(catalog.MEMORY_ALLOC_RETRIES), device.value(catalog.MEMORY_OOMS)) == counted


def test_a_leak_on_the_device_is_seen_below_the_activations(run: Recording) -> None:
    """Looks fall anywhere in a step; the least of ten is near the floor, and that grows by 10 MiB a step."""
    device = Device(run, [])
    context = run.session.context
    assert context is not None
    for point in range(LEAST):
        context.recorder.plain.step = 100 * point
        floor = 10 * GIB + point * 1000 * MIB
        for look in range(10):
            device.memory = [DeviceMemory("cuda:0", floor + (look * 7 + point * 3) % 10 * 3 * GIB, floor, limit=TOTAL)]
            device.probe._update()
        device.memory = [DeviceMemory("cuda:0", floor, floor, limit=TOTAL)]
        device.seconds += 10.0
        device.probe.observe()
    assert device.value(catalog.MEMORY_GROWTH_PER_STEP, "device") == pytest.approx(10 * MIB)
    left = TOTAL - (10 * GIB + (LEAST - 1) * 1000 * MIB)
    assert device.value(catalog.MEMORY_TIME_TO_LIMIT, "device") == pytest.approx(left / (100 * MIB))
    (event,) = run.frames(catalog.EVENT_MEMORY_GROWTH.name)
    assert event["attrs"]["space"] == "device"


class OomCuda(Cuda):
    """A torch with an allocator that calls observers, as CUDA's does once it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.remembers = False
        self.__file__ = "/site-packages/torch/__init__.py"
        self.stats[0] = stats(retries=3)
        self.traced: list[bool] = []
        self.cuda.memory_snapshot = self._segments
        self._C._cuda_isHistoryEnabled = lambda: self.remembers

    def _segments(self, mempool_id: object = None, include_traces: bool = True) -> list[Any]:  # noqa: FBT001, FBT002  # torch's
        del mempool_id
        self.traced.append(include_traces)
        return SEGMENTS


FRAMES = [
    {"filename": "??", "line": 0, "name": "c10::alloc"},
    {"filename": "/site-packages/torch/nn/modules/linear.py", "line": 9, "name": "forward"},
    {"filename": "/home/me/train.py", "line": 40, "name": "main"},
]
BLOCKS: list[dict[str, Any]] = [
    {"size": 3 * GIB, "state": "active_allocated", "frames": FRAMES},
    {"size": 2 * GIB, "state": "active_allocated", "frames": FRAMES},
    {"size": 4 * GIB, "state": "active_allocated", "frames": FRAMES[:2]},
    {"size": 9 * GIB, "state": "inactive", "frames": FRAMES},
    {"size": GIB, "state": "active_allocated"},
]
SEGMENTS = [{"device": 0, "blocks": BLOCKS}, {"device": 1, "blocks": [{**BLOCKS[0], "size": 50 * GIB}]}]


def observer(run: Recording, module: OomCuda) -> OomObserver:
    """An observer that asks this torch, in step 17."""
    watcher, context = OomObserver(), run.session.context
    assert context is not None
    context.recorder.plain.step = 17
    vars(watcher).update(_context=context, _torch=module)
    return watcher


def test_an_oom_event_holds_the_allocator_s_numbers_and_the_step(run: Recording) -> None:
    """What was asked for, what there is, what is held; and where most of it is, if torch remembers."""
    module = OomCuda()
    watcher = observer(run, module)
    watcher.record_oom(0, 8 * GIB, TOTAL, GIB)
    module.remembers = True
    watcher._last -= MIN_INTERVAL_S
    watcher.record_oom(0, 8 * GIB, TOTAL, GIB)
    first, second = run.frames(catalog.EVENT_OUT_OF_MEMORY.name)
    assert first["step"] == 17
    asked = {"device": "cuda:0", "requested": 8 * GIB, "limit": TOTAL, "free": GIB}
    taken = {"allocated": 3 * GIB, "reserved": 6 * GIB, "active": 3 * GIB + 512, "inactive_split": MIB}
    assert first["attrs"] == {**asked, **taken, "allocations": 40, "alloc_retries": 3, "ooms": 0}
    of_models = {"parameters", "gradients", "optimizer_state", "buffers", "modules"}
    assert set(second["attrs"]) == {attribute.name for attribute in catalog.EVENT_OUT_OF_MEMORY.attributes} - of_models
    assert second["attrs"]["largest"] == [
        f"/home/me/train.py:40 {5 * GIB} B in 2 blocks",
        f"/site-packages/torch/nn/modules/linear.py:9 {4 * GIB} B in 1 blocks",
        f"unknown {GIB} B in 1 blocks",
    ]


def test_a_snapshot_is_not_taken_where_it_would_take_long() -> None:
    """Without the history of each allocation, which has no bound; blocks of all devices count, whoever ran out."""
    module = OomCuda()
    assert segments_in_time(module) == SEGMENTS
    assert module.traced == [False]
    module.stats[1] = {"allocation": {"all": {"current": MOST_BLOCKS}}}
    assert segments_in_time(module) is None


def test_who_halves_the_batch_until_it_fits_writes_one_event_a_second(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter has them all."""
    watcher, now_s = observer(run, OomCuda()), [100.0]
    monkeypatch.setattr("torchobs.probes.device_memory.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    for _ in range(50):
        watcher.record_oom(0, GIB, TOTAL, 0)
        now_s[0] += 0.03
    assert len(run.frames(catalog.EVENT_OUT_OF_MEMORY.name)) == 2


GRANDCHILD = """
import subprocess, sys
code = "held = b'x' * (40 << 20); print(flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(flush=True)
input()
child.communicate(b"\\n")
"""


def test_children_of_children_are_found() -> None:
    """A worker that a fork server started holds memory as any other does; beside them there may be a server of the tests."""
    process = ProcessStats()

    def family() -> tuple[int, int]:
        children = process.children()
        assert children is not None
        return children

    before, before_bytes = family()
    with subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        number, size = family()
        child.communicate(b"\n")
    assert number - before == 2
    assert size - before_bytes > 40 * MIB


def test_the_machine_s_memory_is_what_psutil_reads() -> None:
    """In bytes; available is what the kernel estimates, and changes."""
    machine, memory = ProcessStats().machine(), psutil.virtual_memory()
    assert (machine.total, machine.swap_total) == (memory.total, psutil.swap_memory().total)
    assert machine.available == pytest.approx(memory.available, rel=0.3)


MACHINE = Machine(total=64 * GIB, available=48 * GIB, swap_total=0, swap_free=0)


class Rank:
    """A flight file and a recorded tree."""

    def __init__(self, tmp_path: Path, flight_dir: Path, machine: Machine = MACHINE, *, container: bool = True) -> None:
        self.tree, self.file = tmp_path / "tree", File(flight_dir)
        self.membership("/" if container else None)
        self.machine = machine
        self.limits = MemoryLimits(self.file.writer, lambda: self.machine, str(self.tree))

    def membership(self, path: str | None) -> None:
        """Set which group the process is in."""
        plant(self.tree, {"proc/self/cgroup": f"0::{path}\n" if path else "", "proc/self/mountinfo": V2_MOUNT.format(root="/")})

    def group(self, **files: object) -> None:
        """Set the group's files; 1.75 GiB of its usage can be given back."""
        plant(self.tree, v2_group("", **files))  # type: ignore[arg-type]

    def look(self, *, thorough: bool = True) -> dict[str, float]:
        """Look, and return what the file holds of it."""
        self.limits.update(thorough=thorough)
        with closing(open_path(str(self.file.save().path))) as file:
            points = file.read().points
        names = {catalog.MEMORY_HOST_UTILIZATION.name, catalog.CGROUP_MEMORY_OOM_KILLS.name}
        names.add(catalog.CGROUP_MEMORY_LAST_OOM_KILL.name)
        shown = [(series, value) for series, value in points if series.name in names]
        return {str(dict(series.attributes).get("limit", series.name)): float(value) for series, value in shown}  # type: ignore[arg-type]


SWAPPING = Machine(64 * GIB, 16 * GIB, swap_total=8 * GIB, swap_free=4 * GIB)
KILLS = {"torchobs.cgroup.memory.oom_kills": 0.0}


@pytest.mark.parametrize(
    ("machine", "usage", "shares", "left"),
    [
        (MACHINE, 5.75, {"cgroup": 0.5, "machine": 0.25, **KILLS}, (4, 4)),
        (MACHINE, None, {"machine": 0.25}, (48, None)),
        (MACHINE, 0.0, {"machine": 0.25, **KILLS}, (48, None)),
        (SWAPPING, 9.75, {"cgroup": 0.75, "machine": 1 - 20 / 72, **KILLS}, (4, 12)),
    ],
    ids=["file pages can be given back", "no cgroup", "a group without a limit", "swap is room"],
)
def test_the_share_of_each_limit(
    tmp_path: Path, flight_dir: Path, machine: Machine, usage: float | None, shares: object, left: tuple[int | None, ...]
) -> None:
    """Promise: what cannot be given back counts, what may be swapped out is room; no series speaks of what there is not."""
    rank = Rank(tmp_path, flight_dir, machine, container=usage is not None)
    if usage is not None:
        rank.group(**({"limit": str(8 * GIB), "usage": int(usage * GIB)} if usage else {}))
    assert rank.look() == pytest.approx(shares)
    assert [size and size / GIB for size in (rank.limits.left, rank.limits.grouped)] == [*left]
    room = {resource.RLIMIT_AS: int(read("/proc/self/statm").split()[0]) * PAGE + 3 * GIB}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda kind: (room.get(kind, resource.RLIM_INFINITY),) * 2)
        rank.look()
    assert rank.limits.left == pytest.approx(3 * GIB, rel=0.1), "ulimit -v: an allocation fails there"


def test_kills_are_counted_from_the_start_on_and_dated(tmp_path: Path, flight_dir: Path) -> None:
    """The two kills before are not this rank's; the next one is, even in a quick look."""
    rank = Rank(tmp_path, flight_dir)
    rank.group(limit=str(8 * GIB))
    first = rank.look()
    assert first["torchobs.cgroup.memory.oom_kills"] == 0
    assert "torchobs.cgroup.memory.last_oom_kill.timestamp" not in first
    plant(rank.tree, {"sys/fs/cgroup/memory.events": "oom 3\noom_kill 3\n"})
    second = rank.look(thorough=False)
    assert second["torchobs.cgroup.memory.oom_kills"] == 1
    assert second["torchobs.cgroup.memory.last_oom_kill.timestamp"] > 0
