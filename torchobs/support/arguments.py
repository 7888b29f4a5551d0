"""What callers without a type checker may give: whether it is a number, a function, classes."""

from __future__ import annotations


def is_number(value: object) -> bool:
    """Return True for an int or a float, NaN and infinity among them; not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Return True for an int; not for a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """Return True for a str."""
    return isinstance(value, str)


def are_exceptions(value: object) -> bool:
    """Return True for a tuple of exception classes."""
    return isinstance(value, tuple) and all(isinstance(each, type) and issubclass(each, Exception) for each in value)
