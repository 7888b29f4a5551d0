"""Dispatch modes over all operators of a thread: values that are not finite (``anomaly="warn"``), allocations, transfers.

An operator is to blame for NaN or infinity if its inputs were finite. The first of the modes waits for a device at each
operator. ``-inf`` as a constant (attention masks) is no finding, nor is memory that was never written.
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
import torch._dynamo  # torch imports it at a mode's first operator: five seconds and 80 MB, which would be measured
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from torchobs.probes.nonfinite.locate import is_users
from torchobs.tensors.batches import walk
from torchobs.tensors.statistics import own_work
from torchobs.tensors.values import Condition, condition, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType


MOST_FORWARD = 100_000
"""Most forward operators that have their place in the user's code kept for their backward"""
_CONSTANTS = frozenset({
    "full", "full_like", "new_full", "fill", "fill_", "scalar_tensor", "where", "masked_fill", "masked_fill_", "masked_scatter",
    "index_fill", "index_fill_", "index_put", "index_put_", "constant_pad_nd", "copy_", "set_", "resize_", "lift_fresh",
    "lift_fresh_copy",
})  # fmt: skip
"""Operators that write a constant, which may be infinite on purpose"""
UNWRITTEN = frozenset({
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted",
})  # fmt: skip
"""Operators that return memory as it was left there"""


class Birth(NamedTuple):
    """An operator that made NaN or infinity from finite inputs."""

    operator: str
    node: str
    """Autograd node; empty in the forward pass"""
    nans: int
    infinities: int
    location: str
    """file:line of the user's code that called it, or in the backward pass, its forward operator"""

    @property
    def text(self) -> str:
        """The finding in words."""
        counts = " and ".join(f"{n} {kind}" for n, kind in ((self.nans, "NaN"), (self.infinities, "Inf")) if n)
        where = f" in the backward of {self.node}" if self.node else ""
        return f"{counts} from {self.operator}{where}"


class OperatorWatch(TorchDispatchMode):
    """Calls ``on_birth`` with each :class:`Birth`. One for each thread; see :func:`operators_watched`."""

    def __init__(self, on_birth: Callable[[Birth], object]) -> None:
        super().__init__()
        self._on_birth = on_birth
        self._places: OrderedDict[int, tuple[CodeType, int]] = OrderedDict()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and check its results."""
        if own_work.on:  # statistics of `forward_pass()` within the block: NaN where there is no element
            return func(*args, **(kwargs or {}))
        was_odd = func._schema.is_mutable and any(_is_odd(x) for _, x in walk(args[:1]))  # which it will overwrite
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in UNWRITTEN or func.is_view or was_odd:
            return result
        node = torch._C._current_autograd_node()
        if node is None:
            self._remember()
        # the other results of attention serve its derivative alone
        for _, tensor in walk(result[:1] if name.startswith("_scaled_dot_product") else result):
            self._check_result(name, node, tensor, [args, kwargs])
        return result

    def _remember(self) -> None:
        """Keep the user's line by the number of this operator's autograd node, which is the newest one."""
        frame = _user_frame()
        if frame is not None:
            self._places[torch._C._autograd._get_sequence_nr() - 1] = frame
            if len(self._places) > MOST_FORWARD:
                self._places.popitem(last=False)

    def _check_result(self, name: str, node: Any, tensor: Any, arguments: Any) -> None:
        values = plain(tensor)
        if values is None or not _is_odd(tensor):
            return
        nans = int(values.isnan().sum())
        infinities = 0 if name in _CONSTANTS else int(values.isinf().sum())
        inputs = (x for _, x in walk(arguments) if x is not tensor)  # not the one it has overwritten
        if (nans or infinities) and not any(map(_is_odd, inputs)):
            place = self._places.get(node._sequence_nr()) if node is not None else _user_frame()
            location = f"{place[0].co_filename}:{place[1]}" if place is not None else ""
            self._on_birth(Birth(name, node.name() if node is not None else "", nans, infinities, location))


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
    """The mode of this thread, and how many contexts want it."""

    watch: OperatorWatch | None = None
    wanted: int = 0


_watches = _Watches()


@contextmanager
def operators_watched(on_birth: Callable[[Birth], object]) -> Iterator[None]:
    """Watch this thread's operators during the block. The last one to end removes the mode, from anywhere in torch's stack."""
    watch = _watches.watch
    if watch is None:
        watch = _watches.watch = OperatorWatch(on_birth)
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
    """A storage that was allocated under the watch and is not freed."""

    size: int
    location: str


class AllocationWatch(TorchDispatchMode):
    """Counts bytes of storages that operators of this thread return: dense tensors, on any device, views once.

    Workspaces that operators allocate and free themselves do not count.
    """

    def __init__(self, *, lines: bool = False) -> None:
        """``lines``: keep the user's line of each allocation."""
        super().__init__()
        self._lines = lines
        self._live: dict[int, tuple[Any, Live]] = {}
        self.current = self.peak = 0
        """Bytes allocated under this watch that are live, and the most at one time"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for _, x in walk(result) if not func.is_view else ():
            if x.layout is torch.strided and not any(x is argument for argument in args):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._live or not size or storage.device.type == "meta":
            return
        # Torch keeps a storage's Python object for as long as the memory: the reference dies when that is freed.
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self._live[key] = reference, Live(size, user_line() if self._lines else "")
        self.current += size
        self.peak = max(self.peak, self.current)

    def _remove(self, key: int) -> None:
        _, live = self._live.pop(key)
        self.current -= live.size

    def live(self) -> list[Live]:
        """Return the storages that are not freed."""
        return [live for _, live in list(self._live.values())]


class TransferWatch(TorchDispatchMode):
    """Counts transfers of this thread by operator, devices and line."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str, str, bool, str], tuple[int, int]] = {}
        """Calls and bytes by operator, source, target, whether the host waits, and line"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count it if its result is on another device than its input."""
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
        count, size = self.counts.get(key, (0, 0))
        self.counts[key] = count + 1, size + source.numel() * source.element_size()


def _waits(source: Any, target: Any, non_blocking: bool) -> bool:  # noqa: FBT001  # as torch hands it over
    """Return whether the host waits: not between devices, nor with ``non_blocking`` to the host or from pinned memory."""
    if "meta" in {source.device.type, target.device.type} or "cpu" not in {source.device.type, target.device.type}:
        return False
    host = source if source.device.type == "cpu" else target
    return not (non_blocking and (host.is_pinned() or host is target))
