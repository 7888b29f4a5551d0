"""Be careful with collectives of torch's that are the last thing a program does."""

from __future__ import annotations

from time import sleep

_LETTING_GO_S = 0.01


def let_backend_finish() -> None:
    """Wait a moment after a collective, so that the thread of gloo's that ran it has let go of the tensors.

    It does so after the caller has been told that all is done, and needs Python's lock for it. A process group that is
    destroyed in that moment, as by the end of a script, waits for the thread while it holds the lock, for ever (torch 2.13: in
    one of eight runs). Not for what is called in each step, where the program goes on.
    """
    sleep(_LETTING_GO_S)
