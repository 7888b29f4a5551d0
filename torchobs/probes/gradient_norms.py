"""L2 norms of many gradients, without synchronising a device or copying large tensors.

Measured on torch 2.13, 40 M elements, two cores: ``_foreach_norm`` on the CPU is 2.4e-3 off (16 ms); norms of rows of 1,000
and then of those 6e-8 off (9.5 ms). bfloat16 that way is 1.3e-5 off (6.5 ms), with rows in float32 6e-8 (22 ms): the error of a
row is unbiased. float16 rows overflow at 65,504 and cost 46 ms; in float32, a million elements at a time, 16 ms. Where the
float32 square of a norm may have over- or underflowed, float64 is used: so inf or NaN means a non-finite gradient, and
0 one with zeros only. On CUDA ``_foreach_norm`` sums in float64 from the start, since a second computation would have to wait
for the first: each element is converted in a register (``ForeachReduceOp.cu``), where ``vector_norm`` with a ``dtype`` makes a
copy of the whole (``ReduceOpsUtils.h``, but for 16 bits to float32). There, data-centre GPUs are memory-bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import hypot, inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchobs.tensors.device_reads import Timing, is_on_device, wide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from weakref import ref

    from torchobs.tensors.device_reads import Devices, PendingCopy

    Part = tuple[Callable[[], float | None], float]


LARGE = 100_000
"""Elements from which the CPU path computes a norm in two stages."""
_ROW, _CHUNK = 1000, 1_000_000
_DEVICE_CHUNK = 1 << 23
"""Elements of a device's tensor that may be copied at once: large enough to amortise the launches"""
_DEVICE_LARGE = 1 << 24
"""Elements from which CUDA's norms are computed apart from those of smaller tensors: for each tensor, a call clears a
partial sum for each 65,536 elements of the largest one (``kChunkSize``)"""
_L2 = 2.0
_EPSILON = 1e-6
"""The number that ``clip_grads_with_norm_`` adds to the norm before it divides by it"""
TINY = 1e-15
"""A smaller float32 norm may have lost squares to underflow (they leave the normal range at 1e-38)."""


def is_l2(norm_type: Any) -> bool:
    """Return whether it is the L2 norm. torch refuses what is no number; a number on a device is unknown."""
    if type(norm_type) is float:  # in nearly every call
        return norm_type == _L2
    try:
        return not is_on_device(norm_type) and float(norm_type) == _L2
    except (TypeError, ValueError, RuntimeError):
        return False


def completed_total(coefficients: Sequence[Any], limit: float) -> Any:
    """Return the total norm that torch has completed over all shards to divide the limit by it; ``None`` if unknown.

    ``coefficients``: of clipping, not clamped yet. On a device the total is a tensor there. No collective, and nothing waits.
    """
    if not 0.0 < limit < inf or len(coefficients) != 1:
        return None
    coefficient = getattr(coefficients[0], "_local_tensor", coefficients[0]).detach()
    if not coefficient.is_cpu:
        return limit / coefficient - _EPSILON
    divisor = coefficient.item()
    return limit / divisor - _EPSILON if divisor else inf


class Local(NamedTuple):
    """This rank's part of some gradients."""

    keys: list[int]
    tensors: list[Any]
    weights: list[float] | None
    """Factors of the norms (``None``: all 1), such that the squares of all ``ranks`` ranks add up to the whole"""
    ranks: int
    """1 if every rank has the whole gradient"""


def local(keys: Sequence[int], gradients: Sequence[Any]) -> Local:
    """Return the local tensors to measure, without a collective: shards of DTensors; no empty tensors and no partial sums.

    With S distinct shards of a tensor among N ranks each shard is held N / S times and its square counts S / N. A plain tensor
    beside DTensors is held by all ranks of the mesh. ``ranks`` is the size of the largest mesh.
    """
    tensor_type = torch.Tensor
    if all(type(gradient) is tensor_type for gradient in gradients):
        if all(gradient.numel() for gradient in gradients):
            return Local(list(keys), list(gradients), None, 1)
        kept = [(key, gradient) for key, gradient in zip(keys, gradients, strict=True) if gradient.numel()]
        return Local([key for key, _ in kept], [gradient for _, gradient in kept], None, 1)
    with torch.no_grad():  # with gradients, `to_local` is a node of autograd's: 7 µs for each
        parts = [(key, *_shard(gradient)) for key, gradient in zip(keys, gradients, strict=True)]
    ranks = max(size for _, _, _, size in parts)
    there = [(key, tensor, shards) for key, tensor, shards, _ in parts if tensor is not None and tensor.numel()]
    weights = [sqrt(shards / ranks) for _, _, shards in there]
    return Local([key for key, _, _ in there], [tensor for _, tensor, _ in there], weights, ranks)


def _shard(gradient: Any) -> tuple[Any, int, int]:
    """Return the local tensor (``None``: a partial sum, which needs a collective), its number of shards, the mesh's size."""
    if not (hasattr(gradient, "placements") and hasattr(gradient, "device_mesh")):
        return gradient, 1, 1
    shards, mesh = 1, gradient.device_mesh
    for dimension, placement in enumerate(gradient.placements):
        if placement.is_partial():
            return None, 1, mesh.size()
        if not placement.is_replicate():
            shards *= mesh.size(dimension)
    return gradient.to_local(), shards, mesh.size()


def host_norms(tensors: Sequence[Any]) -> list[float]:
    """Return the norm of each tensor; all are on the CPU and none is empty. Call it under ``no_grad``."""
    norms = [0.0] * len(tensors)
    small: dict[Any, list[int]] = {}
    strided, easy = torch.strided, (torch.float32, torch.bfloat16, torch.float16)
    for index, tensor in enumerate(tensors):
        if tensor.layout is strided and tensor.dtype in easy and tensor.numel() < LARGE:
            small.setdefault(tensor.dtype, []).append(index)
        else:
            norms[index] = _norm(_plain(tensor)).item()
    for dtype, indices in small.items():
        group = [tensors[index] for index in indices]
        together: Any = torch._foreach_norm  # torch has no types for it
        lengths = together(group, 2.0) if dtype is torch.float32 else together(group, 2.0, dtype=torch.float32)
        for index, norm in zip(indices, lengths, strict=True):
            norms[index] = norm.item()
    if norms and not (min(norms) > TINY and max(norms) < inf):
        norms = [norm if TINY < norm < inf else _exact(tensors[index]) for index, norm in enumerate(norms)]
    return norms


def device_norms(tensors: Sequence[Any]) -> tuple[Any, list[int]]:
    """Return the norms as one tensor on the tensors' device (float64 on CUDA), and the index of each one's tensor. Never waits.

    An uncoalesced sparse gradient counts with its values as they are, since coalescing waits for the device: its norm is
    then approximate. A tensor that is not dense in memory is computed alone, since its whole group would be copied.
    """
    groups: dict[Any, list[tuple[int, Any]]] = {}
    norms: list[Any] = []
    order: list[int] = []
    easy = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for index, tensor in enumerate(tensors):
        plain = tensor if tensor.layout is torch.strided and tensor.dtype in easy else _plain(tensor)
        dense = plain if plain.is_contiguous() else flat(plain)
        if dense is None or dense.dtype not in easy:
            norms.append(_in_parts(plain))
            order.append(index)
        else:
            groups.setdefault((dense.dtype, dense.numel() >= _DEVICE_LARGE), []).append((index, dense))
    for members in groups.values():
        norms += _together([dense for _, dense in members])
        order += [index for index, _ in members]
    return torch.stack(norms), order


def _together(tensors: list[Any]) -> Any:
    return torch._foreach_norm(tensors, 2.0, dtype=wide(torch, tensors[0].device.type))


def _in_parts(plain: Any) -> Any:
    """Return the norm of a tensor that has to be copied, a part at a time."""
    dense = torch.contiguous_format
    norms = [_together([part.clone(memory_format=dense)])[0] for part in _chunks(plain, _DEVICE_CHUNK)]
    return torch.linalg.vector_norm(torch.stack(norms))


def count_nonfinite(tensor: Any) -> Any:
    """Return the number of non-finite elements as a zero-dimensional tensor on the same device. Never waits.

    ``isfinite`` copies the whole tensor (its absolute values); a comparison takes a byte for each element.
    """
    counts = []
    for part in _chunks(_plain(tensor), _DEVICE_CHUNK):
        counts += [matches.sum() for matches in (part != part, part == inf, part == -inf)]  # noqa: PLR0124  # a NaN equals nothing
    return torch.stack(counts).sum()


def _norm(plain: Any) -> Any:
    norm = torch.linalg.vector_norm
    if plain.dtype in {torch.float32, torch.bfloat16, torch.float64} and plain.numel() >= LARGE:
        dense = flat(plain)
        if dense is not None:
            return _in_two_stages(dense)
    if plain.dtype in {torch.float32, torch.float64}:
        return norm(plain)
    return norm(torch.stack([norm(part, dtype=torch.float32) for part in _chunks(plain, _CHUNK)]))


def _in_two_stages(flat: Any) -> Any:
    norm = torch.linalg.vector_norm
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    rows = flat.numel() // _ROW
    head = norm(flat[: rows * _ROW].view(rows, _ROW), dim=1).to(wide)
    tail = flat[rows * _ROW :]
    if tail.numel():
        head = torch.cat((head, norm(tail).to(wide).reshape(1)))
    return norm(head)


def _exact(tensor: Any) -> float:
    """Return the norm in float64, computed in chunks: no square of a float32 over- or underflows there."""
    norms = [torch.linalg.vector_norm(part.double()) for part in _chunks(_plain(tensor), _CHUNK)]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _chunks(plain: Any, most: int) -> Iterator[Any]:
    """Yield views of at most ``most`` elements, one at a time, so that a copy of one is freed before the next."""
    dense = flat(plain)
    if dense is not None:
        for part in dense.split(most):
            # float8 has no norm, isnan or double
            yield part.float() if plain.dtype.itemsize == 1 else part
    elif len(plain) == 1:
        yield from _chunks(plain[0], most)
    else:
        rows = max(1, most * len(plain) // plain.numel())
        for part in plain.split(rows):
            if part.numel() > most:
                yield from _chunks(part, most)
            else:
                yield part.float() if plain.dtype.itemsize == 1 else part


def flat(tensor: Any) -> Any:
    """Return a view of the elements in memory order (norms do not depend on it), or ``None`` if they are not dense."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    return dense.view(-1) if dense.is_contiguous() else None


def _plain(tensor: Any) -> Any:
    """Return a strided real tensor with the same norm."""
    if tensor.layout is torch.sparse_coo:
        there = not tensor.is_cpu and not tensor.is_coalesced()
        tensor = tensor._values() if there else tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor


class NonFiniteGradient(NamedTuple):
    """A gradient that is not finite: its norm is NaN if any element is, else infinite. ``elements``: how many are not."""

    key: int
    norm: float
    elements: int


class Arriving(NamedTuple):
    """Numbers that are being copied from a device."""

    numbers: PendingCopy
    order: list[int]
    """Indices of the gradients that the first numbers are the norms of"""
    counted: list[int]
    """Indices of the gradients that the next numbers count the non-finite elements of"""
    scaled: bool
    """Whether the last number is the loss scale"""


@dataclass(slots=True)
class Measurement:
    """The norms of some gradients. ``keys``: ids of the parameters, or of the gradients until those are known."""

    keys: list[int]
    weights: list[float] | None
    ranks: int
    norms: list[float] = field(default_factory=list)
    """The norms, loss scale included, in the order of ``keys``; complete once arrived"""
    faults: list[NonFiniteGradient] = field(default_factory=list)
    scale: float = 1.0
    optimizer: ref[Any] | None = None
    whole: bool = False
    """Whether the recorded norm is the one of all shards, which clipping has computed"""
    arriving: list[Arriving] = field(default_factory=list)

    def arrived(self) -> bool:
        """Return whether all numbers have arrived."""
        if self.arriving and all(part.numbers.ready() for part in self.arriving):
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
                    self.faults.append(NonFiniteGradient(self.keys[index], norm, int(elements.get(index, 0))))
        self.arriving = []


@dataclass(slots=True)
class Clipping:
    """Result of one clipping call on ``grads`` gradients."""

    grads: int
    total: Any = None
    """Their norm, of all shards: a number, or a tensor on a device; ``None`` until it is known, if it is distributed"""
    measured: Measurement | None = None
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
        if self.measured is not None:
            self.measured.whole = True


def measure(
    keys: Sequence[int], gradients: Sequence[Any], scale: Any, suspects: frozenset[int], devices: Devices
) -> Measurement | None:
    """Measure gradients; ``None`` during graph capture, for fake tensors and for those that have no values.

    ``scale``: the loss scale they still contain, a tensor, or ``None``. ``suspects``: keys with non-finite elements to be
    counted on a device, which costs six more passes over each; on the CPU they are counted whenever a norm is not finite.
    """
    keys, tensors, weights, ranks = local(keys, gradients)
    measurement = Measurement(keys, weights, ranks)
    by_device: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    if any(device.type == "meta" for device in by_device) or not all(map(devices.cuda.holds, tensors[:1])):
        return None
    if scale is not None and scale.is_cpu:
        measurement.scale, scale = float(scale), None
    measurement.norms = [0.0] * len(tensors)
    with torch.no_grad():
        for device, indices in by_device.items():
            here = [tensors[index] for index in indices]
            if device.type == "cpu":
                for index, tensor, norm in zip(indices, here, host_norms(here), strict=True):
                    measurement.norms[index] = norm
                    if not isfinite(norm):
                        measurement.faults.append(NonFiniteGradient(keys[index], norm, int(count_nonfinite(tensor))))
                continue
            with devices.cuda.on(device):
                if devices.cuda.capturing():
                    return None
                counted = [index for index in indices if keys[index] in suspects and tensors[index].layout is torch.strided]
                among = [(index, tensors[index]) for index in counted]
                measurement.arriving.append(_send(here, indices, among, scale, devices))
        return scaled(measurement, scale, devices) if scale is not None and not measurement.arriving else measurement


def from_norms(keys: list[int], norms: list[Any], devices: Devices) -> Measurement | None:
    """Return a measurement of norms computed elsewhere (zero-dimensional); ``None`` on several devices or in a capture."""
    measurement, first = Measurement(keys, None, 1), norms[0]
    if first.is_cpu:
        measurement.norms = [norm.item() for norm in norms]
        return measurement
    if first.is_meta or len({norm.device for norm in norms}) > 1:
        return None
    with torch.no_grad(), devices.cuda.on(first.device):
        if devices.cuda.capturing():
            return None
        same = len({norm.dtype for norm in norms}) == 1
        dtype = wide(torch, first.device.type)
        numbers = devices.copies.send(torch.stack(norms if same else [norm.to(dtype) for norm in norms]))
    measurement.arriving.append(Arriving(numbers, list(range(len(norms))), [], scaled=False))
    return measurement


def _send(tensors: list[Any], indices: list[int], counted: list[tuple[int, Any]], scale: Any, devices: Devices) -> Arriving:
    """Compute norms, counts and scale on the current device and start to copy them. ``indices`` are the tensors'."""
    device = tensors[0].device
    begun = devices.events.record(device) if device.type == "cuda" else None
    vector, order = device_norms(tensors)
    more = [count_nonfinite(tensor) for _, tensor in counted]
    if scale is not None:
        more.append(scale.to(vector.device, non_blocking=True))
    if more:
        vector = torch.cat([vector, *(number.reshape(1).to(vector.dtype) for number in more)])
    numbers = devices.copies.send(vector)
    if begun is not None:
        devices.time(Timing(device, begun, devices.events.record(device), numbers))
    return Arriving(numbers, [indices[place] for place in order], [index for index, _ in counted], scaled=scale is not None)


def scaled(measurement: Measurement, scale: Any, devices: Devices) -> Measurement | None:
    """Add a device's scale to a measurement with norms on the CPU (offloaded gradients), known or pending."""
    if scale.is_cpu or scale.is_meta:
        return None
    with devices.cuda.on(scale.device):
        if devices.cuda.capturing():
            return None
        measurement.arriving.append(Arriving(devices.copies.send(scale.reshape(1)), [], [], scaled=True))
    return measurement


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

    def pop_arrived(self, last: int) -> Iterator[tuple[int, float, bool]]:
        """Yield step, norm and whether it was clipped, for steps up to ``last``, in order."""
        for step in sorted(self._steps):
            if step > last:
                return
            norms = [(ask(), limit) for ask, limit in self._steps[step]]
            arrived = [(norm, limit) for norm, limit in norms if norm is not None]
            if len(arrived) < len(norms):
                return
            del self._steps[step]
            yield step, hypot(*(norm for norm, _ in arrived)), any(limit < norm < inf for norm, limit in arrived)
