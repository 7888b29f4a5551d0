"""What people compile, export and trace with their own code gives the same graphs with our hooks as without."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from tests.training import mlp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Function = Callable[[torch.Tensor], Any]


class Frozen(nn.Module):
    """Keeps a part of itself in ``eval()``, as batch norms are frozen."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.part = mlp()

    def train(self, mode: bool = True) -> Frozen:  # noqa: FBT001, FBT002  # torch's signature
        """Train, but for that part."""
        super().train(mode)
        self.part.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> Any:
        """Go through it."""
        self.train()
        return self.part(inputs)


def trained() -> tuple[nn.Sequential, torch.optim.SGD]:
    """A model with gradients and an optimizer that has stepped."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def mode(training: bool) -> Function:  # noqa: FBT001  # what is asked for
    """``train()`` or ``eval()`` before the forward."""
    model = mlp()
    return lambda inputs: model.train(mode=training)(inputs)  # noqa: PLW0108  # in what is compiled, not before


def evaluation() -> Function:
    """Both, around a forward, in a function decorated with ``no_grad``."""
    model = mlp()

    @torch.no_grad()
    def function(inputs: torch.Tensor) -> Any:
        model.eval()
        outputs = model(inputs)
        model.train()
        return outputs

    return function


def assigned(name: str, value: object) -> Function:
    """A module is given something."""
    model = mlp()

    def function(inputs: torch.Tensor) -> Any:
        setattr(model, name, value)
        return model(inputs)

    return function


def registered(method: str, value: object) -> Function:
    """The same by a method."""
    model = mlp()

    def function(inputs: torch.Tensor) -> Any:
        getattr(model, method)("more", value)
        return model(inputs)

    return function


def containers() -> Function:
    """Containers that are made in the region."""
    model = mlp()

    def function(inputs: torch.Tensor) -> Any:
        listed = nn.ModuleList([model])
        listed.append(nn.Sequential(nn.ReLU(), model[0]))
        return listed[0](inputs)

    return function


def checkpointed() -> Function:
    """``train()`` in a checkpointed part."""
    inner = mode(training=True)
    return lambda inputs: checkpoint(inner, inputs, use_reentrant=False)


def clipped(by_value: bool) -> Function:  # noqa: FBT001  # which of the two
    """Clipping."""
    model, _ = trained()

    def function(inputs: torch.Tensor) -> Any:
        if by_value:
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            return inputs + 1
        return inputs + nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return function


def autocast() -> Function:
    """A forward in mixed precision."""
    model = mlp()

    def function(inputs: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs)

    return function


def backward() -> Function:
    """A whole forward and backward."""
    model = mlp()

    def function(inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(inputs).sum()
        torch.autograd.backward(loss)
        return torch.zeros(1) + loss.detach()

    return function


def step(scaled: bool) -> Function:  # noqa: FBT001  # with a loss scaler
    """A whole step."""
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)

    def function(inputs: torch.Tensor) -> torch.Tensor:
        model.train()
        loss: torch.Tensor = model(inputs).sum()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return function


def scheduled(make: Callable[[torch.optim.Optimizer], Any], *given: float) -> Function:
    """A scheduler's step, after the optimizer's."""
    _, optimizer = trained()
    scheduler = make(optimizer)

    def function(inputs: torch.Tensor) -> torch.Tensor:
        scheduler.step(*given)
        return inputs + 1

    return function


def loaded() -> Function:
    """An iteration over a data loader."""
    loader = DataLoader(TensorDataset(torch.ones(4, 8)), batch_size=2)

    def function(inputs: torch.Tensor) -> torch.Tensor:
        for (given,) in loader:
            inputs = inputs + given  # a sum
        return inputs

    return function


def saved() -> Function:
    """A save, and a load."""

    def function(inputs: torch.Tensor) -> Any:
        buffer = io.BytesIO()
        torch.save(inputs, buffer)
        buffer.seek(0)
        return torch.load(buffer) + 1

    return function


def described() -> Function:
    """What the script says itself."""

    def function(inputs: torch.Tensor) -> torch.Tensor:
        with torchobs.phase("data"):
            torchobs.log(loss=1.0)
            torchobs.event("test")
        return inputs + 1

    return function


def zeroed() -> Function:
    """Gradients are zeroed by the module and by the optimizer."""
    model, _ = trained()

    def function(inputs: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        return inputs + 1

    return function


CASES: dict[str, Callable[[], Function]] = {
    "train": lambda: mode(training=True),
    "eval": lambda: mode(training=False),
    "train of a module's own": Frozen,
    "no_grad": evaluation,
    "assigned parameter": lambda: assigned("more", nn.Parameter(torch.ones(2))),
    "register_parameter": lambda: registered("register_parameter", nn.Parameter(torch.ones(2))),
    "add_module": lambda: registered("add_module", nn.Identity()),
    "containers": containers,
    "checkpoint": checkpointed,
    "clip_grad_norm_": lambda: clipped(by_value=False),
    "clip_grad_value_": lambda: clipped(by_value=True),
    "autocast": autocast,
    "backward": backward,
    "step": lambda: step(scaled=False),
    "scaled step": lambda: step(scaled=True),
    "StepLR": lambda: scheduled(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)),
    "loader": loaded,
    "save": saved,
    "torchobs": described,
    "zero_grad": zeroed,
}


class Compiled(NamedTuple):
    """What came of it."""

    outcome: str
    operations: tuple[tuple[str, ...], ...] = ()
    breaks: int = 0


def compiled(function: Function, *, fullgraph: bool) -> Compiled:
    """Compile and call it; with the operations of each graph."""
    torch._dynamo.reset()
    counters.clear()
    graphs: list[tuple[str, ...]] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(tuple(sorted(str(node.target) for node in graph.graph.nodes if "call" in node.op)))
        return graph.forward

    outcome = attempt(lambda: torch.compile(function, backend=backend, fullgraph=fullgraph)(torch.ones(2, 8)))
    return Compiled(outcome, tuple(graphs), sum(Counter(counters["graph_break"]).values()))


def attempt(act: Callable[[], object]) -> str:
    """Do it; return what it raised."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            act()
        except Exception as error:  # noqa: BLE001  # whatever torch says to it
            return type(error).__name__
    return ""


def exported(function: Function, *, strict: bool) -> Compiled:
    """Export it."""
    torch._dynamo.reset()
    nodes: list[tuple[str, ...]] = []

    class Whole(nn.Module):
        def forward(self, inputs: torch.Tensor) -> Any:
            return function(inputs)

    def act() -> None:
        graph = torch.export.export(Whole(), (torch.ones(2, 8),), strict=strict).graph
        nodes.append(tuple(str(node.target) for node in graph.nodes))

    return Compiled(attempt(act), tuple(nodes))


def traced(function: Function, *, by_jit: bool) -> Compiled:
    """Trace it, on the old way or by ``make_fx``."""
    nodes: list[tuple[str, ...]] = []

    def act() -> None:
        if by_jit:
            made = torch.jit.trace(function, (torch.ones(2, 8),), check_trace=False)  # type: ignore[no-untyped-call]
            nodes.append(tuple(node.kind() for node in made.graph.nodes()))
        else:
            nodes.append(tuple(str(node.target) for node in make_fx(function)(torch.ones(2, 8)).graph.nodes))

    return Compiled(attempt(act), tuple(nodes))


WAYS: dict[str, Callable[[Function], Compiled]] = {
    "fullgraph": lambda function: compiled(function, fullgraph=True),
    "compile": lambda function: compiled(function, fullgraph=False),
    "export": lambda function: exported(function, strict=False),
    "strict export": lambda function: exported(function, strict=True),
    "make_fx": lambda function: traced(function, by_jit=False),
    "jit.trace": lambda function: traced(function, by_jit=True),
}


def by_all_ways(make: Callable[[], Function]) -> dict[str, Compiled]:
    """Do it, with what this torch can compile of backward passes compiled."""
    with config.patch(trace_autograd_ops=True) if hasattr(config, "trace_autograd_ops") else contextlib.nullcontext():
        return {way: act(make()) for way, act in WAYS.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_the_graphs_are_those_without_torchobs(flight_dir: Path, case: str) -> None:
    """The same outcome, the same operations in as many graphs, and no graph break more; no probe fails on the way.

    Fewer breaks are possible where an optimizer steps: Dynamo gives up on its hooks before it comes to a break of torch's own.
    """
    expected = by_all_ways(CASES[case])
    session = torchobs.init(flight_dir=flight_dir)
    try:
        found = by_all_ways(CASES[case])
        assert session.context is not None
        assert [breaker.probe for breaker in session.context.breakers.values() if breaker.errors] == []
    finally:
        torchobs.shutdown()
        torch._dynamo.reset()
    for way, plain in expected.items():
        assert found[way]._replace(breaks=0) == plain._replace(breaks=0), way
        assert found[way].breaks <= plain.breaks, way
