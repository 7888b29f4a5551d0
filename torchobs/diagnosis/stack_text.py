"""Parse stacks as ``faulthandler`` and py-spy write them, behind the header of ``runtime.stack_dump``. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchobs.diagnosis import text_format

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\(most recent call first\):\n((?:  [^\n]*\n?)*)")
_FRAME = re.compile(r'  File "([^"\n]*)", line ([0-9]+|\?\?\?) in ([^\n]*)')
_MAIN = re.compile(r"^# Thread 0x([0-9a-f]+) is 'MainThread'$", re.MULTILINE)
_PROCESS = re.compile(r"^Process (?=[0-9]{1,10}:)", re.MULTILINE)
_MAIN_OF_PROCESS = re.compile(r'^Thread [^\n]*"MainThread"\n((?:    [^\n]*\n?)*)', re.MULTILINE)
_FRAME_OF_PROCESS = re.compile(r"^    ([^\n]*) \(([^\n]*:[0-9]+)\)$", re.MULTILINE)
_STACK = "Stack (most recent call first):\n"
_MOST = 64
_LAUNCHER = re.compile(r"/torchobs/(?:cli/|__main__\.py)|/bin/torchobs:|^<frozen runpy>")
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.[0-9]+/|/torchobs/(?:probes|runtime|cli)/|^<frozen ")


def main_frames(text: str) -> tuple[str, ...]:
    """Return the main thread's frames as ``file:line in function``, the innermost first; at most 64.

    Without the header, as in stacks of a rank that held the GIL, the main thread is the one that ``faulthandler`` writes last.
    """
    threads = [(int(found[1], 16), found[2]) for found in _THREAD.finditer(text)]
    if not threads:
        return ()
    named = _MAIN.search(text)
    main = next((body for number, body in threads if named and number == int(named[1], 16)), threads[-1][1])
    return _frames(main)


def worker_frames(text: str) -> dict[int, tuple[str, ...]]:
    """Return the main threads' frames of a data loader's workers by process id, as py-spy writes them, the innermost first."""
    found = {}
    for process in _PROCESS.split(text)[1:]:
        pid, _, body = process.partition(":")
        if (main := _MAIN_OF_PROCESS.search(body)) is not None:
            frames = _FRAME_OF_PROCESS.findall(main[1])[:_MOST]
            found[int(pid)] = tuple(f"{place} in {function}" for function, place in frames)
    return found


def crash_frames(text: str) -> tuple[str, ...]:
    """Return the frames of the thread that crashed, the innermost first; empty if it ran no Python code."""
    return _frames(text.partition(_STACK)[2])


def _frames(body: str) -> tuple[str, ...]:
    return tuple(f"{found[1]}:{found[2]} in {found[3]}" for found in list(_FRAME.finditer(body))[:_MOST])


def place(frames: Sequence[str]) -> str:
    """Return the innermost frame, and the innermost of the user's own code if that is another; ``frames``: one or more."""
    own = next((frame for frame in frames if not _LIBRARIES.search(frame)), frames[0])
    called = f", called at {shown(own)}" if own != frames[0] else ""
    return f"{shown(frames[0])}{called}"


def without_launcher(frames: Sequence[str]) -> Sequence[str]:
    """Leave out the outermost frames, of ``torchobs run`` and ``python -m``."""
    end = len(frames)
    while end and _LAUNCHER.search(frames[end - 1]):
        end -= 1
    return frames[:end] or frames


def shown(frame: str) -> str:
    """Return a frame as one sanitised line, shortened for installed packages."""
    return text_format.source_location(text_format.clean(frame))
