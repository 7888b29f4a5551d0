"""Find the lines of the outermost loop around an instruction. Pure: a code object and an offset in, lines out.

A loop ends in a jump back. Exception handlers, which CPython has placed after all other code since 3.12, jump back across code
that follows the loop, so their jumps are ignored. A handler within a loop is found by its line numbers.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType

_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


def loop_lines(code: CodeType, offset: int) -> tuple[int, int] | None:
    """Return the first and the last line of the outermost loop around that instruction; ``None`` if there is none."""
    bytecode = dis.Bytecode(code)
    handlers = getattr(bytecode, "exception_entries", ()) if sys.version_info >= (3, 12) else ()
    end = min((entry.target for entry in handlers), default=len(code.co_code))
    jumps = [(one.argval, one.offset) for one in bytecode if one.opcode in _JUMPS and one.offset < end]
    around = [(target, at) for target, at in jumps if target <= offset <= at]
    if not around:
        return None
    begin, end = min(target for target, _ in around), max(jump for _, jump in around)
    lines = [line for first, last, line in code.co_lines() if line is not None and first <= end and last > begin]
    return min(lines), max(lines)
