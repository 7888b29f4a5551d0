"""A point in the training thread at which hooks may come and go: the next outermost ``torch.autograd.backward``.

Torch walks its dictionaries of hooks while it calls them, and one that changes meanwhile is a ``RuntimeError`` in the user's
``optimizer.step()``, so that no other thread may ever add or remove one. Replacing an attribute is safe from any thread, and
no hook of an optimizer is running when its training thread begins a backward pass.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

from torchobs.probes.core.patch import Patch
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext


class SafePoint:
    """Does things at the next backward of the training thread. One per session: two patches could not leave in any order."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._tasks: deque[Callable[[], object]] = deque()
        self._patch: Patch | None = None
        self._arming = Lock()
        renew_in_child(self, _arming=Lock)
        self._pid = os.getpid()

    def arm(self, task: Callable[[], object]) -> None:
        """Have the task, which must not raise, done once, however often it is asked for. A task may arm itself again."""
        import torch  # there is a training to be in

        with self._arming:
            if task not in self._tasks:
                self._tasks.append(task)
            if self._patch is not None:
                return
            self._patch = Patch(torch.autograd, "backward", self._watched)

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self._context.backwards and get_ident() == self._context.thread and self._patch is not None:
                for due in self._take():
                    due()
            return original(*args, **kwargs)

        return backward

    def disarm(self) -> None:
        """Forget about all of them. Idempotent."""
        self._take()

    def _take(self) -> list[Callable[[], object]]:
        """Return what is to be done, and forget about it: what is armed from now on makes a patch of its own."""
        if self._pid != os.getpid():
            return []  # a forked child, in which the lock may be held by a thread that is not there
        with self._arming:
            self._undo()
            due = list(self._tasks)
            self._tasks.clear()
            return due

    def _undo(self) -> None:
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.undo()
