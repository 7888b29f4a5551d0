"""Check every ten seconds that our patches are in place: other tools that restore their own originals remove them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.core.patch import LOST, RESTORED, active

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.core.patch import Patch


class PatchWatch:
    """Checks the active patches in the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context

    def observe(self) -> None:
        """Restore removed patches with a warning; where that is not possible, report the probe as disabled."""
        for patch in active():
            state = patch.check()
            if state == LOST:
                self._report_lost(patch)
            elif state is not None and state != RESTORED:
                off = self._context.breaker(patch.probe).is_open
                self._context.set_gauge(catalog.PROBE_DISABLED, off, {"probe": patch.probe})
            elif state is not None:
                self._context.warn_limited(
                    f"patch {patch.location}",
                    f"another tool had replaced {patch.location}, so that probe {patch.probe!r} saw nothing of it; "
                    "it does again",
                )

    def _report_lost(self, patch: Patch) -> None:
        context, by = self._context, _name(vars(patch.owner).get(patch.attribute))
        context.set_gauge(catalog.PROBE_DISABLED, 1.0, {"probe": patch.probe})
        attributes = {"probe": patch.probe, "exception.type": "replaced", "location": f"{patch.location} by {by}"}
        context.event(catalog.EVENT_PROBE_DISABLED, attributes)
        what = f"{patch.location} was replaced by {by}, which does not call what was there before"
        context.warn_limited(f"patch {patch.location}", f"{what}: probe {patch.probe!r} sees nothing of it")


def _name(replaced_by: Any) -> str:
    kind = replaced_by if hasattr(replaced_by, "__qualname__") else type(replaced_by)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"
