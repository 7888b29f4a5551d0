"""GPU hardware metrics through NVML: utilization, memory, power, temperature, clocks, throttling, errors, MIG."""

from torchobs.probes.gpu.probe import GpuProbe

__all__ = ["GpuProbe"]
