"""Model FLOPs and their share of a device's peak: formulas, the table of devices, the parameters that count."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from torchobs.detect.flops import DEVICES, Parameters, Progress, peak_flops, peaks_of, step_flops, utilization
from torchobs.probes.flops import count_parameters

DATASHEETS = """
Tesla V100-SXM2-16GB: float16 125.0 | Tesla V100-SXM2-32GB: float32 15.7 | Tesla V100-PCIE-16GB: float16 112.0
Tesla V100S-PCIE-32GB: float16 130.0 | Tesla T4: float16 65.0 | NVIDIA A10: bfloat16 125.0 | NVIDIA A10G: bfloat16 70.0
NVIDIA A30: bfloat16 165.0 | NVIDIA A40: bfloat16 149.7 | A100-SXM4-40GB: bfloat16 312.0
NVIDIA A100-SXM4-80GB: tfloat32 156.0 | NVIDIA A100-PCIE-40GB: float32 19.5 | NVIDIA A100 80GB PCIe: bfloat16 312.0
NVIDIA L4: bfloat16 121.0 | NVIDIA L40: bfloat16 181.05 | NVIDIA L40S: bfloat16 362.05
NVIDIA H100 80GB HBM3: bfloat16 989.4 | NVIDIA H100 PCIe: bfloat16 756.0 | NVIDIA H100 NVL: bfloat16 835.5
NVIDIA H200: tfloat32 494.7 | NVIDIA H200 NVL: bfloat16 835.5 | NVIDIA GH200 480GB: bfloat16 989.4
NVIDIA B200: bfloat16 2250.0 | NVIDIA GB200: bfloat16 2500.0 | NVIDIA GeForce RTX 3090: float16 71.0
GeForce RTX 3090: float16 71.0 | NVIDIA GeForce RTX 4090: bfloat16 165.2 | NVIDIA GeForce RTX 5090: bfloat16 209.5
NVIDIA RTX A6000: bfloat16 154.8 | NVIDIA RTX 6000 Ada Generation: bfloat16 364.2 | AMD Instinct MI250X: bfloat16 191.5
AMD Instinct MI250X/MI250: float16 191.5 | AMD Instinct MI300X: bfloat16 1307.4 | AMD Instinct MI325X: float16 1307.4
"""
"""By device: a type, and the TFLOP/s that it has"""
UNKNOWN = (
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM2e", "NVIDIA H100", "NVIDIA A100X", "NVIDIA L40G", "NVIDIA A10M",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA RTX 6000D",
    "Quadro RTX 6000", "AMD Instinct MI300A", "", "cpu", "Apple M2",
)  # fmt: skip


def test_a_device_s_peak_is_that_of_its_datasheet() -> None:
    """By the names that torch and NVML have; a part of a GPU has none, and no peak is above that of a narrower type."""
    names = re.findall(r"([^|\n]+): (\w+) ([\d.]+)", DATASHEETS)
    peaks = {name.strip(): (peak_flops(name.strip(), dtype) or 0) / 1e12 for name, dtype, _ in names}
    assert peaks == {name.strip(): float(peak) for name, _, peak in names}
    assert [name for name in UNKNOWN if peaks_of(name) is not None] == []
    assert {id(device.peaks) for device in DEVICES} == {id(peaks_of(name)) for name in peaks}
    for device in DEVICES:
        of = device.peaks
        assert of.source
        assert of.float32 <= (of.tfloat32 or of.float32) <= (of.bfloat16 or of.float16) <= of.float16
    assert peak_flops("Tesla T4", "bfloat16") is None
    assert peak_flops("NVIDIA H200", "float8_e4m3fn") is None
    assert peak_flops("NVIDIA H200", "source") is None


def test_the_formulas() -> None:
    """GPT-3's 174.6e9 parameters and 300e9 tokens take 3.14e23 operations (Brown et al., 2020, table D.1)."""
    assert step_flops(Parameters(174.6e9, 0), 300e9) == pytest.approx(3.14e23, rel=2e-3)
    assert step_flops(Parameters(10, 1000), 2) == 2 * (6 * 10 + 4 * 1000)
    assert utilization(2e12, 0.5, 10e12) == 0.4
    assert utilization(2e12, 0.1, 10e12) is None  # twice the peak
    assert utilization(2e12, 0.0, 10e12) is None
    assert Progress(5, 50, 4, 2.0).since(Progress(2, 20, 1, 0.5)) == (3, 30, 3, 1.5)


class Tied(torch.nn.Module):
    """A language model with the embedding's weight in its output layer."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.position = torch.nn.Embedding(100, 8), torch.nn.Embedding(16, 8)
        self.inner = torch.nn.Linear(8, 8, bias=False)
        self.head = torch.nn.Linear(8, 100, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_that_count_are_those_that_multiply(tied: bool) -> None:  # noqa: FBT001  # parametrized
    """Not the embedding that is looked up, but the output layer, once, whoever else has its weight; however it is wrapped."""
    model = Tied(tied=tied)
    assert count_parameters([model, torch.nn.ModuleList([model])], list(model.parameters())) == (864, 0)


def test_frozen_parameters_count_less_and_other_models_not_at_all() -> None:
    """An adapter's model counts as a whole; a teacher that nothing of is trained does not."""
    model, teacher = Tied(tied=False), Tied(tied=False)
    model.head.requires_grad_(requires_grad=False)
    assert count_parameters([teacher, model], [model.inner.weight]) == (64, 800)
    assert count_parameters([teacher], [model.inner.weight]) is None
    assert count_parameters([], []) is None


def test_a_sharded_parameter_counts_by_what_its_rank_multiplies() -> None:
    """FSDP2 gathers it, tensor parallelism does not; ZeRO-3 empties it, and FSDP1's says nothing."""
    model = torch.nn.Linear(4, 8, bias=False)
    shard = SimpleNamespace(is_shard=lambda: True)
    mesh = SimpleNamespace(mesh_dim_names=("dp_shard", "tp"), size=(2, 4).__getitem__)
    model.weight.device_mesh, model.weight.placements = mesh, (shard, shard)  # type: ignore[attr-defined]
    assert count_parameters([model], [model.weight]) == (32 / 4, 0)
    emptied = torch.nn.Linear(4, 8, bias=False)
    emptied.weight.data = torch.empty(0)
    emptied.weight.ds_numel = 32  # type: ignore[attr-defined]
    assert count_parameters([emptied], [emptied.weight]) == (32, 0)
    flat = torch.nn.Linear(4, 8, bias=False)
    flat.weight._fsdp_flattened = True  # type: ignore[attr-defined]
    assert count_parameters([flat], [flat.weight]) is None
