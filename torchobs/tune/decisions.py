"""What is asked of a plan, and what is decided about each technique."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.tune.techniques import Technique


@dataclass(frozen=True)
class Decision(Result):
    """One technique of a plan."""

    technique: str
    used: bool
    reason: str
    """what it does, or why it is not used"""


@dataclass(frozen=True)
class Choice:
    """A decision with what carries it out; nothing does where it is skipped, or concerns the optimizer or the loader."""

    decision: Decision
    technique: Technique | None = None


@dataclass(frozen=True)
class Request:
    """What a plan is asked for."""

    model: nn.Module
    mode: str
    level: str
    device: torch.device
    failed: Callable[[str, str], None]
    """told the technique and the reason when it fails once it is applied"""
    dtype: torch.dtype | None = None
    """autocast's data type; None for the device's own"""
    checkpoint: tuple[type[nn.Module], ...] = ()
    """classes of the modules to checkpoint; empty for repeated blocks"""
    activation_budget: int | None = None
    """bytes of activations that the backward pass may need; None to checkpoint all blocks"""
    attention: str | None = None
    """kernel of scaled_dot_product_attention; None for torch's choice"""
    quantize: str | None = None
    """kind of quantisation"""
    example: Any = None


def skip(name: str, reason: str) -> Choice:
    """Decide against a technique."""
    return Choice(Decision(name, used=False, reason=reason))


def use(name: str, reason: str, technique: Technique | None = None) -> Choice:
    """Decide for a technique."""
    return Choice(Decision(name, used=True, reason=reason), technique)


def reclass_obstacle(module: nn.Module) -> str | None:
    """Return why a module cannot be given a subclass of its class, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module's forward is fixed"
    if "forward" in vars(module):
        return "the module has a forward of its own beside its class's; another library has wrapped it"
    return None
