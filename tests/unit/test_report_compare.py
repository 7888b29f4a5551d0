"""`torchobs compare`: medians and ranges of two runs, and their arguments."""

from __future__ import annotations

from tests.diagnosis_files import facts, step
from torchobs.diagnosis.load import Chosen
from torchobs.report.compare import Compared, compare, comparison_document, parsed, sentence
from torchobs.report.write import markdown


def run(*losses: float) -> Chosen:
    """A run of one rank, whose last tenth of the steps has these losses."""
    return Chosen([facts([*(step(number, 9.0) for number in range(1, 41)), *map(step, range(41, 46), losses)])], [], [], [])


def test_a_curve_has_median_and_range_of_both_runs() -> None:
    """The range is that of the middle half, so that one spike does not make it; nothing is judged."""
    found = compare(run(2.0, 2.1, 2.2, 2.3, 99.0), run(1.0, 1.1, 1.1, 1.1, 1.2))
    loss = next(one for one in found.quantities if one.what == "loss, steps 41 to 45")
    assert (loss.first, loss.first_range) == (2.2, (2.1, 2.3))
    assert (loss.second, loss.second_range, loss.change) == (1.1, (1.1, 1.1), -0.5)
    said = "The loss, steps 41 to 45 is 50 % lower in B: 2.2 (2.1 to 2.3) in A, 1.1 (1.1 to 1.1) in B."
    assert sentence(loss) == said
    assert said in markdown(comparison_document(found))
    assert [one["first_range"] for one in found.to_dict()["quantities"] if one["what"] == loss.what] == [[2.1, 2.3]]


def test_what_cannot_be_compared() -> None:
    """A run without values: it is said; values that are equal, or a single one: no change, no range."""
    assert "one of the runs has no values" in sentence(Compared("step time", "s", None, 0.1, None))
    assert sentence(Compared("step time", "s", 0.1, 0.1, 0.0)) == "The step time: 100 ms in A, 100 ms in B."


def test_arguments_by_name() -> None:
    """In each way that they are given; a negative number is a value."""
    given = ["data.bin", "--lr", "3e-4", "--wd=0.1", "model.depth=12", "--shift", "-1", "--fused", "--seed", "7", "-v"]
    assert parsed(given) == {
        "argument 1": "data.bin", "--lr": "3e-4", "--wd": "0.1", "model.depth": "12", "--shift": "-1", "--fused": "yes",
        "--seed": "7", "-v": "yes",
    }  # fmt: skip
