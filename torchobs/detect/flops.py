"""Floating-point operations of a training step, and how much of the device's peak they are.

All figures are dense (without structured sparsity, with which datasheets often give twice as much), with accumulation in
float32 where the vendor makes a difference, in 10^12 operations per second, at the clock and power limit of the datasheet.
Names are matched as a whole, as ``torch.cuda.get_device_name()`` and NVML have them, so that no PCIe card is taken for an SXM
module and no MIG instance for a whole GPU: a device that is not in the table has no peak.

A product of a weight matrix takes 2 operations for each weight and token in the forward pass, and twice as many in the backward
pass: 6 for each parameter and token (Kaplan et al., 2020, arXiv:2001.08361, section 2.1). A frozen weight has no gradient, but
the gradient of its input is computed where a trained layer lies before it (an adapter in every layer): 4.

The model FLOPs utilization is the number of these operations per second over the peak (PaLM: Chowdhery et al., 2022,
arXiv:2204.02311, appendix B), which counts no operation done twice (activation checkpointing). Left out are attention's
products of queries with keys and of weights with values, 12 x layers x width x sequence length for each token: PaLM has them,
a small part where the sequence is much shorter than six times the width.
"""

from __future__ import annotations

import re
from operator import sub
from typing import NamedTuple


class Peaks(NamedTuple):
    """Peaks of one device in 10^12 operations per second; ``None``: it has no units for that type."""

    float32: float
    tfloat32: float | None
    bfloat16: float | None
    float16: float
    source: str


class _Device(NamedTuple):
    names: str
    """Regular expression for the whole name, without the vendor's part"""
    peaks: Peaks


_H100 = "NVIDIA H100 Tensor Core GPU datasheet"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"
_MEMORY = r"(?:-\d+GB)?"

DEVICES = (
    _Device(rf"V100-SXM2{_MEMORY}", Peaks(15.7, None, None, 125.0, _V100)),
    _Device(rf"V100-PCIE{_MEMORY}", Peaks(14.0, None, None, 112.0, _V100)),
    _Device(rf"V100S-PCIE{_MEMORY}", Peaks(16.4, None, None, 130.0, _V100)),
    _Device(r"T4", Peaks(8.1, None, None, 65.0, "NVIDIA T4 datasheet")),
    _Device(r"A10", Peaks(31.2, 62.5, 125.0, 125.0, "NVIDIA A10 datasheet")),
    _Device(r"A10G", Peaks(35.0, 35.0, 70.0, 70.0, "NVIDIA A10G datasheet (published by AWS for G5 instances)")),
    _Device(r"A30", Peaks(10.3, 82.0, 165.0, 165.0, "NVIDIA A30 datasheet")),
    _Device(r"A40", Peaks(37.4, 74.8, 149.7, 149.7, "NVIDIA A40 datasheet")),
    _Device(
        r"A100-(?:SXM4|SXM|PCIE|PCIe)-\d+GB|A100 80GB PCIe",
        Peaks(19.5, 156.0, 312.0, 312.0, "NVIDIA A100 Tensor Core GPU datasheet"),
    ),
    _Device(r"L4", Peaks(30.3, 60.0, 121.0, 121.0, "NVIDIA L4 datasheet")),
    _Device(r"L40", Peaks(90.5, 90.5, 181.05, 181.05, "NVIDIA L40 datasheet")),
    _Device(r"L40S", Peaks(91.6, 183.0, 362.05, 362.05, "NVIDIA L40S datasheet")),
    _Device(r"H100 80GB HBM3", Peaks(67.0, 494.7, 989.4, 989.4, _H100)),  # SXM5: the PCIe card has HBM2e
    _Device(r"H100 PCIe", Peaks(51.0, 378.0, 756.0, 756.0, _H100)),
    _Device(r"H100 NVL", Peaks(60.0, 417.5, 835.5, 835.5, _H100)),
    _Device(r"H200", Peaks(67.0, 494.7, 989.4, 989.4, _H200)),
    _Device(r"H200 NVL", Peaks(60.0, 417.5, 835.5, 835.5, _H200)),
    _Device(
        r"GH200 (?:480GB|96GB HBM3|144G HBM3e)",
        Peaks(67.0, 494.7, 989.4, 989.4, "NVIDIA GH200 Grace Hopper Superchip datasheet"),
    ),
    _Device(r"B200", Peaks(75.0, 1100.0, 2250.0, 2250.0, "NVIDIA HGX B200 specifications (an eighth of the board)")),
    _Device(r"GB200", Peaks(80.0, 1250.0, 2500.0, 2500.0, "NVIDIA GB200 NVL72 specifications (1/72 of the rack)")),
    _Device(r"RTX 3090", Peaks(35.6, 35.6, 71.0, 71.0, "NVIDIA Ampere GA102 GPU Architecture whitepaper")),
    _Device(r"RTX 4090", Peaks(82.6, 82.6, 165.2, 165.2, "NVIDIA Ada GPU Architecture whitepaper")),
    _Device(r"RTX 5090", Peaks(104.8, 104.8, 209.5, 209.5, "NVIDIA RTX Blackwell GPU Architecture whitepaper")),
    _Device(r"RTX A6000", Peaks(38.7, 77.4, 154.8, 154.8, "NVIDIA Ampere GA102 GPU Architecture whitepaper")),
    _Device(
        r"RTX 6000 Ada Generation",
        Peaks(91.1, 182.1, 364.2, 364.2, "NVIDIA Ada GPU Architecture whitepaper"),
    ),
    _Device(
        r"MI250X(?:/MI250X?)?",
        Peaks(47.9, None, 191.5, 191.5, "AMD Instinct MI250X datasheet (half: torch sees each of two dies)"),
    ),
    _Device(r"MI300X", Peaks(163.4, 653.7, 1307.4, 1307.4, "AMD Instinct MI300X datasheet")),
    _Device(r"MI325X", Peaks(163.4, 653.7, 1307.4, 1307.4, "AMD Instinct MI325X datasheet")),
)

_VENDOR = re.compile(r"^(?:NVIDIA |AMD |Tesla |GeForce |Instinct |Graphics Device )+")


def peaks_of(name: str) -> Peaks | None:
    """Return the peaks of the device of that name; ``None`` if it is unknown."""
    bare = _VENDOR.sub("", name.strip())
    return next((device.peaks for device in DEVICES if re.fullmatch(device.names, bare)), None)


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the peak in operations per second; ``dtype``: as torch names it, or ``tfloat32``. ``None`` if unknown."""
    peaks = peaks_of(name)
    value = getattr(peaks, dtype, None) if peaks is not None and dtype in _DTYPES else None
    return value * 1e12 if value is not None else None


_DTYPES = frozenset(Peaks._fields) - {"source"}


TRAINED, FROZEN = 6, 4
"""Operations for each parameter and token"""


class Parameters(NamedTuple):
    """Elements of the parameters that are multiplied with every token, on this rank."""

    trained: float
    frozen: float


class Progress(NamedTuple):
    """Totals since the rank's start; the seconds are those of the steps that were timed."""

    steps: int
    tokens: int
    timed: int
    timed_s: float

    def since(self, before: Progress) -> Progress:
        """Return the progress since then."""
        return Progress(*map(sub, self, before))


def step_flops(parameters: Parameters, tokens: float) -> float:
    """Return the operations of a step with so many tokens."""
    return (TRAINED * parameters.trained + FROZEN * parameters.frozen) * tokens


def utilization(flops: float, step_s: float, peak: float) -> float | None:
    """Return the share of the peak, in operations per second; ``None`` if it cannot be: more than all of it.

    Such an estimate is of a model that does not use all parameters for every token (a mixture of experts).
    """
    share = flops / step_s / peak if step_s > 0 and peak > 0 else None
    return share if share is not None and 0 < share <= 1 else None
