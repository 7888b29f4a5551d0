"""Looks every ten seconds whether what we have patched is still patched: other tools patch, too, and restore what they know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.core.patch import LOST, RESTORED, active

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.core.patch import Patch


class PatchWatch:
    """For the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context

    def observe(self) -> None:
        """Put back what was taken away, and tell of it; tell what is off where that is not possible."""
        for patch in active():
            state = patch.look()
            if state == LOST:
                self._tell_lost(patch)
            elif state is not None and state != RESTORED:
                self._show(patch.probe, off=self._context.breaker(patch.probe).blown)
            elif state is not None and self._context.warn_limited is not None:
                self._context.warn_limited(
                    f"patch {patch.place}",
                    f"another tool had replaced {patch.place}, so that probe {patch.probe!r} saw nothing of it; it does again",
                )

    def _tell_lost(self, patch: Patch) -> None:
        context, by = self._context, _name(vars(patch.owner).get(patch.attribute))
        self._show(patch.probe, off=True)
        attributes = {"probe": patch.probe, "exception.type": "replaced", "location": f"{patch.place} by {by}"}
        context.writer.event(catalog.EVENT_PROBE_DISABLED.name, attributes, context.recorder.step)
        if context.warn_limited is not None:
            what = f"{patch.place} was replaced by {by}, which does not call what was there before"
            context.warn_limited(f"patch {patch.place}", f"{what}: probe {patch.probe!r} sees nothing of it")

    def _show(self, probe: str, *, off: bool) -> None:
        cell = self._context.writer.table.cell(catalog.PROBE_DISABLED, {"probe": probe})
        if cell is not None:
            cell.set(float(off))


def _name(replaced_by: Any) -> str:
    kind = replaced_by if hasattr(replaced_by, "__qualname__") else type(replaced_by)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"
