"""The seams of torch that several need: a leader replaces each of them once, and others subscribe to it.

A seam is patched when its leader or the first subscriber comes, and restored when the last one goes. The leader's code is
inlined in the replacement: a call without subscribers, as in nearly every step, costs one truth test more. Another tool's
patch of the same seam stays in force wherever it stands (:mod:`torchobs.taps.patch`).

Torch has hooks of its own for the steps of optimizers. It iterates over its dictionary of hooks while it calls them, and raises
``RuntimeError`` in the user's ``step()`` when one is added or removed meanwhile. So temporary listeners share a hook, and a
hook that cannot be removed at once is removed at the beginning of the next backward pass.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections import deque
from threading import Lock, RLock, current_thread, get_ident, main_thread
from typing import TYPE_CHECKING, Any, Protocol

from torchobs.support.after_fork import renew_in_child
from torchobs.taps.patch import Patch, once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    Places = Callable[[], Iterable[tuple[Any, str]]]
    Remove = Callable[[], None]
    Surround = Callable[..., Any]
    """``surround(call, *args, **kwargs)`` returns what ``call(*args, **kwargs)`` does"""
    MakeShared = Callable[[Any, Any, Any], Any]
    """Returns the leader's replacement of an original, which calls ``divert`` instead if ``busy`` is true"""

_COLLECTS_MEANWHILE = sys.version_info[:2] == (3, 11)


class Tap:
    """A seam: functions of torch with a leader. ``places``: yields owners and attributes; ``nests``: see :class:`Patch`."""

    def __init__(self, places: Places, *, nests: bool = False) -> None:
        self._places, self._nests = places, nests
        self._patches: dict[tuple[Any, str], Patch] = {}
        self._make: Callable[[Any], Any] | None = None
        self._probe = ""

    def lead(self, make: Callable[[Any], Any], probe: str) -> None:
        """Replace the functions by what ``make`` returns for each original. ``probe``: see :class:`Patch`."""
        self._make, self._probe = once(make), probe
        self.renew()

    def renew(self) -> None:
        """Replace functions that were added since."""
        if (make := self._make) is None:
            return
        for owner, name in self._places():
            if (owner, name) not in self._patches:
                self._patches[owner, name] = Patch(owner, name, make, probe=self._probe, nests=self._nests)

    def leave(self) -> None:
        """Restore the functions. Idempotent."""
        self._make = None
        while self._patches:
            self._patches.popitem()[1].undo()


class SharedTap(Tap):
    """A seam with subscribers around the leader's replacement, the last one outermost. From any thread."""

    def __init__(self, places: Places) -> None:
        super().__init__(places, nests=True)
        self._subscribers: list[Surround] = []
        self._is_led = False
        self._lock = RLock()
        renew_in_child(self, _lock=RLock)

    def lead_shared(self, make: MakeShared, probe: str) -> None:
        """Replace the functions by what ``make(original, busy, divert)`` returns."""
        with self._lock:
            self._is_led = True
            self._replace(make, probe)

    def leave(self) -> None:
        """End the lead; the functions are restored unless there are subscribers."""
        with self._lock:
            self._is_led = False
            if self._subscribers:
                self._replace(_unled, "")
            else:
                super().leave()

    def subscribe(self, surround: Surround) -> Remove:
        """Have ``surround`` called around the functions; return a function that ends that."""
        with self._lock:
            self._subscribers.append(surround)
            if not self._patches:
                self._replace(_unled, "")
        return functools.partial(self._unsubscribe, surround)

    def _unsubscribe(self, surround: Surround) -> None:
        with self._lock:
            if surround in self._subscribers:
                self._subscribers.remove(surround)
            if not self._subscribers and not self._is_led:
                super().leave()

    def _replace(self, make: MakeShared, probe: str) -> None:
        super().leave()
        # a replacement that another tool still calls has no subscribers from now on
        before, self._subscribers = self._subscribers, self._subscribers.copy()
        before.clear()
        subscribers = self._subscribers

        def make_shared(original: Any) -> Any:
            return make(original, subscribers, functools.partial(_surrounded, subscribers, make(original, (), None)))

        super().lead(make_shared, probe)


def _unled(original: Any, busy: Any, divert: Any) -> Any:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return divert(*args, **kwargs) if busy else original(*args, **kwargs)

    return replacement


def _surrounded(subscribers: list[Surround], call: Any, *args: Any, **kwargs: Any) -> Any:
    for surround in tuple(subscribers):
        call = functools.partial(surround, call)
    return call(*args, **kwargs)


class StepHook:
    """A global hook of optimizers, by the name of torch's register function: the leader's, and one that subscribers share."""

    def __init__(self, register: str) -> None:
        self._register = register
        self._leaders: list[RemovableHandle] = []
        self._handles: list[RemovableHandle] = []
        self._subscribers: list[Callable[[Any], object]] = []
        self._waiting: Remove | None = None
        """Ends the wait for a backward pass at which the hook is registered"""
        self._lock = RLock()
        renew_in_child(self, _lock=RLock)

    def lead(self, hook: Callable[..., Any]) -> None:
        """Register this hook, which is called before the subscribers'."""
        self._leaders.append(self._registered(hook))

    def leave(self) -> None:
        """Remove it. Idempotent."""
        handles, self._leaders = self._leaders, []
        remove_hooks(handles)

    def subscribe(self, listener: Callable[[Any], object]) -> Remove:
        """Call ``listener(optimizer)`` in each step; return a function that ends that at once, from any thread.

        torch iterates over its hooks while a step runs, and a new one would end that with an error. So another thread than the
        main one has it registered when the next backward pass begins, which is before the step. Raise AttributeError, and keep
        nothing, if this torch has no such hooks.
        """
        self._registering()
        with self._lock:
            self._subscribers.append(listener)
            if not self._handles and self._waiting is None:
                if current_thread() is main_thread() and not _hooks_run():
                    self._share()
                else:
                    self._waiting = BACKWARD.subscribe(self._sharing)
        return functools.partial(self._unsubscribe, listener)

    def _sharing(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                waiting()
                if self._subscribers and not self._handles:
                    self._share()
        return call(*args, **kwargs)

    def _share(self) -> None:
        subscribers = self._subscribers

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            del args, kwargs
            for subscriber in tuple(subscribers):
                subscriber(optimizer)

        self._handles.append(self._registered(hook))

    def _registered(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self._registering()(hook)

    def _registering(self) -> Callable[[Callable[..., Any]], RemovableHandle]:
        from torch.optim import optimizer  # torch is optional until training begins

        register: Callable[[Callable[..., Any]], RemovableHandle] = getattr(optimizer, self._register)
        return register

    def _unsubscribe(self, listener: Callable[[Any], object]) -> None:
        with self._lock:
            if listener in self._subscribers:
                self._subscribers.remove(listener)
            if not self._subscribers:
                self._subscribers = []  # of a hook that is not removed yet there are none from now on
                handles, self._handles = self._handles, []
                remove_hooks(handles)


# -- the seams; torch is optional until training begins -------------------------------------------------------------------


def _backward() -> Iterator[tuple[Any, str]]:
    import torch

    yield torch.autograd, "backward"


def _engine() -> Iterator[tuple[Any, str]]:
    import torch

    variable, kind = torch.autograd.Variable, getattr(torch._C, "_ImperativeEngine", None)
    if kind is not None and type(variable._execution_engine) is kind:  # another tool's stand-in is left alone
        yield variable, "_execution_engine"


def _fetch() -> Iterator[tuple[Any, str]]:
    from torch.utils.data import dataloader

    yield dataloader._BaseDataLoaderIter, "__next__"


def _clipping(name: str, alias: str) -> Places:
    """Return the places of a function of ``clip_grad``, where torch has it, and of the same in ``torch.nn.utils``."""

    def places() -> Iterator[tuple[Any, str]]:
        import torch

        utils, clip = torch.nn.utils, torch.nn.utils.clip_grad
        original = getattr(clip, name, None)
        is_alias = getattr(utils, alias, None) is original
        if original is not None:
            yield clip, name
            if is_alias:
                yield utils, alias

    return places


def subclasses(base: type) -> Iterator[type]:
    """Yield a class and all that inherit from it, each before its own subclasses."""
    waiting, visited = [base], set[int]()
    while waiting:
        kind = waiting.pop()
        if id(kind) not in visited:
            visited.add(id(kind))
            yield kind
            waiting += type.__subclasses__(kind)[::-1]


def _scaler(name: str) -> Places:
    """Return the places of a method of ``GradScaler``, there and in each subclass that overrides it."""

    def places() -> Iterator[tuple[Any, str]]:
        from torch.amp import grad_scaler

        for owner in subclasses(grad_scaler.GradScaler):
            if name in vars(owner):
                yield owner, name

    return places


BACKWARD, ENGINE, FETCH = SharedTap(_backward), Tap(_engine), SharedTap(_fetch)
BEFORE_STEP, AFTER_STEP = StepHook("register_optimizer_step_pre_hook"), StepHook("register_optimizer_step_post_hook")
TOTAL_NORM = Tap(_clipping("_get_total_norm", "get_total_norm"))
CLIP_BY_NORM = Tap(_clipping("_clip_grads_with_norm_", "clip_grads_with_norm_"))
CLIP_BY_VALUE = Tap(_clipping("clip_grad_value_", "clip_grad_value_"), nests=True)
SCALER = {name: Tap(_scaler(name), nests=name == "step") for name in ("step", "scale", "unscale_", "update")}


class Training(Protocol):
    """The training thread, as the session knows it."""

    captures: Any

    @property
    def thread(self) -> int:
        """Its identifier."""

    @property
    def backwards(self) -> bool:
        """Whether a backward pass runs in it."""


class SafePoint:
    """Tasks for the training thread's next outermost backward pass, where hooks can be added and removed; for one session.

    No other thread may do that, and no optimizer's hook is running when the training thread begins a backward pass.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._tasks: deque[Callable[[], object]] = deque()
        self._unsubscribe: Remove | None = None
        self._closed = False
        self._arming = Lock()
        renew_in_child(self, _arming=Lock)
        self._pid = os.getpid()

    def arm(self, task: Callable[[], object]) -> None:
        """Queue a task, which must not raise, unless it is queued already, or this is closed. A task may queue itself again."""
        with self._arming:
            if self._closed:
                return
            if task not in self._tasks:
                self._tasks.append(task)
            if self._unsubscribe is None:
                self._unsubscribe = BACKWARD.subscribe(self._before_backward)

    def _before_backward(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        import torch  # torch is optional until training begins

        training, graph_task = self._training, getattr(torch._C, "_current_graph_task_id", lambda: -1)
        is_outermost = get_ident() == training.thread and not training.backwards and graph_task() < 0
        # within the capture of a CUDA graph a task could end it: NCCL's flight recorder queries events
        for due in self._take_tasks() if is_outermost and not training.captures.in_progress() else ():
            due()
        return call(*args, **kwargs)

    def close(self) -> None:
        """Drop all tasks, and take no more: the sampler's last round comes after the hooks' end. Idempotent."""
        self._closed = True
        self._take_tasks()

    def _take_tasks(self) -> list[Callable[[], object]]:
        """Return the tasks, and reset: a task that is armed from now on subscribes again."""
        if self._pid != os.getpid():
            return []  # in a forked child the lock may be held by a thread of the parent
        with self._arming:
            unsubscribe, self._unsubscribe = self._unsubscribe, None
            if unsubscribe is not None:
                unsubscribe()
            due = list(self._tasks)
            self._tasks.clear()
            return due


# -- removing torch's hooks ------------------------------------------------------------------------------------------------

_left: list[RemovableHandle] = []
_waiting: list[Remove] = []


def remove_hooks(handles: Iterable[RemovableHandle]) -> None:
    """Remove optimizers' hooks now or, if torch is calling such hooks in any thread, when the next backward pass begins."""
    _left.extend(handles)
    if _left and not _hooks_run():
        _remove_left()
    elif _left and not _waiting:
        _waiting.append(BACKWARD.subscribe(_removing))


def _removing(call: Any, *args: Any, **kwargs: Any) -> Any:
    if not _hooks_run():
        _remove_left()
        while _waiting:
            _waiting.pop()()
    return call(*args, **kwargs)


def _remove_left() -> None:
    while _left:
        _left.pop().remove()


def _hooks_run() -> bool:
    from torch.optim.optimizer import Optimizer  # torch is optional until training begins

    file = Optimizer.profile_hook_step.__code__.co_filename
    with ThreadFrames() as frames:
        return any(_calls_hooks(frame, file) for frame in frames.values())


def _calls_hooks(frame: Any, file: str) -> bool:
    """Return whether this thread is in torch's wrapper of ``step()``, but not in the step itself (a closure's backward)."""
    called = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == file:
            step = getattr(frame.f_locals.get("func"), "__code__", None)
            if called is None or called is not step:
                return True
        called, frame = code, frame.f_back
    return False


class ThreadFrames:
    """Gives the innermost frame of each thread, by identifier, without a crash of the interpreter.

    Python 3.11 makes the object of a frame when it is asked for, by ``sys._current_frames()`` or ``f_back``, and may collect
    garbage meanwhile. A finalizer lets other threads run then, and their frames are gone when it goes on: it hangs with a lock
    of the interpreter's held (python/cpython#106883), or reads freed memory (#99110). So nothing is collected for as long, some
    microseconds. Before, frames were objects already; since 3.12 garbage is collected between two instructions alone (#97922).

    It is no generator: the frame of one that is suspended has no ``f_back``, and it would be this thread's innermost.
    """

    __slots__ = ("_held_back",)

    def __enter__(self) -> dict[int, FrameType]:
        """Return the frames."""
        self._held_back = _COLLECTS_MEANWHILE and gc.isenabled()
        if self._held_back:
            gc.disable()
        return sys._current_frames()

    def __exit__(self, *_: object) -> None:
        """Let garbage be collected again, if it was."""
        if self._held_back:
            gc.enable()
