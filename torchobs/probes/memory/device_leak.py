"""Names the lines whose blocks of device memory grow: the difference of two snapshots of CUDA's caching allocator.

The allocator's history (``torch.cuda.memory._record_memory_history``, which is private and may be missing) is recorded
between the growth detector's verdict and the second snapshot, with Python's stacks alone and for living blocks alone. Where
the user records it, it is left alone.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from torchobs.probes.memory.leak_report import MOST_ROWS, MOST_TOLD, tell
from torchobs.probes.memory.oom import blocks_by_location, has_history

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

WARM_S, RECORDED_S = 2.0, 10.0
MOST_BLOCKS = 50_000
"""Blocks in use; a snapshot lists them all, with their stacks, in the sampler thread"""


class DeviceLeak:
    """One recording. For the sampler thread, which calls :meth:`proceed`."""

    def __init__(self, context: ProbeContext, torch: Any, now: float) -> None:
        self._context, self._torch, self._since = context, torch, now
        self._first: tuple[Counter[str], Counter[str]] | None = None
        self._on = True
        self._step = context.recorder.step

    @classmethod
    def begin(cls, context: ProbeContext, now: float, torch: Any = None) -> DeviceLeak | None:
        """Begin to record, where torch can and nobody else does."""
        if torch is None:
            import torch  # torch is optional until training begins
        memory: Any = getattr(torch.cuda, "memory", None)
        record = getattr(memory, "_record_memory_history", None)
        if record is None or not hasattr(memory, "_snapshot") or not torch.cuda.is_initialized() or has_history(torch):
            return None
        backend = getattr(torch.cuda, "get_allocator_backend", lambda: "native")
        if backend() != "native" or _blocks(torch) > MOST_BLOCKS:  # no other one records
            return None
        record("state", context="state", stacks="python")
        return cls(context, torch, now)

    def proceed(self, now: float) -> bool:
        """Go on if it is time to; return True at the end."""
        passed = now - self._since
        if not self._on:
            return True
        if self._first is None:
            if passed >= WARM_S:
                self._first, self._since, self._step = self._read(), now, self._context.recorder.step
            return False
        if passed < RECORDED_S:
            return False
        (sizes, counts), (later, numbers) = self._first, self._read()
        self.close()
        rows = [
            f"{line} {numbers[line] - counts[line]} more, {more} B"
            for line, more in (later - sizes).most_common(MOST_ROWS)
            if line != "unknown"  # blocks from before the recording
        ]
        attributes: dict[str, object] = {
            "space": "device", "ended": "complete", "seconds": round(passed, 1),
            "steps": self._context.recorder.step - self._step, "grown": sum(later.values()) - sum(sizes.values()),
        }  # fmt: skip
        tell(self._context, attributes | ({"lines": rows[:MOST_TOLD]} if rows else {}), {"lines": rows})
        return True

    def close(self) -> None:
        """Stop recording."""
        if self._on:
            self._on = False
            self._torch.cuda.memory._record_memory_history(None)

    def _read(self) -> tuple[Counter[str], Counter[str]]:
        package = os.path.dirname(self._torch.__file__)
        return blocks_by_location(self._torch.cuda.memory._snapshot(), None, package)


def _blocks(torch: Any) -> int:
    devices = range(torch.cuda.device_count())
    stats = [torch.cuda.memory_stats_as_nested_dict(device) for device in devices]
    return sum(one.get("allocation", {}).get("all", {}).get("current", 0) for one in stats)
