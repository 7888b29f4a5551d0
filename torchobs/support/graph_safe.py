"""Wrappers that ``torch.compile`` may look into, because inside a compiled region they are what they wrap.

Everything below ``torchobs.probes`` is marked for Dynamo as not to be traced (``probes.compile.dynamo_rules``), and a call of
such a function is an error under ``fullgraph=True``. What people compile with their own code, as clipping, is wrapped from
here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def _never() -> bool:
    return False


is_compiling: Callable[[], bool] = _never
"""Whether a region is being compiled; before torch is imported none is."""


def torch_is_here() -> None:
    """Ask torch from now on whether a region is being compiled."""
    global is_compiling  # noqa: PLW0603  # Dynamo reads it as a constant
    import torch  # it has been imported

    is_compiling = torch.compiler.is_compiling


def outside_of_graphs(original: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``watched``, but inside a compiled region ``original``."""
    import torch  # torch is optional until training begins

    is_compiling = torch.compiler.is_compiling

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_compiling() else watched(*args, **kwargs)

    return either
