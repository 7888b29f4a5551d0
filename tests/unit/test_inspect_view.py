"""What `torchobs inspect` prints of a rank's report."""

from __future__ import annotations

import math

import pytest

from tests.diagnosis_files import fact, facts, step
from torchobs import catalog
from torchobs.cli.inspect_view import report_lines
from torchobs.cli.text import TerminalStyle
from torchobs.diagnosis.json_report import Options

SHARD = "grad norm: of this rank's own shard; the squares of 4 ranks' norms add up to that of the whole's"


@pytest.mark.parametrize(("ranks", "is_told"), [(None, False), (1.0, False), (4.0, True), (math.nan, False), (1e300, False)])
def test_the_norm_of_a_shard_is_said_to_be_one(ranks: float | None, is_told: bool) -> None:  # noqa: FBT001  # of a parametrization
    """FSDP's gradients that are not clipped: each rank has another norm, and none is the model's."""
    values = {} if ranks is None else {catalog.GRAD_NORM_RANKS: ranks}
    report = facts([step(number, 1.0, 0.5) for number in range(1, 4)], values=values)
    assert (SHARD in report_lines([report], [], Options(), TerminalStyle(160))) is is_told


def test_sizes_and_durations_of_events_have_their_unit() -> None:
    """By the catalog; what is no likely number stays as it is."""
    growth = fact(catalog.EVENT_MEMORY_GROWTH, 1.0, 3, space="host", per_step=40_960, time_to_limit=5_400.0)
    odd = fact(catalog.EVENT_SHARED_MEMORY_FULL, 2.0, 4, used=10**400, size="much")
    lines = report_lines([facts([step(1)], events=[growth, odd])], [], Options(), TerminalStyle(1000))
    assert any("per_step=40 KiB time_to_limit=1 h 30 min" in line for line in lines)
    assert any("size=much" in line for line in lines)
