"""``debug.early_stopping`` and ``debug.validation``: decisions, metrics, modes, and what the flight file has of them."""

# mypy: disable-error-code="no-untyped-call, index, possibly-undefined"

from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.training import Recording
from torchobs import debug


def test_it_stops_when_patience_is_over() -> None:
    """The best value stays known; an accuracy is to rise; NaN stops at once; a checkpoint goes on with the same patience."""
    stopper = debug.early_stopping("val_loss", mode="min", patience=2, min_delta=0.1)
    decisions = [stopper(value) for value in (1.0, 0.5, torch.tensor(0.45), 0.6, 0.7)]
    assert [(d.improved, d.patience_left, d.stop) for d in decisions] == [
        (True, 2, False), (True, 2, False), (False, 1, False), (False, 0, True), (False, 0, True),
    ]  # fmt: skip
    assert (decisions[-1].best, decisions[-1].best_check) == (0.5, 2)
    assert "has not improved in 2 checks since its best, 0.5" in decisions[3].reason
    rising, other = (debug.early_stopping("accuracy", mode="max", patience=3) for _ in range(2))
    assert rising({"accuracy": 0.5, "loss": 3.0}).improved
    assert not rising(0.4).improved
    other.load_state_dict(rising.state_dict())
    assert other(0.45).patience_left == 1
    assert bool(debug.early_stopping("loss", mode="min")(nan))
    wrong: Any
    for wrong, words in (({}, "a stopper's state"), (None, "not None"), (rising.state_dict(), "by 'accuracy', not by 'loss'")):
        with pytest.raises(ValueError, match=words):
            debug.early_stopping("loss", mode="min").load_state_dict(wrong)
    with pytest.raises(KeyError, match="accuracy"):
        rising({"loss": 1.0})
    with pytest.raises(ValueError, match="mode"):
        debug.early_stopping("loss", mode="down")  # type: ignore[arg-type]


def test_a_validation() -> None:
    """Means over samples; modes of modules restored one by one; gradients off inside; the stopper is asked."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    stopper = debug.early_stopping("loss", mode="min", patience=1)
    with debug.validation(model, stopper=stopper) as validation:
        assert not model.training
        for samples, loss in ((3, 1.0), (1, 5.0)):
            output = model(torch.ones(samples, 2))
            validation.add(samples, loss=torch.tensor(loss))
        assert not output.requires_grad
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert (validation.samples, validation.batches, validation.metrics, validation.problems) == (4, 2, {"loss": 2.0}, ())
    assert stopper.last is not None
    assert stopper.last.value == 2.0
    with pytest.raises(ZeroDivisionError), debug.validation(model) as broken:  # it is entered, then raises
        1 / 0  # noqa: B018
    assert (broken.error, model.training) == ("ZeroDivisionError", True)
    with debug.validation(name="test") as empty:
        pass
    assert empty.problems[0].text.startswith("no batch")


def test_means_are_over_the_samples_and_of_a_wider_type() -> None:
    """Promise: each metric's is over the samples that it was given for; half precision gives no NaN, infinity or rounding."""
    with debug.validation() as validation:
        for index, samples in enumerate((6, 2, 1)):
            validation.add(samples, loss=1.0, **({} if index == 1 else {"recall": torch.tensor(0.7 * index)}))
    assert (validation.metrics, validation.samples) == ({"loss": 1.0, "recall": pytest.approx(1.4 / 7)}, 9)
    with debug.validation() as validation:
        for loss in (3.0, 1.0) * 600:
            half = {str(kind): torch.tensor(loss, dtype=kind) for kind in (torch.float16, torch.bfloat16)}
            validation.add(64, numpy=np.float16(loss), **half)
    assert set((validation.metrics or {}).values()) == {2.0}


def test_decisions_and_validations_are_events(run: Recording) -> None:
    """With the value, the patience left, the samples and the metrics; the stop is a finding, too."""
    stopper = debug.early_stopping("loss", mode="min", patience=1)
    for loss in (1.0, 2.0):
        with debug.validation(stopper=stopper) as validation:
            validation.add(5, loss=loss)
    decisions = run.attributes("torchobs.debug.early_stopping")
    assert [(event["value"], event["best"], event["patience_left"], event["stop"]) for event in decisions] == [
        (1.0, 1.0, 1, False), (2.0, 1.0, 0, True),
    ]  # fmt: skip
    validations = run.attributes("torchobs.debug.validation")
    assert [(event["samples"], event["batches"], event["loss"]) for event in validations] == [(5, 1, 1.0), (5, 1, 2.0)]
    (stop,) = run.frames("torchobs.debug.finding")
    assert stop["attrs"]["kind"] == "early_stop"
