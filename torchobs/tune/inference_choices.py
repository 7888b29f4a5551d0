"""Which kernel of attention, quantisation and recorded graph a plan uses: all of them only where they are asked for."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchobs.tune.attention import PreferredAttention
from torchobs.tune.decisions import Choice, Request, reclass_obstacle, skip, use
from torchobs.tune.inference import DynamicQuantization, Graph, TorchaoQuantization, torchao_obstacle

if TYPE_CHECKING:
    from collections.abc import Iterator


def attention(request: Request) -> Choice:
    """Prefer the kernel that is asked for."""
    name = "attention"
    if request.attention is None:
        return skip(name, "torch chooses the kernel; pass attention= to prefer one")
    if (obstacle := reclass_obstacle(request.model)) is not None:
        return skip(name, obstacle)
    if request.attention in {"memory_efficient", "cudnn"} and request.device.type != "cuda":
        return skip(name, f"{request.device.type} has no kernel {request.attention!r}")
    other = "" if request.attention == "math" else ", math where it cannot run"
    reason = f"{request.attention}{other}; attention_kernels(batch) tells which ran"
    return use(name, reason, PreferredAttention([request.model], request.attention))


def quantization(request: Request) -> Choice:
    """Quantise linear layers, by torch.ao or by torchao."""
    name = "quantization"
    if request.quantize is None:
        return skip(name, "changes the outputs; pass quantize= to have it")
    linear = list(_linear_layers(request.model))
    if not linear:
        return skip(name, "the model has no nn.Linear with float32 weights")
    return _dynamic(request, linear) if request.quantize == "dynamic" else _torchao(request, linear)


def _dynamic(request: Request, linear: list[nn.Module]) -> Choice:
    name = "quantization"
    if request.device.type != "cpu":
        return skip(name, "torch.ao quantises dynamically on CPUs alone; pass quantize='torchao_int8'")
    if importlib.util.find_spec("torch.ao.nn.quantized.dynamic") is None:
        return skip(name, "this torch has torch.ao no more; pass quantize='torchao_int8'")
    if torch.backends.quantized.engine == "none":
        return skip(name, "this torch was built without kernels for 8-bit integers")
    if (obstacle := next(filter(None, map(reclass_obstacle, linear)), None)) is not None:
        return skip(name, obstacle)
    reason = f"{len(linear)} × Linear in 8-bit integers by torch.ao (deprecated), where nothing asks for gradients"
    return use(name, reason, DynamicQuantization(linear))


def _torchao(request: Request, linear: list[nn.Module]) -> Choice:
    if importlib.util.find_spec("torchao") is None:
        return skip("quantization", "torchao is not installed: pip install 'torchobs[torchao]'")
    if (obstacle := torchao_obstacle()) is not None:
        return skip("quantization", f"this torchao does not fit this torch: {obstacle}")
    what = "weights and inputs" if request.quantize == "torchao_int8" else "weights"
    reason = f"{what} of {len(linear)} × Linear in 8-bit integers by torchao"
    return use("quantization", reason, TorchaoQuantization(request.model, str(request.quantize), linear))


def _linear_layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        # a weight that is computed before each call (weight_norm), or of a class of its own, would not be what is quantised
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.dtype is torch.float32:
            yield module


def graph(request: Request) -> Choice:
    """Record a graph of the example's forward pass."""
    name = "graph"
    if request.graph is None:
        return skip(name, "is for calls of one shape; pass graph='export' to have it")
    if request.example is None:
        return skip(name, "is recorded from an example: pass example=")
    if isinstance(request.model, torch.jit.ScriptModule) or vars(request.model).get("_compiled_call_impl") is not None:
        return skip(name, "the model is compiled already")
    if request.quantize == "dynamic":
        return skip(name, "quantised layers of torch.ao cannot be recorded")
    if any(module._forward_hooks or module._forward_pre_hooks for module in request.model.modules()):
        return skip(name, "the model has hooks, which a graph would not call")

    def failed(reason: str) -> None:
        request.failed(name, reason)

    words = "torch.export" if request.graph == "export" else "TorchScript (deprecated by torch)"
    reason = f"{words} of the example's shapes; other calls run eagerly"
    return use(name, reason, Graph(request.model, request.graph, request.example, failed))
