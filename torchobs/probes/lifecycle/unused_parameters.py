"""Names of the parameters that DistributedDataParallel's error about missing gradients gives by their indices."""

from __future__ import annotations

import re
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, Any

from torchobs.probes.lifecycle.exceptions import root_cause

if TYPE_CHECKING:
    from collections.abc import Iterator

_INDICES = re.compile(r"^Parameter indices which did not receive grad for rank \d+: (\d[\d ]*?)( \.\.\.)?$", re.MULTILINE)
"""In the message of ``reducer.cpp`` (``Reducer::ensure_prior_reduction_finished``), which has the first hundred"""
_FILE = "torch/nn/parallel/distributed.py"
_MAX_NAMED = 8
_MAX_NAME = 120


class UnusedParameters:
    """Names of the parameters of DDP modules in the order of their reducers."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()

    def add(self, model: Any) -> None:
        """Keep the names of a module that has just been made: what requires a gradient may be changed later on."""
        self._names[model] = list(_names(model))

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Return attributes of the exception's event; empty for another error, and where a name would be uncertain."""
        error = root_cause(error)
        message = error.args[0] if isinstance(error, RuntimeError) and error.args else None
        found = _INDICES.search(message) if type(message) is str else None
        model = _raising(error) if found is not None else None
        if found is None or model is None:
            return {}
        indices = [int(text) for text in found[1].split()]
        names = self._names[model] if model in self._names else _names_now(model)
        if not indices or max(indices) >= len(names):
            return {}
        named = [names[index][:_MAX_NAME] for index in indices[:_MAX_NAMED]]
        counted = {} if found[2] else {"unused_count": len(indices)}
        return {"unused": named, **counted, "unused_of": type(model.module).__qualname__[:_MAX_NAME]}


def _raising(error: BaseException) -> Any:
    """Return the DDP module in which it was raised; ``None`` if the traceback has none."""
    from torch.nn.parallel import DistributedDataParallel

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename.endswith(_FILE)]
    owners = [frame.f_locals.get("self") for frame in reversed(frames)]
    return next((owner for owner in owners if isinstance(owner, DistributedDataParallel)), None)


def _names_now(model: Any) -> list[str]:
    """Return the names of a module made before ``init()``, if the reducer has as many parameters of the same size.

    Asking the reducer may wait for a backward pass, which the thread that raised does not run.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    data = model._get_ddp_logging_data()
    parameters = [parameter for _, parameter in _parameters(model)]
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    same = (len(parameters), size) == (data.get("num_parameter_tensors"), data.get("total_parameter_size_bytes"))
    return list(_names(model)) if same else []


def _names(model: Any) -> Iterator[str]:
    return (name for name, _ in _parameters(model))


def _parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield what ``DistributedDataParallel._build_params_for_reducer`` collects, with names."""
    known = set[int]()
    for prefix, module in model.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            ignored = f"{prefix}.{name}" in model.parameters_to_ignore
            if parameter.requires_grad and not ignored and id(parameter) not in known:
                known.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter
