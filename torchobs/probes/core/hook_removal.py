"""Remove optimizer hooks, also when that is asked for by a hook of the user's.

torch iterates over its dictionary of hooks while it calls them, and raises ``RuntimeError`` in the user's ``step()`` when one
is removed meanwhile. They stay until the next backward pass then, without effect.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torchobs.probes.core.patch import Patch
from torchobs.probes.core.thread_frames import ThreadFrames

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.utils.hooks import RemovableHandle

_left: list[RemovableHandle] = []
_patches: list[Patch] = []


def remove_hooks(handles: Iterable[RemovableHandle]) -> None:
    """Remove them now, unless torch is calling optimizer hooks in any thread; :func:`remove_later` does it then."""
    _left.extend(handles)
    if not _hooks_run():
        _remove_left()


def remove_later() -> None:
    """Have what is left removed when the next backward pass begins. Called last, when all patches of the same are undone."""
    import torch  # torch is optional until training begins

    if _left and not _patches:
        _patches.append(Patch(torch.autograd, "backward", _removing))


def _removing(original: Any) -> Any:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if _patches and not _hooks_run():
            _remove_left()
            while _patches:
                _patches.pop().undo()
        return original(*args, **kwargs)

    return backward


def _remove_left() -> None:
    while _left:
        _left.pop().remove()


def _hooks_run() -> bool:
    from torch.optim.optimizer import Optimizer  # torch is optional until training begins

    file = Optimizer.profile_hook_step.__code__.co_filename
    with ThreadFrames() as frames:
        return any(_calls_hooks(frame, file) for frame in frames.values())


def _calls_hooks(frame: Any, file: str) -> bool:
    """Return True if this thread is in torch's wrapper of ``step()``, but not in the step itself (a closure's backward)."""
    called = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == file:
            step = getattr(frame.f_locals.get("func"), "__code__", None)
            if called is None or called is not step:
                return True
        called, frame = code, frame.f_back
    return False
