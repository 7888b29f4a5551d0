"""Keeps Dynamo from tracing our hooks, which would be compiled, and recompiled, with the user's code.

``trace_rules.add`` marks files as skipped and has no inverse, so entries are removed by hand. Its import takes a second: this
waits until somebody else has imported it. ``torchobs.api`` is not marked: in a compiled region its functions return at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs.support.import_hooks import after_import, cancel

if TYPE_CHECKING:
    from importlib.abc import MetaPathFinder

    from torchobs.support.error_guard import CircuitBreaker

SKIPPED = ("torchobs.probes", "torchobs.flight", "torchobs.support.error_guard", "torchobs.runtime.session")


class DynamoRules:
    """Our entries in Dynamo's list of files to skip."""

    def __init__(self) -> None:
        self._handle: MetaPathFinder | None = None
        self._added: list[str] = []

    def install(self, breaker: CircuitBreaker) -> None:
        """Add the entries now, or once ``torch._dynamo`` is imported; ``breaker`` keeps our errors out of that import."""
        self._handle = after_import("torch._dynamo", breaker.guard(self._add))

    def remove(self) -> None:
        """Remove the entries. Idempotent."""
        cancel(self._handle)
        if self._added:
            rules = _trace_rules()
            for entry in self._added:
                if entry in rules.SKIP_DIRS:
                    rules.SKIP_DIRS.remove(entry)
            rules._recompile_re()  # what add() calls
            self._added = []

    def _add(self) -> None:
        rules = _trace_rules()
        before = list(rules.SKIP_DIRS)
        for name in SKIPPED:
            rules.add(name)
        self._added = [entry for entry in rules.SKIP_DIRS if entry not in before]


def _trace_rules() -> Any:
    from torch._dynamo import trace_rules  # imported by now

    return trace_rules
