"""What the training thread is doing, for probes whose part in it depends on that."""

from __future__ import annotations

from threading import get_ident

from torchobs.probes.core.training_loop import TrainingLoop


class TrainingState:
    """State of the training thread. The step probe owns it: others read, but for what is named here.

    ``thread`` is first set by the session, ``loop`` noted by ``torchobs.step`` as well, and ``idle`` and
    ``evaluating_since_ns`` belong to the phase probe, which finds them in the sampler thread.
    """

    __slots__ = ("backwards", "evaluating_since_ns", "idle", "in_closure", "loop", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        """The training thread: the one that steps optimizers"""
        self.backwards = 0
        """1 while a backward pass runs in it"""
        self.in_closure = False
        """Whether an optimizer is evaluating its closure"""
        self.loop = TrainingLoop()
        """The loops of the training on that thread's stack"""
        self.idle = False
        """Whether the thread has left those loops"""
        self.evaluating_since_ns = 0
        """When a long evaluation in progress began; 0 if none is in progress"""
