"""What watches training: one signal per file, one class each with ``install`` and ``remove`` (``host.Probe``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.probes.amp import AmpProbe
from torchobs.probes.cgroup import CgroupProbe
from torchobs.probes.checkpoint import CheckpointProbe
from torchobs.probes.compile import CompileProbe
from torchobs.probes.data import DataProbe
from torchobs.probes.device_memory import DeviceMemoryProbe
from torchobs.probes.distributed import DistributedProbe
from torchobs.probes.epochs import EpochProbe
from torchobs.probes.exits import ExitProbe
from torchobs.probes.gpu import GpuProbe
from torchobs.probes.gradients import GradientProbe
from torchobs.probes.loaders import LoaderProbe
from torchobs.probes.loss import LossProbe
from torchobs.probes.memory import MemoryProbe
from torchobs.probes.optimizer import OptimizerProbe
from torchobs.probes.phases import PhaseProbe
from torchobs.probes.schedulers import SchedulerProbe
from torchobs.probes.step import StepProbe

if TYPE_CHECKING:
    from torchobs.probes.host import Probe

PROBES: tuple[type[Probe], ...] = (
    ExitProbe, StepProbe, PhaseProbe, DataProbe, LoaderProbe, EpochProbe, CheckpointProbe, LossProbe, AmpProbe, GradientProbe,
    OptimizerProbe, SchedulerProbe, GpuProbe, MemoryProbe, CgroupProbe, DeviceMemoryProbe, DistributedProbe,
    CompileProbe,
)  # fmt: skip
"""In the order of installation; all but the first need torch."""
