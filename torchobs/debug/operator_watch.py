"""Find the operators whose results are not finite, while the program goes on: ``anomaly="warn"``.

A dispatch mode sees every operator of the forward and the backward pass. An operator is to blame if its results are not finite
although its inputs were. It waits for a device at each operator.

``-inf`` as a constant (attention masks) is no finding, nor is memory that nobody has written to yet.
"""

# mypy: disable-error-code="no-untyped-call, unreachable"

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo  # torch imports it at a mode's first operator: five seconds and 80 MB of what is measured within
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from torchobs.probes.nonfinite.locate import is_users
from torchobs.tensors.batches import walk
from torchobs.tensors.statistics import own_work
from torchobs.tensors.values import Condition, condition, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType


MOST_FORWARD = 100_000
"""Forward operators whose place in the user's code is remembered for their backward"""
_CONSTANTS = frozenset({
    "full", "full_like", "new_full", "fill", "fill_", "scalar_tensor", "where", "masked_fill", "masked_fill_", "masked_scatter",
    "index_fill", "index_fill_", "index_put", "index_put_", "constant_pad_nd", "copy_", "set_", "resize_", "lift_fresh",
    "lift_fresh_copy",
})  # fmt: skip
"""Operators that write a constant, which may be infinite on purpose"""
UNWRITTEN = frozenset({
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted",
})  # fmt: skip
"""Operators whose result holds what was in that memory before"""


class Birth(NamedTuple):
    """An operator whose results are not finite although its inputs are."""

    operator: str
    node: str
    """Autograd node in the backward pass, or empty"""
    nans: int
    infinities: int
    location: str
    """file:line of the user's code that called it; in the backward pass, that called the forward operator"""

    @property
    def text(self) -> str:
        """The finding in words."""
        counts = " and ".join(f"{n} {kind}" for n, kind in ((self.nans, "NaN"), (self.infinities, "Inf")) if n)
        where = f" in the backward of {self.node}" if self.node else ""
        return f"{counts} from {self.operator}{where}"


class OperatorWatch(TorchDispatchMode):
    """Calls ``found`` with each :class:`Birth`. One for each thread; see :func:`operators_watched`."""

    def __init__(self, found: Callable[[Birth], object]) -> None:
        super().__init__()
        self._found = found
        self._places: OrderedDict[int, tuple[CodeType, int]] = OrderedDict()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and look at what it returns."""
        if own_work.on:  # of `forward_pass()` within the block, whose statistics have NaN for what there is nothing of
            return func(*args, **(kwargs or {}))
        was_odd = func._schema.is_mutable and any(_is_odd(x) for _, x in walk(args[:1]))  # what it is to change
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in UNWRITTEN or func.is_view or was_odd:
            return result
        node = torch._C._current_autograd_node()
        if node is None:
            self._remember()
        # the other results of attention are for its derivative alone
        for _, tensor in walk(result[:1] if name.startswith("_scaled_dot_product") else result):
            self._look(name, node, tensor, [args, kwargs])
        return result

    def _remember(self) -> None:
        """Remember the user's line by the number of the autograd node that this operator belongs to, the last one made."""
        frame = _user_frame()
        if frame is not None:
            self._places[torch._C._autograd._get_sequence_nr() - 1] = frame
            if len(self._places) > MOST_FORWARD:
                self._places.popitem(last=False)

    def _look(self, name: str, node: Any, tensor: Any, given: Any) -> None:
        values = plain(tensor)
        if values is None or not _is_odd(tensor):
            return
        nans = int(values.isnan().sum())
        infinities = 0 if name in _CONSTANTS else int(values.isinf().sum())
        inputs = (x for _, x in walk(given) if x is not tensor)  # but for what it has overwritten
        if (nans or infinities) and not any(map(_is_odd, inputs)):
            place = self._places.get(node._sequence_nr()) if node is not None else _user_frame()
            location = f"{place[0].co_filename}:{place[1]}" if place is not None else ""
            self._found(Birth(name, node.name() if node is not None else "", nans, infinities, location))


def _user_frame() -> tuple[CodeType, int] | None:
    """Return code and line of the innermost frame outside torch and torchobs."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_users(code):
            return code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def user_line() -> str:
    """Return file:line of the innermost frame outside torch and torchobs; empty without one."""
    place = _user_frame()
    return f"{place[0].co_filename}:{place[1]}" if place is not None else ""


def _is_odd(x: Any) -> bool:
    return condition(x) in {Condition.BAD, Condition.MASKED}


class _Watches(threading.local):
    """The mode of this thread and how many contexts want it."""

    watch: OperatorWatch | None = None
    wanted: int = 0


_watches = _Watches()


@contextmanager
def operators_watched(found: Callable[[Birth], object]) -> Iterator[None]:
    """Watch this thread's operators during the block; with the last one the mode goes, wherever in the stack of modes it is."""
    watch = _watches.watch
    if watch is None:
        watch = _watches.watch = OperatorWatch(found)
        watch.__enter__()
    _watches.wanted += 1
    try:
        yield
    finally:
        _watches.wanted -= 1
        if not _watches.wanted:
            _watches.watch = None
            _leave(watch)


def _leave(watch: OperatorWatch) -> None:
    above = []
    while (top := _get_current_dispatch_mode()) is not None and top is not watch:
        above.append(_pop_mode())  # entered later and still there: tasks of an event loop end in any order
    if top is watch:
        watch.__exit__(None, None, None)
    for mode in reversed(above):
        _push_mode(mode)


class Live(NamedTuple):
    """A tensor's storage that was allocated while the watch was on, and is not freed yet."""

    size: int
    location: str


class AllocationWatch(TorchDispatchMode):
    """Counts bytes of storages that operators of this thread return: dense tensors, on any device, views once.

    What operators allocate and free inside themselves is not seen (workspaces of kernels).
    """

    def __init__(self, *, lines: bool = False) -> None:
        """``lines``: remember the user's line of each allocation."""
        super().__init__()
        self._lines = lines
        self._live: dict[int, tuple[Any, Live]] = {}
        self.current = self.peak = 0
        """Bytes allocated under this watch that are live, and the most so far"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and account for what it returns."""
        result = func(*args, **(kwargs or {}))
        for _, x in walk(result) if not func.is_view else ():
            if x.layout is torch.strided and not any(x is argument for argument in args):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._live or not size or storage.device.type == "meta":
            return
        # Torch keeps a storage's Python object for as long as the memory, so that the reference tells when it is freed.
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self._live[key] = reference, Live(size, user_line() if self._lines else "")
        self.current += size
        self.peak = max(self.peak, self.current)

    def _remove(self, key: int) -> None:
        _, live = self._live.pop(key)
        self.current -= live.size

    def live(self) -> list[Live]:
        """Return what is not freed yet."""
        return [live for _, live in list(self._live.values())]


class TransferWatch(TorchDispatchMode):
    """Counts transfers of this thread by operator, devices and line."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str, str, bool, str], tuple[int, int]] = {}
        """Calls and bytes by operator, source, target, whether the host waits, and line"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it if its result is on another device than what it was given."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if name == "_local_scalar_dense" and args[0].device.type != "cpu":
            self._add(name, args[0], "cpu", waits=True)
        elif name == "_to_copy" and result.device != args[0].device:
            self._add(name, args[0], str(result.device), waits=_waits(args[0], result, kwargs.get("non_blocking", False)))
        elif name == "copy_" and isinstance(args[1], torch.Tensor) and args[1].device != args[0].device:
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)  # noqa: PLR2004  # its third argument
            self._add(name, args[1], str(args[0].device), waits=_waits(args[1], args[0], non_blocking))
        return result

    def _add(self, name: str, source: Any, target: str, *, waits: bool) -> None:
        key = name, str(source.device), target, waits, user_line()
        count, size = self.seen.get(key, (0, 0))
        self.seen[key] = count + 1, size + source.numel() * source.element_size()


def _waits(source: Any, target: Any, non_blocking: bool) -> bool:  # noqa: FBT001  # as torch hands it over
    """Return True if the host waits for a device: not between devices, nor from and to pinned memory with ``non_blocking``."""
    if "meta" in {source.device.type, target.device.type} or "cpu" not in {source.device.type, target.device.type}:
        return False
    host = source if source.device.type == "cpu" else target
    return not (non_blocking and (host.is_pinned() or host is target))
