"""Classifies the compiler's messages into a few kinds and strips values from them. Pure.

``recompile_reason`` and graph break reasons are texts for people, with source lines, stack traces, sizes and string values;
only the guard's expression and its names leave the process. Formats: torch 2.13's
``torch/_dynamo/guards.py``, ``torch/csrc/dynamo/guards.cpp`` and ``graph_break_registry.json``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LENGTH = 200
"""Longest text in an event, in characters"""

REMEDIES = {
    "shape": "mark the dimension with torch._dynamo.mark_dynamic(), compile with dynamic=True, or pad to a few sizes",
    "tensor": "give it tensors of one dtype, device, layout and requires_grad",
    "global_state": "call it under one grad mode, autocast and default dtype, or compile one function for each",
    "type": "give it arguments of one type: None in place of a tensor, or another class, is a new graph",
    "value": "what it reads is compiled in as a constant: pass a tensor, or keep what changes out of the function",
    "other": "TORCH_LOGS=recompiles tells more",
}
"""What to do about guards that keep failing, by ``catalog.COMPILE_GUARDS``"""

_STAGES = {
    "kernels": ("triton_compile_time_us",),
    "inductor": ("inductor_cumulative_compile_time_us",),
    "aot": ("aot_autograd_cumulative_compile_time_us", "backward_cumulative_compile_time_us"),
    "dynamo": ("dynamo_cumulative_compile_time_us",),
}
"""From the inside out: each stage's time holds that of the stage before it."""

NEEDED = ("compile_id", "co_name", "fail_type", "recompile_reason", "dynamo_cumulative_compile_time_us")
"""Fields of ``torch._dynamo.utils.CompilationMetrics`` that this probe cannot do without"""

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
_SHAPE = re.compile(r"\.(size|stride|storage_offset|ndim|numel)\b|\bs\d+\b")
_VALUE = re.compile(r"[=<>]|\bis\b|\bin\b|\bnot\b|\blen\(")
_LITERAL = re.compile(
    r"""(?P<name>\[\s*(?:'[A-Za-z_][\w.]{0,63}'|"[A-Za-z_][\w.]{0,63}"|\d{1,6})\s*\])"""
    r"""|'(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?|(?<![\w.])-?\d[\w.]*(?:(?<=e)-\d+)?"""
)
_TENSOR_WORDS = ("device index", "Duplicate tensor", "dispatch key")
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
    kind, expression = _read_tensor(text) or _read_identity(text) or (_kind(text), without_values(text))
    return Guard(kind, _short(expression))


def _read_tensor(text: str) -> tuple[str, str] | None:
    if found := _TENSOR.match(text):
        index = _INDEX.search(text)
        kind = "shape" if found["what"] in {"size", "stride", "rank"} else "tensor"
        return kind, f"{found['name']}: {found['what']}{f' at index {index[1]}' if index else ''}"
    if found := _NO_TENSOR.match(text):
        return "type", f"{found['name']} is a tensor"
    return None


def _read_identity(text: str) -> tuple[str, str] | None:
    if found := _TYPE.match(text):
        return "type", f"type({without_values(found['name'])}) is {found['type'] or '…'}"
    if found := _OBJECT.match(text):
        return "value", f"id({without_values(found['name'])})"
    if text.startswith("GLOBAL_STATE changed:"):
        return "global_state", text.partition(":")[2].strip()
    if text.startswith("BACKEND_MATCH"):
        return "other", "backend"  # its description holds paths and addresses
    return None


def _kind(text: str) -> str:
    if any(word in text for word in _TENSOR_WORDS):
        return "tensor"
    if "mode_stack" in text or "global_state" in text:
        return "global_state"
    if _SHAPE.search(text):
        return "shape"
    return "value" if _VALUE.search(text) else "other"


def read_break(reason: str) -> tuple[str, str]:
    """Return a graph break's class, one of ``catalog.COMPILE_BREAK``, and the first line of its reason."""
    line = reason.partition("\n")[0].strip()
    kind = "data_dependent" if _DATA_DEPENDENT.search(line) else "call" if _CALL.search(line) else "other"
    return kind, _short(without_values(line))


def read_failure(fail_type: str, fail_reason: str) -> str:
    """Return why a compilation failed: one of ``catalog.COMPILE_FAILURE``."""
    if "Limit" in fail_type or _LIMIT.search(fail_reason.partition("\n")[0]):
        return "recompile_limit"
    return "unsupported" if fail_type in {"Unsupported", "UserError"} else "error"


def without_values(text: str) -> str:
    """Replace the literals in an expression by ``…``; names and indices in brackets stay."""
    return _LITERAL.sub(lambda found: found["name"] or "…", text)


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
