"""Unused parts of a checkpoint that a run loads: keys that fit nowhere, and an optimizer's state that is left in the file.

Quiet are adapters (all of their keys fit), a part of a large checkpoint that fills the whole model, other heads, a teacher's
checkpoint, pretrained weights without an optimizer's state, and optimizers that keep none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torchobs.support.error_guard import call

if TYPE_CHECKING:
    import torch

    from torchobs.probes.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

FEW = 10
"""Fewer than one key in so many fits: a prefix such as ``module.`` is the usual reason"""
_MOST_SEARCHED = 64
"""Items of a file that are searched: it may be a data cache"""


class Restored:
    """Follows ``torch.load`` and ``Module.load_state_dict`` to the first step of an optimizer."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        self._context, self._breaker = context, breaker
        self._whole = WeakSet[Any]()
        """modules that got all of their state"""
        self._left: set[int] = set()
        """numbers of parameters of the optimizers with a state in a file"""
        context.hooks.before_step.register(breaker, self._before_step)
        context.hooks.before_step.due_at = 0

    def read(self, content: Any) -> None:
        """Record the optimizers' states in a file."""
        self._left |= set(_optimizers(content))

    def watched(self, original: Any) -> Any:
        """Return ``Module.load_state_dict`` with a look at its result."""
        breaker, compare = self._breaker, self._compare

        @functools.wraps(original)
        def load_state_dict(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            call(breaker, compare, args[0], args[1] if len(args) > 1 else kwargs.get("state_dict", {}), result)
            return result

        return load_state_dict

    def _compare(self, module: Any, state: Any, result: Any) -> None:
        missing, unexpected, keys = result.missing_keys, result.unexpected_keys, len(state)
        if not missing:
            self._whole.add(module)
        matched = max(0, keys - len(unexpected))  # a module's own hook may have added keys
        if matched * FEW < min(keys, matched + len(missing)):
            of = {"model": type(module).__name__, "unexpected": unexpected[0], "missing": missing[0]}
            self._context.report("checkpoint_keys_unused", **of, keys=keys, matched=matched)

    def _before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:  # noqa: FBT001  # a listener
        del closure
        self._context.hooks.before_step.unregister(self._breaker.probe)  # each listener costs every measured step
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        loaded = {id(parameter) for module in self._whole for parameter in module.parameters()}
        if len(stepped) in self._left and not optimizer.state and stepped <= loaded:
            of = {"optimizer": type(optimizer).__name__, "parameters": len(stepped)}
            self._context.report("checkpoint_optimizer_unused", **dict[str, Any](of))
        self._whole.clear()


def _optimizers(content: Any, depth: int = 2) -> Iterator[int]:
    """Yield the number of parameters of each optimizer's state that is not empty, down to lists in a dictionary.

    A file may hold anything under the name ``state``: a tensor, which has no truth value, and on a device would wait for it.
    """
    if not isinstance(content, (dict, list, tuple)):
        return
    state, groups = (content.get("state"), content.get("param_groups")) if isinstance(content, dict) else (None, None)
    if isinstance(state, Mapping) and state and isinstance(groups, list):
        parameters = [group.get("params") for group in groups if isinstance(group, dict)]
        yield sum(len(group) for group in parameters if isinstance(group, list))
    elif depth:
        for value in islice(content.values() if isinstance(content, dict) else content, _MOST_SEARCHED):
            yield from _optimizers(value, depth - 1)
