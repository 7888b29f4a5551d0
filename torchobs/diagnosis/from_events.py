"""Findings from events: one loop over the table of kinds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from torchobs import catalog
from torchobs.catalog.findings import KINDS, ORIGIN, RECOMPILE_REMEDIES, Finding, Kind, as_subject, fields, origin_of
from torchobs.flight.events import Event
from torchobs.ranks.events import Events
from torchobs.ranks.rank_view import RankView

SPOILED = "nonfinite_parameters"
UNTIL_A_STEP = "never_stepped"
"""Shown only of a run without a step: its first one may come after hundreds of micro-batches"""
LAST_WORDS = (
    "device_out_of_memory",
    "host_out_of_memory",
    "gpu_lost",
    "gpu_xid",
    "worker_died",
    "shared_memory_full",
)
"""Errors of machine, device or workers: findings only if the rank ended soon after"""
GATED = frozenset({*catalog.ANOMALY_KINDS, *LAST_WORDS, ORIGIN, SPOILED, "save_raised", "memory_growth", "amp_scale_collapsed"})
"""Kinds that take more than their event"""
KIND_OF = {kind.name: (kind.source.name, kind.key) for kind in KINDS.values() if kind.source is not None}
"""Name of the event or metric that makes a kind, and its key"""
_BY_EVENT: dict[str, list[Kind]] = {}
for _kind in KINDS.values():
    if isinstance(_kind.source, catalog.Event) and not _kind.name.startswith((ORIGIN, SPOILED)):
        _BY_EVENT.setdefault(_kind.source.name, []).append(_kind)
_ATTRIBUTES = {event.name: [attribute.name for attribute in event.attributes] for event in catalog.EVENTS}
_SELECTING = ("kind", "cause")
"""Attributes that select the kind of an event's finding"""
_IN_PARAMETERS = frozenset({"parameter", "overflow"})
"""Origins of NaN and infinity that are in parameters"""

K = TypeVar("K")
V = TypeVar("V")


def remembered(function: Callable[[K], V]) -> Callable[[K], V]:
    """Return the function with a cache of its results, as long as the argument lives: the page calls it each second."""
    results: WeakKeyDictionary[K, V] = WeakKeyDictionary()

    @wraps(function)
    def remembering(argument: K) -> V:
        if argument not in results:
            results[argument] = function(argument)
        return results[argument]

    return remembering


@remembered
def from_events(events: Events) -> Mapping[str, Finding]:
    """Return the findings from events, by kind.

    The newest event counts; one about no parameter or layer takes its kind back. Of origins of NaN and infinity the first
    counts, until one comes that does not lie in weights that already have such values.
    """
    findings: dict[str, Finding] = {}
    for event in events:
        for kind in _BY_EVENT.get(event.name, ()):
            if not kind.key or kind.key in map(event.attributes.get, _SELECTING):
                _add(findings, kind, event)
        if event.name == catalog.EVENT_NONFINITE_ORIGIN.name:
            _add_origin(findings, event)
        elif event.name == catalog.EVENT_NONFINITE_REST.name:
            findings.pop(SPOILED, None)
            if event.count("parameters_affected"):
                findings[SPOILED] = Finding(SPOILED, "", event.step, {"parameter": as_subject(event.text("parameter", 120))})
    return findings


def _add(findings: dict[str, Finding], kind: Kind, event: Event) -> None:
    if event.name == catalog.EVENT_UNMOVED_LAYERS.name and kind.key not in {"unused", "no_gradient"}:
        for name, earlier in list(findings.items()):
            if name.startswith("unmoved_layers_") and earlier.step != event.step and not name.endswith("no_gradient"):
                del findings[name]  # the causes of one step are written together
    before = findings.pop(kind.name, None)
    if 0 in (event.attributes.get("parameters_affected"), event.attributes.get("layers_affected")):
        return
    values = values_of(event)
    if before is not None:
        values["more"] = before.values.get("more", 0) + 1  # type: ignore[operator]  # it was set here
    if _suffice(kind, values):
        findings[kind.name] = Finding(kind.name, "", event.step, values)


def _suffice(kind: Kind, values: Mapping[str, object]) -> bool:
    """Return whether a sentence can be made of these values; a damaged or forged event may lack any."""
    return fields(kind.short) <= {"step", *(name for name, value in values.items() if value is not None)}


def values_of(event: Event) -> dict[str, object]:
    """Return the values for the placeholders in the texts of an event's finding."""
    values: dict[str, object] = {name: event.attributes.get(name) for name in _ATTRIBUTES.get(event.name, ())}
    values["exception.type"] = event.text("exception.type").removeprefix("builtins.") or None
    if "kind" in values:
        values["kind"] = event.text("kind").replace("_", " ")
    if "space" in values:
        values["memory"] = "Device" if values["space"] == "device" else "Host"
    if event.name == catalog.EVENT_MEMORY_LEAK.name:
        tensors, lines = event.texts("tensors", 1, 200), event.texts("lines", 1, 200)
        values["tensor"] = tensors[0] if tensors else None
        place, _, amount = lines[0].partition(" ") if lines else ("", "", "")
        values |= {"place": place if tensors else None, "line": None if tensors else place, "amount": amount}
        values["native"] = not (tensors or lines)
    if event.name == catalog.EVENT_ACTIVATIONS.name:
        values["compiled"] = event.count("compiled") or None
    if event.name == catalog.EVENT_WORKER_DIED.name:
        values["how"] = event.text("signal") or f"exit code {event.text('code')}"
    if event.name == catalog.EVENT_RECOMPILE_STORM.name:
        values["remedy"] = RECOMPILE_REMEDIES.get(event.text("guard"))
    return values


def _add_origin(findings: dict[str, Finding], event: Event) -> None:
    origin, operator = event.text("origin"), event.text("operator", 80)
    is_consequence = origin in _IN_PARAMETERS or (origin == "unknown" and not operator)
    if is_consequence or (origin == "backward" and not operator):
        findings[SPOILED] = Finding(SPOILED, "", event.step, {"parameter": as_subject(event.text("parameter", 120))})
    if ORIGIN not in findings or not is_consequence:
        born = origin_of(event.attributes, event.step)
        if _suffice(KINDS[born.kind], born.values):
            findings[ORIGIN] = born


def source(ranks: Sequence[RankView]) -> RankView | None:
    """Return the rank that saw a NaN or infinity arise first: averaged gradients bring it to all ranks.

    Ranks that only have it in their parameters, or do not know its origin, are left out.
    """
    first = [(facts[0], report) for report in ranks if (facts := report.events_named(catalog.EVENT_NONFINITE_ORIGIN))]
    origins = [(fact.step or 0, report) for fact, report in first if fact.text("origin") not in {"unknown", "parameter"}]
    return min(origins, key=lambda pair: pair[0])[1] if origins else None
