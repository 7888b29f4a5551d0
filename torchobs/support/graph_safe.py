"""Wrappers that ``torch.compile`` may trace: inside a compiled region they act as the wrapped function.

Everything below ``torchobs.probes`` and ``torchobs.taps`` is marked for Dynamo as not to be traced (``DynamoRules``), and
calling it is an error under ``fullgraph=True``. Functions that users compile with their own code, such as clipping, are
therefore wrapped here.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


is_compiling: Callable[[], bool] = bool
"""Returns whether a region is being compiled; before torch is imported always False."""


def use_torch() -> None:
    """Use torch's check from now on. Called once torch is imported."""
    global is_compiling  # noqa: PLW0603  # Dynamo reads it as a constant
    import torch  # it has been imported

    is_compiling = torch.compiler.is_compiling


def outside_of_graphs(original: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``watched``, and inside a compiled region ``original``."""
    import torch  # torch is optional until training begins

    is_compiling = torch.compiler.is_compiling

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_compiling() else watched(*args, **kwargs)

    return dispatch


def no_hook_in_graphs(watched: Callable[..., Any]) -> Callable[..., None]:
    """Return a hook that calls ``watched``, and inside a compiled region does nothing."""
    import torch  # torch is optional until training begins

    is_compiling = torch.compiler.is_compiling

    def unless_compiling(*args: Any) -> None:
        if not is_compiling():
            watched(*args)

    return unless_compiling


class OutputHook:
    """A module's forward hook that calls ``watched(module, output)``, and inside a compiled region does nothing.

    A model that is copied or saved as a whole while it has the hook gets one that does nothing, and that is made of the
    standard library, so that the copy can be loaded where there is no torchobs.
    """

    __slots__ = ("_watched",)

    def __init__(self, watched: Callable[[Any, Any], object]) -> None:
        self._watched = watched

    def __call__(self, module: Any, _args: object, output: Any) -> None:
        """See :meth:`torch.nn.Module.register_forward_hook`."""
        if not is_compiling():
            self._watched(module, output)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        """Return a function that takes any arguments and returns ``None``."""
        return getattr, (nullcontext(), "__exit__")


def transformed() -> Callable[[], bool]:
    """Return a function that checks whether it runs inside ``torch.func``'s transformations: their tensors must not be kept."""
    import torch  # torch is optional until training begins

    level = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", lambda: None)  # noqa: SLF001  # as below
    return lambda: level() is not None


def dispatch_modes() -> Callable[[], int]:
    """Return a function that counts torch's dispatch modes: without any, as in training, no graph is being made.

    For hooks of every step, which save themselves the frame of :func:`graph_being_made` by asking it first.
    """
    import torch  # torch is optional until training begins

    return getattr(torch._C, "_len_torch_dispatch_stack", int)  # noqa: SLF001  # as below; ``int()`` is 0


def graph_being_made() -> Callable[[], bool]:
    """Return a function that returns True while torch traces a graph: ``torch.export``, ``make_fx``.

    Tracing trains nothing and has no values, and an operation of ours would become part of the user's graph. Tracing is
    recognized by its dispatch modes; without any, as in training, the check takes 40 ns.
    """
    import torch  # torch is optional until training begins

    core: Any = torch._C  # noqa: SLF001  # there is no public API
    try:
        count, mode_of, keys = core._len_torch_dispatch_stack, core._get_dispatch_mode, core._TorchDispatchModeKey  # noqa: SLF001
        tracing_modes = (keys.FAKE, keys.PROXY)
    except AttributeError:  # another torch version: a traced training step may then contain operations of ours
        return lambda: False

    def is_tracing() -> bool:
        return count() > 0 and any(mode_of(key) is not None for key in tracing_modes)

    return is_tracing
