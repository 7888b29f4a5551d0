"""What a loss was computed of; whether a forward pass takes derivatives of its own (physics-informed networks)."""

from __future__ import annotations

import re
from typing import Any

_AUTOGRAD_REFUSES = re.compile(r"requires?[ _]grad")
"""In what autograd says of a tensor that has no graph: "element 0 of tensors does not require grad", "requires_grad=False" """


def wants_gradients(message: str) -> bool:
    """Return True if an error's message is autograd's of a tensor without gradients: the pass works where they are on."""
    return _AUTOGRAD_REFUSES.search(message) is not None


def nodes_of(loss: Any) -> list[Any]:
    """Return the nodes of the graph of a loss; none of one that has no graph."""
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        following = {next_node for next_node, _ in node.next_functions if next_node is not None} - seen
        seen |= following
        nodes += following
    return nodes


def leaves_of(loss: Any) -> list[Any]:
    """Return the tensors to which a backward pass from a loss with a graph adds gradients."""
    return [node.variable for node in nodes_of(loss) if node.name() == "torch::autograd::AccumulateGrad"]
