"""Parse stacks as ``faulthandler`` writes them, behind the header of ``runtime.stack_dump``. Pure."""

from __future__ import annotations

import re

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\(most recent call first\):\n((?:  [^\n]*\n?)*)")
_FRAME = re.compile(r'  File "([^"\n]*)", line ([0-9]+|\?\?\?) in ([^\n]*)')
_MAIN = re.compile(r"^# Thread 0x([0-9a-f]+) is 'MainThread'$", re.MULTILINE)
_MOST = 64


def main_frames(text: str) -> tuple[str, ...]:
    """Return the main thread's frames as ``file:line in function``, the innermost first; at most 64.

    Without the header, as in stacks of a rank that held the GIL, the main thread is the one that ``faulthandler`` writes last.
    """
    threads = [(int(found[1], 16), found[2]) for found in _THREAD.finditer(text)]
    if not threads:
        return ()
    named = _MAIN.search(text)
    main = next((body for number, body in threads if named and number == int(named[1], 16)), threads[-1][1])
    return tuple(f"{found[1]}:{found[2]} in {found[3]}" for found in list(_FRAME.finditer(main))[:_MOST])
