"""Weak references to the user's tensors which do not keep ``torch.utils.swap_tensors`` from swapping them.

It refuses a tensor that somebody refers to weakly, for the tensor has another content afterwards. Modules use it to convert
and load parameters of some subclasses (quantized ones), and all after ``set_swap_module_params_on_conversion(True)`` of
``torch.__future__``. Our references mean the object, whatever its content, so they are hidden from it.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any


class TensorReference(weakref.ref[Any]):
    """A weak reference to a tensor; as fast to call as :class:`weakref.ref`."""

    __slots__ = ()


class _ShownReferences(ModuleType):
    """The module ``weakref`` as ``torch.utils`` uses it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(tensor: object) -> list[Any]:
        """Return the weak references to it but ours."""
        return [each for each in weakref.getweakrefs(tensor) if type(each) is not TensorReference]


def let_tensors_be_swapped() -> None:
    """Hide our references from ``torch.utils.swap_tensors``. Idempotent, and for good: references outlive a session's end."""
    import torch.utils  # torch is optional until training begins

    if getattr(torch.utils, "weakref", None) is weakref:
        torch.utils.weakref = _ShownReferences("weakref", weakref.__doc__)  # type: ignore[attr-defined]  # not in its stubs
