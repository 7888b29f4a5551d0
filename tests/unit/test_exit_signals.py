"""The marks of signals that end a process by their default: where they are stored, and what is refused."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest

from tests.support import NEEDS_COMPILER
from torchobs.flight.writer import exit_signals
from torchobs.flight.writer.native import compiled

native = compiled()
pytestmark = pytest.mark.skipif(native is None, reason=NEEDS_COMPILER)

SIZE = 64


def a_map() -> object:
    """Return 64 writable bytes."""
    assert native is not None
    memory = ctypes.create_string_buffer(SIZE)
    return native.Map(memory, ctypes.addressof(memory), SIZE)


def caught() -> int:
    """Return the signals that have a handler, of Python's or not."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)


def test_handlers_come_and_go_without_python_s_knowledge() -> None:
    """What others ask Python for is as it was, and a handler that somebody installed later stays."""
    before, bit = caught(), 1 << signal.SIGUSR2 - 1
    exit_signals.mark(native, a_map(), 8)
    try:
        assert caught() & ~before & bit
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        signal.signal(signal.SIGUSR1, lambda *_: None)
        exit_signals.unmark(native)
        assert caught() == before | 1 << signal.SIGUSR1 - 1
    finally:
        exit_signals.unmark(native)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_signal_with_a_handler_is_left_alone() -> None:
    """Somebody handles or ignores it: it will not end the process."""
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        exit_signals.mark(native, a_map(), 8)
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        exit_signals.unmark(native)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.parametrize("offset", [SIZE, SIZE - 4, 4, -8])
def test_a_word_outside_of_the_map_is_refused(offset: int) -> None:
    """Nothing is marked then."""
    before = caught()
    with pytest.raises((ValueError, OverflowError)):
        exit_signals.mark(native, a_map(), offset)
    assert caught() == before


@pytest.mark.parametrize(
    ("target", "words"), [(object(), {}), (a_map() if native else None, []), (a_map() if native else None, {"x": 1})]
)
def test_what_is_no_map_or_no_words_is_refused(target: object, words: object) -> None:
    """As by any function of Python's."""
    assert native is not None
    with pytest.raises(TypeError):
        native.mark_signals(target, 8, words)


@pytest.mark.parametrize("number", [0, 65, -1])
def test_what_is_no_signal_is_refused(number: int) -> None:
    """With the error that says so."""
    assert native is not None
    with pytest.raises(ValueError, match="no such signal"):
        native.mark_signals(a_map(), 8, {number: 1})


def test_a_child_of_fork_has_the_defaults() -> None:
    """What ends it is nobody's exit but its own."""
    before = caught()
    exit_signals.mark(native, a_map(), 8)
    try:
        child = os.fork()
        if not child:
            os._exit(int(caught() != before))
        assert os.waitpid(child, 0)[1] == 0
        assert caught() != before
    finally:
        exit_signals.unmark(native)
