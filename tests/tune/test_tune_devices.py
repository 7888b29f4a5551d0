"""torchobs.tune: device, memory, seeds; and which devices a measurement waits for, here and in torchobs.debug."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchobs import tune
from torchobs.debug import operations
from torchobs.tune.comparison import synchronize


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is an accelerator")
def test_auto_is_the_cpu_where_nothing_else_is() -> None:
    """Promise: auto is a device that is there, and one that is not is an error that says which are."""
    assert tune.device() == torch.device("cpu")
    with pytest.raises(ValueError, match="device 'cuda:3' is not there: this process sees cpu"):
        tune.device("cuda:3")
    with pytest.raises(ValueError, match="'gpu' is no device: use 'auto'"):
        tune.device("gpu")


def test_memory_of_the_process_grows_with_a_tensor_and_is_given_back() -> None:
    """Promise: memory_stats sees what is allocated, clear_cache collects garbage and returns what the system got back."""
    tune.clear_cache("cpu")
    before = tune.memory_stats("cpu")
    tensors = [torch.ones(1024) for _ in range(20_000)]  # 80 MB of the C heap's small blocks
    full = tune.memory_stats("cpu")
    assert full.allocated_bytes - before.allocated_bytes > 60e6
    assert full.total_bytes is not None
    assert full.free_bytes is not None
    assert 0 < full.free_bytes <= full.total_bytes
    last = tensors[-1]  # keeps the heap's end in use: free() alone cannot give back what is below it
    cycles = [[tensors[0], list[Any]()] for _ in range(50)]
    for cycle in cycles:
        cycle.append(cycle)
    del tensors, cycles, cycle
    allocated = tune.memory_stats("cpu").allocated_bytes
    freed = tune.clear_cache("cpu")
    after = tune.memory_stats("cpu").allocated_bytes
    assert last.sum() == 1024
    assert freed.objects >= 50
    assert abs(freed.freed_bytes - (allocated - after)) < 5e6
    assert after - before.allocated_bytes < 20e6


def test_all_devices_are_listed() -> None:
    """Promise: the CPU and each accelerator, by name."""
    devices = tune.devices()
    assert devices.ok
    assert devices.devices[0].device == "cpu"
    assert devices["cpu"].total_bytes == tune.memory_stats("cpu").total_bytes
    with pytest.raises(KeyError, match="there is no 'tpu'; there is cpu"):
        devices["tpu"]


def test_what_the_cpu_cannot_is_said() -> None:
    """Promise: a limit that torch cannot set is a reason, a wrong fraction an error."""
    limit = tune.memory_fraction(0.9, "cpu")
    assert (bool(limit), limit.limit_bytes) == (False, None)
    assert [str(problem) for problem in limit.problems] == ["cpu: torch cannot limit memory of cpu"]
    for wrong in (0, -1, 1.5, "0.9", True):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            tune.memory_fraction(wrong, "cpu")  # type: ignore[arg-type]


def test_equal_seeds_are_equal_numbers() -> None:
    """Promise: Python, NumPy and torch draw the same again."""
    import numpy as np

    def draws() -> list[Any]:
        seeded = tune.seed(42)
        assert seeded.generators == ("python", "torch", "numpy")
        return [random.random(), float(torch.rand(())), float(np.random.rand())]  # noqa: NPY002  # the global one is seeded

    python, state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        assert draws() == draws()
        drawn = draws()
        assert tune.seed(np.uint16(42)).seed == 42  # as of a NumPy generator's integers
        assert [random.random(), float(torch.rand(())), float(np.random.rand())] == drawn  # noqa: NPY002
        for wrong in (-1, 1.5, "42", None, True, np.float64(3), np.int64(-1)):
            tune.seed(42)
            with pytest.raises(ValueError, match="from 0 to 4294967295"):
                tune.seed(wrong)  # type: ignore[arg-type]
            assert [random.random(), float(torch.rand(()))] == drawn[:2]  # no generator was seeded
    random.setstate(python)
    np.random.set_state(state)  # noqa: NPY002


def test_deterministic_algorithms_on_request() -> None:
    """Promise: deterministic=True raises where torch has none, False lifts it, None leaves it."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        with torch.random.fork_rng():
            assert tune.seed(1, deterministic=True).deterministic
            assert torch.backends.cudnn.deterministic
            assert tune.seed(2).deterministic
            assert any("PYTHONHASHSEED" in note for note in tune.seed(1).notes)
            with pytest.raises(RuntimeError, match="deterministic"):
                torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
            assert not tune.seed(1, deterministic=False).deterministic
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def test_a_timing_waits_for_the_devices_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has a context on two of three devices; none is made on the other."""
    waited = list[int]()
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 3, synchronize=waited.append)
    contexts = SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index > 0)
    monkeypatch.setattr(operations, "torch", SimpleNamespace(cuda=cuda, _C=contexts))
    operations.wait_for_devices()
    assert waited == [1, 2]


def test_a_comparison_waits_for_the_device_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal has one."""
    waited = list[tuple[object, ...]]()
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, kind), "synchronize", lambda *device: waited.append(device))
    for device in ("cuda:1", "xpu:1", "mps", "cpu"):
        synchronize(device)
    assert waited == [("cuda:1",), ("xpu:1",), ()]
