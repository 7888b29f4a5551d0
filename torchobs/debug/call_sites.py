"""Note which module and line each node of a forward pass's graph comes from."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.overrides import TorchFunctionMode

from torchobs.probes.gradients.parameter_names import clean
from torchobs.probes.nonfinite.locate import is_users

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch import nn

    from torchobs.probes.nonfinite.graph import GraphNode
    from torchobs.probes.nonfinite.origin import NonfiniteOrigin


class CallSite(NamedTuple):
    """Where nodes ``first`` to ``last`` (exclusive) of the graph were made."""

    first: int
    last: int
    module: str
    kind: str
    line: str


class CallSites(TorchFunctionMode):
    """Notes each call of a torch function, with the module that is running and the line of the user's code."""

    def __init__(self, model: nn.Module) -> None:
        import torch

        super().__init__()
        self._sites: list[CallSite] = []
        self._running: list[tuple[str, str]] = []
        self._handles = []
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks
            told = (clean(path) or type(module).__name__, type(module).__name__)
            self._handles += [
                module.register_forward_pre_hook(self._entering(told), prepend=True),
                module.register_forward_hook(self._leaving, always_call=True),
            ]

    def remove(self) -> None:
        """Remove the modules' hooks."""
        for handle in self._handles:
            handle.remove()

    def find(self, number: int) -> CallSite | None:
        """Return the innermost call that made the node with this sequence number."""
        fitting = [site for site in self._sites if site.first <= number < site.last]
        return min(fitting, key=lambda site: site.last - site.first, default=None)

    @property
    def running(self) -> tuple[str, str]:
        """Path and class of the innermost module that runs now; both empty outside of any."""
        return self._running[-1] if self._running else ("", "")

    def _entering(self, told: tuple[str, str]) -> Callable[..., None]:
        return lambda *_: self._running.append(told)

    def _leaving(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch

        number = torch._C._autograd._get_sequence_nr
        first = number()
        result = function(*args, **(kwargs or {}))
        if number() > first:
            self._sites.append(CallSite(first, number(), *self.running, _user_line()))
        return result


def placed(origin: NonfiniteOrigin, node: GraphNode, sites: CallSites) -> NonfiniteOrigin:
    """Return the origin with the module and the line that were seen to make the node."""
    site = sites.find(node.number)
    if site is None or origin.kind == "parameter":
        return origin
    return replace(origin, module=site.module, module_class=site.kind, line=site.line)


def _user_line() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
