"""Account for the memory of tensors as operators allocate and free it: what is live, the most so far, and by which line."""

# mypy: disable-error-code="no-untyped-call, unreachable"
# torch has no types for its dispatch modes

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchobs.debug.operator_watch import user_line


class Live(NamedTuple):
    """A tensor's storage that was allocated while the watch was on, and is not freed yet."""

    size: int
    location: str


class AllocationWatch(TorchDispatchMode):
    """Counts bytes of storages that operators of this thread return: dense tensors, on any device, views once.

    What operators allocate and free inside themselves is not seen (workspaces of kernels).
    """

    def __init__(self, *, lines: bool = False) -> None:
        """``lines``: remember the user's line of each allocation."""
        super().__init__()
        self._lines = lines
        self._live: dict[int, tuple[Any, Live]] = {}
        self.current = self.peak = 0
        """Bytes allocated under this watch that are live, and the most so far"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and account for what it returns."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._take(result, args)
        return result

    def _take(self, result: Any, args: Any) -> None:
        if isinstance(result, torch.Tensor):
            if result.layout is torch.strided and not any(result is argument for argument in args):
                self._add(result.untyped_storage())
        elif isinstance(result, (tuple, list)):
            for part in result:
                self._take(part, args)

    def _add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._live or not size or storage.device.type == "meta":
            return
        # Torch keeps a storage's Python object for as long as the memory, so that the reference tells when it is freed.
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self._live[key] = reference, Live(size, user_line() if self._lines else "")
        self.current += size
        self.peak = max(self.peak, self.current)

    def _remove(self, key: int) -> None:
        _, live = self._live.pop(key)
        self.current -= live.size

    def live(self) -> list[Live]:
        """Return what is not freed yet."""
        return [live for _, live in list(self._live.values())]
