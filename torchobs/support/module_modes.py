"""Evaluation or training mode for a while: what runs a model beside its training leaves each module in its own mode."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode within the block, and each back into its own after it, also after an exception.

    A module with a ``train`` of its own has it called, on the way there and back: a layer may merge weights in it, as loralib's
    do, keep a flag, or leave children in a mode that it chooses. Of all others the attribute ``training`` is set. A graph of
    ``torch.export``, whose ``train`` and ``eval`` are not implemented, has no modes, and is left as it is.
    """
    with _modes_kept(model):
        if _overrides(model, "eval"):
            with suppress(NotImplementedError):
                model.eval()
        else:
            _set(model, mode=False)
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Put all modules into training mode within the block, as :func:`evaluating` does for evaluation mode."""
    with _modes_kept(model):
        _set(model, mode=True)
        yield


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:  # parents before children, whose modes a parent's own train() changes
            if _overrides(module, "train") and (mode or module.training):
                _call_train(module, mode=mode)
        for module, mode in modes:
            if module.training != mode:
                module.training = mode


def _set(module: nn.Module, *, mode: bool) -> None:
    """Do what ``module.train(mode)`` does, but not call torch's own: probes take that for the training's own evaluation."""
    if _overrides(module, "train"):
        _call_train(module, mode=mode)
        return
    module.training = mode
    for child in module.children():
        _set(child, mode=mode)


def _call_train(module: nn.Module, *, mode: bool) -> None:
    """Call a ``train`` of the module's own as torch does, by position."""
    with suppress(NotImplementedError):
        module.train(mode)


def _overrides(module: nn.Module, name: str) -> bool:
    import torch  # torch is optional until training begins

    method: Any = getattr(module, name)
    return getattr(method, "__func__", None) is not getattr(torch.nn.Module, name)
