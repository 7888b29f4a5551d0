"""GPU hardware by NVIDIA's management library: utilisation, memory, power, temperature, clocks, throttling, errors, MIG."""

from torchobs.probes.gpu.probe import GpuProbe

__all__ = ["GpuProbe"]
