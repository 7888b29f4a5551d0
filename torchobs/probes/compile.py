"""``torch.compile``: number, duration and causes of compilations, and compilation in progress, which could look like a hang.

``recompile_reason`` and graph break reasons are texts for people, with source lines, stack traces, sizes and string values;
only the guard's expression and its names leave the process. Formats: torch 2.13's
``torch/_dynamo/guards.py``, ``torch/csrc/dynamo/guards.cpp`` and ``graph_break_registry.json``.

torch keeps records of the last 64 compilations, which the sampler thread reads. Start and end are seen in
``CompilationCallbackHandler.install_callbacks``, which wraps every compilation of a function or of a graph's backward, and
every CUDA graph recording. (Registered callbacks would be the official way, but ``torch._dynamo.reset()`` deletes them, and
of several compiling threads only the first calls them.) There the training thread also collects the records before a reset.

Importing ``torch._dynamo`` takes a second, so nothing happens until other code imports it, and there are no series before the
first compilation.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
import sys
import time
from collections import deque
from math import nan
from pathlib import Path
from threading import Lock, get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.catalog.findings import RECOMPILE_REMEDIES, Finding, finding
from torchobs.detect.learning import QUIET_S, Recompiles
from torchobs.support.after_fork import renew_in_child
from torchobs.support.import_hooks import after_import, cancel
from torchobs.support.rate_limit import RateLimiter
from torchobs.taps.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.abc import MetaPathFinder

    from torchobs.catalog import Metric
    from torchobs.probes.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker


_RULES = "torch._dynamo.trace_rules"
SKIPPED = (
    "torchobs.probes",
    "torchobs.taps",
    "torchobs.tensors",
    "torchobs.flight",
    "torchobs.support.error_guard",
    "torchobs.runtime.profiler",
    "torchobs.runtime.session",
)


class DynamoRules:
    """Our entries in Dynamo's list of files to skip: our hooks would be compiled, and recompiled, with the user's code.

    ``trace_rules.add`` marks files and has no inverse, so entries are removed by hand. Its import takes a second: this waits
    until somebody else has imported it. ``torchobs.api`` is not marked: in a compiled region its functions return at once.
    """

    def __init__(self) -> None:
        self._handle: MetaPathFinder | None = None
        self._added: list[str] = []

    def install(self, breaker: CircuitBreaker) -> None:
        """Add the entries now, or once ``torch._dynamo`` is imported; ``breaker`` keeps our errors out of that import."""
        self._handle = after_import("torch._dynamo", breaker.guard(self._add))

    def remove(self) -> None:
        """Remove the entries. Idempotent."""
        cancel(self._handle)
        if self._added:
            rules: Any = sys.modules[_RULES]
            for entry in self._added:
                if entry in rules.SKIP_DIRS:
                    rules.SKIP_DIRS.remove(entry)
            rules._recompile_re()  # what add() calls
            self._added = []

    def _add(self) -> None:
        rules: Any = importlib.import_module(_RULES)
        before = list(rules.SKIP_DIRS)
        for name in SKIPPED:
            rules.add(name)
        self._added = [entry for entry in rules.SKIP_DIRS if entry not in before]


MAX_LENGTH = 200
"""Longest text in an event, in characters"""

_STAGES = {
    "kernels": ("triton_compile_time_us",),
    "inductor": ("inductor_cumulative_compile_time_us",),
    "aot": ("aot_autograd_cumulative_compile_time_us", "backward_cumulative_compile_time_us"),
    "dynamo": ("dynamo_cumulative_compile_time_us",),
}
"""From the inside out: each stage's time holds that of the stage before it."""

NEEDED = ("compile_id", "co_name", "fail_type", "recompile_reason", "dynamo_cumulative_compile_time_us")
"""Fields of ``torch._dynamo.utils.CompilationMetrics`` that this probe needs"""

FIELDS = (
    *(field for fields in _STAGES.values() for field in fields),
    *("compile_id", "co_name", "co_filename", "co_firstlineno", "recompile_reason", "fail_type", "fail_reason", "is_forward"),
    *("is_runtime", "duration_us", "start_time_us", "end_time_us"),
    *("inductor_fx_local_cache_hit_count", "inductor_fx_local_cache_miss_count"),
)
"""All fields that are read, where they exist"""

_COMPILE_ID = re.compile(r"^\[?!?\d+(?:/\d+)*(?:_\d+)?\]?: ")
_SOURCE = re.compile(r"\s+# .*")
_TENSOR = re.compile(r"^tensor '(?P<name>.*)' (?P<what>size|stride|rank|dtype|requires_grad|[a-z ]+?) mismatch")
_INDEX = re.compile(r"mismatch at index (\d+)")
_NO_TENSOR = re.compile(r"^expected type of '(?P<name>.*)' to be a tensor type")
_TYPE = re.compile(r"^___check_type_id\((?P<name>.+), \d+\)(?:, type=<class '(?P<type>[^']*)'>)?")
_OBJECT = re.compile(r"^___check_obj_id\((?P<name>.+), \d+\)")
_KINDS = (
    ("tensor", re.compile(r"device index|Duplicate tensor|dispatch key")),
    ("global_state", re.compile(r"mode_stack|global_state")),
    ("shape", re.compile(r"\.(size|stride|storage_offset|ndim|numel)\b|\bs\d+\b")),
    ("value", re.compile(r"[=<>]|\bis\b|\bin\b|\bnot\b|\blen\(")),
)
"""Of all other guards, by the first that matches"""
_LITERAL = re.compile(
    r"""(?P<name>\[\s*(?:'[A-Za-z_][\w.]{0,63}'|"[A-Za-z_][\w.]{0,63}"|\d{1,6})\s*\])"""
    r"""|'(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?|(?<![\w.])-?\d[\w.]*(?:(?<=e)-\d+)?"""
)
_DATA_DEPENDENT = re.compile(r"generic_jump|data.dependent|dynamic shape|\.item\(|tolist|nonzero|unbacked", re.IGNORECASE)
_CALL = re.compile(
    r"skip|function call|method call|builtin|call_function|call_method|graph_break\(|disable|Logger", re.IGNORECASE
)
_LIMIT = re.compile(r"limit exceeded|cache_size_limit|recompile_limit", re.IGNORECASE)


class Guard(NamedTuple):
    """A guard that failed: one of ``catalog.COMPILE_GUARDS``, and its expression without values."""

    kind: str
    expression: str


def read_guard(reason: str) -> Guard:
    """Return the failed guard from ``recompile_reason``."""
    text = _SOURCE.sub("", _COMPILE_ID.sub("", reason).partition("\n")[0]).strip()
    if match := _TENSOR.match(text):
        index = _INDEX.search(text)
        kind = "shape" if match["what"] in {"size", "stride", "rank"} else "tensor"
        expression = f"{match['name']}: {match['what']}{f' at index {index[1]}' if index else ''}"
    elif match := _NO_TENSOR.match(text):
        kind, expression = "type", f"{match['name']} is a tensor"
    elif match := _TYPE.match(text):
        kind, expression = "type", f"type({without_values(match['name'])}) is {match['type'] or '…'}"
    elif match := _OBJECT.match(text):
        kind, expression = "value", f"id({without_values(match['name'])})"
    elif text.startswith("GLOBAL_STATE changed:"):
        kind, expression = "global_state", text.partition(":")[2].strip()
    elif text.startswith("BACKEND_MATCH"):
        kind, expression = "other", "backend"  # its description holds paths and addresses
    else:
        kind = next((name for name, pattern in _KINDS if pattern.search(text)), "other")
        expression = without_values(text)
    return Guard(kind, _short(expression))


def read_break(reason: str) -> tuple[str, str]:
    """Return a graph break's class, one of ``catalog.COMPILE_BREAK``, and the first line of its reason."""
    line = reason.partition("\n")[0].strip()
    kind = "data_dependent" if _DATA_DEPENDENT.search(line) else "call" if _CALL.search(line) else "other"
    return kind, _short(without_values(line))


def read_failure(fail_type: str, fail_reason: str) -> str:
    """Return the reason for a failed compilation: one of ``catalog.COMPILE_FAILURE``."""
    if "Limit" in fail_type or _LIMIT.search(fail_reason.partition("\n")[0]):
        return "recompile_limit"
    return "unsupported" if fail_type in {"Unsupported", "UserError"} else "error"


def without_values(text: str) -> str:
    """Replace the literals in an expression by ``…``; names and indices in brackets stay."""
    return _LITERAL.sub(lambda literal: literal["name"] or "…", text)


def stage_seconds(record: Mapping[str, object]) -> dict[str, float]:
    """Return the seconds of each of ``catalog.COMPILE_STAGES`` alone: torch's figures nest, these add up.

    A record with ``is_runtime`` has no function or graph: kernels were tuned or recorded while the model ran.
    """
    if record.get("is_runtime"):
        return {"kernels": _us(record, "duration_us") / 1e6}
    seconds, inner = dict[str, float](), 0
    for stage, fields in _STAGES.items():
        total = max(inner, sum(_us(record, field) for field in fields))
        seconds[stage] = (total - inner) / 1e6
        inner = total
    return seconds


def _us(record: Mapping[str, object], field: str) -> int:
    value = record.get(field)
    return max(0, int(value)) if isinstance(value, int | float) else 0


def _short(text: str) -> str:
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"


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
        self._context, self._lookups, self._counted = context, lookups, before
        for metric in (
            catalog.COMPILE_TIME, catalog.COMPILE_COMPILATIONS, catalog.COMPILE_RECOMPILES, catalog.COMPILE_FAILURES,
            catalog.COMPILE_GRAPH_BREAKS,
        ):  # fmt: skip
            for value in metric.attributes[0].values:
                self._count(metric, value, 0)
        for cache, result in before:
            context.count(catalog.COMPILE_CACHE_LOOKUPS, 0, {"cache": cache, "result": result})
        self._functions: dict[str, tuple[str, str]] = {}
        self._reported_breaks: set[tuple[str, str]] = set()
        self._recompiles = Recompiles()
        self._warnings = RateLimiter(QUIET_S)

    def count_lookups(self) -> None:
        """Count cache lookups since the last call; a counter that fell was cleared by other code."""
        before, self._counted = self._counted, self._lookups()
        for (cache, result), total in self._counted.items():
            more = total - before[cache, result] if total >= before[cache, result] else total
            self._context.count(catalog.COMPILE_CACHE_LOOKUPS, more, {"cache": cache, "result": result})

    def note_record(self, record: Any, step: int) -> None:
        """Count one ``CompilationMetrics`` record. ``step``: the number of steps that had ended by then."""
        fields = {name: getattr(record, name, None) for name in FIELDS}
        for stage, seconds in stage_seconds(fields).items():
            self._count(catalog.COMPILE_TIME, stage, seconds)
        if fields["is_runtime"]:
            return
        function, location = self._place(fields)
        guard = read_guard(str(fields["recompile_reason"])) if fields["recompile_reason"] else None
        if fields["fail_type"] is not None:
            self._note_failure(fields, location, guard)
        elif fields["is_forward"] is not False:
            self._count(catalog.COMPILE_COMPILATIONS, "recompile" if guard else "first")
            if guard:
                self._note_recompile(location, guard, step)
        self._write_span(fields, function, location, guard)

    def note_break(self, reason: Any) -> None:
        """Count one ``GraphCompileReason``."""
        text = str(getattr(reason, "reason", ""))
        if _OWN_FILES in text:
            return  # a compiled optimizer step breaks at our own hook, which is no break in user code
        kind, message = read_break(text)
        self._count(catalog.COMPILE_GRAPH_BREAKS, kind)
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

    def _note_recompile(self, location: str, guard: Guard, step: int) -> None:
        self._count(catalog.COMPILE_RECOMPILES, guard.kind)
        attributes: dict[str, object] = {"location": location, "guard": guard.kind, "expression": guard.expression}
        self._context.writer.event(catalog.EVENT_RECOMPILE.name, attributes, step + 1)
        times = self._recompiles.note(location, time.monotonic(), step)
        if times:
            self._context.event(catalog.EVENT_RECOMPILE_STORM, {**attributes, "recompiles": times})
            remedy = RECOMPILE_REMEDIES[guard.kind]
            self._warn_limited(Finding("recompile_storm", "", step, {**attributes, "recompiles": times, "remedy": remedy}).long)

    def _note_failure(self, fields: Mapping[str, Any], location: str, guard: Guard | None) -> None:
        reason = str(fields["fail_reason"])
        if _OWN_FILES in reason:
            return  # as above
        kind = read_failure(str(fields["fail_type"]), reason)
        self._count(catalog.COMPILE_FAILURES, kind)
        attributes = {"location": location, "reason": kind, "exception.type": str(fields["fail_type"])}
        self._context.event(catalog.EVENT_COMPILE_FAILED, attributes)
        if kind == "recompile_limit" and guard is not None:
            self._warn_limited(finding("compile_failure", location=location, reason="its recompile limit").short)

    def _write_span(self, fields: Mapping[str, Any], function: str, location: str, guard: Guard | None) -> None:
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

    def _count(self, metric: Metric, value: str, amount: float = 1) -> None:
        """Count by the metric's only attribute."""
        self._context.count(metric, amount, {metric.attributes[0].name: value})

    def _warn_limited(self, words: str) -> None:
        """Log at most once a minute; the events have every occurrence."""
        if self._warnings.take(time.monotonic()):
            logger.warning("torchobs: %s", words)


_MAX_WAITING = 4096


class ListReader:
    """Reads new items of a list of torch's, even if the list is cleared, or trimmed at its front."""

    def __init__(self, read: Callable[[], Sequence[Any]]) -> None:
        self._read, self._last = read, None
        self.fresh()

    def fresh(self) -> Sequence[Any]:
        """Return the items added since the last call."""
        items = self._read()
        start = len(items)
        while start and items[start - 1] is not self._last:
            start -= 1
        if items:
            self._last = items[-1]
        return items[start:]


class _Started(NamedTuple):
    """A running compilation; ``shown``: it is recorded in the step's timeline."""

    started_ns: int
    shown: bool


class CompileProbe:
    """Watches the compiler's records, graph breaks and cache lookups."""

    name = "compile"

    def __init__(self) -> None:
        self._handle: MetaPathFinder | None = None
        self._patch: Patch | None = None
        self._records = self._breaks = ListReader(list)
        self._waiting: deque[tuple[Any, int | None]] = deque(maxlen=_MAX_WAITING)
        self._gather_lock = Lock()
        renew_in_child(self, _gather_lock=Lock)
        self._running: list[_Started] = []
        self._owner: dict[str, int] = {}
        self._depth = 0
        self._started_once = False
        self._on_trial = False
        self._lookups: Callable[[], Lookups] = dict
        self._before: Lookups = {}
        self._compile_records: CompileRecords | None = None

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`: now, or right after ``torch._dynamo`` has been imported."""
        self._context = context
        self._breaker = context.breaker(self.name)
        self._handle = after_import("torch._dynamo", self._breaker.guard(self._attach))
        context.hooks.compiles_on_trial.register(self._breaker, self._try)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        cancel(self._handle)
        if self._patch is not None:
            self._patch.undo()
        if self._compile_records is not None:
            self._context.set_gauge(catalog.COMPILE_IN_PROGRESS, nan)

    def sample(self) -> None:
        """Publish new compilations; nearly free without any."""
        if not self._started_once:
            return
        if self._compile_records is None:
            self._compile_records = CompileRecords(self._context, self._lookups, self._before)
        at_work = float(bool(self._running))
        self._gather()
        while self._waiting:
            item, step = self._waiting.popleft()
            if step is None:
                self._compile_records.note_break(item)
            else:
                self._compile_records.note_record(item, step)
        self._compile_records.count_lookups()
        self._context.set_gauge(catalog.COMPILE_IN_PROGRESS, at_work)

    def _attach(self) -> None:
        from torch._dynamo import callback, utils  # imported by now

        if missing := set(NEEDED) - set(utils.CompilationMetrics.__dataclass_fields__):
            raise AttributeError(*sorted(missing))
        breaks, counters = utils.graph_break_reasons, utils.counters
        self._lookups = lambda: lookups(counters)
        self._before = self._lookups()
        self._records = ListReader(utils.get_compilation_metrics)
        self._breaks = ListReader(lambda: breaks)
        handler = type(callback.callback_handler)
        self._patch = Patch(handler, "install_callbacks", self._watched, probe=self.name)

    def _watched(self, original: Any) -> Any:
        begin, gather = self._breaker.guard(self._begin), self._breaker.guard(self._gather)

        @functools.wraps(original)
        @contextlib.contextmanager
        def install_callbacks(*args: Any, **kwargs: Any) -> Iterator[None]:
            started = begin(args)
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                if started is not None:
                    self._end(started)  # even if the breaker has tripped meanwhile; cannot raise
                    gather()

        return install_callbacks

    def _begin(self, args: tuple[Any, ...]) -> _Started:
        now_ns = monotonic_ns()
        self._gather()
        shown = not self._on_trial and self._concerns_training(args) and self._owner.setdefault("", get_ident()) == get_ident()
        if shown:
            self._depth += 1
            if self._depth == 1:
                self._context.recorder.compile_begins(now_ns)
        started = _Started(now_ns, shown)
        self._running.append(started)
        self._started_once = True
        return started

    def _concerns_training(self, args: tuple[Any, ...]) -> bool:
        """Return whether this is the training thread, or the autograd engine's that it waits for in a backward pass."""
        if get_ident() == self._context.training.thread:
            return True
        return bool(self._context.training.backwards) and any(getattr(arg, "name", "") == "LAZY_BACKWARD" for arg in args)

    def _end(self, started: _Started) -> None:
        self._running.remove(started)
        if not started.shown:
            return
        self._depth -= 1
        if not self._depth:
            self._owner.clear()
            self._context.recorder.compile_ends(monotonic_ns())

    def _try(self, begins: bool) -> None:  # noqa: FBT001  # a hook's only argument
        """Collect the graphs that the training compiled before a trial, and release those that were compiled on trial."""
        with self._gather_lock:  # a collection in progress is of before
            self._collect()
            self._on_trial = begins

    def _gather(self) -> None:
        """Collect new records and breaks; does nothing while another thread collects."""
        if self._gather_lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._gather_lock.release()

    def _collect(self) -> None:
        step, breaks, records = self._context.recorder.step, self._breaks.fresh(), self._records.fresh()
        if not self._on_trial:
            self._waiting.extend((reason, None) for reason in breaks)
            self._waiting.extend((record, step) for record in records)
