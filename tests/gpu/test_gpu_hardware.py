"""GPU hardware by the driver's own library."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchobs
from tests import support
from tests.training import Recording
from torchobs.flight import reader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason=support.NEEDS_CUDA),
    pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="needs nvidia-ml-py (pip install nvidia-ml-py)"),
]


@pytest.fixture
def session(flight_dir: Path) -> Iterator[torchobs.Session]:
    """A session of a rank that holds memory on the first GPU."""
    memory = torch.ones(1 << 26, device="cuda")
    yield torchobs.init(flight_dir=flight_dir)
    torchobs.shutdown()
    del memory


def uuid() -> str:
    """The first device's, as torch has it."""
    return str(torch.cuda.get_device_properties(0).uuid)


def test_the_gpu_in_use_is_sampled_and_told_by_torch_s_uuid(session: torchobs.Session) -> None:
    """What dcgm-exporter calls UUID, and values that are physically possible."""
    run = Recording(session)
    support.wait_until(lambda: any(key[0] == "torchobs.rank.gpu.info" for key in run.values()))
    values = run.values()
    (info,) = (key for key in values if key[0] == "torchobs.rank.gpu.info")
    assert any(uuid() in part for part in info[1:])
    assert "cuda:0" in info
    used = [value for key, value in values.items() if key[0] == "hw.gpu.memory.usage"]
    assert max(used) > 1 << 28
    power = [value for key, value in values.items() if key[0] == "hw.power"]
    assert all(1 < value < 5000 for value in power)
    assert all(0 <= value <= 1 for key, value in values.items() if key[0] == "hw.gpu.utilization")
    assert run.errors() == []


def test_energy_agrees_with_the_work_done(session: torchobs.Session) -> None:
    """A second of matrix products takes between 10 J and 5 kJ, counted from the rank's start to its end."""
    run = Recording(session)
    support.wait_until(lambda: any(key[0] == "hw.energy" for key in run.values()))
    matrix = torch.randn(4096, 4096, device="cuda")
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        matrix = torch.nn.functional.normalize(matrix @ matrix)
        torch.cuda.synchronize()
    assert session.writer is not None
    file = reader.open_path(session.writer.path)
    torchobs.shutdown()
    points = [point.value for point in file.read(final=True).points if point.series.name == "hw.energy"]
    file.close()
    assert 10 < max(value for value in points if isinstance(value, float)) < 5000


def test_a_look_costs_the_training_thread_next_to_nothing(session: torchobs.Session) -> None:
    """NVML is called without the GIL: while a look at the GPU is under way, Python goes on."""
    run = Recording(session)
    support.wait_until(lambda: ("torchobs.overhead", "gpu") in run.values())
    assert session._probe_manager is not None
    probe: Any = session._probe_manager._probes["gpu"]
    worst_s, before = 0.0, time.perf_counter()
    for index in range(200_000):
        if index % 20_000 == 0:
            probe.observe()
        now = time.perf_counter()
        worst_s, before = max(worst_s, now - before), now
    assert worst_s < 0.02  # some switch intervals of 5 ms
