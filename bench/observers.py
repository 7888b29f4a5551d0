"""What else people put beside their training, as its own documentation says: for ``bench.peers``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.workloads import NOBODY, Nobody

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from bench.workloads import Observer


def torchobs_at(level: str) -> Callable[[], Observer]:
    """``torchobs.init()`` at that level, and nothing else."""

    def start() -> Observer:
        import torchobs

        torchobs.init(flight_dir=_directory("torchobs"), level=level)
        return NOBODY

    return start


class WandB(Nobody):
    """Weights & Biases, offline: ``watch`` (gradient histograms every 1,000 steps by default) and the loss of every step."""

    def __init__(self, log_freq: int = 1000) -> None:
        import wandb

        os.environ["WANDB_SILENT"] = "true"
        self._run = wandb.init(mode="offline", dir=_directory("wandb"))
        self._log_freq = log_freq
        self._watched = False

    def after(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        """See :class:`Observer`."""
        if not self._watched:
            self._watched = True
            self._run.watch(model, log_freq=self._log_freq)
        self._run.log({"loss": loss.item()})


class TensorBoard(Nobody):
    """TensorBoard: the loss of every step and a histogram of every gradient in one of ten."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(_directory("tensorboard"))
        self._step = 0

    def after(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        """See :class:`Observer`."""
        self._step += 1
        self._writer.add_scalar("loss", loss.item(), self._step)
        if self._step % 10 == 0:
            for name, parameter in model.named_parameters():
                self._writer.add_histogram(name, parameter.grad, self._step)


class LayerNorms(Nobody):
    """What Lightning's ``grad_norm`` utility does in ``on_before_optimizer_step``: a norm of each gradient, read at once."""

    def after(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        """See :class:`Observer`."""
        norms = {name: p.grad.data.norm(2.0) for name, p in model.named_parameters() if p.grad is not None}
        total = torch.tensor(list(norms.values())).norm(2.0)
        self.logged = {name: norm.item() for name, norm in norms.items()} | {"total": total.item(), "loss": loss.item()}


class OpenTelemetrySdk(Nobody):
    """The OpenTelemetry SDK in the trainer: a span and three instruments per step, exported to nobody."""

    def __init__(self) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        spans = TracerProvider()
        self._kept = InMemorySpanExporter()
        spans.add_span_processor(BatchSpanProcessor(self._kept))
        meter = MeterProvider([InMemoryMetricReader()]).get_meter("training")
        self._tracer = spans.get_tracer("training")
        self._steps = meter.create_counter("steps")
        self._loss, self._norm = meter.create_histogram("loss"), meter.create_histogram("norm")

    def step(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """See :class:`Observer`."""
        del model
        return self._tracer.start_as_current_span("step")  # type: ignore[return-value]  # it yields the span

    def after(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        """See :class:`Observer`."""
        self._steps.add(1, {"rank": 0})
        self._loss.record(loss.item(), {"rank": 0})
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        self._norm.record(norm.item(), {"rank": 0})
        self._kept.clear()


class TraceML(Nobody):
    """TraceML, started by its launcher: automatic instrumentation, and its context manager around each step."""

    def __init__(self) -> None:
        import traceml_ai

        self._trace_step = traceml_ai.trace_step

    def step(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """See :class:`Observer`."""
        step: AbstractContextManager[None] = self._trace_step(model)
        return step


def _directory(name: str) -> str:
    return tempfile.mkdtemp(prefix=f"bench-{name}-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


OBSERVERS: dict[str, tuple[str, Callable[[], Observer]]] = {
    "none": ("nothing", Nobody),
    "basic": ("torchobs, basic (the default)", torchobs_at("basic")),
    "advanced": ("torchobs, advanced", torchobs_at("advanced")),
    "extreme": ("torchobs, extreme", torchobs_at("extreme")),
    "wandb": ("W&B offline, watch()", WandB),
    "tensorboard": ("TensorBoard, histograms every 10", TensorBoard),
    "norms": ("a norm per layer, .item() each", LayerNorms),
    "otel": ("OpenTelemetry SDK in the trainer", OpenTelemetrySdk),
    "traceml": ("TraceML", TraceML),
}
"""Name → (what the table says, how it is started)."""

LAUNCHED = {"traceml": ("traceml", "run", "--run-name")}
"""Those that need a launcher of their own; a name for the run, the script, ``--args`` and its arguments follow."""
