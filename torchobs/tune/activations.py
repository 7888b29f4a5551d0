"""What the modules of a model keep for the backward pass, measured, and which of them to recompute within a budget of bytes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchobs.support.model_calls import call
from torchobs.support.storages import storages
from torchobs.tune.difference import undisturbed

if TYPE_CHECKING:
    from collections.abc import Sequence


class Kept:
    """Bytes of activations that one forward pass keeps for the backward pass; parameters and buffers are none.

    ``by_block`` has for each of the blocks what recomputing it would save: all that is kept within it but its inputs.
    """

    def __init__(self, model: nn.Module, example: Any, blocks: Sequence[nn.Module]) -> None:
        self.total = 0
        self.by_block = [0] * len(blocks)
        self._within: list[tuple[int, set[int]]] = []
        self._seen = {each.data_ptr() for tensor in (*model.parameters(), *model.buffers()) for each in storages(tensor)}
        with ExitStack() as stack:
            stack.enter_context(undisturbed(model))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
            for index, block in enumerate(blocks):
                stack.callback(block.register_forward_pre_hook(self._entering(index), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leaving, always_call=True).remove)
            call(model, example)

    def _entering(self, index: int) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            inputs = {storage.data_ptr() for each in tensors for storage in storages(each)}
            self._within.append((index, inputs))

        return hook

    def _leaving(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._within.pop()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        for storage in storages(tensor):
            if storage.data_ptr() in self._seen:  # none is used again before the pass ends: the graph holds what is kept
                continue
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
            if self._within and storage.data_ptr() not in self._within[-1][1]:
                self.by_block[self._within[-1][0]] += storage.nbytes()
        return tensor.detach()  # a node that holds its own output is a cycle of C++ objects, which no collector sees


def recomputed(kept: Kept, budget: int) -> tuple[list[int], int]:
    """Return the indices of the blocks to recompute, the largest first and no more than needed, and what is kept at most then.

    While one of them is recomputed, its own activations are there again: the largest of them counts.
    """
    chosen: list[int] = []
    most = kept.total
    for index in sorted(range(len(kept.by_block)), key=lambda index: -kept.by_block[index]):
        if most <= budget or not kept.by_block[index]:
            break
        chosen.append(index)
        saved = [kept.by_block[each] for each in chosen]
        most = kept.total - sum(saved) + max(saved)
    return sorted(chosen), most
