"""Which graphs of compiled regions may be run again, and what is known of their nodes and inputs."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import fx
from torch.nn import functional

from torchobs.probes.nonfinite.captured_graph import MOST_NODES, CapturedGraph, ModulePaths, NotRepeatableError, Site, capture

if TYPE_CHECKING:
    from collections.abc import Callable


def graph_of(target: Callable[..., Any] | str, kind: str = "call_function", *, root: Any = None) -> fx.GraphModule:
    """A graph that calls this with its one input."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.create_node(kind, target, (x,)))
    return fx.GraphModule(torch.nn.Module() if root is None else root, graph)


def users(x: Any) -> Any:
    """A function that the user has allowed in graphs."""
    return x


@pytest.mark.parametrize(
    "target",
    [
        *(torch.log, functional.relu, functional.max_pool2d, torch.fft.fft, torch.linalg.norm, torch.special.erf, operator.neg),
        *(torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.sin.default, torch.ops.aten.cos),
        *(torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast),
    ],
)
def test_what_computes_may_be_repeated(target: Callable[..., Any]) -> None:
    """Torch's functions and operators, Python's operators, and what ends with the run."""
    assert isinstance(capture(graph_of(target)), CapturedGraph)


@pytest.mark.parametrize(
    "target",
    [
        *(users, torch.manual_seed, torch.set_rng_state, torch._C._set_deterministic_algorithms, torch.set_default_dtype),
        *(
            torch.cuda.synchronize,
            torch.distributed.all_reduce,
            torch.ops._c10d_functional.all_reduce,
            torch.ops.higher_order.cond,
        ),
        *(torch.func.vmap, torch.autograd.grad, torch.jit.script),
    ],
)
def test_what_may_do_more_than_compute_is_not_repeated(target: Callable[..., Any]) -> None:
    """Code of the user's, states of torch's, collectives, devices, transformations."""
    with pytest.raises(NotRepeatableError):
        capture(graph_of(target))


@pytest.mark.parametrize("method", ["register_hook", "set_", "requires_grad_", "backward"])
def test_methods_that_do_more_are_not_repeated(method: str) -> None:
    """Of a tensor, as others may be."""
    assert isinstance(capture(graph_of("abs", "call_method")), CapturedGraph)
    with pytest.raises(NotRepeatableError):
        capture(graph_of(method, "call_method"))


def test_neither_modules_nor_very_large_graphs_are_repeated() -> None:
    """A module's code is the user's, and its hooks."""
    root = torch.nn.Module()
    root.inner = torch.nn.ReLU()
    with pytest.raises(NotRepeatableError):
        capture(graph_of("inner", "call_module", root=root))
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(MOST_NODES):
        x = graph.call_function(torch.neg, (x,))
    graph.output(x)
    with pytest.raises(NotRepeatableError):
        capture(fx.GraphModule(torch.nn.Module(), graph))


class Source(NamedTuple):
    """Dynamo's, by the name alone."""

    name: Any


class Argument(NamedTuple):
    """Dynamo's of an input."""

    source: Source


@pytest.mark.parametrize("wrapped", [str, lambda text: lambda: text], ids=["attribute", "method"])
def test_modules_are_named_as_the_model_does(wrapped: Callable[[str], Any]) -> None:
    """The inner model of a larger one; a module that is reached by another way has the name of the one around it."""
    module = graph_of(torch.log)
    (x,) = module.graph.find_nodes(op="placeholder")
    name = "L['self']._modules['blocks']._modules['0']._parameters['weight']"
    x.meta |= {"grapharg": Argument(Source(wrapped(name))), "example_value": torch.ones(1)}
    captured = capture(module)
    (given,) = captured.inputs
    assert given == ("L['self']", "blocks.0.weight", True, True, False)
    paths = ModulePaths(captured, ["encoder.blocks.0.weight"], {"encoder", "encoder.blocks.0", "encoder.norm"})
    for modules, path in {
        ("L['self'].blocks.0",): "encoder.blocks.0",
        ("L['self'].norm", "L['self']"): "encoder.norm",
        ("G['hidden'].act", "L['self'].blocks.0.forward.__self__.act", "L['self'].norm"): "encoder.norm",
        (): "encoder",
    }.items():
        assert paths.of(Site(modules, "")) == path
    assert ModulePaths(captured, [""], ()).of(Site(("L['self'].norm",), "")) is None
