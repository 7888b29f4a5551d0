"""The loss of a model and a batch by a person's ``loss_fn``: one place for all toolboxes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from torchobs.support.arguments import is_number
from torchobs.tensors.batches import call, is_sequence, walk

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS = "loss_fn(model, batch), or loss_fn(output, target)"
_MODEL_NAMES = frozenset({"model", "module", "net", "network"})
"""Names of a first parameter that takes the model"""
_PAIR = 2


def compute_loss(model: Any, batch: Any, loss_fn: Callable[..., Any] | None = None, *, target: Any = None) -> Any:
    """Run a model's forward pass on a batch, and return its loss.

    A ``loss_fn`` with a first parameter named ``model`` (or ``module``, ``net``, ``network``) is called with the model and
    the batch, and calls the model itself. Any other is called with the model's output and, if it takes two arguments, with
    ``target``; where none is given, with the last item of a batch that is a tuple or a list, which the model does not get
    then, else with the batch. Without ``loss_fn`` the loss is the output's ``loss``, or the sum of its floating-point tensors.

    The model is called with a tensor as its only argument, a tuple as its arguments, a mapping as its keyword arguments.

    Returns:
        What ``loss_fn`` returns; ``None`` without one if the output has no floating-point tensor.

    Raises:
        TypeError: ``loss_fn`` is no function, takes neither one argument nor two, or takes the model and there is a target.
    """
    if loss_fn is None:
        return output_loss(call(model, batch))
    parameters = parameters_of(loss_fn)
    if parameters[0] in _MODEL_NAMES:
        if target is not None:
            raise TypeError(
                "loss_fn(model, batch) takes no target: it is part of the batch; target= is for loss_fn(output, target)"
            )
        return loss_fn(model, batch)
    if target is not None:
        return loss_fn(call(model, batch), target)
    if len(parameters) == 1:
        return loss_fn(call(model, batch))
    if is_sequence(batch) and len(batch) >= _PAIR:
        *inputs, last = batch
        return loss_fn(call(model, inputs[0] if len(inputs) == 1 else tuple(inputs)), last)
    return loss_fn(call(model, batch), batch)


def mean_loss(model: Any, batch: Any, loss_fn: Callable[..., Any]) -> torch.Tensor:
    """Return the result of :func:`compute_loss`, where a loss function has to return one number.

    Raises:
        TypeError: it returns something else.
    """
    loss = compute_loss(model, batch, loss_fn)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        problem = f"one of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn returns the mean loss, a tensor of one number, not {problem}")
    return loss


def output_loss(output: Any) -> Any:
    """Return an output's own ``loss``, or the sum of its floating-point tensors; ``None`` if it has none."""
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for _, tensor in walk(output)]
    # in float64, where the device has it, so that the sum of finite numbers is finite
    sums = [tensor.sum(dtype=wide_type(tensor.device)) for tensor in tensors if tensor.is_floating_point()]
    return torch.stack([total.to(sums[0].device) for total in sums]).sum() if sums else None


def wide_type(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def check_trained(model: Any, **parts: Any) -> None:
    """Raise for a model that computes nothing, and for a ``loss_fn``, ``optimizer`` or ``max_grad_norm`` that cannot be used.

    Raises:
        TypeError: one is of another type, or the optimizer needs a closure; the message says what to give.
        ValueError: the model is on the device meta, the optimizer has none of its parameters, the norm is none (None is no
            clipping), or gradients to clip are sparse.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a torch.nn.Module, not {type(model).__name__}")
    if is_without_values(model):
        raise ValueError("the model is on the device meta, where nothing is computed: move it to a real one first")
    if (limit := parts.get("max_grad_norm")) is not None:
        if not (is_number(limit) and limit > 0):
            raise ValueError(f"max_grad_norm is {limit!r}; it is a number above 0, or None to clip nothing")
        if any(getattr(module, "sparse", False) is True for module in model.modules()):
            raise ValueError("torch clips no sparse gradients, as of an embedding with sparse=True: pass max_grad_norm=None")
    if "loss_fn" in parts:
        parameters_of(parts["loss_fn"])
    if "optimizer" in parts:
        _check_optimizer(model, parts["optimizer"])


def _check_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is one of torch.optim over the model's parameters, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS calls a closure several times in a step, and there is none here: use another optimizer")
    if not has_parameters_of(optimizer, model):
        raise ValueError("the optimizer has none of the model's parameters: make it of model.parameters()")


def is_without_values(model: torch.nn.Module) -> bool:
    """Return whether a model is on the device meta, and not offloaded by accelerate, which brings the values when needed."""
    tensors = [*model.parameters(), *model.buffers()]
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return bool(tensors) and all(tensor.is_meta for tensor in tensors) and not is_offloaded


def has_parameters_of(optimizer: Any, model: Any) -> bool:
    """Return whether an optimizer has some of a model's parameters, or the model has none."""
    ids = set(map(id, model.parameters()))
    return not ids or any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])


def parameters_of(loss_fn: Any) -> list[str]:
    """Return the names of positional parameters without a default; without a signature, those of torch's losses."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a function, {FORMS}, not {type(loss_fn).__name__}")
    if isinstance(loss_fn, type):
        raise TypeError(f"loss_fn is a function, {FORMS}, not a class: {loss_fn.__name__}() makes one")
    function = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ["input", "target"]
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    parameters = list(signature.parameters.values())
    required = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    names = [parameter.name for parameter in required if parameter.kind in positional]
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        names += ["input", "target"][len(names) :]
    if len(names) not in {1, _PAIR}:
        raise TypeError(f"loss_fn takes {len(names)} arguments; it is {FORMS}")
    return names
