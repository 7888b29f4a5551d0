"""All findings on a rank, in the order of importance. Pure."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from torchobs.diagnosis.exit_cause import ending
from torchobs.diagnosis.health import ERROR, INFO, WARNING, Finding
from torchobs.diagnosis.numerics import numerics
from torchobs.diagnosis.performance import pace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.diagnosis.rank_report import RankReport

_RULES = (ending, numerics, pace)
_ORDER = (ERROR, WARNING, INFO)


def diagnose(facts: RankReport) -> list[Finding]:
    """Return the findings on a rank: first how it ended, then the others, the worst first."""
    first, *rest = chain.from_iterable(rule(facts) for rule in _RULES)
    return [first, *sorted(rest, key=lambda finding: _ORDER.index(finding.severity))]


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst severity among them."""
    return min((finding.severity for finding in findings), key=_ORDER.index, default=INFO)
