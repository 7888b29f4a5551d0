"""Patterns for names: as Python's own have them, but for the time they take."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchobs.exporter.pattern import compiled

ATOMS = st.sampled_from(["a", "b", "_", ".", "[ab]", "[^a]", r"\w", r"\.", "[a-c_]"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join).map(lambda text: f"({text})"),
        inner.map(lambda text: f"(?:{text})*"),
        inner.map(lambda text: f"({text})+"),
        inner.map(lambda text: f"({text})?"),
    ),
    max_leaves=6,
)


@given(PATTERNS, st.text("ab_.c", max_size=8))
def test_a_pattern_matches_what_python_s_matches(pattern: str, name: str) -> None:
    """The whole name, by every way that there is."""
    assert compiled(pattern)(name) is (re.fullmatch(pattern, name, re.DOTALL | re.ASCII) is not None)


@pytest.mark.parametrize(
    "pattern", ["(a+)+", "(a|a)*", "(a*)*b", "(a?a?a?a?)*c", ".*.*.*.*.*.*.*x", "((a*)*)*", "(a|aa|aaa)+b"]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    """Those for which trying one way after the other takes longer than anyone waits."""
    began = time.thread_time()
    compiled(pattern)("a" * 250 + "!")
    assert time.thread_time() - began < 2.0  # milliseconds; tried one after the other they are 2^250 ways


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "(",
        ")",
        "a)",
        "*",
        "a**",
        "a{3}",
        "[",
        "[]",
        "(?=a)",
        "(?P<x>a)",
        r"\1",
        "^a$",
        "a" * 1001,
        "(" * 50 + ")" * 50,
        "[b-a]",
        "\\",
    ],
)
def test_what_is_not_understood_is_refused(pattern: str) -> None:
    """Before anything is served by it."""
    with pytest.raises(ValueError, match=r"\A"):
        compiled(pattern)
