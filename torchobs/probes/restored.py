"""What a run loads from checkpoints: the step it goes on from, and parts that are not used.

Unused are keys that fit nowhere, and an optimizer's state that is left in the file. Quiet are adapters (all of their keys
fit), a part of a large checkpoint that fills the whole model, other heads, a teacher's checkpoint, pretrained weights without
an optimizer's state, and optimizers that keep none.

The step is that at which a rank, alive or dead, saved the same file, by size and time of change (:func:`stamp_of`): its flight
file, in the same directory, says it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torchobs import catalog
from torchobs.flight import reader
from torchobs.flight.events import Span
from torchobs.flight.layout import BadFlightFileError
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
        self._left: dict[int, tuple[bool, str | None]] = {}
        """whether an optimizer in a file has a state, and the file's stamp, by the number of its parameters"""
        self._stamp: str | None = None
        """that of the file from which the run goes on"""
        context.training.restored = False
        context.hooks.before_step.register(breaker, self._before_step)
        context.hooks.before_step.due_at = 0

    def read(self, content: Any, file: Any) -> None:
        """Record the optimizers' states in a file."""
        self._context.training.restored = True
        stamp = stamp_of(file)
        self._left |= {parameters: (has_state, stamp) for parameters, has_state in _optimizers(content)}

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
        self._context.training.restored = True
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
        has_state, stamp = self._left.get(len(stepped), (False, None)) if stepped <= loaded else (False, None)
        self._stamp = stamp if optimizer.state or not has_state else None
        if has_state and not optimizer.state:
            of = {"optimizer": type(optimizer).__name__, "parameters": len(stepped)}
            self._context.report("checkpoint_optimizer_unused", **dict[str, Any](of))

    def find_step(self) -> None:
        """Publish the step at which the file was saved from which the run goes on. In the sampler thread."""
        stamp, self._stamp, place = self._stamp, None, self._context.writer.place
        if stamp is None or place is None or not place.is_there():
            return
        for name in reader.names(place.fd):
            with suppress(OSError, BadFlightFileError), closing(reader.open_file(place.fd, name, os.geteuid())) as file:
                for step in _steps_at(file, stamp):
                    self._context.scalars.infer_resumed_from(step)


def stamp_of(file: Any) -> str | None:
    """Return what a file keeps when it is renamed, or copied with its times; ``None`` if it is no path."""
    if isinstance(file, (str, os.PathLike)):
        with suppress(OSError):
            status = os.stat(file)  # noqa: PTH116  # it may be any os.PathLike
            return f"{status.st_mtime_ns}-{status.st_size}"
    return None


def _steps_at(file: reader.FlightFile, stamp: str) -> list[float]:
    """Return the steps of the run at which a rank saved the file with that stamp, if it is known where that began."""
    done = [item.attributes["step"] for item in file.events(stamp) if isinstance(item, Span) and item.is_ours]
    points = file.read().points if done else ()
    before = [point.value for point in points if point.series.name == catalog.STEPS_RESUMED_FROM.name]
    return [float(steps + done[-1]) for steps in before if isinstance(steps, (int, float))]


def _optimizers(content: Any, depth: int = 2) -> Iterator[tuple[int, bool]]:
    """Yield the number of parameters of each optimizer, and whether it has a state, down to lists in a dictionary.

    A file may hold anything under the name ``state``: a tensor, which has no truth value, and on a device would wait for it.
    """
    if not isinstance(content, (dict, list, tuple)):
        return
    state, groups = (content.get("state"), content.get("param_groups")) if isinstance(content, dict) else (None, None)
    if isinstance(state, Mapping) and isinstance(groups, list):
        parameters = [group.get("params") for group in groups if isinstance(group, dict)]
        yield sum(len(group) for group in parameters if isinstance(group, list)), bool(state)
    elif depth:
        for value in islice(content.values() if isinstance(content, dict) else content, _MOST_SEARCHED):
            yield from _optimizers(value, depth - 1)
