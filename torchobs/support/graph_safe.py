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


def no_hook_in_graphs(watched: Callable[..., Any]) -> Callable[..., None]:
    """Return a hook that calls ``watched``, but does nothing inside a compiled region."""
    import torch  # torch is optional until training begins

    is_compiling = torch.compiler.is_compiling

    def unless_compiling(*args: Any) -> None:
        if not is_compiling():
            watched(*args)

    return unless_compiling


def graph_being_made() -> Callable[[], bool]:
    """Return a function that returns True if torch makes a graph of what is called now: ``torch.export``, ``make_fx``.

    There nothing is trained, values are not to be had, and an operation of ours would become part of the user's graph. That is
    known by the dispatch modes that are on; where there are none, as in training, it takes 40 ns.
    """
    import torch  # torch is optional until training begins

    core: Any = torch._C  # noqa: SLF001  # there is no public way to ask
    try:
        count, mode_of, keys = core._len_torch_dispatch_stack, core._get_dispatch_mode, core._TorchDispatchModeKey  # noqa: SLF001
        making = (keys.FAKE, keys.PROXY)
    except AttributeError:  # another torch: then an operation of ours may be seen by who traces a training step
        return lambda: False

    def is_made() -> bool:
        return count() > 0 and any(mode_of(key) is not None for key in making)

    return is_made
