"""Device memory on a device: the allocator's own figures, the user's peaks, the event before the exception."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import support
from tests.gpu import no_waiting
from tests.training import Recording, recording
from torchobs import catalog
from torchobs.probes.device_memory import DeviceMemoryProbe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=support.NEEDS_CUDA)

MIB = 1024**2
UNTOUCHED = """
import sys, time, torch, torchobs
session = torchobs.init(flight_dir=sys.argv[1])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
began = time.monotonic()
while time.monotonic() - began < 2.5:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
assert not session.context.breaker("device_memory").errors
print(torch.cuda.is_initialized())
"""


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording with a sampler that leaves the device memory alone: the test asks when it wants."""
    yield from recording(flight_dir, disable_probes="device_memory")


@pytest.fixture
def probe(run: Recording) -> Iterator[DeviceMemoryProbe]:
    """The probe, installed."""
    probe = DeviceMemoryProbe()
    assert run.session.context is not None
    torch.zeros(1, device="cuda")
    probe.install(run.session.context)
    yield probe
    probe.remove()
    torch.cuda.empty_cache()


def shown(run: Recording, metric: catalog.Metric) -> float:
    """What the file holds for the first device."""
    assert run.session.writer is not None
    run.session.writer.publish()
    return float(run.values()[metric.name, "cuda:0"])


def test_a_cpu_training_does_not_initialise_cuda(flight_dir: Path) -> None:
    """On a machine with a GPU, which somebody else may be using."""
    command = [sys.executable, "-c", UNTOUCHED, str(flight_dir)]
    environ = {**support.clean_environment(), "PYTHONPATH": str(support.ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environ)
    assert done.stdout.split() == ["False"]


def test_the_gauges_are_the_allocator_s_figures(run: Recording, probe: DeviceMemoryProbe) -> None:
    """To the byte, without a synchronisation."""
    blocks = [torch.ones(MIB, device="cuda") for _ in range(8)]
    del blocks[::2]
    with no_waiting():
        probe.observe()
    figures = torch.cuda.memory_stats(0)
    assert shown(run, catalog.MEMORY_DEVICE_ALLOCATED) == torch.cuda.memory_allocated(0) >= 16 * MIB
    assert shown(run, catalog.MEMORY_DEVICE_RESERVED) == torch.cuda.memory_reserved(0)
    assert shown(run, catalog.MEMORY_DEVICE_ACTIVE) == figures["active_bytes.all.current"]
    assert shown(run, catalog.MEMORY_DEVICE_INACTIVE_SPLIT) == figures["inactive_split_bytes.all.current"]
    assert shown(run, catalog.MEMORY_DEVICE_LIMIT) == torch.cuda.get_device_properties(0).total_memory
    assert shown(run, catalog.MEMORY_OOMS) == 0
    assert not [key for key in run.values() if key[0].startswith("torchobs.memory.device") and key[1] != "cuda:0"]


def test_the_user_s_peaks_are_the_user_s(run: Recording, probe: DeviceMemoryProbe) -> None:
    """Looking resets none of them, and their being reset takes none of ours away."""
    torch.cuda.reset_peak_memory_stats(0)
    large = torch.ones(64 * MIB, device="cuda")
    del large
    highest = torch.cuda.max_memory_allocated(0)
    probe.observe()
    assert torch.cuda.max_memory_allocated(0) == highest >= 256 * MIB
    assert shown(run, catalog.MEMORY_DEVICE_PEAK) == highest
    torch.cuda.reset_peak_memory_stats(0)
    probe.observe()
    assert torch.cuda.max_memory_allocated(0) < highest
    assert shown(run, catalog.MEMORY_DEVICE_PEAK) == highest


def test_the_event_is_there_before_the_exception_which_is_untouched(run: Recording, probe: DeviceMemoryProbe) -> None:
    """More than there is: the event has what was asked for and what was held, the error is torch's own."""
    block = torch.ones(4 * MIB, device="cuda")
    wanted = 2 * torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate") as error:
        torch.empty(wanted, dtype=torch.uint8, device="cuda")
    (event,) = run.frames(catalog.EVENT_OUT_OF_MEMORY.name)
    assert event["attrs"]["device"] == "cuda:0"
    assert event["attrs"]["requested"] >= wanted
    assert event["attrs"]["allocated"] == torch.cuda.memory_allocated(0) >= block.nbytes
    assert event["attrs"]["free"] > 0
    assert "largest" not in event["attrs"]
    assert error.value.__cause__ is None
    probe.observe()
    assert shown(run, catalog.MEMORY_OOMS) == 1


@pytest.mark.usefixtures("probe")
def test_where_most_of_it_is_stands_in_the_event_if_torch_remembers(run: Recording) -> None:
    """Locations only: this file, and a line of it."""
    record: Any = torch.cuda.memory._record_memory_history
    record("state")
    try:
        block = torch.ones(64 * MIB, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    finally:
        record(None)
    (event,) = run.frames(catalog.EVENT_OUT_OF_MEMORY.name)
    assert event["attrs"]["largest"][0].startswith(f"{__file__}:")
    assert f" {block.nbytes} B in 1 blocks" in event["attrs"]["largest"][0]


def test_a_session_that_is_over_hears_nothing(flight_dir: Path) -> None:
    """The observer cannot be detached; it does nothing."""
    for run in recording(flight_dir):
        torch.zeros(1, device="cuda")
        assert run.session.active
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
