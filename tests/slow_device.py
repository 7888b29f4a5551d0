"""A device that is as late as a test wants: each copy lands when it is told to, wholly, in part, or never."""

from __future__ import annotations

import contextlib
from array import array
from typing import TYPE_CHECKING, Any

import torch

from torchobs.tensors.device_reads import Device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager


class Words:
    """Memory as the probes use it, of which no mode of torch's (``FakeTensorMode``) makes anything else."""

    def __init__(self, bits: Any, kind: str) -> None:
        self._bits, self._kind = bits, kind
        self.dtype = torch.float64

    def __len__(self) -> int:
        return len(self._bits) // 8

    def __getitem__(self, words: slice) -> Words:
        begin, end, _ = words.indices(len(self))
        return Words(self._bits[8 * begin : 8 * end], self._kind)

    def view(self, dtype: torch.dtype) -> Words:
        assert dtype is torch.int64
        return Words(self._bits, "q")

    def fill_(self, value: int) -> None:
        self.put([value] * len(self))

    def put(self, values: Sequence[float]) -> None:
        self._bits.cast(self._kind)[: len(values)] = array(self._kind, values)

    def tolist(self) -> list[float]:
        numbers: list[float] = self._bits.cast(self._kind).tolist()
        return numbers


class Stored:
    """Memory of the device, as the probes use it."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values

    def __getitem__(self, slots: slice) -> torch.Tensor:
        return torch.cat([value.detach().double().reshape(1) for value in self.values[slots]])


class Passed:
    """An event, recorded at the device's time, and reached as long as the device has reached what it was given."""

    def __init__(self, device: SlowDevice) -> None:
        self.device, self.at_ms = device, device.now_ms

    def query(self) -> bool:
        assert not self.device.is_capturing
        return self.device.has_reached

    def elapsed_time(self, end: object, /) -> float:
        assert isinstance(end, Passed)
        assert self.device.has_reached
        return end.at_ms - self.at_ms


class SlowDevice(Device):
    """See the module. It does nothing else, and what must not be done while a graph is captured fails then."""

    def __init__(self) -> None:
        self.sent: list[tuple[torch.Tensor, Any]] = []
        self.is_capturing = False
        self.now_ms, self.has_reached = 0.0, True
        """Time on the device, and whether it has come to the end of what it was given"""
        self.made = self.events = self.current = 0
        """Allocations of host memory, events made, the current stream"""

    def on(self, _: torch.device) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def stream(self, _: torch.device) -> int:
        return self.current

    @contextlib.contextmanager
    def within(self, _: torch.device, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def capturing(self) -> bool:
        return self.is_capturing

    def holds(self, _: torch.Tensor) -> bool:
        return True

    def event(self, again: Any = None) -> Passed:
        assert not self.is_capturing
        self.events += again is None
        if again is None:
            return Passed(self)
        again.at_ms = self.now_ms
        event: Passed = again
        return event

    def numbers(self, size: int, _: torch.device) -> Any:
        assert not self.is_capturing
        return Stored([torch.zeros(())] * size)

    def store(self, value: torch.Tensor, numbers: Any, slot: int) -> None:
        assert not self.is_capturing
        numbers.values[slot] = value

    def empty(self, size: int, _: str) -> Any:
        assert not self.is_capturing
        self.made += 1
        return Words(memoryview(bytearray(8 * size)), "d")

    def send(self, values: torch.Tensor, into: Any) -> None:
        assert not self.is_capturing
        assert len(values) == len(into)
        self.sent.append((values.detach().double(), into))

    def land(self) -> None:
        values, into = self.sent.pop(0)
        into.put(values.tolist())

    def land_as(self, numbers: Sequence[float], copy: int = 0) -> None:
        """One of the copies, of a tensor without values, arrives as these numbers."""
        values, into = self.sent.pop(copy)
        assert len(values) == len(numbers)
        into.put(numbers)
