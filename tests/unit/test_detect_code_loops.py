"""Loops as a code object has them: whether the call of `here` is in one, and on which line that one ends."""

from __future__ import annotations

import sys
from types import CodeType

import pytest

from torchobs.detect.code_loops import loop_lines

NULL = "from contextlib import nullcontext\n"
LOOPS = {
    "for": ("for _ in (1,):\n    here()\ndone()", 2),
    "while": ("go = True\nwhile go:\n    here()\n    go = False\ndone()", 4),
    # Python 3.14 has the code of `break` behind the jump back
    "forever": ("go = True\nwhile True:\n    here()\n    if done():\n        break\ndone()", 5 - (sys.version_info >= (3, 14))),
    "nested": ("for _ in (1,):\n    for _ in (1,):\n        here()\n    done()\ndone()", 4),
    "before": ("for _ in (1,):\n    done()\nhere()", None),
    "none": ("here()", None),
    "with": (f"{NULL}for _ in (1,):\n    with nullcontext():\n        here()\n    done()\ndone()", 5),
    "behind a with": (
        f"{NULL}for _ in (1,):\n    with nullcontext():\n        done()\n    here()\ndone()", 5,
    ),
    "handled": ("for _ in (1,):\n    try:\n        here()\n    except ValueError:\n        continue\n    done()\ndone()", 6),
    "behind a handler": (
        "for _ in (1,):\n    try:\n        int('')\n    except ValueError:\n        pass\n    here()\ndone()", 6,
    ),
    "after handlers": ("try:\n    done()\nexcept ValueError:\n    done()\nfor _ in (1,):\n    here()\ndone()", 6),
    "within a try": ("try:\n    for _ in (1,):\n        here()\nfinally:\n    done()", 3),
    "behind one within a try": ("try:\n    for _ in (1,):\n        done()\nfinally:\n    here()", None),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_the_outermost_loop_around_an_instruction(name: str) -> None:
    """Its last line is the loop's own, whatever jumps there are for exceptions; the first is never behind the instruction's."""
    source, expected = LOOPS[name]
    found: list[tuple[CodeType, int, int]] = []

    def here() -> None:
        frame = sys._getframe(1)
        found.append((frame.f_code, frame.f_lasti, frame.f_lineno))

    code = compile(source, "script", "exec")
    exec(code, {"here": here, "done": lambda: True})  # noqa: S102  # the script above
    ((made, offset, line),) = found
    lines = loop_lines(made, offset)
    assert (lines[1] if lines else None) == expected
    assert lines is None or lines[0] <= line
