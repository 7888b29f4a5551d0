"""Replacing an attribute of somebody else's, and putting back exactly what was there."""

from __future__ import annotations

from typing import Any


class Patch:
    """``owner.attribute`` replaced by ``replacement``. Undone only while it is still ours: later patches by others stay."""

    __slots__ = ("attribute", "inherited", "original", "owner", "replacement")

    def __init__(self, owner: Any, attribute: str, replacement: Any) -> None:
        self.owner, self.attribute, self.replacement = owner, attribute, replacement
        self.inherited = attribute not in vars(owner)
        self.original = getattr(owner, attribute) if self.inherited else vars(owner)[attribute]
        setattr(owner, attribute, replacement)

    def undo(self) -> None:
        """Restore the original. Idempotent."""
        if vars(self.owner).get(self.attribute) is not self.replacement:
            return
        if self.inherited:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)
