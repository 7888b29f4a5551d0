"""Looks every ten seconds whether what we have patched is still patched: other tools patch, too, and restore what they know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes import patching

if TYPE_CHECKING:
    from torchobs.probes.host import Host
    from torchobs.probes.patching import Patch


class PatchWatch:
    """For the sampler thread."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def observe(self) -> None:
        """Put back what was taken away, and tell of it; tell what is off where that is not possible."""
        for patch in patching.active():
            state = patch.look()
            if state == patching.LOST:
                self._tell_lost(patch)
            elif state is not None and state != patching.RESTORED:
                self._show(patch.probe, off=self._host.fuse(patch.probe).blown)
            elif state is not None and self._host.say is not None:
                self._host.say(
                    f"patch {patch.place}",
                    f"another tool had replaced {patch.place}, so that probe {patch.probe!r} saw nothing of it; it does again",
                )

    def _tell_lost(self, patch: Patch) -> None:
        host, by = self._host, _name(vars(patch.owner).get(patch.attribute))
        self._show(patch.probe, off=True)
        attributes = {"probe": patch.probe, "exception.type": "replaced", "location": f"{patch.place} by {by}"}
        host.writer.event(catalog.EVENT_PROBE_DISABLED.name, attributes, host.cycle.step)
        if host.say is not None:
            what = f"{patch.place} was replaced by {by}, which does not call what was there before"
            host.say(f"patch {patch.place}", f"{what}: probe {patch.probe!r} sees nothing of it")

    def _show(self, probe: str, *, off: bool) -> None:
        cell = self._host.writer.table.cell(catalog.PROBE_DISABLED, {"probe": probe})
        if cell is not None:
            cell.set(float(off))


def _name(replaced_by: Any) -> str:
    kind = replaced_by if hasattr(replaced_by, "__qualname__") else type(replaced_by)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"
