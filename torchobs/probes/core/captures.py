"""Know when a CUDA graph is being captured, so that threads of ours rest meanwhile.

A garbage collection runs in whichever thread makes the object that is one too many. In the sampler thread it could destroy a
graph or an event of the user's that was part of a cycle, and in a capture's default mode an unsafe CUDA call of any thread
(the ``cudaFree`` of a graph's private pool) ends the capture with an error. The statistics of ``cudaMallocAsync``'s allocator
are CUDA calls, too (``cudaMemPoolGetAttribute``). So the threads that do rounds (the sampler's, the GPU probe's) do none while
a capture is in progress, and a capture waits for the rounds in progress.
"""

from __future__ import annotations

import time

LONGEST_S = 60.0
"""A capture without an end for so long has failed: the sampler goes on"""
_PATIENCE_S, _REST_S = 0.2, 0.0005
"""Age of a round, of usually some ms, from which on no capture waits for it: the driver may not answer for long"""


class Captures:
    """Captures in progress in any thread. Their threads begin and end them, the threads that do rounds ask."""

    __slots__ = ("_begun_s", "_rounds")

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}
        self._rounds: dict[str, float] = {}
        """Threads of ours whose round is in progress, and since when"""

    def begin(self, graph: int) -> None:
        """Note that this graph, by id, is about to be captured, and wait for rounds in progress, but not for long."""
        now = self._begun_s[graph] = time.monotonic()
        while time.monotonic() - now < _PATIENCE_S and self._has_young_round():
            time.sleep(_REST_S)

    def end(self, graph: int) -> None:
        """Note that the capture has ended or did not begin."""
        self._begun_s.pop(graph, None)

    def begin_round(self, thread: str) -> bool:
        """Note that a thread of ours begins a round; return False if it has to rest. :meth:`end_round` follows either way.

        It is noted first and asked then: a capture that begins in between waits.
        """
        self._rounds[thread] = time.monotonic()
        return not self.in_progress()

    def end_round(self, thread: str) -> None:
        """Note that the thread's round has ended."""
        self._rounds.pop(thread, None)

    def in_progress(self) -> bool:
        """Return True if a graph is being captured."""
        begun_s = tuple(self._begun_s.values())  # another thread's capture may end meanwhile
        return bool(begun_s) and max(begun_s) > time.monotonic() - LONGEST_S

    def _has_young_round(self) -> bool:
        return any(time.monotonic() - begun_s < _PATIENCE_S for begun_s in tuple(self._rounds.values()))
