"""A point in the training thread at which hooks may come and go: the next outermost ``torch.autograd.backward``.

Torch walks its dictionaries of hooks while it calls them, and one that changes meanwhile is a ``RuntimeError`` in the user's
``optimizer.step()``, so that no other thread may ever add or remove one. Replacing an attribute is safe from any thread, and
no hook of an optimizer is running when its training thread begins a backward pass.
"""

from __future__ import annotations

import functools
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torchobs.probes.patching import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.host import Host


class SafePoint:
    """Does one thing at the next backward of the training thread. Any thread may arm it."""

    def __init__(self, host: Host, task: Callable[[], None]) -> None:
        """``task`` must not raise."""
        self._host, self._task = host, task
        self._patch: Patch | None = None

    def arm(self) -> None:
        """Have the task done; once, however often it is asked for."""
        import torch  # there is a training to be in

        if self._patch is not None:
            return
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            if not self._host.backwards and get_ident() == self._host.thread and self._patch is not None:
                self.disarm()
                self._task()
            return original(*args, **kwargs)

        self._patch = Patch(torch.autograd, "backward", backward)

    def disarm(self) -> None:
        """Forget about it. Idempotent."""
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.undo()
