"""Read many small tensors by one copy for each device, waiting for it or not."""

from __future__ import annotations

import asyncio
from typing import Any

POLL_S = 0.0005
"""How often an awaited copy is looked at, in seconds: kernels for a large tensor take about as long."""


class Numbers:
    """One-dimensional tensors on any devices, to be read together as lists of floats."""

    def __init__(self) -> None:
        self._parts: dict[Any, list[tuple[int, Any]]] = {}
        self._count = 0

    def add(self, numbers: Any) -> int:
        """Add a one-dimensional float tensor; return its index in what is read."""
        index, self._count = self._count, self._count + 1
        self._parts.setdefault(numbers.device, []).append((index, numbers))
        return index

    def read(self) -> list[list[float]]:
        """Return the numbers, after one copy for each device."""
        return self._split({device: _joined(parts).tolist() for device, parts in self._parts.items()})

    async def aread(self) -> list[list[float]]:
        """Return the numbers as :meth:`read` does, without blocking the event loop while a CUDA device computes."""
        return self._split({device: await _arrived(_joined(parts)) for device, parts in self._parts.items()})

    def _split(self, flat: dict[Any, list[float]]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in range(self._count)]
        for device, parts in self._parts.items():
            begin = 0
            for index, tensor in parts:
                found[index] = flat[device][begin : begin + tensor.numel()]
                begin += tensor.numel()
        return found


def _joined(parts: list[tuple[int, Any]]) -> Any:
    import torch

    return torch.cat([tensor for _, tensor in parts])


async def _arrived(flat: Any) -> list[float]:
    if not flat.is_cuda:
        return list(flat.tolist())
    import torch

    events: Any = torch.cuda
    with torch.cuda.device(flat.device):
        landing = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        landing.copy_(flat, non_blocking=True)
        copied: Any = events.Event()
        copied.record()
    while not copied.query():  # noqa: ASYNC110  # CUDA sets no asyncio.Event
        await asyncio.sleep(POLL_S)
    return list(landing.tolist())
