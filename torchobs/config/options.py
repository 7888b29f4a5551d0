"""Options: their types, their names, and how they are read from flags, environment variables and arguments of ``init()``.

The trainer's settings, the exporter, its OTLP push and the commands declare their options with :class:`Option` and read them
with :func:`read`, so that precedence, limits and messages are the same everywhere: a flag or argument beats the
variables, in their order; a source without a valid value is reported and skipped.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args
from urllib.parse import quote, unquote

Number = TypeVar("Number", int, float)

Level = Literal["off", "basic", "advanced", "extreme"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
Attributes = tuple[tuple[str, str], ...]

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_UNITS = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2}
_KUBERNETES_UNITS = {"": 1, "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3}
# Patterns as text: compiled on first use, they cost the import nothing.
_SIZE = r"(\d{1,18})\s*([A-Za-z]*)"
_INTEGER = r"[+-]?\d{1,18}"
_ADDRESS = r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:\[\]/]*)):(?P<port>\d{1,5})"
_MAX_PORT = 65535
_MAX_SHOWN = 40
_DURATION = r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?"
# https://www.w3.org/TR/trace-context/#traceparent-header: version ff and ids of zeros alone are invalid.
_TRACEPARENT = r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"


class PartlyUsableError(ValueError):
    """Some items of a list are invalid: ``usable`` is the value made of the others."""

    def __init__(self, complaint: str, usable: object) -> None:
        super().__init__(complaint)
        self.usable = usable


# Named tuples rather than dataclasses: created in 0.2 ms instead of 1.4 ms, in every training.
class ValueKind(NamedTuple):
    """A type of option value. ``parse`` raises ``ValueError`` for text that is not ``allowed`` (a description for people)."""

    allowed: str
    parse: Callable[[str], object]
    choices: tuple[str, ...] = ()
    """all values of a finite set"""


class Address(NamedTuple):
    """Where a server listens, as ``bind()`` takes it; an empty host is every interface, as in Prometheus' ``:9090``."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def as_text(value: object) -> str:
    """Return an argument's value as text, so that arguments and variables share one set of limits.

    Raises:
        TypeError: no setting accepts such an object.
        ValueError: a number has more digits than Python converts.
    """
    match value:
        case bool():
            return str(value).lower()
        case str() | int() | float() | Address():
            return str(value)
        case os.PathLike():
            return os.fsdecode(value)
        case Mapping():
            return as_text(tuple(value.items()))
        case list() | tuple() | set() | frozenset():
            # A comma after every item, so that [1] is no number to the types that expect one.
            return "".join(f"{_item(item)}," for item in value)
        case _:
            raise TypeError(type(value).__name__)


def _item(item: object) -> str:
    match item:
        case (key, value):
            return f"{key}={quote(str(value))}"
        case _:
            return str(item)


def either(words: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def closest(word: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return ``, did you mean X?`` if a candidate is similar, else nothing; all begin with ``prefix``."""
    import difflib  # only for a mistake

    # Without the prefix, since a common prefix makes all words similar.
    matches = difflib.get_close_matches(word.removeprefix(prefix), [name.removeprefix(prefix) for name in candidates], n=1)
    return f", did you mean {prefix}{matches[0]}?" if matches else ""


def _boolean(text: str) -> bool:
    if (word := text.lower()) in _TRUE | _FALSE:
        return word in _TRUE
    raise ValueError(text)


def _one_of(words: Collection[str], word: str) -> str:
    if word not in words:
        raise ValueError(word)
    return word


def _text(text: str) -> str:
    if not text:
        raise ValueError("empty")
    return text


def _path(text: str) -> Path:
    if "\0" in text:
        raise ValueError("a path holds no NUL")
    return Path(_text(text))


def _matched(pattern: str, text: str) -> re.Match[str]:
    if match := re.fullmatch(pattern, text, re.ASCII):
        return match
    raise ValueError(text)


def _integer(text: str) -> int:
    # int() also accepts "1_000", Arabic digits and numbers of any length, which nobody intends.
    return int(_matched(_INTEGER, text)[0])


def _within(value: Number, low: float, high: float) -> Number:
    if not low <= value <= high:
        raise ValueError(value)
    return value


def _size(text: str, units: Mapping[str, int]) -> int:
    match = _matched(_SIZE, text)
    return int(match[1]) * units[_one_of(units, match[2])]


def _address(text: str) -> Address:
    match = _matched(_ADDRESS, text)
    return Address(match["ipv6"] or match["host"], _within(int(match["port"]), 0, _MAX_PORT))


def duration_s(text: str) -> float:
    """Return seconds for ``90``, ``90s``, ``1m30s``, ``2h``. Raises ``ValueError`` for anything else."""
    hours, minutes, seconds = (float(part or 0) for part in _matched(_DURATION, _text(text)).groups())
    total = hours * 3600 + minutes * 60 + seconds
    if not math.isfinite(total):
        raise ValueError(text)
    return total


def _target(text: str) -> str:
    import shlex
    from urllib.parse import urlsplit

    url = text.removeprefix("ntfy:")
    if url.startswith(("http://", "https://")):
        parts = urlsplit(url)
        if not parts.hostname or parts.port == 0 or "@" in parts.netloc or not re.fullmatch(r"[!-~]+", url):
            raise ValueError("a URL")
    elif url != text or not shlex.split(text):
        raise ValueError("a command")
    return text


def _attributes(text: str) -> Attributes:
    """Parse ``key=value,…`` as the OpenTelemetry SDK's ``OTELResourceDetector`` does: items without ``=`` are left out."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    usable = {key.strip(): unquote(value.strip()) for key, equals, value in pairs if equals and key.strip()}
    if wrong := [key + equals + value for key, equals, value in pairs if not equals or not key.strip()]:
        raise PartlyUsableError(f"{wrong[0][:_MAX_SHOWN]!r} is left out", tuple(usable.items()))
    return tuple(usable.items())


def _names(text: str, valid: Collection[str]) -> frozenset[str]:
    words = frozenset(word.strip() for word in text.split(",")) - {""}
    if wrong := sorted(words.difference(valid)):
        raise PartlyUsableError(f"{wrong[0][:_MAX_SHOWN]!r} is unknown{closest(wrong[0], valid)}", words.intersection(valid))
    return words


def one_of(*words: str) -> ValueKind:
    """Return the type of one of these words; case does not matter."""
    spellings = {word.lower(): word for word in words}
    return ValueKind(either(words), lambda text: spellings[_one_of(spellings, text.lower())], words)


BOOLEAN = ValueKind("1, true, yes, on or 0, false, no, off", _boolean)
SDK_DISABLED = ValueKind("true or false", lambda text: one_of("true", "false").parse(text) == "false")
"""True if OpenTelemetry's ``OTEL_SDK_DISABLED`` leaves the SDK enabled; its specification allows only these words."""
TEXT = ValueKind("text, not empty", _text)
PATH = ValueKind("a path", _path)
ABSOLUTE_PATH = ValueKind("an absolute path", lambda text: Path(_matched(r"/.*", str(_path(text)))[0]))
ADDRESS = ValueKind(f"host:port with a port up to {_MAX_PORT}", _address)
TRACEPARENT = ValueKind("a W3C traceparent", lambda text: _matched(_TRACEPARENT, text)[0])
INTERVAL = ValueKind(
    "auto or an integer, at least 1", lambda text: "auto" if text.lower() == "auto" else _within(_integer(text), 1, math.inf)
)
ATTRIBUTES = ValueKind("key=value,key=value with percent-encoded values", _attributes)
MEMORY = ValueKind("bytes, such as 134217728 or 128Mi", lambda text: _size(text, _KUBERNETES_UNITS))
DURATION = ValueKind("a duration such as 90s, 5m or 1h30m", duration_s)
TARGET = ValueKind("a URL such as https://hooks.example/…, ntfy:URL, or a command", _target)
LEVEL, LOG_LEVEL = one_of(*get_args(Level)), one_of(*get_args(LogLevel))


def integer(minimum: int, maximum: float = math.inf) -> ValueKind:
    """Return the type of integers within these limits."""
    limits = f"at least {minimum}" if maximum == math.inf else f"from {minimum} to {maximum}"
    return ValueKind(f"an integer, {limits}", lambda text: _within(_integer(text), minimum, maximum))


def duration(minimum: str, maximum: str) -> ValueKind:
    """Return the type of durations in seconds within these limits."""
    limits = duration_s(minimum), duration_s(maximum)
    return ValueKind(
        f"a duration from {minimum} to {maximum}, such as 5s or 1m", lambda text: _within(duration_s(text), *limits)
    )


def size(minimum: int, maximum: int) -> ValueKind:
    """Return the type of sizes in bytes within these limits, which are whole KiB."""
    return ValueKind(
        f"bytes, KiB or MiB, from {minimum // 1024}KiB to {maximum // 1024}KiB",
        lambda text: _within(_size(text, _UNITS), minimum, maximum),
    )


def fraction(minimum: float, maximum: float) -> ValueKind:
    """Return the type of numbers within these limits; NaN is never within."""
    return ValueKind(f"a number from {minimum:g} to {maximum:g}", lambda text: _within(float(text), minimum, maximum))


def names(allowed: Collection[str]) -> ValueKind:
    """Return the type of comma-separated lists of these names."""
    return ValueKind(f"a comma-separated list of {', '.join(allowed)}", lambda text: _names(text, allowed))


EXPORTER_PREFIX = "TORCHOBS_EXPORTER_"
"""Prefix of the exporter's environment variables."""

_MAX_VALUE = 120
# Kubernetes sets such variables in all containers of a namespace for a Service with a name that begins with "torchobs".
_SERVICE_LINK = r"TORCHOBS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"


@dataclass(frozen=True, slots=True)
class SettingsProblem:
    """An ignored value: the variable, flag or argument, its value (``None``: not to be shown), and the reason."""

    name: str
    value: str | None
    reason: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name} {self.reason}"
        shown = repr(self.value)
        shown = shown if len(shown) <= _MAX_VALUE else shown[:_MAX_VALUE] + "…"
        return f"{self.name}{' ' if self.name.startswith('-') else '='}{shown}: {self.reason}"


class Option(NamedTuple):
    """One option or setting. Texts are for people; ``kind`` checks and parses the value.

    A named tuple, like the types: a training creates two dozen at its start.
    """

    name: str
    """the field that it sets"""
    kind: ValueKind
    brief: str
    default: str = ""
    """description of the default"""
    variables: tuple[str, ...] = ()
    """in order of precedence"""
    also: tuple[tuple[str, ValueKind], ...] = ()
    """further variables, read last, with the type of each: another unit, or the opposite meaning"""
    flag: str = ""
    """empty: not available on the command line"""
    metavar: str = ""
    several: bool = False
    """may be given more than once; its variables hold several values, separated by blanks"""
    bare: str = ""
    """value of a flag without one; empty: a value is required"""
    hidden_if: str | None = None
    """texts that contain this are not shown in messages"""

    @property
    def every_variable(self) -> tuple[str, ...]:
        """All its environment variables, including those of another type."""
        return (*self.variables, *(name for name, _ in self.also))


def with_exporter_variable(option: Option) -> Option:
    """Return the option with a first variable derived from its flag: ``--web.file-sd`` becomes ``…_WEB_FILE_SD``."""
    variable = EXPORTER_PREFIX + re.sub(r"[.-]+", "_", option.flag.lstrip("-")).upper()
    return option._replace(variables=(variable, *option.variables))


def read(
    table: Iterable[Option], flags: Mapping[str, Iterable[object]], environ: Mapping[str, str], problems: list[SettingsProblem]
) -> dict[str, object]:
    """Return the values of a table's options by name, of those that have one; adds ignored values to ``problems``.

    ``flags``: the values of flags or arguments by name. Of an option that may be given several times it is a tuple.
    """
    chosen = [(option, values_of(option, flags.get(option.name, ()), environ, problems)) for option in table]
    return {option.name: tuple(values) if option.several else values[-1] for option, values in chosen if values}


def values_of(
    option: Option,
    arguments: Iterable[object],
    environ: Mapping[str, str],
    problems: list[SettingsProblem],
    first: tuple[str, ValueKind] | None = None,
) -> list[object]:
    """Return the values of the first source that has any; an empty list means the default. Adds to ``problems``.

    Sources are ``first``, a variable that beats even the flag, then ``arguments``, the values of the flag or argument, then
    the other variables. An empty variable counts as unset, as in OpenTelemetry.
    """
    for source, kind, raw in _sources(option, list(arguments), environ, first):
        values = [value for item in raw for value in _parsed(option, source, kind, item, problems)]
        if values:
            return values
    return []


def unknown_variables(
    environ: Mapping[str, str], prefix: str, names: Iterable[str], *, what: str, others: Iterable[str] = ()
) -> Iterator[SettingsProblem]:
    """Yield a problem for every variable with this prefix that is none of ``names`` and ``others``.

    Its value is not shown: a misspelled variable may hold a secret.
    """
    names = [name for name in names if name.startswith(prefix)]
    for name in sorted(environ.keys() - {*names, *others}):
        if name.startswith(prefix) and not re.fullmatch(_SERVICE_LINK, name):
            yield SettingsProblem(name, None, f"is an unknown {what}{closest(name, names, prefix)}")


def _sources(
    option: Option, arguments: list[object], environ: Mapping[str, str], first: tuple[str, ValueKind] | None
) -> Iterator[tuple[str, ValueKind, list[object]]]:
    variables = [(name, option.kind) for name in option.variables]
    for name, kind in [*([first] if first else []), ("", option.kind), *variables, *option.also]:
        if not name and arguments:
            yield option.flag or f"argument {option.name}", kind, arguments
        elif text := environ.get(name, "").strip():
            yield name, kind, list(text.split()) if option.several else [text]


def _parsed(option: Option, source: str, kind: ValueKind, item: object, problems: list[SettingsProblem]) -> Iterator[object]:
    text: str | None = None
    try:
        text = as_text(item).strip()
        yield kind.parse(text)
    except PartlyUsableError as error:
        problems.append(SettingsProblem(source, text, f"{error}; expected {kind.allowed}"))
        yield error.usable
    except (TypeError, ValueError):
        if text is None:
            problems.append(SettingsProblem(source, None, f"cannot be such a {type(item).__name__}"))
        elif option.hidden_if is not None and option.hidden_if in text:
            problems.append(SettingsProblem(source, None, f"is not repeated here; expected {kind.allowed}"))
        else:
            problems.append(SettingsProblem(source, text, f"expected {kind.allowed}"))
