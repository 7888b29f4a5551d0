"""What watches training: one signal per file, one class each with ``install`` and ``remove`` (``context.Probe``).

What probes tell each other while training runs goes through hook lists (``core.context``); what one needs to know of another is
an object that :func:`factories` gives to both.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchobs.probes.activations.activations import ActivationProbe
from torchobs.probes.compile.compile import CompileProbe
from torchobs.probes.data.epochs import EpochCount, EpochProbe
from torchobs.probes.data.loaders import DataProbe, LoaderProbe
from torchobs.probes.gpu.monitor import GpuProbe
from torchobs.probes.gradients.gradients import GradientProbe
from torchobs.probes.gradients.replica_weights import Replicas
from torchobs.probes.lifecycle.checkpoints import CheckpointProbe
from torchobs.probes.lifecycle.collectives import CollectivesProbe
from torchobs.probes.lifecycle.distributed import DistributedProbe
from torchobs.probes.memory.device_memory import DeviceMemoryProbe
from torchobs.probes.memory.growth import Suspicion
from torchobs.probes.memory.leak import LeakProbe
from torchobs.probes.memory.process_memory import CgroupProbe, MemoryProbe
from torchobs.probes.nonfinite.probe import NonfiniteProbe
from torchobs.probes.optimizer.optimizer import OptimizerProbe, RateSource, ResumeProbe
from torchobs.probes.optimizer.schedulers import SchedulerProbe
from torchobs.probes.precision.amp import AmpProbe
from torchobs.probes.step.device_times import DeviceTimeProbe
from torchobs.probes.step.flops import FlopsProbe
from torchobs.probes.step.loss import LossProbe
from torchobs.probes.step.phases import PhaseProbe
from torchobs.probes.step.steps import StepProbe

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import Probe
    from torchobs.probes.precision.amp import LossScaling

    ProbeFactories = dict[str, Callable[[], Probe]]


def factories(scaling: LossScaling) -> ProbeFactories:
    """Return what makes each probe that needs torch, by name, in the order of installation; for one session.

    A probe that is switched off and on again is made anew, with the same objects.
    """
    rates, epochs, suspicion, replicas = RateSource(), EpochCount(), Suspicion(), Replicas()
    return {
        StepProbe.name: partial(StepProbe, rates),
        PhaseProbe.name: PhaseProbe,
        DeviceTimeProbe.name: DeviceTimeProbe,
        DataProbe.name: DataProbe,
        LoaderProbe.name: partial(LoaderProbe, replicas),
        EpochProbe.name: partial(EpochProbe, epochs),
        CheckpointProbe.name: CheckpointProbe,
        LossProbe.name: LossProbe,
        AmpProbe.name: partial(AmpProbe, scaling),
        GradientProbe.name: partial(GradientProbe, scaling, replicas),
        OptimizerProbe.name: partial(OptimizerProbe, rates),
        ResumeProbe.name: ResumeProbe,
        SchedulerProbe.name: partial(SchedulerProbe, epochs),
        GpuProbe.name: GpuProbe,
        MemoryProbe.name: partial(MemoryProbe, suspicion=suspicion),
        CgroupProbe.name: CgroupProbe,
        DeviceMemoryProbe.name: DeviceMemoryProbe,
        LeakProbe.name: partial(LeakProbe, suspicion),
        DistributedProbe.name: partial(DistributedProbe, replicas),
        CollectivesProbe.name: CollectivesProbe,
        CompileProbe.name: CompileProbe,
        NonfiniteProbe.name: partial(NonfiniteProbe, scaling),
        ActivationProbe.name: ActivationProbe,
        FlopsProbe.name: FlopsProbe,
    }
