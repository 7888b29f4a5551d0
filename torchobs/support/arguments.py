"""Checks of arguments, for callers without a type checker."""

from __future__ import annotations


def is_number(value: object) -> bool:
    """Return whether the value is an int or a float, NaN and infinity included; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Return whether the value is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """Return whether the value is a str."""
    return isinstance(value, str)


def are_exceptions(value: object) -> bool:
    """Return whether the value is a tuple of exception classes."""
    return isinstance(value, tuple) and all(isinstance(item, type) and issubclass(item, Exception) for item in value)
