"""Model FLOPs and their share of the devices' peak, from the counters and the model's parameters; in the sampler thread."""

from __future__ import annotations

import sys
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.detect.flops import Parameters, Progress, peak_flops, step_flops, utilization
from torchobs.flight.totals import DURATION_SUM, Totals, Word
from torchobs.probes.distributed import axis_of, by_axis, of_process_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchobs.probes.context import ProbeContext

_SPLIT = frozenset({"tp", "ep"})
"""Axes with parts of a parameter that their rank alone uses; sharded data parallelism gathers its parts"""
_UNKNOWN_SIZE = frozenset({"UninitializedParameter", "FlatParameter"})


class FlopsProbe:
    """Publishes ``torchobs.model.flops`` and ``torchobs.mfu``. ``device_name``: of a torch device, "" for one without peak."""

    name = "flops"

    def __init__(self, device_name: Callable[[Any], str] | None = None) -> None:
        self._device_name = device_name or _torch_device_name
        self._before = Progress(0, 0, 0, 0.0)
        self._key: tuple[int, ...] = ()
        self._parameters: Parameters | None = None
        self._is_shown = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`: there are no hooks."""

    def observe(self) -> None:
        """Publish both for the steps since the last time."""
        context = self._context
        now = progress(context.writer.table.core.totals)
        lately, logged = now.since(self._before), context.scalars.flops
        if not lately.steps:
            if context.training.idle and now.steps:
                self._set_utilization(None)
            return
        self._before = now
        flops = logged if logged is not None else self._estimate(lately)
        if flops is None or not isfinite(flops) or flops <= 0:
            return
        context.set_gauge(catalog.MODEL_FLOPS, flops)
        peak = self._peak()
        if peak is not None and lately.timed:
            self._set_utilization(utilization(flops, lately.timed_s / lately.timed, peak))

    def _set_utilization(self, share: float | None) -> None:
        if share is not None or self._is_shown:
            self._is_shown = True
            self._context.set_gauge(catalog.MFU, nan if share is None else share)

    def _estimate(self, lately: Progress) -> float | None:
        if not lately.tokens:
            return None
        optimizers = self._context.recorder.optimizers()
        key = tuple(sorted(map(id, optimizers)))
        if key != self._key or self._parameters is None:
            self._key, self._parameters = key, count_parameters(self._context.outermost(), self._trained())
        if self._parameters is None:
            return None
        context_parallel = by_axis(of_process_groups()).get("cp")  # it splits each sample after it was loaded
        parts = context_parallel.size if context_parallel is not None else 1
        return step_flops(self._parameters, lately.tokens / lately.steps / parts)

    def _trained(self) -> list[Any]:
        return [parameter for parameter in self._context.trained() if parameter.requires_grad]

    def _peak(self) -> float | None:
        """Return the peak of all devices with parameters; ``None`` if one is unknown or no GPU."""
        devices = {parameter.device: parameter for parameter in self._trained()}
        peaks = [self._peak_of(device, parameter) for device, parameter in devices.items()]
        numbers = [peak for peak in peaks if peak is not None]
        return sum(numbers) if numbers and len(numbers) == len(peaks) else None

    def _peak_of(self, device: Any, parameter: Any) -> float | None:
        dtype = self._context.training.autocast.get(device.type) or str(parameter.dtype).removeprefix("torch.")
        return peak_flops(self._device_name(device), "tfloat32" if dtype == "float32" and _uses_tf32() else dtype)


def progress(totals: Totals) -> Progress:
    """Return the fold's counters."""
    buckets = totals.ints[Word.STEP_DURATION : DURATION_SUM]
    return Progress(totals.ints[Word.STEPS], totals.ints[Word.TOKENS], sum(buckets), totals.floats[DURATION_SUM])


def count_parameters(modules: Iterable[Any], trained: list[Any]) -> Parameters | None:
    """Count the parameters of those modules that hold one of the ``trained``; ``None`` if there is none, or sizes are unknown.

    An embedding that is only looked up multiplies nothing, and does not count, unless it is the output layer's weight as well.
    FSDP1's flat parameters do not say which module a parameter is of.
    """
    wanted = {id(parameter) for parameter in trained}
    parameters: dict[int, Any] = {}
    products: set[int] = set()
    try:
        for module in modules:
            of_module = {id(parameter): parameter for parameter in module.parameters()}
            if wanted.isdisjoint(of_module):
                continue
            parameters |= of_module
            for part in module.modules():
                if not any(kind.__name__ in {"Embedding", "EmbeddingBag"} for kind in type(part).__mro__):
                    products.update(id(parameter) for parameter in vars(part).get("_parameters", {}).values())
    except RuntimeError:  # a dictionary changed its size: the model is being changed
        return None
    counted = [parameters[key] for key in products if key in parameters]
    unknown = any(type(x).__name__ in _UNKNOWN_SIZE or getattr(x, "_fsdp_flattened", False) for x in counted)
    if unknown or not counted:
        return None
    sizes = [(id(parameter) in wanted, _own_elements(parameter)) for parameter in counted]
    return Parameters(sum(size for used, size in sizes if used), sum(size for used, size in sizes if not used))


def _own_elements(parameter: Any) -> float:
    """Return the elements that this rank multiplies with its tokens."""
    elements = float(getattr(parameter, "ds_numel", 0) or parameter.numel())  # ZeRO-3 leaves no elements between uses
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        for at, (name, placement) in enumerate(zip(names, parameter.placements, strict=False)):
            if axis_of(name) in _SPLIT and placement.is_shard():
                elements /= mesh.size(at)
    return elements


def _uses_tf32() -> bool:
    matmul = sys.modules["torch"].backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # since torch 2.9; reading allow_tf32 may raise there
    return bool(precision == "tf32" if precision is not None else matmul.allow_tf32)


def _torch_device_name(device: Any) -> str:
    cuda = sys.modules["torch"].cuda
    return str(cuda.get_device_name(device)) if device.type == "cuda" and cuda.is_initialized() else ""
