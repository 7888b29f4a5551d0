"""Living objects of a class, and weak references to the user's tensors.

Among all objects are tuples that other threads are still building. In CPython ``tuple(...)`` raises ``SystemError`` there, in
code of the user's, if anything else refers to the tuple when it is done. So the list of all objects must not live while another
thread runs: it is made, used and dropped in one call of C functions, which keeps the GIL. No variable may hold it, and all
iterators have to come to their end, since the list contains them. Nor may a garbage collection begin in that call, which an
iterator can set off: finalizers and callbacks of the user's are Python code, and let other threads run.

``torch.utils.swap_tensors`` refuses a tensor with a weak reference, for its content is another afterwards. Modules convert and
load parameters of some subclasses so (quantized ones), and all after ``set_swap_module_params_on_conversion(True)`` of
``torch.__future__``. Our references mean the object, whatever its content, so they are hidden from it.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from itertools import chain, compress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torchobs.taps.taps import subclasses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_every = chain.from_iterable


def living(base: type) -> list[Any]:
    """Return all living objects of a class and those that inherit from it. Holds the GIL for 100 ms with 250,000 objects."""
    classes = set(map(id, subclasses(base)))
    with collections_paused():
        return list(objects_of(classes))


def living_optimizers() -> list[Any]:
    """Return all optimizers, also those that have not stepped; as slow as :func:`living`: seldom, in the sampler thread."""
    import torch  # torch is optional until training begins

    return living(torch.optim.Optimizer)


@contextmanager
def collections_paused() -> Iterator[None]:
    """Let no garbage collection begin in the block, which is to be one call of a C function."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def objects_of(classes: set[int]) -> Iterator[Any]:
    """Return an iterator over the living objects of just these classes (ids): for one call of a C function."""
    store = dict[int, list[Any]]()
    objects = chain(_every(map(store.setdefault, (0,), map(gc.get_objects, (None,)))), (None,))
    return compress(objects, map(classes.__contains__, map(id, map(type, _every(map(store.pop, (0,)))))))


def types_of_objects() -> Iterator[type]:
    """Return an iterator over the class of each living object; use it like that of :func:`objects_of`."""
    return map(type, _every(map(gc.get_objects, (None,))))


class TensorReference(weakref.ref[Any]):
    """A weak reference to a tensor; as fast to call as :class:`weakref.ref`."""

    __slots__ = ()


class _ShownReferences(ModuleType):
    """The module ``weakref`` as ``torch.utils`` uses it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(tensor: object) -> list[Any]:
        """Return the weak references to it, except ours."""
        return [reference for reference in weakref.getweakrefs(tensor) if type(reference) is not TensorReference]


def let_tensors_be_swapped() -> None:
    """Hide our references from ``torch.utils.swap_tensors``. Idempotent, and for good: references outlive a session's end."""
    import torch.utils  # torch is optional until training begins

    if getattr(torch.utils, "weakref", None) is weakref:
        torch.utils.weakref = _ShownReferences("weakref", weakref.__doc__)  # type: ignore[attr-defined]  # not in its stubs


S = TypeVar("S")


class _Entry(NamedTuple):
    ref: weakref.ref[Any]
    number: int
    state: Any


class ObjectIndex(Generic[S]):
    """Index and state for each of at most ``limit`` living objects; indices of dead ones are reused.

    Holds weak references. Written by the training thread, read by any.
    """

    def __init__(self, limit: int, make: Callable[[int], S]) -> None:
        self._limit, self._make = limit, make
        self._entries: dict[int, _Entry] = {}

    def of(self, thing: object) -> S | None:
        """Return the state of ``thing``, which is created at the first call; ``None`` beyond the limit."""
        entry = self._entries.get(id(thing))
        if entry is not None and entry.ref() is thing:
            state: S = entry.state
            return state
        return self._enter(thing)

    def _enter(self, thing: object) -> S | None:
        living = {key: entry for key, entry in self._entries.items() if entry.ref() is not None}
        taken = {entry.number for entry in living.values()}
        index = next((number for number in range(self._limit) if number not in taken), None)
        state = None
        if index is not None:
            state = self._make(index)
            living[id(thing)] = _Entry(weakref.ref(thing), index, state)
        self._entries = living
        return state

    def living(self) -> list[tuple[Any, S]]:
        """Return the living objects and their states, in the order of their indices."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.number)
        return [(thing, entry.state) for entry in entries if (thing := entry.ref()) is not None]
