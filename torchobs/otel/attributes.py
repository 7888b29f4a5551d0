"""Attribute values as JSON types, and warnings about misuse that are logged once.

The rules are the SDK's: a foreign object becomes its text, or is dropped if it has none; empty keys are dropped. Types that
JSON lacks become text: bytes in base64 and non-finite floats by name, as OpenTelemetry specifies for backends without such
types, and integers beyond 64 bits, which OTLP lacks too, in hexadecimal.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

from torchobs.flight.layout import encodable, nonfinite_name
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    Plain: TypeAlias = str | bool | int | float | list["Plain"] | dict[str, "Plain"] | None
    from collections.abc import Callable


_INT64 = 1 << 63
_MAX_DEPTH = 8


def clean(value: object, depth: int = _MAX_DEPTH) -> Plain:  # noqa: PLR0911  # one line for each type
    """Convert ``value`` to JSON types. Never raises; values nested deeper than 8 levels become the name of their type."""
    if type(value) is str:
        return encodable(value)
    if isinstance(value, str):
        return encodable(str.__str__(value))  # a string Enum's value, not its name
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -_INT64 <= value < _INT64 else hex(value)
    if isinstance(value, float):
        return float(value) if isfinite(value) else nonfinite_name(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (Mapping, Sequence)):
        return _clean_nested(value, depth - 1) if depth else type(value).__name__
    return text(value)


def cleaned(attributes: object) -> dict[str, Plain]:
    """Convert a mapping of attributes to JSON types; an empty one if it is no mapping."""
    plain: dict[str, Plain] = {}
    if isinstance(attributes, Mapping):
        for key, value in attributes.items():
            if name := clean_key(key):
                plain[name] = value if type(value) is str and value.isascii() else clean(value)
    return plain


def flat(attributes: object) -> dict[str, Plain]:
    """Return attributes that identify a series, sorted by name: scalars and lists of scalars; deeper ones as JSON text."""
    return {name: _flatten(value) for name, value in sorted(cleaned(attributes).items())}


def frozen(attributes: object) -> tuple[tuple[str, Any], ...]:
    """Return :func:`flat` attributes as a hashable."""
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in flat(attributes).items())


def clean_key(key: object) -> str:
    """Return an attribute's name; the empty string if it is not a valid name."""
    if type(key) is str and key.isascii():
        return key
    return encodable(str.__str__(key)) if isinstance(key, str) else text(key) or ""


def text(value: object) -> str | None:
    """Return ``str(value)``; ``None`` when its class defines no text, or raises."""
    kind = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        return None
    written = call(CircuitBreaker("attribute"), str, value)
    return encodable(written) if written is not None else None


def _clean_nested(value: Mapping[object, object] | Sequence[object], depth: int) -> Plain:
    if isinstance(value, Mapping):
        pairs = ((clean_key(key), item) for key, item in value.items())
        return {key: clean(item, depth) for key, item in pairs if key}
    return [clean(item, depth) for item in value]


def _flatten(value: Plain) -> Plain:
    nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value))
    return json.dumps(value, separators=(",", ":")) if nested else value


logger = logging.getLogger("torchobs")
_logged: set[str] = set()


def warn_once(problem: str, *details: object) -> None:
    """Log a warning the first time that ``problem`` (without its details) occurs."""
    if problem not in _logged:
        _logged.add(problem)
        logger.warning("torchobs: " + problem, *details)  # noqa: G003  # our own texts, a handful of them


def delegate_safely(set_delegate: Callable[..., None], delegate: object) -> None:
    """Call ``set_delegate(delegate)``; if the application's provider raises, log one warning."""
    breaker = CircuitBreaker("provider")
    call(breaker, set_delegate, delegate)
    for failure in breaker.failures:
        warn_once("the application's meter provider failed with %s at %s", failure.exception, failure.location)
