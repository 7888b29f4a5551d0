"""A state to go back to: everything that a training has learned, in the host's memory."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``state_dict()`` of several objects, copied to the CPU; nothing in it is shared with them."""

    step: int
    states: tuple[dict[str, Any], ...]

    @classmethod
    def take(cls, step: int, objects: Sequence[Any]) -> Snapshot:
        """Copy the states of these objects."""
        return cls(step, tuple(_copied(each.state_dict()) for each in objects))

    def restore(self, objects: Sequence[Any]) -> None:
        """Give the states back to the same objects; the snapshot stays as it is."""
        for each, state in zip(objects, self.states, strict=True):
            each.load_state_dict(_copied(state))  # an optimizer keeps what it is given


def _copied(value: Any) -> Any:
    return pytree.tree_map(_copied_leaf, value)


def _copied_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return deepcopy(leaf)
    return leaf.detach() if leaf.is_meta else leaf.detach().to("cpu", copy=True)  # on the device meta is nothing to copy
