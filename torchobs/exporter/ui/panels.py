"""Small panels: the run's key figures, and one rank's memory, mixed precision, compilation and use of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.exporter.ui.view_model import WHOLES
from torchobs.report import charts
from torchobs.report.html import EMPTY, Html, definitions, exact, joined, named, tag, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchobs.catalog import Metric
    from torchobs.exporter.ui.view_model import Model, Row
    from torchobs.ranks.metric_values import Readings

Line = tuple[str, Html]
"""A term and its value"""


def key_figures(model: Model) -> Html:
    """Return the row of key figures below the health summary."""
    if model.run is None or model.focus is None:
        return EMPTY
    return tag("dl", *(_figure(*line) for line in _key_lines(model, model.focus)), class_="figures")


def _figure(name: str, value: Html, more: Html = EMPTY) -> Html:
    return tag("div", tag("dt", name), tag("dd", value), tag("dd", more, class_="more") if more else EMPTY)


def _key_lines(model: Model, focus: Row) -> Iterator[tuple[str, Html, Html]]:
    total, steps = model.total_steps, model.run.status.steps if model.run else 0
    bar = (
        joined([charts.meter(steps / total), f"{text_format.percent(min(steps / total, 1.0))} of {total:,}"])
        if total
        else EMPTY
    )
    yield "Step", exact(f"{steps:,}", steps), bar
    if model.left_s is not None:
        yield "Time left", tag("span", text_format.span(model.left_s)), tag("span", _at_what_speed(focus))
    yield from _speed(focus)
    goodput = focus.readings.of(catalog.GOODPUT_TIME)
    if sum(goodput.values()):
        productive = goodput.get(("productive",), 0.0) / sum(goodput.values())
        yield "Goodput", exact(text_format.percent(productive), productive), tag("span", "of the time since the start")
    yield from _rate(focus.readings)
    share = focus.readings.get(catalog.MFU)
    if share is not None and focus.status.standstill is None:
        yield "MFU", exact(text_format.percent(share), share), tag("span", "of the devices' peak, by the model's operations")


def _at_what_speed(focus: Row) -> str:
    aside = any(focus.readings.get(catalog.GOODPUT_TIME, state) for state in ("evaluation", "checkpoint"))
    return "with evaluations and checkpoints as so far" if aside else "at the present speed"


def _speed(focus: Row) -> Iterator[tuple[str, Html, Html]]:
    pace, still = focus.speed, focus.status.standstill
    if still is not None:
        yield "Speed", text("–"), tag("span", f"no step for {text_format.span(still.seconds)}")
    if pace is None:
        return
    work = ((pace.tokens_per_s, "tokens"), (pace.samples_per_s, "samples"))
    parts = [joined([exact(text_format.rate(value, what), value), " on this rank, over its "]) for value, what in work if value]
    over = tag("span", f"{'' if parts else 'over its '}last {pace.steps:,} steps ({text_format.duration(pace.window_s)})")
    yield "Speed", exact(text_format.rate(pace.per_s, "steps"), pace.per_s), joined([*parts[:1], over])


def _rate(readings: Readings) -> Iterator[tuple[str, Html, Html]]:
    rates = readings.of(catalog.LEARNING_RATE)
    if rates:
        first = rates.get(("0",), next(iter(rates.values())))
        groups = f"first of {len(rates)} groups" if len(rates) > 1 else ""
        yield "Learning rate", exact(text_format.number(first), first), tag("span", groups)


def details(model: Model) -> Html:
    """Return the chosen rank's panels, without empty ones."""
    focus = model.focus
    if focus is None:
        return EMPTY
    panels = {
        "Where the time since the start went": _goodput(focus.readings),
        "Memory": definitions(_memory(focus.readings)),
        "Mixed precision": definitions(_amp(focus.readings)),
        "torch.compile": definitions(_compile(focus.readings)),
        "Checkpoints and gradients": definitions(_checkpoints(focus.readings, model.now_s)),
    }
    cards = [tag("div", tag("h3", name), content, class_="card") for name, content in panels.items() if content]
    return joined([tag("h2", "Rank ", named(focus.rank), " in detail"), tag("div", *cards, class_="cards")])


def _goodput(readings: Readings) -> Html:
    times = {key[0]: value for key, value in readings.of(catalog.GOODPUT_TIME).items() if key and value > 0}
    whole = sum(times.values())
    if not whole:
        return EMPTY
    order = sorted(times, key=lambda name: -times[name])
    bar = charts.stacked([(f"goodput-{name}", times[name] / whole) for name in order if name in _GOODPUT])
    lines = [
        (name, joined([charts.stacked([(f"goodput-{name}", 1.0)]) if name in _GOODPUT else EMPTY,
                       exact(text_format.duration(times[name]), times[name]),
                       f" ({text_format.percent(times[name] / whole)})"]))
        for name in order
    ]  # fmt: skip
    return joined([bar, definitions(lines, "keyed")])


_GOODPUT = frozenset({*catalog.GOODPUT_STATES, catalog.STARTUP})


def _memory(readings: Readings) -> Iterator[Line]:
    limits = readings.of(catalog.MEMORY_DEVICE_LIMIT)
    for device, reserved in readings.of(catalog.MEMORY_DEVICE_RESERVED).items():
        yield f"{device[0]} reserved", _of(reserved, limits.get(device))
        for word, metric in (("in use", catalog.MEMORY_DEVICE_ALLOCATED), ("peak", catalog.MEMORY_DEVICE_PEAK)):
            value = readings.get(metric, *device)
            if value is not None:
                yield f"{device[0]} {word}", exact(text_format.size(value), value)
    for word, metric in (("process", catalog.MEMORY_HOST_RSS), ("its workers", catalog.MEMORY_HOST_CHILDREN_RSS)):
        value = readings.get(metric)
        if value:
            yield word, exact(text_format.size(value), value)
    working_set = readings.get(catalog.CGROUP_MEMORY_WORKING_SET)
    if working_set is not None:
        yield "container", _of(working_set, readings.get(catalog.CGROUP_MEMORY_LIMIT))
    for (limit,), part in readings.of(catalog.MEMORY_HOST_UTILIZATION).items():
        yield f"{WHOLES.get(limit, limit)} full", joined([charts.meter(part), exact(text_format.percent(part), part)])
    for (space,), left_s in readings.of(catalog.MEMORY_TIME_TO_LIMIT).items():
        yield f"{space} memory full in", exact(text_format.span(left_s), left_s)


def _of(value: float, limit: float | None) -> Html:
    used = exact(text_format.size(value), value)
    return joined([charts.meter(value / limit), used, " of ", exact(text_format.size(limit), limit)]) if limit else used


def _amp(readings: Readings) -> Iterator[Line]:
    kinds = [f"{dtype} on {device}" for device, dtype in readings.of(catalog.AMP_AUTOCAST)]
    if kinds:
        yield "autocast", tag("span", ", ".join(kinds))
    scales = readings.of(catalog.AMP_SCALE)
    for (scaler,), scale in scales.items():
        yield "loss scale" if len(scales) == 1 else f"loss scale {scaler}", exact(text_format.number(scale), scale)
    if scales:
        yield from _counts(readings, (("steps skipped", catalog.AMP_STEPS_SKIPPED), ("in a row now", catalog.AMP_SKIP_STREAK)))


def _compile(readings: Readings) -> Iterator[Line]:
    times = sum(readings.of(catalog.COMPILE_TIME).values())
    if not times and not readings.get(catalog.COMPILE_IN_PROGRESS):
        return
    yield "now", tag("span", "compiling" if readings.get(catalog.COMPILE_IN_PROGRESS) else "idle")
    yield "time spent", exact(text_format.duration(times), times)
    first, again = (int(readings.get(catalog.COMPILE_COMPILATIONS, cause) or 0) for cause in ("first", "recompile"))
    yield "compilations", tag("span", f"{first:,}, and {again:,} again")
    breaks = sum(readings.of(catalog.COMPILE_GRAPH_BREAKS).values())
    failures = sum(readings.of(catalog.COMPILE_FAILURES).values())
    yield "graph breaks", exact(text_format.count(breaks), breaks)
    if failures:
        yield "given up", exact(text_format.count(failures), failures)
    hits = sum(value for (_, result), value in readings.of(catalog.COMPILE_CACHE_LOOKUPS).items() if result == "hit")
    lookups = sum(readings.of(catalog.COMPILE_CACHE_LOOKUPS).values())
    if lookups:
        yield "cache hits", tag("span", f"{text_format.count(hits)} of {text_format.count(lookups)}")


def _checkpoints(readings: Readings, now_s: float) -> Iterator[Line]:
    saved, failed = readings.get(catalog.CHECKPOINTS, "saved"), readings.get(catalog.CHECKPOINTS, "failed")
    if saved or failed:
        failures = f", {text_format.count(failed)} failed" if failed else ""
        yield "checkpoints", joined([exact(text_format.count(saved), saved), failures])
    at_s, size = readings.get(catalog.CHECKPOINT_TIMESTAMP), readings.get(catalog.CHECKPOINT_SIZE)
    if at_s:
        yield "last one", tag("span", f"{text_format.span(now_s - at_s)} ago" + (f", {text_format.size(size)}" if size else ""))
    yield from _counts(readings, (("steps clipped", catalog.GRAD_CLIPPED_STEPS), ("not finite", catalog.GRAD_NONFINITE_STEPS)))
    for (kind,), value in readings.of(catalog.ANOMALIES).items():
        if value:
            yield kind.replace("_", " "), exact(f"{text_format.count(value)} so far", value)


def _counts(readings: Readings, wanted: Sequence[tuple[str, Metric]]) -> Iterator[Line]:
    for word, metric in wanted:
        value = readings.get(metric)
        if value is not None:
            yield word, exact(text_format.count(value), value)
