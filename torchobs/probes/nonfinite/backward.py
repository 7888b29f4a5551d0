"""Find the node that made the gradients of a finite loss non-finite by its derivative: ``sqrt`` at 0, ``log`` behind a mask.

After the backward pass its values are gone, but not its graph: the gradient turned at a node below which all parameters got
non-finite gradients, and above which none did. Of the nodes there with a possibly infinite derivative, the likeliest is named.
With hooks on the nodes, in the next backward pass, it is seen (:class:`BackwardWatch`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchobs.tensors.values import Condition, condition, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torchobs.support.error_guard import CircuitBreaker
    from torchobs.tensors.graph import GraphNode

LEAST_AGREEMENT = 0.6
"""Share that the gradients below a node and those that are not finite need to have in common, for it to explain them"""
RISKY_BACKWARD = {
    "sqrt": 0, "hypot": 0, "pow": 1, "log": 1, "div": 1, "acos": 1, "asin": 1, "reciprocal": 1, "xlogy": 1, "log2": 1,
    "log10": 1, "log1p": 1, "linalg_eigh": 1, "linalg_svd": 1, "acosh": 1, "atanh": 1, "logit": 1, "rsqrt": 2, "exp": 2,
    "logsumexp": 2, "prod": 2, "cumprod": 2,
}  # fmt: skip
"""Operators with an infinite or undefined derivative at some finite value, the likeliest first: sqrt at 0.

Torch makes that of norms, deviations, distances and ``atan2`` 0, and bounds that of the binary cross entropy.
"""
_WRITTEN_BY_USER = 3
"""Risk of a derivative that the user has written: after all that can be infinite somewhere"""


def likely_node(nodes: Sequence[GraphNode], bad: Collection[int]) -> GraphNode | None:
    """Return the node that most likely caused the non-finite gradients of these parameters (ids); ``None`` for none."""
    order = {id(node.parameter): 1 << place for place, node in enumerate(n for n in nodes if n.parameter is not None)}
    target = sum(order[key] for key in bad if key in order)
    if not target:
        return None
    below: dict[GraphNode, int] = {}
    best: tuple[float, ...] | None = None
    likely = None
    for node in nodes:  # leaves first, then in the order of the forward pass
        if node.parameter is not None:
            below[node] = order[id(node.parameter)]
            continue
        reached = 0
        for producer, _ in node.inputs:
            reached |= below.get(producer, 0) if producer is not None else 0
        below[node] = reached
        risk = RISKY_BACKWARD.get(node.operator, _WRITTEN_BY_USER if _is_users(node.function) else None)
        if risk is None or not reached or _is_harmless(node):
            continue
        agreement = (reached & target).bit_count() / (reached | target).bit_count()
        rank = (-agreement, risk, node.number)
        if agreement >= LEAST_AGREEMENT and (best is None or rank < best):
            best, likely = rank, node
    return likely


def _is_users(function: Any) -> bool:
    """Return whether it is a ``torch.autograd.Function`` of the user's, not one of torch's."""
    user_class = getattr(function, "_forward_cls", None)
    return user_class is not None and not user_class.__module__.startswith("torch.")


def _is_harmless(node: GraphNode) -> bool:
    """Return whether it is a power with a derivative that is finite everywhere, or a division by a constant."""
    exponent = node.settings().get("exponent") if node.operator == "pow" else None
    constant = node.operator == "div" and len(node.inputs) > 1 and node.inputs[1][0] is None
    return constant or (isinstance(exponent, (int, float)) and exponent >= 1)


class BackwardWatch:
    """Hooks on every node of a graph, for one backward pass: the first that makes a non-finite gradient of finite ones."""

    def __init__(self, nodes: Sequence[GraphNode], notify: Callable[[GraphNode], object], breaker: CircuitBreaker) -> None:
        """Install the hooks.

        Args:
            nodes: of the graph.
            notify: called with that node at once, while it still has the values that it has kept.
            breaker: whatever fails in a hook trips it; the hooks are removed then.
        """
        self._notify: Callable[[GraphNode], object] | None = notify
        self._queued, self._breaker = False, breaker
        self._handles = [node.function.register_hook(self._hook(node)) for node in nodes if node.parameter is None]

    def _hook(self, node: GraphNode) -> Any:
        look = self._breaker.guard(partial(self._examine, node))

        def see(results: Sequence[Any], incoming: Sequence[Any]) -> None:
            look(results, incoming)
            if self._breaker.is_open:
                self.remove()

        return see

    def _examine(self, node: GraphNode, results: Sequence[Any], incoming: Sequence[Any]) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.remove)
        notify = self._notify
        if notify is not None and any(map(_odd, results)) and not any(map(_odd, incoming)):
            self._notify = None
            notify(node)

    def remove(self) -> None:
        """Remove the hooks, which would keep the graph alive. Idempotent; the end of the backward pass does it."""
        self._notify = None
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _odd(gradient: Any) -> bool:
    return gradient is not None and condition(gradient) in {Condition.BAD, Condition.MASKED}


def bad_gradients(parameters: Iterable[Any]) -> list[Any]:
    """Return the parameters with a gradient that is not finite; on a device with one transfer for all of them."""
    bad, later = [], list[tuple[Any, Any]]()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = plain(gradient)
        if values is not None and not values.is_cpu and values.numel():
            later.append((parameter, values))
        elif condition(gradient) in {Condition.BAD, Condition.MASKED}:
            bad.append(parameter)
    if later:
        device = later[0][1].device
        sound = torch.stack([values.abs().amax().isfinite().to(device) for _, values in later]).tolist()
        bad += [parameter for (parameter, _), is_sound in zip(later, sound, strict=True) if not is_sound]
    return bad
