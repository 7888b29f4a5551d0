"""Findings on what layers put out, which level extreme looks at. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import INFO, WARNING, Finding
from torchobs.diagnosis.rank_report import RankReport

_WHY = {
    "compiled": "in a module that torch.compile has compiled",
    "silent": "not called as modules: in a compiled function, or of a model that is not trained any more",
    "left_out": "more than have series",
}


def activations(report: RankReport) -> Iterator[Finding]:
    """Yield which layers were not looked at, and where the history of an anomaly is."""
    for fact in report.events_named(catalog.EVENT_ACTIVATIONS)[-1:]:
        missing = {name: fact.count(name) for name in _WHY if fact.count(name)}
        every = fact.count("layers") + sum(missing.values())
        if missing:
            why = text_format.joined([f"{count:,} {_WHY[name]}" for name, count in missing.items()])
            text = f"What {sum(missing.values()):,} of {every:,} layers put out was not looked at: {why}."
            yield Finding(INFO, "activations_unread", text)
    dead = report.events_named(catalog.EVENT_DEAD_UNITS)
    if dead:
        layers = [f"{each.count('units_dead'):,} of {each.count('units'):,} units of {each.text('layer')}" for each in dead]
        steps = text_format.plural(max(each.count("steps") for each in dead), "step")
        text = f"Dead units: {text_format.joined(layers, 3)} gave zero for every sample of up to {steps}, and learn nothing."
        yield Finding(WARNING, "dead_units", text)
    for fact in report.events_named(catalog.EVENT_LAYER_HISTORY)[-1:]:
        files = [left.name for left in report.left if left.id == fact.text("evidence")]
        if files:
            kind = text_format.clean(fact.text("kind").replace("_", " "), 40)
            text = f"What the layers put out around the {kind} of step {fact.step:,} is in {files[0]}."
            yield Finding(INFO, "layer_history", text)
