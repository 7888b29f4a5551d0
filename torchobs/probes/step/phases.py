"""Record phases and evaluations, and detect that training is idle.

``Module.train`` is where ``eval()`` and ``train()`` meet; only the outermost call counts, since it recurses into the children.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.detect.hangs import idle_from
from torchobs.flight.metrics.totals import DURATION_SUM
from torchobs.probes.core.boundaries import EVAL, TRAIN
from torchobs.probes.core.patch import Patch
from torchobs.probes.core.span_limit import LONG_NS, span_limiter
from torchobs.probes.core.timeline import FORWARD, OTHER
from torchobs.probes.step.goodput import OpenTime, Startup
from torchobs.support.graph_safe import outside_of_graphs

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext


class PhaseProbe:
    """Enables the recording of phases, and observes the begin and end of evaluation."""

    name = "phases"

    def __init__(self) -> None:
        self._patch: Patch | None = None
        self._depth = 0
        self._budget = span_limiter()

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        import torch  # torch is optional until training begins

        self._context, self._training = context, context.training
        self._startup, self._open, self._ended = Startup(context), OpenTime(context), False
        context.recorder.record_phases(enabled=True)
        self._patch = Patch(torch.nn.Module, "train", self._watched_train, probe=self.name, nests=True)

    def _watched_train(self, original: Any) -> Any:
        training, note = self._training, self._context.breaker(self.name).guard(self._note)

        def train(module: Any, mode: bool = True) -> Any:  # noqa: FBT001, FBT002  # torch's signature
            if self._depth or get_ident() != training.thread:
                return original(module, mode)
            self._depth = 1
            note(module, mode)
            try:
                return original(module, mode)
            finally:
                self._depth = 0

        return outside_of_graphs(original, train)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        if self._patch is not None:
            self._patch.undo()
            self._context.recorder.record_phases(enabled=False)
            self._training.evaluating_since_ns = 0
            self._ended = True

    def sample(self) -> None:
        """Write spans of finished evaluations; update goodput and the startup time."""
        self._training.idle = self._is_idle()
        self._open.sample(last=self._ended)
        self._training.evaluating_since_ns = self._open.evaluating_since_ns
        self._startup.sample(last=self._ended)
        found = self._context.recorder.evaluations
        while found:
            begun_ns, ended_ns = found.popleft()
            if ended_ns - begun_ns >= LONG_NS or self._budget.take(ended_ns):
                self._context.write_span(catalog.SPAN_EVALUATION.name, begun_ns, ended_ns, {}, failed=False)

    def _is_idle(self) -> bool:
        """Return True if no boundary came for longer than goodput's idle threshold and the training loop is not running.

        The stack, 6 µs to read, is read only then: a second stage's loop is recorded some steps later.
        """
        context = self._context
        phase, since_ns = context.recorder.phase()
        patience_s = idle_from(context.writer.table.core.totals.floats[DURATION_SUM + 2])
        quiet = phase in {FORWARD, OTHER} and monotonic_ns() - since_ns > patience_s * 1e9
        return quiet and self._training.loop.left(self._training.thread)

    def _note(self, module: Any, mode: bool) -> None:  # noqa: FBT001  # torch's signature
        now_ns = monotonic_ns()
        recorder = self._context.recorder
        recorder.mark(TRAIN if mode else EVAL, now_ns, id(module))
        if recorder.metered:
            self._context.record_overhead(self.name, monotonic_ns() - now_ns)
