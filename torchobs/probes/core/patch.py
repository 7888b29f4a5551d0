"""Replacing an attribute of somebody else's, and putting back exactly what was there.

Others do the same. One that wraps what it finds leaves our function where it cannot be taken out: it stays, does nothing, and
is put to work again by the next patch of the same attribute, so that there is never more than one. One that puts back what it
found before us takes our function away: :meth:`Patch.look` finds that out, for the sampler thread (``patch_watch``).
"""

from __future__ import annotations

import sys
from threading import RLock
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.core.callees import leads_to
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[Any], Any]

PLACED, RESTORED, LOST = "placed", "restored", "lost"


class _Left(NamedTuple):
    """A function of ours that somebody else's still calls, and what it stands in front of. It does nothing."""

    owner: Any
    attribute: str
    replacement: Any
    original: Any
    inherited: bool


_left: list[_Left] = []
_active: list[Patch] = []
_mutex = RLock()
"""For who begins, ends and looks: a patch that has just been undone must not be put back. A signal handler may do it, too"""


class Patch:
    """``owner.attribute`` replaced by what ``make`` returns for it. Undone only while that stands there: later patches stay.

    ``probe``: who is off without it, for :meth:`look`; without a name nobody looks. ``nests``: whether it may be called within
    itself, so that it can be put in front of whatever has taken its place.
    """

    __slots__ = ("_make", "attribute", "inherited", "nests", "original", "owner", "probe", "replacement", "state")

    def __init__(self, owner: Any, attribute: str, make: Make, *, probe: str = "", nests: bool = False) -> None:
        self.owner, self.attribute, self._make, self.probe, self.nests = owner, attribute, make, probe, nests
        self.state = PLACED
        with _mutex:
            if not self._revive():
                self.inherited = attribute not in vars(owner)
                self.original = self._current()
                self.replacement = make(self.original)
                setattr(owner, attribute, self.replacement)
            if probe:
                _active.append(self)

    @property
    def place(self) -> str:
        """The attribute's full name."""
        owner = self.owner
        module = "" if isinstance(owner, type(sys)) else f"{getattr(owner, '__module__', '')}."
        return f"{module}{getattr(owner, '__qualname__', getattr(owner, '__name__', ''))}.{self.attribute}"

    def undo(self) -> None:
        """Restore the original. Idempotent."""
        with _mutex:
            if self in _active:
                _active.remove(self)
            if vars(self.owner).get(self.attribute) is self.replacement:
                if self.inherited:
                    delattr(self.owner, self.attribute)
                else:
                    setattr(self.owner, self.attribute, self.original)
            elif leads_to(self._current(), self.replacement):
                _left[:] = [left for left in _left if (left.owner, left.attribute) != (self.owner, self.attribute)]
                _left.append(_Left(self.owner, self.attribute, self.replacement, self.original, self.inherited))

    def look(self) -> str | None:
        """See whether it is still called; put it back if not. Return what has become of it, once: a state as above."""
        with _mutex:
            before, self.state = self.state, self._settle() if self in _active else self.state
            return self.state if self.state == RESTORED or self.state != before else None

    def _settle(self) -> str:
        current = vars(self.owner).get(self.attribute)
        if current is self.replacement:
            return PLACED
        if current is self.original or (current is None and self.inherited):
            setattr(self.owner, self.attribute, self.replacement)
            return RESTORED
        current = self._current()
        if leads_to(current, self.replacement):
            return PLACED
        if not self.nests and not leads_to(current, self.original):
            return LOST  # or it is called in a way that does not show; twice it must not be
        self.original, self.inherited = current, self.attribute not in vars(self.owner)
        self.replacement = self._make(current)
        setattr(self.owner, self.attribute, self.replacement)
        return RESTORED

    def _current(self) -> Any:
        return vars(self.owner)[self.attribute] if self.attribute in vars(self.owner) else getattr(self.owner, self.attribute)

    def _revive(self) -> bool:
        """Have a function that was left in place do the work, if there is one that is still called."""
        for left in _left:
            if left.owner is not self.owner or left.attribute != self.attribute:
                continue
            made = self._make(left.original)
            if leads_to(self._current(), left.replacement) and _transplant(made, left.replacement):
                _left.remove(left)
                self.original, self.replacement, self.inherited = left.original, left.replacement, left.inherited
                return True
        return False


def active() -> list[Patch]:
    """Return those in place that are to be looked after."""
    return list(_active)


def once(make: Make) -> Make:
    """Return ``make``, but for the same original the same replacement: for a function that has several names."""
    made: list[tuple[Any, Any]] = []

    def make_once(original: Any) -> Any:
        found = next((replacement for known, replacement in made if known is original), None)
        if found is None:
            found = make(original)
            made.append((original, found))
        return found

    return make_once


def _transplant(source: Any, target: Any) -> bool:
    """Make one function of ours do what another one of the same code does; return False if they are not of the same code."""
    if not isinstance(source, FunctionType) or not isinstance(target, FunctionType) or source.__code__ is not target.__code__:
        return False
    for old, new in zip(target.__closure__ or (), source.__closure__ or (), strict=True):
        old.cell_contents = new.cell_contents
    return True


renew_in_child(sys.modules[__name__], _mutex=RLock)
