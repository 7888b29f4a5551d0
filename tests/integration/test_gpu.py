"""GPU hardware, on the real ``pynvml`` over a library of C functions that each test equips with GPUs."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import torchobs
from tests import nvml, support
from tests.training import Recording, recording
from torchobs import catalog
from torchobs.probes import gpu as monitor
from torchobs.probes.gpu import GpuMonitor
from torchobs.probes.gpu_sensors import MEANINGS, Used, kind, visible

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


G0, G1 = nvml.H100_UUID.format(index=0), nvml.H100_UUID.format(index=1)


@dataclass
class Bench:
    """A fleet on a fake library, and the flight file it writes into."""

    run: Recording
    fake: nvml.FakeNvml
    fleet: GpuMonitor

    def of(self, name: str, uuid: str = G0) -> Any:
        """The series of that name and device, by their other attributes, with their values."""
        values = {}
        for point in self.run.view().points:
            attributes = dict(point.series.attributes)
            if point.series.name == name and attributes.pop("hw.id", None) == uuid:
                attributes.pop("hw.type", None)
                values[tuple(attributes.values())] = point.value
        return values

    def look(self) -> None:
        """One round, visible at once."""
        self.fleet.round()
        assert self.run.session.writer is not None
        self.run.session.writer.publish()


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording without its own GPU probe, nor a sampler that might be publishing when a test wants to."""
    for recorded in recording(flight_dir, disable_probes="gpu"):
        sampler = recorded.session._sampler
        assert sampler is not None
        sampler.stop()
        sampler._thread.join()
        yield recorded


@pytest.fixture
def bench(run: Recording, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A bench with one H100, or what the test's parameter makes."""
    options = request.param() if hasattr(request, "param") else {}
    library = nvml.installed(options.pop("gpus", [nvml.h100()]), monkeypatch)
    place = options.pop("local_rank", 0), options.pop("visible", None)
    devices = options.pop("used", None)
    assert run.session.context is not None
    fleet = GpuMonitor(run.session.context, *place, lambda: devices)
    yield Bench(run, library, fleet)
    fleet.close()
    assert library.initialised == 0, "what was initialised is given back"


def made(**what: Any) -> pytest.MarkDecorator:
    """A parameter of the bench, made anew for each test."""
    return pytest.mark.parametrize("bench", [lambda: dict(what)], indirect=True, ids=[""])


def test_a_full_gpu_has_all_it_can_tell_in_27_series(bench: Bench) -> None:
    """Shares as ratios, SI units, counters from 0: what the GPU did before we looked is none of ours."""
    bench.look()
    kinds = ("ecc_corrected", "ecc_uncorrected", "xid_application", "xid_driver", "xid_hardware", "nvlink", "pcie_replay")
    expected = {
        "hw.gpu.utilization": {("general",): 0.97}, "torchobs.gpu.memory.busy": {(): 0.41},
        "hw.gpu.memory.usage": {(): 60 << 30}, "hw.gpu.memory.limit": {(): 80 << 30},
        "hw.power": {(): 612.345}, "torchobs.gpu.power.limit": {(): 700.0},
        "hw.temperature": {("gpu",): 64.0, ("memory",): 71.0}, "torchobs.gpu.nvlink.links": {(): 18.0},
        "torchobs.gpu.clock.frequency": {(): 1.755e9}, "torchobs.gpu.clock.limit": {(): 1.98e9}, "hw.energy": {(): 0.0},
        "torchobs.gpu.throttle.time": {("power",): 0.0, ("thermal",): 0.0},
        "torchobs.gpu.nvlink.io": {("receive",): 0.0, ("transmit",): 0.0},
        "hw.errors": dict.fromkeys([(kind,) for kind in kinds], 0),
        "hw.status": {("ok",): 1.0, ("degraded",): 0.0, ("failed",): 0.0},
    }  # fmt: skip
    assert {name: bench.of(name) for name in expected} == expected
    series = [point.series for point in bench.run.view().points if "hw.id" in dict(point.series.attributes)]
    assert len(series) == 26  # and one that names the rank


def test_counters_grow_by_what_the_driver_counted(bench: Bench) -> None:
    """Energy, throttling, errors and NVLink traffic, in joules, seconds, errors and bytes."""
    bench.look()
    (gpu,) = bench.fake.gpus
    gpu.millijoules += 7_250
    gpu.violation_ns[1] += 1_500_000_000
    gpu.ecc[0] += 2
    gpu.replays += 1
    gpu.fields[52] += 4
    gpu.fields[138] += 3
    bench.look()
    assert bench.of("hw.energy") == {(): 7.25}
    assert bench.of("torchobs.gpu.throttle.time") == {("power",): 0.0, ("thermal",): 1.5}
    assert bench.of("torchobs.gpu.nvlink.io") == {("receive",): 0.0, ("transmit",): 3072.0}
    errors = bench.of("hw.errors")
    assert (errors[("ecc_corrected",)], errors[("pcie_replay",)], errors[("nvlink",)]) == (2, 1, 4)


@made(gpus=[nvml.geforce()])
def test_a_consumer_card_tells_what_it_has_and_is_asked_for_the_rest_once(bench: Bench) -> None:
    """Not supported, not permitted, older than the function: the series is absent and the rest goes on."""
    uuid = bench.fake.gpus[0].uuid
    bench.look()
    asked = dict(bench.fake.calls)
    bench.look()
    assert bench.of("hw.gpu.memory.usage", uuid) == {(): 60 << 30}
    assert bench.of("hw.temperature", uuid) == {("gpu",): 64.0}
    for name in ("hw.energy", "torchobs.gpu.nvlink.links", "torchobs.gpu.nvlink.io", "torchobs.gpu.throttle.time"):
        assert bench.of(name, uuid) == {}
    assert bench.of("hw.errors", uuid) == {("pcie_replay",): 0}
    again = {name: count - asked[name] for name, count in bench.fake.calls.items() if name in bench.fake.gpus[0].refuses}
    assert set(again.values()) == {0, 1}  # 1: the remapped rows, which make the state
    assert again["nvmlDeviceGetTotalEnergyConsumption"] == 0


@made(gpus=[nvml.h100(0), nvml.h100(1)], used=[Used("cuda:0", G0[4:], in_use=True), Used("cuda:1", G1[4:], in_use=True)])
def test_a_gpu_that_is_lost_harms_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Its gauges end, its state is failed, one event and one line say so; the other GPU goes on; it may come back."""
    bench.look()
    first, second = bench.fake.gpus
    first.everything, second.milliwatts = nvml.LOST, 100_000
    with caplog.at_level(logging.WARNING, "torchobs"):
        for _ in range(3):
            bench.look()
    assert bench.of("hw.power") == bench.of("hw.gpu.utilization") == bench.of("hw.gpu.memory.usage") == {}
    assert bench.of("hw.status") == {("ok",): 0.0, ("degraded",): 0.0, ("failed",): 1.0}
    assert bench.of("hw.power", G1) == {(): 100.0}
    assert bench.of("hw.energy") == {(): 0.0}
    assert bench.run.attributes("torchobs.gpu.lost") == [{"hw.id": G0, "reason": "lost"}]
    assert [G0 in record.getMessage() for record in caplog.records] == [True]
    first.everything, first.millijoules = nvml.SUCCESS, first.millijoules + 1000
    bench.look()
    assert bench.of("hw.status") == {("ok",): 1.0, ("degraded",): 0.0, ("failed",): 0.0}
    assert bench.of("hw.power") == {(): 612.345}
    assert bench.of("hw.energy") == {(): 1.0}


@pytest.mark.parametrize(
    ("change", "state"),
    [({"rows": (0, 0, 1, 0)}, "degraded"), ({"rows": (0, 1, 0, 1)}, "failed"), ({"ecc": {0: 0, 1: 1}}, "degraded"),
     ({"fields": {230: 1}}, "degraded"), ({"rows": (5, 0, 0, 0)}, "ok")],
    ids=str,
)  # fmt: skip
def test_the_state_is_what_the_driver_says_of_memory_and_recovery(bench: Bench, change: dict[str, Any], state: str) -> None:
    """A row that waits for its replacement or an uncorrected error: degraded; one that cannot be replaced: failed."""
    vars(bench.fake.gpus[0]).update(change)
    bench.look()
    assert [name for (name,), value in bench.of("hw.status").items() if value] == [state]


def test_an_xid_is_counted_and_told_with_its_number(bench: Bench) -> None:
    """Without ever waiting for one; as the fault of the program, the driver or the hardware, by NVIDIA's catalog."""
    bench.look()
    (gpu,) = bench.fake.gpus
    meanings = {79: "fell off the bus", 9999: "", 31: "memory page fault", 13: "graphics engine exception"}
    bench.fake.xids += [(gpu, xid) for xid in meanings]
    bench.look()
    counts = {kind: count for (kind,), count in bench.of("hw.errors").items() if count}
    assert counts == {"xid_hardware": 1, "xid_driver": 1, "xid_application": 2}
    events = [{"hw.id": G0, "xid": xid, "meaning": meaning} for xid, meaning in meanings.items()]
    assert bench.run.attributes("torchobs.gpu.xid") == events


@made(gpus=[nvml.h100(0, mig=True), nvml.h100(1)])
def test_a_gpu_in_mig_mode_has_no_series(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, and who has them; a GPU beside it is sampled."""
    with caplog.at_level(logging.INFO, "torchobs"):
        for _ in range(2):
            bench.look()
    assert {dict(point.series.attributes).get("hw.id") for point in bench.run.view().points} - {None} == {G1}
    assert bench.of("hw.power", G1) == {(): 612.345}
    assert ["dcgm-exporter" in record.getMessage() for record in caplog.records] == [True]


EIGHT = [nvml.h100(index) for index in range(8)]
UUIDS = [nvml.H100_UUID.format(index=index) for index in range(8)]


def one_of_eight(index: int) -> list[Used]:
    """All of them; that one is in use."""
    return [Used(f"cuda:{number}", uuid[4:], in_use=number == index) for number, uuid in enumerate(UUIDS)]


@made(gpus=EIGHT, used=one_of_eight(5), local_rank=5)
def test_a_rank_samples_the_gpu_it_uses(bench: Bench) -> None:
    """Under torchrun every rank sees all of them; rank 5 has the series of its own, and names itself."""
    bench.look()
    sampled = {dict(p.series.attributes).get("hw.id") for p in bench.run.view().points} - {None}
    assert sampled == {UUIDS[5]}
    assert bench.run.values()[("torchobs.rank.gpu.info", UUIDS[5], "cuda:5", UUIDS[5], EIGHT[5].name)] == 1.0


@made(gpus=EIGHT, used=one_of_eight(0))
def test_idle_gpus_are_local_rank_0_s_after_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one uses one GPU of eight is worth knowing; a few values of each show it."""
    bench.look()
    assert bench.of("hw.gpu.utilization", G1) == {}
    monkeypatch.setattr(monitor, "IDLE_GPUS_AFTER_S", 0.0)
    bench.look()
    assert bench.of("hw.gpu.utilization", G1) == {("general",): 0.97}
    assert bench.of("hw.power", G1) == {(): 612.345}
    assert bench.of("torchobs.gpu.nvlink.links", G1) == bench.of("hw.errors", G1) == {}


def gpu_threads() -> list[threading.Thread]:
    """The probe's threads that live."""
    return [thread for thread in threading.enumerate() if thread.name == "torchobs-gpu"]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> nvml.FakeNvml:
    """A library with one H100."""
    return nvml.installed([nvml.h100()], monkeypatch)


@pytest.fixture
def session(flight_dir: Path, library: nvml.FakeNvml) -> Iterator[torchobs.Session]:
    """A session that the test may end; its probe has sampled that library once."""
    assert library.gpus
    session = torchobs.init(flight_dir=flight_dir, log_level="INFO")
    support.wait_until(lambda: ("hw.power", G0, "gpu") in Recording(session).values())
    support.wait_until(probe_of(session)._round_done.is_set)  # the first round is over
    yield session
    torchobs.shutdown()


def probe_of(session: torchobs.Session) -> Any:
    """Its probe of GPUs."""
    assert session._probe_manager is not None
    return session._probe_manager._probes["gpu"]


def test_a_session_samples_from_a_thread_of_its_own(
    session: torchobs.Session, library: nvml.FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From init to shutdown, and the last value is that of the end."""
    monkeypatch.setattr(monitor, "END_WAIT_S", 30.0)
    assert [thread.daemon for thread in gpu_threads()] == [True]
    assert ("torchobs.overhead", "gpu") in Recording(session).values()
    library.gpus[0].millijoules += 9_000
    with Recording(session).file() as file:
        torchobs.shutdown()
        energy = {point.value for point in file.read(final=True).points if point.series.name == "hw.energy"}
    assert energy == {9.0}
    assert gpu_threads() == []
    assert library.initialised == 0


def test_no_round_begins_while_a_graph_is_captured(session: torchobs.Session, library: nvml.FakeNvml) -> None:
    """Its thread might collect a graph of the user's as garbage, and the end of that is none of the capture's business."""
    assert session.context is not None
    gpu, captures = probe_of(session), session.context.training.captures
    captures.begin(1)
    before = library.calls["nvmlDeviceGetPowerUsage"]
    for _ in range(2):
        gpu._round_done.clear()
        gpu.observe()
        support.wait_until(gpu._round_done.is_set)
    assert library.calls["nvmlDeviceGetPowerUsage"] == before
    captures.end(1)
    gpu.observe()
    support.wait_until(lambda: library.calls["nvmlDeviceGetPowerUsage"] > before)


@pytest.mark.serial
def test_a_driver_that_hangs_stops_nothing_but_its_own_thread(
    session: torchobs.Session, library: nvml.FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The heartbeat goes on, the gauges end, it is said once, the process does not wait for it; it may come back."""
    monkeypatch.setattr(monitor, "STUCK_S", 0.05)
    caplog.set_level(logging.INFO, "torchobs")
    run, gpu = Recording(session), probe_of(session)
    library.hangs.clear()
    gpu.observe()
    support.wait_until(lambda: gpu._busy_since is not None)
    beat = run.view().live.heartbeat_ns or 0
    time.sleep(0.3)
    gpu.observe()
    gpu.observe()
    support.wait_until(lambda: ("hw.power", G0, "gpu") not in run.values())
    support.wait_until(lambda: (run.view().live.heartbeat_ns or 0) > beat)
    assert sum("has not answered" in record.getMessage() for record in caplog.records) == 1
    begun = time.monotonic()
    torchobs.shutdown()
    assert time.monotonic() - begun < 1.0
    library.hangs.set()
    support.wait_until(lambda: not gpu_threads())
    assert library.initialised == 0


def test_without_a_driver_there_is_nothing_and_it_is_said_once(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No library: the thread ends. Most machines without a GPU are so; it is no warning."""
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    caplog.set_level(logging.INFO, "torchobs")
    for run in recording(flight_dir, log_level="INFO"):
        support.wait_until(lambda: any("no GPU metrics" in record.getMessage() for record in caplog.records))
        support.wait_until(lambda: not gpu_threads())
        assert not [series for series in run.values() if series[0].startswith(("hw.", "torchobs.gpu", "torchobs.rank.gpu"))]
    assert sum("no GPU metrics" in record.getMessage() for record in caplog.records) == 1
    assert {record.levelname for record in caplog.records if "GPU" in record.getMessage()} == {"INFO"}


FIRST, SECOND, THIRD = "GPU-8932f937-d72c", "GPU-8932ffff-0000", "GPU-1d1f0000-1111"


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, [FIRST, SECOND, THIRD]), ("", []), (" 2 , 0 ", [THIRD, FIRST]), ("0,7,1", [FIRST]), ("1,-1,0", [SECOND]),
     ("GPU-1d1f,GPU-8932f9", [THIRD, FIRST]), ("GPU-8932f", []), ("GPU-none,0", [])],
)  # fmt: skip
def test_gpus_that_cuda_would_list(variable: str | None, expected: list[str]) -> None:
    """Ordinals, UUIDs and their beginnings; the list ends where a name is none."""
    assert visible(variable, [FIRST, SECOND, THIRD]) == expected


XIDS = {
    "xid_application": (13, 31, 32, 43, 45, 69),
    "xid_hardware": (48, 62, 64, 74, 79, 94, 95, 140, 149),
    "xid_driver": (61, 63, 92, 119, 120, 154, 9999),
}


def test_whose_affair_an_xid_is() -> None:
    """By NVIDIA's action: the program's to itself, a reset's or a technician's, and the rest, which shall wake nobody."""
    assert {name: tuple(number for number in numbers if kind(number) == name) for name, numbers in XIDS.items()} == XIDS
    assert {kind(number) for number in range(200)} == set(catalog.XID_ERRORS) <= set(catalog.HW_ERROR.values)
    assert {kind(number) for number in MEANINGS} == set(catalog.XID_ERRORS)
