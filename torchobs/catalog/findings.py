"""The table of kinds of findings, with their words: of the log, page, ``top``, ``inspect`` and report.

A sentence is a template: ``{step:,}`` is a value, and a part in brackets is left out where one of its values is absent. A
format is ``,`` (a whole number), ``n`` (a measured number), ``size``, ``s`` (a duration), ``span``, ``%``, ``fold``, one of two
words by the number (``{count:is|are}``), or a noun (``{count:step}`` is *1 step* or *3 steps*); without one it is clean text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter
from types import MappingProxyType
from typing import NamedTuple

from torchobs.catalog.model import Event, Metric, Severity
from torchobs.support import text

_INFO, _WARNING, _ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
_MOST_NAMED = 3
_LONGEST = 4000
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "n": text.number,
    "size": text.size,
    "s": text.duration,
    "span": text.span,
    "%": text.percent,
    "fold": text.fold,
    ",": text.count,
}


class Kind(NamedTuple):
    """A kind of finding. ``section``: id of the section of a report with the data behind it."""

    name: str
    """stable, for programs"""
    severity: Severity
    short: str
    """for page, ``top`` and the training's log: present tense, no figure that changes each second"""
    long: str
    """for ``inspect`` and report"""
    section: str
    alert: str = ""
    """its alert in Prometheus"""
    source: Event | Metric | None = None
    """what makes it; none: a function of ``diagnosis``"""
    key: str = ""
    """value of the event's attribute ``kind``, where an event has several kinds"""


class Finding(NamedTuple):
    """A statement about a run or one of its ranks, made by :func:`finding`. ``severity`` is *info*, *warning* or *error*."""

    kind: str
    rank: str = ""
    step: int | None = None
    values: Mapping[str, object] = MappingProxyType({})

    @property
    def severity(self) -> str:
        """The kind's severity, or the one that the values bring."""
        found = self.values.get("severity")
        return (found if isinstance(found, Severity) else KINDS[self.kind].severity).name.lower()

    @property
    def section(self) -> str:
        """Id of the section with the data behind it."""
        return KINDS[self.kind].section

    @property
    def short(self) -> str:
        """The finding in a few words."""
        return self._said(KINDS[self.kind].short)

    @property
    def long(self) -> str:
        """The finding with its figures, and what to do."""
        return self._said(KINDS[self.kind].long or KINDS[self.kind].short) + str(self.values.get("also", ""))

    def _said(self, template: str) -> str:
        return sentence(template, {"rank": self.rank or None, "step": self.step, **self.values})


def finding(kind: str, *, rank: str = "", step: int | None = None, **values: object) -> Finding:
    """Return a finding of that kind; ``severity`` among the values replaces the kind's."""
    return Finding(kind, rank, step, values)


def sentence(template: str, values: Mapping[str, object]) -> str:
    """Fill a template in; a value that is ``None`` or empty is absent."""
    parts = re.split(r"[\[\]]", template)
    return "".join(_filled(part, values, optional=index % 2 == 1) for index, part in enumerate(parts))


def _filled(part: str, values: Mapping[str, object], *, optional: bool) -> str:
    words = []
    for literal, name, spec, _ in Formatter().parse(part):
        words.append(literal)
        if name is not None:
            value = values.get(name)
            if optional and value in (None, "", [], ()):
                return ""
            words.append(_formatted(value, spec or ""))
    return "".join(words)


def _formatted(value: object, spec: str) -> str:
    if isinstance(value, (list, tuple)):
        return text.clean(text.joined(value, _MOST_NAMED), _LONGEST)
    if not spec or not isinstance(value, (int, float)):
        return text.NONE if value is None else text.clean(value, _LONGEST)
    if spec in _FORMATS:
        return _FORMATS[spec](value)
    one, is_choice, more = spec.partition("|")
    return (one if value == 1 else more) if is_choice else text.plural(int(value), one)


_BY_SECTION = {
    "training": {
        "diverged", "gradient_explosion", "gradient_vanishing", "loss_spike", "nonfinite_gradient", "nonfinite_loss",
        "clipped_late", "evaluation_mode", "gradients_kept", "left_out", "losses_kept", "never_stepped", "same_order",
        "scheduler_before_optimizer", "scheduler_idle_optimizer", "scheduler_never_stepped",
        "nonfinite_parameters", "nonfinite_origin", "past_anomalies", "zero_learning_rate", "scheduler_misused",
        "amp_skips", "amp_scale_collapsed", "amp_unscaled", "clipped_scaled", "model_changes", "other_thread", "device_unread",
    },
    "layers": {"unmoved_layers", "dead_units", "activations_unread"},
    "time": {"data", "held_up", "slowdown", "stalled", "checkpoint_age", "no_checkpoint", "checkpoint_failed"},
    "memory": {"memory_growth", "memory_leak", "out_of_memory", "memory.out_of_memory", "memory.shared_full"},
    "compile": {"recompile_storm", "graph_breaks", "compile_failure"},
    "ranks": {
        "first_failed", "slowest_rank", "out_of_step", "ranks_missing", "ranks_disagree", "weights_differ", "same_batches",
        "collective_timeout", "collectives_differ", "waited_for",
    },
    "events": {
        "alive", "finished", "ended", "end_unknown", "interrupted", "terminated", "exception", "exit_code", "crashed", "lost",
        "hung", "unresponsive", "unrecorded", "launcher", "thread_exception", "dropped", "probes_off", "gpu_failed",
        "workers_died", "checkpoint.failed", "data.worker_died", "gpu.lost", "gpu.xid", "headline", "verdict",
    },
}  # fmt: skip
KINDS: dict[str, Kind] = {
    name: Kind(name, _WARNING, "{gist}", "{text}", section) for section, names in _BY_SECTION.items() for name in names
}
