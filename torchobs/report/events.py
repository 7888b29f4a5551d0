"""The section of events. Pure."""

from __future__ import annotations

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.rank_report import Fact, RankReport, attribute_text
from torchobs.report.content import Section, Table, section

_MOST = 200


def section_of(report: RankReport, of: str) -> Section:
    """Return the last events that the file holds."""
    shown = [fact for fact in report.events if fact.name != catalog.EVENT_SCALARS.name]
    rows = tuple(
        (text_format.moment(fact.time_s, "%H:%M:%S"), "" if fact.step is None else f"{fact.step:,}", _name(fact), _told(fact))
        for fact in shown[-_MOST:]
    )
    left = f"; the last {_MOST} of {len(shown):,}" if len(shown) > _MOST else ""
    table = Table(f"Events that the flight file holds{left}", ("Time", "Step", "Event", "What"), rows, frozenset({0, 2, 3}))
    return section("events", f"Events{of}", table if rows else None, wide=True)


def _name(fact: Fact) -> str:
    kind = fact.text("kind").replace("_", " ")
    return kind or text_format.clean(fact.name.removeprefix("torchobs."), 80)


def _told(fact: Fact) -> str:
    words = ((name, attribute_text(fact, name)) for name in list(fact.attributes)[:10] if name != "kind")
    told = [f"{text_format.clean(name, 40)} {text}" for name, text in words if text]
    return text_format.clean(" · ".join(told), 600)
