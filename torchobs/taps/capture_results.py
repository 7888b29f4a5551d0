"""Capture the results of one torch function inside other code's call, in this thread only."""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable


class CapturedResults(TorchFunctionMode):
    """Records the calls of ``function`` in a ``with`` block: results, and ids of what they were made of."""

    def __init__(self, function: Callable[..., Any], *, keep: bool = False) -> None:
        """``keep``: keep the first arguments themselves, too."""
        super().__init__()
        self._function, self._keep = function, keep
        self.keys: list[int] = []
        """ids of the tensors that the results are of"""
        self.arguments: list[Any] = []
        self.results: list[Any] = []
        self.spent_ns = 0
        """Overhead, after the block: a torch function mode runs Python code around every torch call"""

    def __enter__(self) -> Any:
        """Enter the mode."""
        self.spent_ns = -monotonic_ns()
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it

    def __exit__(self, *error: object) -> None:
        """Leave the mode."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        self.spent_ns += monotonic_ns()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it and keep the result; of the arguments by default only the ids, so that no tensor lives longer."""
        begun_ns = monotonic_ns()
        result = func(*args, **(kwargs or {}))
        self.spent_ns += begun_ns - monotonic_ns()
        if func is self._function:
            several = isinstance(result, (list, tuple))
            self.keys += [id(tensor) for tensor in args[0]] if several else [id(args[0])]
            self.results += result if several else [result]
            if self._keep:
                self.arguments.append(args[0])
        return result
