"""Detect ranks that exchange nothing: they are in one process group, and each trains a model of its own.

The model was not wrapped (DistributedDataParallel, FSDP), or its ``.module`` is called. A process group counts its collectives
(``getSequenceNumberForGroup`` of ProcessGroupGloo and ProcessGroupNCCL; point-to-point operations are not among them). Local
SGD exchanges something every few hundred steps (500 in Douillard et al. 2023, "DiLoCo", section 3), so that the time without a
collective is recorded here, and judged where the end of the run is known (``diagnosis.exchange``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

STEPS_RECORDED = 200, 1000
"""Steps without a collective at which an event is written"""
_MOST_EVENTS = 8
"""An even number: the last of local SGD's says that something is exchanged"""


class ExchangeWatch:
    """A part of :class:`~torchobs.probes.lifecycle.distributed.DistributedProbe`, in the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._calls: int | None = None
        self._since = self._recorded = self._events = 0

    def look(self, groups: list[Any], world_size: int) -> None:
        """See how many collectives the groups have called by now."""
        step, calls = self._context.recorder.step, _calls(groups)
        if calls is None or world_size < 2 or not step:  # noqa: PLR2004  # a single rank has no peers
            return
        if calls != self._calls:
            self._calls, self._since = calls, step
            if self._recorded:
                self._record(step, 0, world_size)
            return
        due = max((steps for steps in STEPS_RECORDED if step - self._since >= steps), default=0)
        if due > self._recorded:
            self._record(step, step - self._since, world_size)
            self._recorded = due

    def _record(self, step: int, steps: int, world_size: int) -> None:
        self._recorded = 0
        if self._events < _MOST_EVENTS:
            self._events += 1
            told = {"steps": steps, "world_size": world_size}
            self._context.writer.event(catalog.EVENT_NO_COLLECTIVES.name, told, step)


def _calls(groups: list[Any]) -> int | None:
    """Return the number of collectives that this rank has called; ``None`` if a group does not tell."""
    try:
        return sum(group._get_sequence_number_for_group() for group in groups) if groups else None
    except (AttributeError, RuntimeError, TypeError):  # another backend, or the training thread has just destroyed it
        return None
