"""What is said of evidence that a rank could not write."""

from __future__ import annotations

from typing import Any

import pytest

from torchobs import catalog
from torchobs.exporter.api import artifacts
from torchobs.exporter.api.history import Dated, Position

REASONS = {
    str(reason)
    for event in (catalog.EVENT_STACKS_FAILED, catalog.EVENT_PROFILE_FAILED)
    for attribute in event.attributes
    if attribute.name == "reason"
    for reason in attribute.values
}


@pytest.mark.parametrize("reason", sorted(REASONS - {"error"}))
def test_every_reason_has_its_remedy(reason: str) -> None:
    """Whoever asked is told what to do, and what the system said."""
    problem = artifacts.failure_problem("3", {"reason": reason, "detail": "No space left on device"})
    assert (problem.status, problem.kind) == (410, "evidence-failed")
    assert problem.detail.startswith("Rank 3 ")
    assert ": " in problem.detail
    assert problem.detail.endswith(" (No space left on device)")


@pytest.mark.parametrize("said", [{}, {"reason": ["x"], "detail": {}}, {"reason": "a\nb", "exception.type": 7}])
def test_whatever_a_rank_says_is_an_answer(said: dict[str, Any]) -> None:
    """The event is from a file that anybody may have written."""
    assert artifacts.failure_problem("0", said).detail == "Rank 0 failed at it."


def test_what_a_rank_says_is_one_short_line() -> None:
    """However long it is."""
    assert len(artifacts.failure_problem("0", {"reason": "no_room", "detail": "\x1b[31m\n" + "x" * 9_000}).detail) < 400
    assert "\n" not in artifacts.failure_problem("0", {"detail": "a\nb"}).detail


def test_only_the_evidence_in_question_is_found() -> None:
    """Not another's failure, and not an event of the application that has the same attribute."""
    events = [
        Dated(Position(at, "ab", at), {"name": name, "attributes": {"evidence": evidence, "at": at}})
        for at, (name, evidence) in enumerate(
            [("mine", "1" * 16), ("torchobs.stacks", "1" * 16), ("torchobs.stacks_failed", "2" * 16)]
        )
    ]
    assert artifacts.failure(events, "1" * 16) is None
    assert artifacts.failure(events, "2" * 16) == {"evidence": "2" * 16, "at": 2}
