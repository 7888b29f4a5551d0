"""Measure the norm of each of an optimizer's gradients: at once on the CPU, asynchronously on a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import hypot, inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.core.pinned_buffers import wide
from torchobs.probes.gradients.devices import Timing
from torchobs.probes.gradients.norms import count_nonfinite, count_on_device, device_norms, host_norms, local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from weakref import ref

    from torchobs.probes.core.pinned_buffers import PendingCopy
    from torchobs.probes.gradients.devices import BatchPart, Devices

    Part = tuple[Callable[[], float | None], float]


class NonFiniteGradient(NamedTuple):
    """A non-finite gradient. ``nans`` and ``infinities`` count elements; on a device only their sum is known."""

    key: int
    norm: float
    nans: int
    infinities: int


class Arriving(NamedTuple):
    """Numbers that are being copied from a device."""

    numbers: PendingCopy | BatchPart
    order: list[int]
    """Indices of the gradients that the first numbers are the norms of"""
    counted: list[int]
    """Indices of the gradients that the next numbers count the non-finite elements of"""
    scaled: bool
    """Whether the last number is the loss scale"""


@dataclass(slots=True)
class Measurement:
    """The norms of some gradients. ``keys``: ids of the parameters, or of the gradients as long as only those are known."""

    keys: list[int]
    weights: list[float] | None
    ranks: int
    norms: list[float] = field(default_factory=list)
    """The norms, loss scale included, in the order of ``keys``; complete once arrived"""
    faults: list[NonFiniteGradient] = field(default_factory=list)
    scale: float = 1.0
    optimizer: ref[Any] | None = None
    whole: bool = False
    """Whether the recorded norm is another one: that of all shards, which clipping has computed"""
    arriving: list[Arriving] = field(default_factory=list)

    def arrived(self) -> bool:
        """Return True if all numbers have arrived."""
        if self.arriving and all(one.numbers.ready() for one in self.arriving):
            self._receive()
        return not self.arriving

    def total(self) -> float:
        """Return the total norm, unscaled."""
        return hypot(*self.weighted())

    def weighted(self) -> list[float]:
        """Return each norm, unscaled and weighted."""
        weights, scale = self.weights, self.scale
        if weights is not None:
            return [norm * weight / scale for norm, weight in zip(self.norms, weights, strict=True)]
        return self.norms if scale == 1.0 else [norm / scale for norm in self.norms]

    def _receive(self) -> None:
        self.norms = self.norms or [0.0] * len(self.keys)
        for numbers, order, counted, scaled in self.arriving:
            values = numbers.take()
            if scaled:
                self.scale = values.pop()
            for index, value in zip(order, values, strict=False):
                self.norms[index] = value
            elements = dict(zip(counted, values[len(order) :], strict=True))
            for index in order:
                norm = self.norms[index]
                if not isfinite(norm):
                    self.faults.append(NonFiniteGradient(self.keys[index], norm, 0, int(elements.get(index, 0))))
        self.arriving = []


@dataclass(slots=True)
class Clipping:
    """Result of one clipping call on ``grads`` gradients."""

    grads: int
    total: Any = None
    """Their norm, of all shards: a number, or a tensor on a device; ``None`` until it is known, if it is distributed"""
    each: Measurement | None = None
    """Their norms by the gradients' ids, in a step that is due"""
    limit: float = inf
    first: int = 0
    """id of the first gradient"""
    scaling: int = 0
    """How many losses had been scaled by then"""
    step: int = 0
    """The last step that had ended by then"""
    scale: Any = None
    """The loss scale that the gradients still contained, a number or a tensor on a device"""

    def make_whole(self, total: Any) -> None:
        """Take the total of sharded gradients, a number or a plain tensor."""
        self.total = total if isinstance(total, float) else total.item() if total.is_cpu else total.detach()
        if self.each is not None:
            self.each.whole = True


def measure(
    torch: Any, keys: Sequence[int], gradients: Sequence[Any], scale: Any, suspects: frozenset[int], devices: Devices
) -> Measurement | None:
    """Measure gradients; ``None`` during graph capture, for fake tensors and for those that have no values.

    ``scale``: the loss scale they still contain, a tensor, or ``None``. ``suspects``: keys whose non-finite elements are
    counted on a device, which costs six more passes over each; on the CPU they are counted whenever a norm is not finite.
    """
    keys, tensors, weights, ranks = local(keys, gradients)
    made = Measurement(keys, weights, ranks)
    by_device: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    if any(device.type == "meta" for device in by_device) or not all(map(devices.cuda.holds, tensors[:1])):
        return None
    if scale is not None and scale.is_cpu:
        made.scale, scale = float(scale), None
    with torch.no_grad():
        return _from_devices(torch, made, tensors, by_device, scale, suspects, devices)


def from_norms(torch: Any, keys: list[int], norms: list[Any], devices: Devices) -> Measurement | None:
    """Return a measurement of norms computed elsewhere (zero-dimensional); ``None`` on several devices or in a capture."""
    made, first = Measurement(keys, None, 1), norms[0]
    if first.is_cpu:
        made.norms = [norm.item() for norm in norms]
        return made
    if first.is_meta or len({norm.device for norm in norms}) > 1:
        return None
    with torch.no_grad(), devices.cuda.on(first.device):
        if devices.cuda.capturing():
            return None
        same = len({norm.dtype for norm in norms}) == 1
        dtype = wide(torch, first.device.type)
        numbers = devices.copies.send(torch.stack(norms if same else [norm.to(dtype) for norm in norms]))
    made.arriving.append(Arriving(numbers, list(range(len(norms))), [], scaled=False))
    return made


def _from_devices(
    torch: Any, made: Measurement, tensors: list[Any], by_device: dict[Any, list[int]], scale: Any, suspects: frozenset[int],
    devices: Devices,
) -> Measurement | None:  # fmt: skip
    made.norms = [0.0] * len(tensors)
    for device, indices in by_device.items():
        here = [tensors[index] for index in indices]
        if device.type == "cpu":
            _measure_here(made, indices, here)
            continue
        with devices.cuda.on(device):
            if devices.cuda.capturing():
                return None
            counted = [index for index in indices if made.keys[index] in suspects and tensors[index].layout is torch.strided]
            among = [(index, tensors[index]) for index in counted]
            made.arriving.append(_send(torch, here, indices, among, scale, devices))
    if scale is not None and not made.arriving:
        return scaled(made, scale, devices)
    return made


def _measure_here(made: Measurement, indices: list[int], tensors: list[Any]) -> None:
    """Measure the tensors on the CPU."""
    for index, tensor, norm in zip(indices, tensors, host_norms(tensors), strict=True):
        made.norms[index] = norm
        if not isfinite(norm):
            made.faults.append(NonFiniteGradient(made.keys[index], norm, *count_nonfinite(tensor)))


def _send(
    torch: Any, tensors: list[Any], indices: list[int], counted: list[tuple[int, Any]], scale: Any, devices: Devices
) -> Arriving:
    """Compute norms, counts and scale on the current device and start to copy them. ``indices`` are the tensors'."""
    device = tensors[0].device
    batch = devices.batch(device) if devices.batching or device in devices.batches else None
    elements = sum(tensor.numel() for tensor in tensors) if batch is not None else 0
    timed = device.type == "cuda" and (batch is None or (batch.timed is None and elements >= batch.expected))
    begun = devices.events.record(device) if timed else None
    vector, order = device_norms(tensors)
    more = [count_on_device(tensor) for _, tensor in counted]
    if scale is not None:
        more.append(scale.to(vector.device, non_blocking=True))
    if more:
        vector = torch.cat([vector, *(number.reshape(1).to(vector.dtype) for number in more)])
    numbers: PendingCopy | BatchPart
    if batch is None:
        numbers = sent = devices.copies.send(vector)
        if begun is not None:
            devices.time(Timing(device, begun, devices.events.record(device), sent, 1.0))
    else:
        numbers = batch.add(vector)
        batch.elements, batch.largest = batch.elements + elements, max(batch.largest, elements)
        if begun is not None:
            batch.timed = begun, devices.events.record(device), elements
    return Arriving(numbers, [indices[place] for place in order], [index for index, _ in counted], scaled=scale is not None)


def scaled(made: Measurement, scale: Any, devices: Devices) -> Measurement | None:
    """Add a device's scale to a measurement with norms on the CPU (offloaded gradients), known or pending."""
    if scale.is_cpu or scale.is_meta:
        return None
    with devices.cuda.on(scale.device):
        if devices.cuda.capturing():
            return None
        made.arriving.append(Arriving(devices.copies.send(scale.reshape(1)), [], [], scaled=True))
    return made


class PendingNorms:
    """Total norms pending on devices, by step; written as late values when all parts have arrived.

    A part is a function that returns its norm (``None`` until it has arrived), and the clipping threshold. The training thread
    adds, the sampler thread takes.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[Part]] = {}

    def add(self, step: int, ask: Callable[[], float | None], limit: float = inf, *, anew: bool = False) -> None:
        """Add a part of that step's norm. ``anew``: replace earlier parts (a closure's last evaluation counts)."""
        parts = self._steps.setdefault(step, [])
        if anew:
            parts.clear()
        parts.append((ask, limit))

    def take(self, last: int) -> Iterator[tuple[int, float, bool]]:
        """Yield step, norm and whether it was clipped, for steps up to ``last``, in order."""
        for step in sorted(self._steps):
            if step > last:
                return
            norms = [(ask(), limit) for ask, limit in self._steps[step]]
            known = [(norm, limit) for norm, limit in norms if norm is not None]
            if len(known) < len(norms):
                return
            del self._steps[step]
            yield step, hypot(*(norm for norm, _ in known)), any(limit < norm < inf for norm, limit in known)
