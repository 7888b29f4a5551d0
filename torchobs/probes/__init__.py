"""What watches training: one signal per file, one class each with ``install`` and ``remove`` (``context.Probe``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.probes.compile.compile import CompileProbe
from torchobs.probes.data.epochs import EpochProbe
from torchobs.probes.data.fetches import DataProbe
from torchobs.probes.data.loaders import LoaderProbe
from torchobs.probes.gpu import GpuProbe
from torchobs.probes.gradients.gradients import GradientProbe
from torchobs.probes.lifecycle.checkpoints import CheckpointProbe
from torchobs.probes.lifecycle.distributed import DistributedProbe
from torchobs.probes.lifecycle.exits import ExitProbe
from torchobs.probes.memory.cgroup import CgroupProbe
from torchobs.probes.memory.device_memory import DeviceMemoryProbe
from torchobs.probes.memory.process_memory import MemoryProbe
from torchobs.probes.optimizer.hyperparameters import OptimizerProbe
from torchobs.probes.optimizer.schedulers import SchedulerProbe
from torchobs.probes.precision.amp import AmpProbe
from torchobs.probes.step.loss import LossProbe
from torchobs.probes.step.phases import PhaseProbe
from torchobs.probes.step.steps import StepProbe

if TYPE_CHECKING:
    from torchobs.probes.core.context import Probe

PROBES: tuple[type[Probe], ...] = (
    ExitProbe, StepProbe, PhaseProbe, DataProbe, LoaderProbe, EpochProbe, CheckpointProbe, LossProbe, AmpProbe, GradientProbe,
    OptimizerProbe, SchedulerProbe, GpuProbe, MemoryProbe, CgroupProbe, DeviceMemoryProbe, DistributedProbe,
    CompileProbe,
)  # fmt: skip
"""In the order of installation; all but the first need torch."""
