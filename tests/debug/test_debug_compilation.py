"""``debug.explain_compile``: graph breaks, recompilations and guards in words."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import pytest
import torch
from torch import nn

from tests.debug.models import texts
from torchobs import debug


class Branching(nn.Module):
    """Its forward pass asks for a value: a graph break; and counts its calls: a constant in the graph."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.layer, self.calls, self.counts = nn.Linear(4, 4), 0, counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
            return self.layer(x) * self.calls  # type: ignore[no-any-return]
        if x.sum() > 0:
            x = x + 1
        out: torch.Tensor = self.layer(x)
        return out


class GivenUp(nn.Linear):
    """Breaks the graph within a loop: torch leaves all of its forward pass to Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
        return super().forward(x)


def test_a_model_in_one_graph() -> None:
    """No break; guards are counted by what they check; random state and batch norm's buffers are what they were."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout()), torch.randn(6, 4)
    before, random = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    buffers = dict(model.named_buffers())
    check = debug.explain_compile(model, x)
    assert (check.graphs, check.full_graph, check.breaks, check.error) == (1, True, (), None)
    assert check.operators >= 3
    assert sum(check.guards.values()) > 0
    assert {row.function for row in check.recompiles} == {"Sequential"}
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_break_is_told_with_its_line_and_its_kind() -> None:
    """Data-dependent control flow, at the line that has it."""
    check = debug.explain_compile(Branching(), torch.ones(6, 4))
    assert (check.full_graph, check.graphs, len(check.breaks)) == (False, 2, 1)
    assert check.breaks[0].kind == "data_dependent"
    assert f"{__file__}:" in check.breaks[0].location
    for model, batch, place in ((nn.LSTM(4, 4), torch.ones(2, 3, 4), "LSTM"), (GivenUp(4, 4), torch.ones(6, 4), __file__)):
        check = debug.explain_compile(model, batch)
        assert (len(check.breaks), check.breaks[0].location.split(":")[0], check.full_graph) == (1, place, False)
        assert "the first batch" not in {row.call for row in check.recompiles}


def test_a_constant_that_changes_is_named_as_what_recompiles() -> None:
    """Each call: with the guard's expression and a remedy."""
    check = debug.explain_compile(Branching(counts=True), torch.ones(6, 4))
    again = next(row for row in check.recompiles if row.call == "the same batch again")
    assert (again.guard, again.function) == ("value", "Branching")
    assert "calls" in again.expression
    assert any(text.endswith(again.remedy) for text in texts(check))


def test_what_is_tried_beside_the_training_is_no_mistake_of_it() -> None:
    """Promise: no anomaly are evaluation's own graph, sizes that the model refuses by itself, and a batch without tensors."""

    class OfFour(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.view(4, 4))

    check = debug.explain_compile(OfFour(4, 2), torch.randn(4, 4))
    assert (check.error, check.problems) == (None, ())
    assert [row.call for row in check.recompiles] == ["no gradients (evaluation)"]
    assert debug.explain_compile(OfWords(), {"words": ["a", "b"]}).error is None


class OfWords(nn.Embedding):
    """Makes its tensors itself."""

    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, words: list[str]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.tensor([len(word) for word in words]))


def test_what_the_model_raises_is_told() -> None:
    """As ``error``, with its message."""
    check = debug.explain_compile(nn.Linear(4, 4), torch.ones(6, 5))
    assert check.error is not None
    assert check.problems[-1].text.startswith("the model raised")
    with pytest.raises(TypeError, match="compile"):
        debug.explain_compile(torch.relu, torch.ones(2))


def test_what_was_compiled_is_compiled_again() -> None:
    """Promise: a compiled model of the program computes the same after it, once it is compiled again; it is not left eager."""
    runs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        del example_inputs
        runs.append(graph)
        return graph.forward

    model = Branching()
    compiled = torch.compile(model, backend=backend)
    expected, graphs = compiled(torch.ones(6, 4)), len(runs)
    assert debug.explain_compile(compiled, torch.ones(6, 4)).error is None
    assert torch.equal(compiled(torch.ones(6, 4)), expected)
    assert len(runs) == 2 * graphs > 0
