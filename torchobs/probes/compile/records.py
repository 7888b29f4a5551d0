"""Turns the compiler's records into counters, events, spans and warnings. For the sampler thread."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.detect.recompiles import QUIET_S, Recompiles
from torchobs.probes.compile import reasons
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchobs.flight.writer.series_table import Cell
    from torchobs.probes.core.context import ProbeContext

LOOKUPS = {
    "fx_graph": ("inductor", "fxgraph_cache_"),
    "autograd": ("aot_autograd", "autograd_cache_"),
}
"""For each cache: its group in ``torch._dynamo.utils.counters``, and the prefix of hit, miss and bypass there"""
Lookups = dict[tuple[str, str], int]
_MAX_LOCATIONS = 256
_OWN_FILES = str(Path(__file__).parent.parent)
logger = logging.getLogger("torchobs")


def lookups(counters: Mapping[str, Mapping[str, int]]) -> Lookups:
    """Return the cache lookups so far by cache and result, of ``torch._dynamo.utils.counters``."""
    return {
        (cache, result): counters.get(group, {}).get(f"{prefix}{result}", 0)
        for cache, (group, prefix) in LOOKUPS.items()
        for result in catalog.CACHE_RESULT.values
    }


class CompileRecords:
    """One per session, created at the first compilation: a run that never compiles has none of these series."""

    def __init__(self, context: ProbeContext, lookups: Callable[[], Lookups], before: Lookups) -> None:
        self._context, self._lookups, self._seen = context, lookups, before
        self._cells: dict[tuple[str, ...], Cell | None] = {}
        for metric in (
            catalog.COMPILE_TIME, catalog.COMPILE_COMPILATIONS, catalog.COMPILE_RECOMPILES, catalog.COMPILE_FAILURES,
            catalog.COMPILE_GRAPH_BREAKS,
        ):  # fmt: skip
            (attribute,) = metric.attributes
            for value in attribute.values:
                self._cells[metric.name, value] = context.writer.table.cell(metric, {attribute.name: value})
        for cache, result in before:
            attributes = {"cache": cache, "result": result}
            self._cells[cache, result] = context.writer.table.cell(catalog.COMPILE_CACHE_LOOKUPS, attributes)
        self._in_progress = context.writer.table.cell(catalog.COMPILE_IN_PROGRESS, {})
        self._functions: dict[str, tuple[str, str]] = {}
        self._reported_breaks: set[tuple[str, str]] = set()
        self._recompiles = Recompiles()
        self._warnings = RateLimiter(QUIET_S)

    def show_progress(self, at_work: float) -> None:
        """Publish whether the compiler is running, 1 or 0; NaN removes the series."""
        if self._in_progress is not None:
            self._in_progress.set(at_work)

    def count_lookups(self) -> None:
        """Count cache lookups since the last call; a counter that fell was cleared by somebody else."""
        seen, self._seen = self._seen, self._lookups()
        for key, total in self._seen.items():
            self._add(key, total - seen[key] if total >= seen[key] else total)

    def note_record(self, record: Any, step: int) -> None:
        """Count one ``CompilationMetrics`` record. ``step``: the number of steps that had ended by then."""
        fields = {name: getattr(record, name, None) for name in reasons.FIELDS}
        for stage, seconds in reasons.stage_seconds(fields).items():
            self._add((catalog.COMPILE_TIME.name, stage), seconds)
        if fields["is_runtime"]:
            return
        function, location = self._place(fields)
        guard = reasons.read_guard(str(fields["recompile_reason"])) if fields["recompile_reason"] else None
        if fields["fail_type"] is not None:
            self._note_failure(fields, location, guard)
        elif fields["is_forward"] is not False:
            self._add((catalog.COMPILE_COMPILATIONS.name, "recompile" if guard else "first"), 1)
            if guard:
                self._note_recompile(function, location, guard, step)
        self._write_span(fields, function, location, guard)

    def note_break(self, reason: Any) -> None:
        """Count one ``GraphCompileReason``."""
        text = str(getattr(reason, "reason", ""))
        if _OWN_FILES in text:
            return  # a compiled optimizer step breaks at our own hook, which is no break in user code
        kind, message = reasons.read_break(text)
        self._add((catalog.COMPILE_GRAPH_BREAKS.name, kind), 1)
        stack = getattr(reason, "user_stack", None) or ()
        location = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown"
        if (location, message) not in self._reported_breaks and len(self._reported_breaks) < _MAX_LOCATIONS:
            self._reported_breaks.add((location, message))
            self._context.event(catalog.EVENT_GRAPH_BREAK, {"location": location, "reason": kind, "message": message})

    def _place(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        """Return the function's name and location, remembered for records without them (backward, recompile limit)."""
        frame = str(fields["compile_id"]).rpartition("/")[0]
        if fields["co_name"] is not None:
            if len(self._functions) >= _MAX_LOCATIONS:
                self._functions.clear()
            self._functions[frame] = str(fields["co_name"]), f"{fields['co_filename']}:{fields['co_firstlineno']}"
        return self._functions.get(frame, ("unknown", "unknown"))

    def _note_recompile(self, function: str, location: str, guard: reasons.Guard, step: int) -> None:
        self._add((catalog.COMPILE_RECOMPILES.name, guard.kind), 1)
        attributes: dict[str, object] = {"location": location, "guard": guard.kind, "expression": guard.expression}
        self._context.event(catalog.EVENT_RECOMPILE, attributes)
        times = self._recompiles.note(location, time.monotonic(), step)
        if times:
            self._context.event(catalog.EVENT_RECOMPILE_STORM, {**attributes, "recompiles": times})
            self._warn_limited(f"torch.compile has recompiled {function} ({location}) {times} times within ten minutes", guard)

    def _note_failure(self, fields: Mapping[str, Any], location: str, guard: reasons.Guard | None) -> None:
        reason = str(fields["fail_reason"])
        if _OWN_FILES in reason:
            return  # as above
        kind = reasons.read_failure(str(fields["fail_type"]), reason)
        self._add((catalog.COMPILE_FAILURES.name, kind), 1)
        attributes = {"location": location, "reason": kind, "exception.type": str(fields["fail_type"])}
        self._context.event(catalog.EVENT_COMPILE_FAILED, attributes)
        if kind == "recompile_limit" and guard is not None:
            self._warn_limited(
                f"torch.compile has given up {location} at its recompile limit, and more of its calls run uncompiled", guard
            )

    def _write_span(self, fields: Mapping[str, Any], function: str, location: str, guard: reasons.Guard | None) -> None:
        begun_us, ended_us = fields["start_time_us"], fields["end_time_us"]
        if begun_us is None or ended_us is None:
            return
        cause = "backward" if fields["is_forward"] is False else "recompile" if guard else "first"
        attributes: dict[str, object] = {"function": function, "location": location, "cause": cause}
        hits, misses = fields["inductor_fx_local_cache_hit_count"], fields["inductor_fx_local_cache_miss_count"]
        if hits or misses:
            attributes["cached"] = not misses
        offset_ns = time.monotonic_ns() - time.time_ns()
        begun_ns, ended_ns = begun_us * 1000 + offset_ns, ended_us * 1000 + offset_ns
        self._context.write_span(
            catalog.SPAN_COMPILE.name, begun_ns, ended_ns, attributes, failed=fields["fail_type"] is not None
        )

    def _add(self, key: tuple[str, ...], amount: float) -> None:
        cell = self._cells[key]
        if cell is not None and amount:
            cell.add(amount)

    def _warn_limited(self, what: str, guard: reasons.Guard) -> None:
        """Log at most once a minute; the events have every occurrence."""
        if self._warnings.take(time.monotonic()):
            failed = f"{guard.kind} ({guard.expression})"
            logger.warning(
                "torchobs: %s. The guard that failed last: %s. Remedy: %s", what, failed, reasons.REMEDIES[guard.kind]
            )
