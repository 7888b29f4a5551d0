"""Declaration of options, which come from a flag, environment variables or an argument of ``init()``.

The trainer's settings, the exporter, its OTLP push and the commands declare their options with :class:`Option` and read them
with :func:`values_of`, so that precedence, limits and messages are the same everywhere: a flag or argument beats the
variables, in their order; a source without a valid value is reported and skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchobs.config import option_types
from torchobs.config.option_types import PartlyUsableError, ValueKind

EXPORTER_PREFIX = "TORCHOBS_EXPORTER_"
"""Prefix of the exporter's environment variables."""

_MAX_SHOWN = 120
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
        shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "…"
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
    own = EXPORTER_PREFIX + re.sub(r"[.-]+", "_", option.flag.lstrip("-")).upper()
    return option._replace(variables=(own, *option.variables))


def values_of(
    option: Option,
    given: Iterable[object],
    environ: Mapping[str, str],
    problems: list[SettingsProblem],
    first: tuple[str, ValueKind] | None = None,
) -> list[object]:
    """Return the values of the first source that has any; an empty list means the default. Adds to ``problems``.

    Sources are ``first``, a variable that beats even the flag, then ``given``, the flag's or argument's values, then the other
    variables. An empty variable counts as unset, as in OpenTelemetry.
    """
    for source, kind, raw in _sources(option, list(given), environ, first):
        found = [value for item in raw for value in _parsed(option, source, kind, item, problems)]
        if found:
            return found
    return []


def unknown_variables(
    environ: Mapping[str, str], prefix: str, known: Iterable[str], *, what: str, others: Iterable[str] = ()
) -> Iterator[SettingsProblem]:
    """Yield a problem for every variable with this prefix that is neither ``known`` nor one of the ``others``.

    Its value is not shown: a misspelled variable may hold a secret.
    """
    known = [name for name in known if name.startswith(prefix)]
    for name in sorted(environ.keys() - {*known, *others}):
        if name.startswith(prefix) and not re.fullmatch(_SERVICE_LINK, name):
            yield SettingsProblem(name, None, f"is an unknown {what}{option_types.closest(name, known, prefix)}")


def _sources(
    option: Option, given: list[object], environ: Mapping[str, str], first: tuple[str, ValueKind] | None
) -> Iterator[tuple[str, ValueKind, list[object]]]:
    variables = [(name, option.kind) for name in option.variables]
    for name, kind in [*([first] if first else []), ("", option.kind), *variables, *option.also]:
        if not name and given:
            yield option.flag or f"argument {option.name}", kind, given
        elif text := environ.get(name, "").strip():
            yield name, kind, list(text.split()) if option.several else [text]


def _parsed(option: Option, source: str, kind: ValueKind, item: object, problems: list[SettingsProblem]) -> Iterator[object]:
    text: str | None = None
    try:
        text = option_types.as_text(item).strip()
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
