"""Find transfers between devices as operators make them, and the user's line that caused each."""

# mypy: disable-error-code="no-untyped-call, unreachable"
# torch has no types for its dispatch modes

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchobs.debug.operator_watch import user_line

Key = tuple[str, str, str, bool, str]
"""Operator, source, target, whether the host waits, line"""


class TransferWatch(TorchDispatchMode):
    """Counts transfers of this thread by operator, devices and line."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Key, tuple[int, int]] = {}
        """Calls and bytes"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it if its result is on another device than what it was given."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if name == "_local_scalar_dense" and args[0].device.type != "cpu":
            self._add(name, args[0], "cpu", waits=True)
        elif name == "_to_copy" and result.device != args[0].device:
            self._add(name, args[0], str(result.device), waits=_waits(args[0], result, kwargs.get("non_blocking", False)))
        elif name == "copy_" and isinstance(args[1], torch.Tensor) and args[1].device != args[0].device:
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)  # noqa: PLR2004  # its third argument
            self._add(name, args[1], str(args[0].device), waits=_waits(args[1], args[0], non_blocking))
        return result

    def _add(self, name: str, source: Any, target: str, *, waits: bool) -> None:
        key = name, str(source.device), target, waits, user_line()
        count, size = self.seen.get(key, (0, 0))
        self.seen[key] = count + 1, size + source.numel() * source.element_size()


def _waits(source: Any, target: Any, non_blocking: bool) -> bool:  # noqa: FBT001  # as torch hands it over
    """Return True if the host waits for a device: not between devices, nor from and to pinned memory with ``non_blocking``."""
    if "meta" in {source.device.type, target.device.type} or "cpu" not in {source.device.type, target.device.type}:
        return False
    host = source if source.device.type == "cpu" else target
    return not (non_blocking and (host.is_pinned() or host is target))
