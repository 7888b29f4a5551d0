"""Leave out optimizer steps of threads other than the training thread: their backward passes and fetches are not recorded.

One thread at a time is the training thread. Another one replaces it when it steps the same optimizer, or when the former has
ended, has left its training loops, or makes no more steps. Two that train at the same time are reported once.
"""

from __future__ import annotations

import threading
from threading import get_ident
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.probes.core.thread_frames import ThreadFrames

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

_PATIENCE = 3
"""Steps of another thread without one of the training thread, after which the latter no longer counts as such"""


class OtherThreads:
    """Detects them. ``is_other`` is for threads that step optimizers, ``sample`` for the sampler; a part of ``StepProbe``."""

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._training = context, context.training
        self.has_begun = False
        """Whether the training thread has made a step"""
        self.steps = 0
        """Steps that were not recorded"""
        self.running: dict[int, int] = {}
        """Threads within such a step, with its nesting depth"""
        self._seen_at: dict[int, tuple[int, int]] = {}
        self._name, self._reported = "", False

    def is_other(self, optimizer: object) -> bool:
        """Return True if the current thread, not the training thread, is about to make a step that is not recorded."""
        recorder, ident = self._context.recorder, get_ident()
        if self._training.backwards and not _is_of_python(ident):
            return False  # an optimizer within the backward pass, which runs in a device's own thread
        if not self.has_begun or recorder.alive(id(optimizer)) is optimizer or self._has_ended(ident):
            self._seen_at.clear()
            return False
        self._name = threading.current_thread().name
        self.steps += 1
        return True

    def _has_ended(self, ident: int) -> bool:
        """Return True if the training thread no longer trains."""
        training, ended = self._training, self._context.recorder.ended
        with ThreadFrames() as frames:
            is_gone = training.thread not in frames
        if is_gone or training.loop.left(training.thread):
            return True
        step, without = self._seen_at.get(ident, (-1, 0))
        without = without + 1 if step == ended else 0
        self._seen_at[ident] = ended, without
        return without >= _PATIENCE and not training.loop.is_known

    def sample(self) -> None:
        """Report once that another thread trains."""
        if self.steps and not self._reported:
            self._reported = True
            context, name = self._context, self._name
            context.event(catalog.EVENT_OTHER_THREAD, {"thread": name})
            context.warn_limited(
                "threads", f"thread {name} steps an optimizer beside the training thread: its steps are not recorded"
            )


def _is_of_python(ident: int) -> bool:
    """Return True if Python has started that thread."""
    return any(thread.ident == ident and not isinstance(thread, threading._DummyThread) for thread in threading.enumerate())
