"""Catching what one function of torch's returns inside somebody else's call, in this thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable


class Intercepted(TorchFunctionMode):
    """A ``with`` block's calls of ``function``: first arguments and results."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self._keys: list[int] = []
        self.results: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it; keep the result. Ids, and not tensors, lest anything lives longer for it."""
        result = func(*args, **(kwargs or {}))
        if func is self._function:
            several = isinstance(result, (list, tuple))
            self._keys += [id(each) for each in args[0]] if several else [id(args[0])]
            self.results += result if several else [result]
        return result

    def keys_and_results(self) -> tuple[list[int], list[Any]]:
        """Return the ids of the tensors given and the result for each."""
        return self._keys, self.results
