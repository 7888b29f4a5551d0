"""Replace an attribute of another library, and restore exactly what was there.

Other tools patch, too. If one has wrapped our function, it cannot be removed: it stays, disabled, and the next patch of the
same attribute uses it again, so that there is never more than one. If one restores its own original, our function is lost:
:meth:`Patch.check`, called by the sampler thread, detects that.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from threading import RLock
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    MakeReplacement = Callable[[Any], Any]

PLACED, RESTORED, LOST = "placed", "restored", "lost"
_MOST = 500
"""Most objects that are searched"""
_MOST_ITEMS = 64


class _DormantPatch(NamedTuple):
    """A disabled replacement that another tool's function still calls, and the original that it calls in turn."""

    owner: Any
    attribute: str
    replacement: Any
    original: Any
    inherited: bool


_dormant: list[_DormantPatch] = []
_active: list[Patch] = []
_mutex = RLock()
"""Held while a patch is made, undone or checked, so that none just undone is put back. Reentrant for signal handlers"""


class Patch:
    """Replacement of ``owner.attribute`` by what ``make`` returns for the original. Later patches of it by others stay.

    ``probe``: the probe that needs it, for :meth:`check`; without a name it is not watched. ``nests``: whether a nested call
    does no harm, so that the replacement can be put in front of another tool's.
    """

    __slots__ = ("_make", "attribute", "inherited", "nests", "original", "owner", "probe", "replacement", "state")

    def __init__(self, owner: Any, attribute: str, make: MakeReplacement, *, probe: str = "", nests: bool = False) -> None:
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
    def location(self) -> str:
        """The attribute's qualified name."""
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
                _dormant[:] = [kept for kept in _dormant if (kept.owner, kept.attribute) != (self.owner, self.attribute)]
                _dormant.append(_DormantPatch(self.owner, self.attribute, self.replacement, self.original, self.inherited))

    def check(self) -> str | None:
        """Put the replacement back if it is not called now. Return its state if it was restored or has changed."""
        with _mutex:
            before, self.state = self.state, self._repair() if self in _active else self.state
            return self.state if self.state == RESTORED or self.state != before else None

    def _repair(self) -> str:
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
            return LOST  # it may still be called in a way that cannot be found, and must not be called twice
        self.original, self.inherited = current, self.attribute not in vars(self.owner)
        self.replacement = self._make(current)
        setattr(self.owner, self.attribute, self.replacement)
        return RESTORED

    def _current(self) -> Any:
        return vars(self.owner)[self.attribute] if self.attribute in vars(self.owner) else getattr(self.owner, self.attribute)

    def _revive(self) -> bool:
        """Use a dormant replacement again if one is still called; return whether there is one."""
        for dormant in _dormant:
            if dormant.owner is not self.owner or dormant.attribute != self.attribute:
                continue
            replacement = self._make(dormant.original)
            if leads_to(self._current(), dormant.replacement) and _transplant(replacement, dormant.replacement):
                _dormant.remove(dormant)
                self.original, self.replacement, self.inherited = dormant.original, dormant.replacement, dormant.inherited
                return True
        return False


def active() -> list[Patch]:
    """Return the patches that are watched."""
    return list(_active)


def once(make: MakeReplacement) -> MakeReplacement:
    """Return ``make`` memoised by its original, for a function that has several names."""
    replacements: list[tuple[Any, Any]] = []

    def make_once(original: Any) -> Any:
        replacement = next((replacement for key, replacement in replacements if key is original), None)
        if replacement is None:
            replacement = make(original)
            replacements.append((original, replacement))
        return replacement

    return make_once


def _transplant(source: Any, target: Any) -> bool:
    """Copy the closure of ``source`` into ``target``; return False unless both are functions with the same code."""
    if not isinstance(source, FunctionType) or not isinstance(target, FunctionType) or source.__code__ is not target.__code__:
        return False
    for old, new in zip(target.__closure__ or (), source.__closure__ or (), strict=True):
        old.cell_contents = new.cell_contents
    return True


def leads_to(function: Any, wanted: Any) -> bool:
    """Return whether calling ``function`` can call ``wanted``; it is not run.

    The objects that it refers to are searched: decorators keep what they wrap in a closure, in ``__wrapped__``, in a global
    name or in an object's attribute.
    """
    queue, visited = deque([function]), {id(function)}
    while queue and len(visited) < _MOST:
        current = queue.popleft()
        if current is wanted:
            return True
        for referred in _referred(current):
            if id(referred) not in visited:
                visited.add(id(referred))
                queue.append(referred)
    return False


def _referred(target: Any) -> Iterator[Any]:
    """Yield the objects that a call of ``target`` may call."""
    if isinstance(target, FunctionType):
        yield from _of_function(target)
    elif isinstance(target, (MethodType, staticmethod, classmethod)):
        yield target.__func__
        if isinstance(target, MethodType):
            yield target.__self__
    elif isinstance(target, functools.partial):
        yield target.func
        yield from target.args[:_MOST_ITEMS]
    elif isinstance(target, (list, tuple)):
        yield from target[:_MOST_ITEMS]
    elif isinstance(target, dict):
        if len(target) <= _MOST_ITEMS:
            yield from list(target.values())
    elif not isinstance(target, (type, type(functools), str, bytes, int, float)):
        yield from _of_object(target)


def _of_function(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
    if (wrapped := function.__dict__.get("__wrapped__")) is not None:
        yield wrapped
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if not str(function.__globals__.get("__name__", "")).startswith(("torch.", "torchobs.")):  # they reach too much
        yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)


def _of_object(target: Any) -> Iterator[Any]:
    """Yield ``__call__`` and the attributes: a function may be held there, or a method used as the replacement."""
    if isinstance(call := getattr(type(target), "__call__", None), FunctionType):  # noqa: B004  # which function it is
        yield call
    attributes = getattr(target, "__dict__", None)
    if isinstance(attributes, dict) and not str(type(target).__module__).startswith(("torch.", "torchobs.")):
        yield from list(attributes.values())[:_MOST_ITEMS]


renew_in_child(sys.modules[__name__], _mutex=RLock)
