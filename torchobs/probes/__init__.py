"""Observers of the training: one signal per file, one class each with ``install`` and ``remove`` (``context.Probe``).

Probes talk to each other through hook lists (``context``) while training runs; what one needs of another is
an object that :func:`factories` gives to both.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.amp import LossScaling
    from torchobs.probes.context import Probe

    ProbeFactories = dict[str, Callable[[], Probe]]


def factories(scaling: LossScaling) -> ProbeFactories:
    """Return the factory of each probe that needs torch, by name, in the order of installation; for one session.

    A probe that is switched off and on again is made anew, with the same objects. To be called once torch is imported, as
    the probes' modules do.
    """
    from torchobs.probes.activations import ActivationProbe
    from torchobs.probes.amp import AmpProbe
    from torchobs.probes.checkpoints import CheckpointProbe
    from torchobs.probes.collectives import CollectivesProbe
    from torchobs.probes.compile import CompileProbe
    from torchobs.probes.data import DataProbe, LoaderProbe
    from torchobs.probes.device_memory import DeviceMemoryProbe
    from torchobs.probes.device_times import DeviceTimeProbe
    from torchobs.probes.distributed import DistributedProbe
    from torchobs.probes.epochs import EpochProbe
    from torchobs.probes.flops import FlopsProbe
    from torchobs.probes.gpu import GpuProbe
    from torchobs.probes.gradients import GradientProbe
    from torchobs.probes.leak import LeakProbe
    from torchobs.probes.loss import LossProbe
    from torchobs.probes.memory_growth import Suspicion
    from torchobs.probes.nonfinite.probe import NonfiniteProbe
    from torchobs.probes.optimizer import OptimizerProbe, ResumeProbe
    from torchobs.probes.phases import PhaseProbe
    from torchobs.probes.process_memory import CgroupProbe, MemoryProbe
    from torchobs.probes.replicas import Replicas
    from torchobs.probes.schedulers import SchedulerProbe
    from torchobs.probes.steps import StepProbe

    suspicion, replicas = Suspicion(), Replicas()
    return {
        StepProbe.name: StepProbe,
        PhaseProbe.name: PhaseProbe,
        DeviceTimeProbe.name: DeviceTimeProbe,
        DataProbe.name: DataProbe,
        LoaderProbe.name: partial(LoaderProbe, replicas),
        EpochProbe.name: EpochProbe,
        CheckpointProbe.name: CheckpointProbe,
        LossProbe.name: LossProbe,
        AmpProbe.name: partial(AmpProbe, scaling),
        GradientProbe.name: partial(GradientProbe, scaling, replicas),
        OptimizerProbe.name: OptimizerProbe,
        ResumeProbe.name: ResumeProbe,
        SchedulerProbe.name: SchedulerProbe,
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
