"""One measurement of an optimizer's gradients: the norm of each, read at once on the CPU, on its way from a device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import hypot, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.landing import Landings
from torchobs.probes.norms import count_nonfinite, device_norms, host_norms, local

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import ref

    from torchobs.probes.landing import Landing

_MOST_TIMED = 64
"""Measurements under way whose time is known later; a device that is further behind tells of the last ones"""


class Fault(NamedTuple):
    """A gradient that is not finite. ``nans`` and ``infinities`` count elements; on a device only their sum is known."""

    key: int
    norm: float
    nans: int
    infinities: int


class Timing(NamedTuple):
    """CUDA events around a device's part of a measurement, for the training thread alone (``landing``)."""

    begun: Any
    done: Any


class Devices:
    """What measuring on devices needs: where the numbers arrive, and how long it took, for who wants to know."""

    __slots__ = ("landings", "timings")

    def __init__(self) -> None:
        self.landings = Landings()
        self.timings: deque[Timing] = deque(maxlen=_MOST_TIMED)

    def take_ns(self, torch: Any) -> int:
        """Return the devices' time for what they have finished since the last call. In the training thread; never waits."""
        spent_ns = 0
        if self.timings and not torch.cuda.is_current_stream_capturing():
            while self.timings and self.timings[0].done.query():
                begun, done = self.timings.popleft()
                spent_ns += int(begun.elapsed_time(done) * 1e6)
        return spent_ns


@dataclass(slots=True)
class Measurement:
    """The norms of some gradients. ``keys``: the parameters' ids (or their gradients', while only those are known)."""

    keys: list[int]
    weights: list[float] | None
    ranks: int
    norms: list[float] = field(default_factory=list)
    """as they are, the loss scale included; in the order of ``keys``, once arrived"""
    faults: list[Fault] = field(default_factory=list)
    scale: float = 1.0
    optimizer: ref[Any] | None = None
    arriving: list[tuple[Landing, list[int], list[int]]] = field(default_factory=list)
    """Numbers under way, which gradients their first ones are the norms of, and the next ones the non-finite elements of"""

    def arrived(self) -> bool:
        """Tell whether all is known."""
        if self.arriving and all(numbers.ready() for numbers, _, _ in self.arriving):
            self._receive()
        return not self.arriving

    def total(self) -> float:
        """Return the norm of all of them, unscaled."""
        return hypot(*self.weighted())

    def weighted(self) -> list[float]:
        """Return each norm, unscaled and weighted."""
        weights, scale = self.weights, self.scale
        if weights is not None:
            return [norm * weight / scale for norm, weight in zip(self.norms, weights, strict=True)]
        return self.norms if scale == 1.0 else [norm / scale for norm in self.norms]

    def _receive(self) -> None:
        self.norms = self.norms or [0.0] * len(self.keys)
        for numbers, order, counted in self.arriving:
            *values, scale = numbers.take()
            self.scale = scale
            for index, value in zip(order, values, strict=False):
                self.norms[index] = value
            elements = dict(zip(counted, values[len(order) :], strict=True))
            for index in order:
                norm = self.norms[index]
                if not isfinite(norm):
                    self.faults.append(Fault(self.keys[index], norm, 0, int(elements.get(index, 0))))
        self.arriving = []


def measure(
    torch: Any, keys: Sequence[int], gradients: Sequence[Any], scale: Any, suspects: frozenset[int], devices: Devices
) -> Measurement | None:
    """Measure them; ``None`` where that cannot be: a graph is being captured, or a device other than CPU and CUDA has them.

    ``scale``: the loss scale they still contain, or ``None``. ``suspects``: keys whose non-finite elements a device shall
    count, which costs two more passes over each; on the CPU they are counted wherever a norm says so.
    """
    keys, tensors, weights, ranks = local(keys, gradients)
    made = Measurement(keys, weights, ranks)
    by_device: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    if any(device.type not in {"cpu", "cuda"} for device in by_device):
        return None
    with torch.no_grad():
        if len(by_device) <= 1 and not (tensors and tensors[0].is_cuda):
            made.norms = host_norms(tensors)
            made.faults = [
                Fault(keys[index], norm, *count_nonfinite(tensors[index]))
                for index, norm in enumerate(made.norms)
                if not isfinite(norm)
            ]
            made.scale = 1.0 if scale is None else float(scale)
            return made
        return _from_devices(torch, made, tensors, by_device, scale, suspects, devices)


def from_norms(torch: Any, keys: list[int], norms: list[Any], devices: Devices) -> Measurement | None:
    """Make one of norms that somebody else has computed, each a tensor without dimensions; all of the same device."""
    made = Measurement(keys, None, 1)
    if not norms[0].is_cuda:
        made.norms = [norm.item() for norm in norms]
        return made
    with torch.no_grad(), torch.cuda.device(norms[0].device):
        if torch.cuda.is_current_stream_capturing() or len({norm.device for norm in norms}) > 1:
            return None
        same = len({norm.dtype for norm in norms}) == 1
        vector = torch.stack(norms if same else [norm.double() for norm in norms]).double()
        numbers = devices.landings.send(torch.cat([vector, torch.ones(1, device=vector.device, dtype=vector.dtype)]))
    made.arriving.append((numbers, list(range(len(norms))), []))
    return made


def _from_devices(
    torch: Any, made: Measurement, tensors: list[Any], by_device: dict[Any, list[int]], scale: Any, suspects: frozenset[int],
    devices: Devices,
) -> Measurement | None:  # fmt: skip
    made.norms = [0.0] * len(tensors)
    for device, indices in by_device.items():
        here = [tensors[index] for index in indices]
        if device.type == "cpu":
            for index, norm in zip(indices, host_norms(here), strict=True):
                made.norms[index] = norm
            continue
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return None
            begun = torch.cuda.Event(enable_timing=True)
            begun.record()
            vector, order = device_norms(here)
            counted = [
                place for place in order if made.keys[indices[place]] in suspects and here[place].layout is torch.strided
            ]
            more = [(~torch.isfinite(here[place])).sum() for place in counted]
            factor = torch.ones(1, device=device) if scale is None else scale.to(device, non_blocking=True)
            vector = torch.cat([vector, *(number.reshape(1).double() for number in (*more, factor))])
            numbers = devices.landings.send(vector)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
            devices.timings.append(Timing(begun, done))
        made.arriving.append((numbers, [indices[place] for place in order], [indices[place] for place in counted]))
    return made
