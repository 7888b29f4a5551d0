"""What the training thread is doing, for probes whose part in it depends on that."""

from __future__ import annotations

from collections import deque
from threading import get_ident
from typing import NamedTuple

from torchobs.probes.core.captures import Captures
from torchobs.probes.core.training_loop import TrainingLoop


class EpochStart(NamedTuple):
    """Begin of an epoch, on CLOCK_MONOTONIC, and the last step that had ended by then."""

    number: int
    begun_ns: int
    step: int


class LeftPhase(NamedTuple):
    """A phase that an exception has left, on CLOCK_MONOTONIC: it holds until training goes on after ``left_ns``."""

    phase: int
    begun_ns: int
    left_ns: int


class TrainingState:
    """State of the training thread. The step probe owns it: others read, but for what is named here.

    ``thread`` is first set by the session, ``loop`` noted by ``torchobs.step`` as well, and ``idle`` and
    ``evaluating_since_ns`` belong to the phase probe, which finds them in the sampler thread. The epoch probe sets ``epoch``
    and adds to ``epochs``, from which the run's spans take. The AMP probe sets ``autocast``, the exit probe ``left``.
    """

    __slots__ = (
        "autocast", "backwards", "captures", "epoch", "epochs", "evaluating_since_ns", "idle", "in_closure", "left", "loop",
        "thread",
    )  # fmt: skip

    def __init__(self) -> None:
        self.thread = get_ident()
        """The training thread: the one that steps optimizers"""
        self.autocast: dict[str, str] = {}
        """The data type of autocast in training, by type of device, as last seen"""
        self.backwards = 0
        """1 while a backward pass runs in it"""
        self.left: LeftPhase | None = None
        """The phase that an exception has left which may end the training"""
        self.in_closure = False
        """Whether an optimizer is evaluating its closure"""
        self.captures = Captures()
        """Captures of CUDA graphs, in whatever thread"""
        self.loop = TrainingLoop()
        """The loops of the training on that thread's stack"""
        self.idle = False
        """Whether the thread has left those loops"""
        self.evaluating_since_ns = 0
        """When a long evaluation in progress began; 0 if none is in progress"""
        self.epoch = 0
        """Number of the last epoch that has begun, from 1; 0 before the first"""
        self.epochs: deque[EpochStart] = deque(maxlen=1024)
        """Epochs whose begin the run's spans have not been told yet"""
