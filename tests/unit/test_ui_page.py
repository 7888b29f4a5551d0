"""Parts of the live page, from numbers alone."""

from __future__ import annotations

import pytest

from tests.ui import row, run
from torchobs import catalog
from torchobs.exporter.ui.page import rendered
from torchobs.exporter.ui.view_model import Choice, model


@pytest.mark.parametrize("ranks", [None, 1.0, 4.0])
def test_the_norm_of_a_shard_is_said_to_be_one(ranks: float | None) -> None:
    """FSDP's gradients that are not clipped: each rank has another norm, and none is the model's."""
    one = row(values={} if ranks is None else {catalog.GRAD_NORM_RANKS.name: {(): ranks}})
    page = rendered(model((run(one),), Choice(), {}, [], 0.0))
    assert f"<h3>Gradient norm{' of its shard' if ranks == 4 else ''}</h3>" in page["curves"]
