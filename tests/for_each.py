"""One test for a promise about many things: each is checked, and the test's message names all that fail."""

from __future__ import annotations

import functools
import inspect
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def for_each(things: Mapping[str, tuple[Any, ...]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that checks one of the things, given by name: its first arguments; others are fixtures."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        width = len(next(iter(things.values())))
        fixtures = list(inspect.signature(check).parameters.values())[width:]

        @functools.wraps(check)
        def test(**values: Any) -> None:
            failures = []
            for name, thing in things.items():
                try:
                    check(*thing, **values)
                except (AssertionError, LookupError, TypeError, ValueError) as problem:
                    failures.append(f"{name}: {''.join(traceback.format_exception_only(problem))}")
            assert not failures, "\n".join(failures)

        test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]  # pytest asks for the fixtures by it
        return test

    return decorate
