"""Which techniques a mode and a level ask for, and which of them this model, device and torch can have."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchobs.support.result import Result
from torchobs.support.text import size
from torchobs.tensors.batches import FAILURES, first_line
from torchobs.tune import techniques

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.tune.techniques import Technique

    Reply = str | tuple[str, Technique | None]
    """Why a technique is not used; or what it does, with the object that does it, if any"""


@dataclass(frozen=True)
class Decision(Result):
    """One technique of a plan."""

    technique: str
    used: bool
    reason: str
    """what it does, or why it is not used"""


@dataclass(frozen=True)
class Request:
    """The request for a plan."""

    model: nn.Module
    mode: str
    level: str
    device: torch.device
    on_failure: Callable[[str, str], None]
    """called with technique and reason if it fails after it was applied"""
    amp: str | torch.dtype = "auto"
    """type for autocast, see :func:`amp_dtype`"""
    checkpointing: tuple[type[nn.Module], ...] = ()
    """classes of the modules to checkpoint; empty for repeated blocks"""
    activation_budget: int | None = None
    """bytes of activations that the backward pass may need; None to checkpoint all blocks"""
    quantize: str | None = None
    """kind of quantisation"""
    example: Any = None


def reclass_obstacle(module: nn.Module) -> str | None:
    """Return why a module's class cannot be replaced by a subclass, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module's forward is fixed"
    if "forward" in vars(module):
        return "the module has a forward of its own beside its class's; another library has wrapped it"
    return None


AMP = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}
_AMPERE = (8, 0)
_BFLOAT16_INSTRUCTIONS = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")


def choose(request: Request) -> dict[Decision, Technique | None]:
    """Decide on each technique, in the order of application; return each decision and its technique.

    That is None if the technique is skipped, or concerns the optimizer or the loader.
    """
    asked = {"mode": (request.mode, MODES[request.mode]), "level": (request.level, LEVELS[request.level])}
    choices = dict[Decision, "Technique | None"]()
    for name, decide in _DECIDE.items():
        other = next((f"{what} {value!r}" for what, (value, parts) in asked.items() if name not in parts), None)
        reply = decide(request) if other is None else f"not part of {other}"
        reason, technique = (reply, None) if isinstance(reply, str) else reply
        choices[Decision(name, used=not isinstance(reply, str), reason=reason)] = technique
    return choices


def amp_dtype(amp: object, device: torch.device) -> tuple[torch.dtype | None, str]:
    """Return the type for autocast on a device, None for no autocast, and why.

    Args:
        amp: ``"bf16"``, ``"fp16"``, ``"off"`` or their types, or ``"auto"``: a type with instructions on the device.
        device: the device that computes.

    Raises:
        ValueError: ``amp`` is none of these.
    """
    if amp != "auto":
        dtype = next((dtype for name, dtype in AMP.items() if amp in (name, dtype)), None)
        if dtype is None:
            raise ValueError(f"amp is {', '.join(map(repr, AMP))}, one of their types, or 'auto', not {amp!r}")
        return (None, "amp is off") if dtype is torch.float32 else (dtype, "asked for")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU computes in bfloat16"
        return torch.float16, "the GPU has no bfloat16; float16 needs a GradScaler"
    if device.type == "cpu" and not any(getattr(torch.cpu, name, bool)() for name in _BFLOAT16_INSTRUCTIONS):
        return None, "this CPU has no instructions for bfloat16, autocast would slow it down; pass amp='bf16' to have it anyway"
    if device.type in {"cpu", "xpu"} or (device.type == "mps" and torch.backends.mps.is_macos_or_newer(14, 0)):
        return torch.bfloat16, "the device has instructions for bfloat16"
    return None, f"autocast on {device.type} is not supported"


def _autocast(request: Request) -> Reply:
    if request.quantize is not None and request.mode == "inference":
        return "the weights are to be quantised"
    dtype, reason = amp_dtype(request.amp, request.device)
    if dtype is None:
        return reason
    if (obstacle := reclass_obstacle(request.model)) is not None:
        return obstacle
    kind = request.device.type
    return f"{str(dtype)[6:]}: {reason}", techniques.Reclassed([request.model], lambda: torch.autocast(kind, dtype=dtype))


def _checkpointing(request: Request) -> Reply:
    if request.mode == "full" and not request.checkpointing:
        return "saves memory for a second forward pass; pass checkpointing= or use mode 'memory_efficient'"
    asked = [module for module in request.model.modules() if isinstance(module, request.checkpointing)]
    blocks = outermost(asked if request.checkpointing else repeated_blocks(request.model))
    if not blocks:
        return "the model has no repeated blocks; pass the class of the modules as checkpointing="
    if (obstacle := next(filter(None, map(reclass_obstacle, blocks)), None)) is not None:
        return obstacle
    state, doubt = _state(request, blocks)
    if state is not None:
        return f"the blocks have {state}"
    if request.activation_budget is not None:
        return _within_budget(request, blocks, request.activation_budget)
    kinds = ", ".join(f"{count} × {kind}" for kind, count in Counter(type(block).__name__ for block in blocks).items())
    return f"recompute the activations of {kinds}{doubt}", techniques.Checkpointing(blocks)


def _state(request: Request, blocks: list[nn.Module]) -> tuple[str | None, str]:
    """Return which buffers a block's forward pass changes, or in words why that is unknown."""
    state = techniques.find_state(blocks)
    if state is not None or request.example is None:
        return state, ""
    try:
        return techniques.try_state(request.model, request.example, blocks), ""
    except FAILURES as error:  # such as a model that takes another input in training
        why = first_line(error)
        return None, f"; whether they have state is not known, a forward pass in training mode failed: {why}"


def _within_budget(request: Request, blocks: list[nn.Module], budget: int) -> Reply:
    if request.example is None:
        return "activations are measured with an example: pass example="
    kept = techniques.Kept(request.model, request.example, blocks)
    chosen, most = techniques.recomputed(kept, budget)
    if not chosen:
        return f"activations take {size(kept.total)}, and {size(budget)} are allowed"
    missed = f"; the budget of {size(budget)} is not reached" if most > budget else ""
    count = f"{len(chosen)} of {len(blocks)} blocks"
    reason = f"recompute the activations of {count}: {size(most)} at most instead of {size(kept.total)}{missed}"
    return reason, techniques.Checkpointing([blocks[index] for index in chosen])


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return modules of a class that is in one list at least twice, with parts: a single operation keeps its input anyway."""
    repeated = []
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(map(type, container))
            repeated += [block for block in container if kinds[type(block)] > 1 and any(True for _ in block.children())]
    return repeated


def outermost(blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks that are within no other block, each once."""
    inner = {id(part) for block in blocks for part in block.modules() if part is not block}
    return [block for block in {id(block): block for block in blocks}.values() if id(block) not in inner]


def _channels_last(request: Request) -> Reply:
    if not any(isinstance(module, nn.Conv2d) for module in request.model.modules()):
        return "the model has no 2-dimensional convolution"
    if any(type(weight) is not nn.Parameter for weight in request.model.parameters()):
        return "the parameters are of a class of their own (sharded or quantised)"
    if not any(techniques.is_movable(module.weight) for module in request.model.modules() if isinstance(module, nn.Conv2d)):
        return "the weights share their memory, with other processes or each other, and this would end that"
    return "weights of convolutions are stored with the channels last", techniques.ChannelsLast(request.model)


def _tf32(request: Request) -> Reply:
    if request.device.type != "cuda":
        return "only NVIDIA GPUs have TF32"
    if torch.version.hip or torch.cuda.get_device_capability(request.device) < _AMPERE:
        return "this GPU has no TF32 (Ampere has, and later ones)"
    return "float32 products are computed in TF32", techniques.Flag(torch.backends.cuda.matmul, "allow_tf32", value=True)


def _cudnn_benchmark(request: Request) -> Reply:
    if request.device.type != "cuda" or not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "cuDNN is not in use on this device"
    if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for"
    flag = techniques.Flag(torch.backends.cudnn, "benchmark", value=True)
    return "the fastest algorithm of each convolution is searched for", flag


def _fused_optimizer(request: Request) -> Reply:
    if request.device.type not in {"cpu", "cuda", "mps", "xpu"}:
        return f"there is none on {request.device.type}"
    if not all(weight.is_floating_point() for weight in request.model.parameters()):
        return "some parameters are no floating-point numbers"
    return "pass optimizer_options(torch.optim.AdamW) to the optimizer", None


def _loader(request: Request) -> Reply:
    pinned = "pinned memory and " if request.device.type == "cuda" else ""
    return f"pass loader_options(num_workers) to the DataLoader: {pinned}persistent workers", None


def _compile(request: Request) -> Reply:
    if request.mode == "inference" and request.quantize == "dynamic":
        return "quantised layers of torch.ao cannot be compiled"
    if isinstance(request.model, torch.jit.ScriptModule):
        return "a TorchScript module is compiled already"
    if vars(request.model).get("_compiled_call_impl") is not None or hasattr(request.model, "_orig_mod"):
        return "the model is compiled already"
    if not torch._dynamo.eval_frame.is_dynamo_supported():
        return "torch.compile does not support this Python or system"
    mode = "max-autotune" if request.level == "extreme" and request.device.type == "cuda" else None
    reason = f"torch.compile(mode={mode!r})" if mode else "torch.compile"

    def report_failure(words: str) -> None:
        request.on_failure("compile", words)

    technique = techniques.Compilation(request.model, mode, report_failure)
    return f"{reason}; eager from then on, should it fail", technique


def _quantization(request: Request) -> Reply:
    if request.quantize is None:
        return "changes the outputs; pass quantize= to have it"
    linear = list(_linear_layers(request.model))
    if not linear:
        return "the model has no nn.Linear with float32 weights"
    if request.device.type != "cpu":
        return "torch.ao quantises dynamically on CPUs alone"
    if torch.backends.quantized.engine == "none" or importlib.util.find_spec("torch.ao.nn.quantized.dynamic") is None:
        return "this torch is without torch.ao or its kernels for 8-bit integers"
    if (obstacle := next(filter(None, map(reclass_obstacle, linear)), None)) is not None:
        return obstacle
    reason = f"{len(linear)} × Linear in 8-bit integers by torch.ao (deprecated), where nothing asks for gradients"
    return reason, techniques.DynamicQuantization(linear)


def _linear_layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        # a weight that is computed before each call (weight_norm), or has a class of its own, cannot be quantised
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.dtype is torch.float32:
            yield module


_DECIDE: dict[str, Callable[[Request], Reply]] = {
    "quantization": _quantization,
    "autocast": _autocast,
    "checkpointing": _checkpointing,
    "channels_last": _channels_last,
    "tf32": _tf32,
    "cudnn_benchmark": _cudnn_benchmark,
    "fused_optimizer": _fused_optimizer,
    "loader": _loader,
    "compile": _compile,
}
"""In the order of application"""
MODES: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "amp": frozenset({"autocast", "tf32", "fused_optimizer", "loader"}),
    "compile": frozenset({"compile", "channels_last", "cudnn_benchmark", "fused_optimizer", "loader"}),
    "memory_efficient": frozenset({"autocast", "checkpointing"}),
    "full": frozenset(_DECIDE) - {"quantization"},
    "inference": frozenset(_DECIDE) - {"checkpointing", "fused_optimizer"},
}
LEVELS: dict[str, frozenset[str]] = {
    "off": frozenset(),
    "basic": frozenset(_DECIDE) - {"channels_last", "tf32", "cudnn_benchmark"},
    "advanced": frozenset(_DECIDE) - {"cudnn_benchmark"},
    "extreme": frozenset(_DECIDE),
}
"""``advanced`` adds changes of memory layout and float32 products, ``extreme`` a search for kernels at the start"""
