"""``inspect_diffusion`` and ``diffusion_monitor``: the parts of a diffusion pipeline, and its latents step by step."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from torchobs.debug.findings import monitors, record_findings, record_series
from torchobs.debug.tensors import require
from torchobs.support.result import Checked, Problem, Result
from torchobs.taps.patch import Patch
from torchobs.tensors.statistics import Rows
from torchobs.tensors.values import bytes_of, elements_of

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_STEPS = 10_000
DIVERGING = 100.0
"""Times the first step's norm: latents keep about the norm of their noise"""


@dataclass(frozen=True, slots=True)
class Component(Result):
    """One part of a pipeline. Numbers are 0 for what has no parameters (scheduler, tokenizer)."""

    name: str
    kind: str
    """Its class; ``absent`` for one that is ``None``"""
    parameters: int
    trainable: int
    size_bytes: int
    """Of parameters and buffers"""
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    training: bool


@dataclass(frozen=True, slots=True)
class DiffusionCheck(Checked):
    """A diffusion pipeline."""

    pipeline: str
    total_parameters: int
    trainable_parameters: int
    size_bytes: int
    """Of all components; memory that several share counts once"""
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    components: tuple[Component, ...]
    problems: tuple[Problem, ...]


def inspect_diffusion(pipeline: Any) -> DiffusionCheck:
    """Describe the components of a diffusion pipeline: parameters, types, devices, memory, and what does not fit together.

    Args:
        pipeline: one of diffusers, or any object with ``components`` (a mapping) or with modules as attributes.

    Raises:
        TypeError: it has no module among its components.
    """
    parts = {name: part for name, part in _parts(pipeline).items() if not name.startswith("_")}
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    if not modules:
        kind = type(pipeline).__name__
        raise TypeError(f"inspect_diffusion() takes a pipeline with modules (unet, vae, ...), and {kind} has none")
    rows = tuple(_component(name, part, is_module=name in modules) for name, part in parts.items())
    every = {id(x): x for module in modules.values() for x in [*module.parameters(), *module.buffers()]}
    parameters = {id(x): x for module in modules.values() for x in module.parameters()}
    sick = [*_mismatches([row for row in rows if row.name in modules]), *_nonfinite(modules)]
    return DiffusionCheck(
        pipeline=type(pipeline).__name__, total_parameters=sum(map(elements_of, parameters.values())),
        trainable_parameters=sum(elements_of(x) for x in parameters.values() if x.requires_grad),
        size_bytes=sum(map(bytes_of, every.values())), dtypes=_sorted(row.dtypes for row in rows),
        devices=_sorted(row.devices for row in rows), components=rows,
        problems=record_findings("inspect_diffusion", sick),
    )  # fmt: skip


def _parts(pipeline: Any) -> dict[str, Any]:
    components = getattr(pipeline, "components", None)
    if components is not None and hasattr(components, "items"):
        return dict(components.items())
    if isinstance(pipeline, torch.nn.Module):
        return dict(pipeline.named_children())
    return dict(getattr(pipeline, "__dict__", {}))


def _component(name: str, part: Any, *, is_module: bool) -> Component:
    kind = "absent" if part is None else type(part).__name__
    if not is_module:
        return Component(name, kind, 0, 0, 0, (), (), training=False)
    parameters, tensors = list(part.parameters()), [*part.parameters(), *part.buffers()]
    return Component(
        name, kind, sum(map(elements_of, parameters)), sum(elements_of(x) for x in parameters if x.requires_grad),
        sum(map(bytes_of, tensors)), _sorted([str(x.dtype).removeprefix("torch.")] for x in parameters),
        _sorted([str(x.device)] for x in tensors), training=bool(part.training),
    )  # fmt: skip


def _sorted(groups: Any) -> tuple[str, ...]:
    return tuple(sorted({value for group in groups for value in group}))


def _mismatches(rows: list[Component]) -> Iterator[tuple[str, str, str]]:
    for what, values in (("device", [row.devices for row in rows]), ("type", [row.dtypes for row in rows])):
        if len({value for value in values if value}) > 1:
            usual = Counter(value for value in values if value).most_common(1)[0][0]
            for row, value in zip(rows, values, strict=True):
                if value and value != usual:
                    text = f"its {what} is {', '.join(value)}, that of most others {', '.join(usual)}"
                    yield f"component_{what}", row.name, text


def _nonfinite(modules: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    rows = Rows()
    for name, module in modules.items():
        for key, x in module.named_parameters():
            rows.add(f"{name}.{key}", x)
    for row in rows.described():
        if row.defect:
            yield "nonfinite_parameter", row.name, row.defect


@dataclass(frozen=True, slots=True)
class DenoisingStep(Result):
    """The latents after one step. Statistics are of finite elements, the norm of all."""

    step: int
    timestep: float | None
    norm: float | None
    mean: float | None
    std: float | None
    nan_count: int
    inf_count: int
    drift: float | None
    """Norm of this step's change, divided by the norm before it; ``None`` for the first"""
    time_s: float | None
    """Since the step before; ``None`` for the first"""


@dataclass(frozen=True, slots=True)
class DenoisingCheck(Checked):
    """All steps that a monitor has seen."""

    steps: int
    time_s: float
    mean_s: float | None
    final_norm: float | None
    first_nonfinite: int | None
    """Step after which latents were not finite"""
    problems: tuple[Problem, ...]
    rows: tuple[DenoisingStep, ...]


class DiffusionMonitor:
    """Watches latents; see :func:`diffusion_monitor`. Nothing waits for the device before :meth:`result`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew, for another image."""
        self._rows, self._steps = Rows(), list[tuple[int, Any, int, float | None]]()
        """Each step's number, timestep, index of its drift among the numbers read, and seconds since the step before"""
        self._before: Any = None
        self._at: float | None = None

    def __call__(self, pipeline: Any, step: int, timestep: Any, callback_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Record a step, as diffusers' ``callback_on_step_end``; return its tensors unchanged.

        Raises:
            ValueError: ``latents`` are not among the tensors.
        """
        del pipeline
        if "latents" not in callback_kwargs:
            raise ValueError("there are no latents: call the pipeline with callback_on_step_end_tensor_inputs=['latents']")
        self.step(callback_kwargs["latents"], timestep=timestep, step=step)
        return callback_kwargs

    def step(self, latents: Any, timestep: Any = None, step: int | None = None) -> None:
        """Record the latents after one step, in a loop of one's own. Steps beyond 10,000 are left out."""
        require(latents, "Tensor", "diffusion_monitor")
        if len(self._steps) >= MOST_STEPS:
            return
        monitors.add(self)
        now = time.perf_counter()
        with torch.no_grad():
            current = latents.detach().clone()  # schedulers may write into their sample
            self._rows.add("latents", current)
            before = self._before if self._before is not None and self._before.shape == current.shape else current
            norm, norm_before = (torch.linalg.vector_norm(x.float()) for x in (current, before))
            drift = torch.linalg.vector_norm(current.float() - before.float()) / norm_before
            at = self._rows.numbers.add(drift.double().reshape(1))
        self._steps.append((len(self._steps) if step is None else int(step), timestep, at, self._at and now - self._at))
        record_series({"diffusion.latent_norm": norm})
        self._before, self._at = current, now

    @contextmanager
    def watch(self, pipeline: Any) -> Iterator[DiffusionMonitor]:
        """Watch each step of a pipeline's scheduler in a ``with`` block, for pipelines without ``callback_on_step_end``.

        Args:
            pipeline: an object with a ``scheduler``, or the scheduler itself.

        Raises:
            TypeError: there is no scheduler with a ``step``.
        """
        scheduler = getattr(pipeline, "scheduler", pipeline)
        if not callable(getattr(scheduler, "step", None)):
            raise TypeError(f"watch() takes a pipeline or a scheduler with step(), not {type(pipeline).__name__}")

        def watched(original: Any) -> Any:
            def step(model_output: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(model_output, timestep, *args, **kwargs)
                self.step(result[0] if isinstance(result, tuple) else getattr(result, "prev_sample", result), timestep=timestep)
                return result

            return step

        patch = Patch(scheduler, "step", watched)
        try:
            yield self
        finally:
            patch.undo()

    def result(self) -> DenoisingCheck:
        """Return all steps so far, after one transfer from each device."""
        read, rows = self._rows.numbers.read(), list[DenoisingStep]()
        for (step, timestep, at, time_s), row in zip(self._steps, self._rows.described(read), strict=True):
            drift, number = read[at][0] if rows else None, None if timestep is None else float(timestep)
            numbers = row.norm, row.mean, row.std, row.nan_count, row.inf_count
            rows.append(DenoisingStep(step, number, *numbers, drift, time_s))
        times = [row.time_s for row in rows if row.time_s is not None]
        odd = next((row for row in rows if row.nan_count or row.inf_count), None)
        return DenoisingCheck(
            steps=len(rows), time_s=sum(times), mean_s=sum(times) / len(times) if times else None,
            final_norm=rows[-1].norm if rows else None, first_nonfinite=odd.step if odd is not None else None,
            problems=record_findings("diffusion_monitor", _latent_texts(rows, odd)), rows=tuple(rows),
        )  # fmt: skip


def _latent_texts(rows: list[DenoisingStep], odd: DenoisingStep | None) -> Iterator[tuple[str, str, str]]:
    if odd is not None:
        counts = f"{odd.nan_count} NaN and {odd.inf_count} Inf"
        text = f"{counts} after step {odd.step} (timestep {odd.timestep}), for the first time"
        yield "nonfinite_latents", "latents", text
    norms = [(row.step, row.norm or 0.0) for row in rows]
    grown = next(((step, norm) for step, norm in norms if DIVERGING * norms[0][1] < norm < inf and norms[0][1]), None)
    if grown is not None:
        text = f"their norm is {grown[1]:.3g} after step {grown[0]}, {norms[0][1]:.3g} at first"
        yield "diverging_latents", "latents", text


def diffusion_monitor() -> DiffusionMonitor:
    """Return a monitor of denoising steps: norm, NaN, drift and time of the latents after each.

    Give it to a pipeline of diffusers as ``callback_on_step_end``, call ``monitor.step(latents, timestep)`` in a loop of one's
    own, or enclose a pipeline without callbacks by ``monitor.watch(pipeline)``; then ``monitor.result()``.
    """
    return DiffusionMonitor()
