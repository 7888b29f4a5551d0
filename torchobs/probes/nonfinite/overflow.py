"""What a step has made of its gradients: whether they may have overflowed in float16, or were finite.

A float16 is at most 65504, and a gradient may be larger though the loss itself fits. A loss scaler leaves such steps out
(Micikevicius et al. 2018, section 3.2). Without one the optimizer steps with infinity, and the next loss is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs.probes.nonfinite.values import Condition, condition

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchobs.probes.nonfinite.graph import GraphNode

SHARE_OF_STEP = 2
"""From so many parameters on they are what a step made of its gradients, not one bad weight"""


def computes_in_float16(parameters: Iterable[Any], nodes: Iterable[GraphNode] = ()) -> bool:
    """Return True if parameters are float16, or results in the graph are, as under autocast."""
    import torch  # torch is optional until training begins

    results = (each for node in nodes for each in getattr(node.function, "_input_metadata", ()))  # private: without it, False
    return any(each.dtype is torch.float16 for each in parameters) or any(
        getattr(each, "dtype", None) is torch.float16 for each in results
    )


def is_of_a_step(bad: Sequence[Any], optimizers: Iterable[Any]) -> bool:
    """Return True if an optimizer's step made these parameters non-finite: there are several, or it has kept such gradients."""
    return len(bad) >= SHARE_OF_STEP or any(_keeps_bad_values(optimizer, each) for each in bad for optimizer in optimizers)


def gradients_were_finite(bad: Sequence[Any], optimizers: Iterable[Any]) -> bool:
    """Return True if what an optimizer keeps for one of these parameters is finite: its gradients were as well."""
    return any(_keeps_finite_values(optimizer, each) for each in bad for optimizer in optimizers)


def _keeps_finite_values(optimizer: Any, parameter: Any) -> bool:
    kept = [value for value in _kept_for(optimizer, parameter) if value.shape == parameter.shape and value.is_floating_point()]
    return bool(kept) and all(condition(value) is Condition.FINITE for value in kept)


def _keeps_bad_values(optimizer: Any, parameter: Any) -> bool:
    return any(condition(value) is not Condition.FINITE for value in _kept_for(optimizer, parameter))


def _kept_for(optimizer: Any, parameter: Any) -> list[Any]:
    import torch  # torch is optional until training begins

    state = optimizer.state.get(parameter)
    return [value for value in list(state.values()) if isinstance(value, torch.Tensor)] if isinstance(state, dict) else []
