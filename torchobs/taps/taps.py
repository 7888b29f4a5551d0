"""Run tasks in the training thread where hooks can be added and removed: at the next outermost ``torch.autograd.backward``.

Torch iterates over its hook dictionaries while it calls the hooks, and a change meanwhile is a ``RuntimeError`` in the user's
``optimizer.step()``; so no other thread may add or remove hooks. Replacing an attribute is safe from any thread, and no
optimizer hook is running when the training thread begins a backward pass.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections import deque
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Protocol

from torchobs.support.after_fork import renew_in_child
from torchobs.taps.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from torch.utils.hooks import RemovableHandle


_COLLECTS_MEANWHILE = sys.version_info[:2] == (3, 11)


class ThreadFrames:
    """Gives the innermost frame of each thread, by identifier, without a crash of the interpreter.

    Python 3.11 makes the object of a frame when it is asked for, by ``sys._current_frames()`` or ``f_back``, and may collect
    garbage as it makes it. A finalizer lets other threads run then, whose frames are gone when it goes on: it hangs with a lock
    of the interpreter's held (python/cpython#106883), or reads freed memory (#99110). So nothing is collected for as long, some
    microseconds. Before, frames were objects already; since 3.12 garbage is collected between two instructions alone (#97922).

    It is no generator: the frame of one that is suspended has no ``f_back``, and it would be this thread's innermost.
    """

    __slots__ = ("_held_back",)

    def __enter__(self) -> dict[int, FrameType]:
        """Return the frames."""
        self._held_back = _COLLECTS_MEANWHILE and gc.isenabled()
        if self._held_back:
            gc.disable()
        return sys._current_frames()

    def __exit__(self, *_: object) -> None:
        """Let garbage be collected again, if it was."""
        if self._held_back:
            gc.enable()


_left: list[RemovableHandle] = []
_patches: list[Patch] = []


class Training(Protocol):
    """The training thread, as the session knows it."""

    thread: int
    backwards: int
    captures: Any


class SafePoint:
    """Queue of tasks for the next backward. One per session, since two patches would have to be undone in order."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._tasks: deque[Callable[[], object]] = deque()
        self._patch: Patch | None = None
        self._closed = False
        self._arming = Lock()
        renew_in_child(self, _arming=Lock)
        self._pid = os.getpid()

    def arm(self, task: Callable[[], object]) -> None:
        """Queue a task, which must not raise, unless it is queued already, or this is closed. A task may queue itself again."""
        import torch  # torch is optional until training begins

        with self._arming:
            if self._closed:
                return
            if task not in self._tasks:
                self._tasks.append(task)
            if self._patch is not None:
                return
            self._patch = Patch(torch.autograd, "backward", self._watched)

    def _watched(self, original: Any) -> Any:
        import torch  # as above

        # our own watch of backward passes, put back after another tool's patch, may be in front, and has set ``backwards``
        graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1 if not self._training.backwards else 0)

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            training = self._training
            if self._patch is not None and get_ident() == training.thread and graph_task() < 0:  # in no other backward pass
                # within the capture of a CUDA graph a task could end it: NCCL's flight recorder queries events
                for due in self._take() if not training.captures.in_progress() else ():
                    due()
            return original(*args, **kwargs)

        return backward

    def close(self) -> None:
        """Drop all tasks, and take no more: the sampler's last round comes after the hooks' end. Idempotent."""
        self._closed = True
        self._take()

    def _take(self) -> list[Callable[[], object]]:
        """Return the tasks, and reset: a task that is armed from now on makes a new patch."""
        if self._pid != os.getpid():
            return []  # in a forked child the lock may be held by a thread of the parent
        with self._arming:
            self._undo()
            due = list(self._tasks)
            self._tasks.clear()
            return due

    def _undo(self) -> None:
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.undo()


def remove_hooks(handles: Iterable[RemovableHandle]) -> None:
    """Remove them now, unless torch is calling optimizer hooks in any thread; :func:`remove_later` does it then.

    torch iterates over its dictionary of hooks while it calls them, and raises ``RuntimeError`` in the user's ``step()`` when
    one is removed meanwhile, be it by a hook of the user's. They stay until the next backward pass then, without effect.
    """
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
