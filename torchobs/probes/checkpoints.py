"""Checkpoints: duration and size of ``torch.save``, ``safetensors.torch.save_file`` and ``torch.distributed.checkpoint``.

Nothing is changed or serialized twice: the size is the file's, or the distance that a buffer's position moved. Saves between
two steps count as one checkpoint, since most trainers write several files. What counts:

* state of a model or an optimizer (:func:`holds_state`) after the first step: no data caches, no initial weights;
* saves to a path or an open file; saves to memory (or a file object that is no file) from ``MIN_BYTES`` on: Lightning saves to
  memory first, but so does everyone who sends an object to another rank.

A save inside another one is part of it. An asynchronous save takes training time while it copies, and is a checkpoint once it
is complete. Saves through ``from torch import save`` before ``torchobs.init()`` are missed.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from torchobs import catalog
from torchobs.probes.context import LONG_NS, span_limiter
from torchobs.probes.restored import Restored, stamp_of
from torchobs.probes.timeline import CHECKPOINT, PIN, UNPIN
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import call
from torchobs.support.import_hooks import after_import, cancel
from torchobs.taps.patch import Patch, once

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.abc import MetaPathFinder

    from torchobs.probes.context import ProbeContext


_MAX_OBJECTS = 20_000
"""Most objects inspected: a microsecond each, against milliseconds for a save"""


def holds_state(saved: Any, parameters: Iterable[Any]) -> bool:
    """Return whether an object is, or contains, the state of a model or an optimizer.

    State is recognized by content, since names are the user's: modules, optimizers and their ``state_dict``, tensors that share
    memory with a trained parameter, and mappings of arrays where half have shapes of parameters (copies on another device,
    averaged weights, another precision). ``parameters``: the trained parameters known. Without any, any tensor counts.
    """
    trained = list(parameters)
    addresses, shapes = set(filter(None, map(_address, trained))), set(map(_shape, trained))
    waiting, visited, inspected = deque([saved]), set[int](), 0
    while waiting and inspected < _MAX_OBJECTS:
        content = waiting.popleft()
        inspected += 1
        if isinstance(content, (str, bytes, int, float, complex, type(None))):
            continue
        if isinstance(content, (torch.nn.Module, torch.optim.Optimizer)):
            return True
        if isinstance(content, torch.Tensor):
            if not trained or isinstance(content, torch.nn.Parameter) or _address(content) in addresses:
                return True
        elif id(content) not in visited:
            visited.add(id(content))
            if isinstance(content, Mapping) and _is_state(content, shapes):
                return True
            waiting.extend(_content(content))
    return False


def _is_state(mapping: Mapping[object, object], shapes: set[tuple[int, ...]]) -> bool:
    if hasattr(mapping, "_metadata") or ("param_groups" in mapping and "state" in mapping):
        return True  # what Module.state_dict and Optimizer.state_dict return
    arrays = [shape for value in mapping.values() if (shape := _shape(value))]
    return bool(arrays) and sum(shape in shapes for shape in arrays) * 2 >= len(arrays)


def _content(content: Any) -> Iterable[Any]:
    if isinstance(content, Mapping):
        return list(content.values())
    if isinstance(content, (list, tuple, set, frozenset, deque)):
        return list(content)[:_MAX_OBJECTS]
    if isinstance(content, type) or callable(content):
        return ()
    attributes = getattr(content, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else ()


def _shape(value: Any) -> tuple[int, ...]:
    """Return an array's shape, ``()`` for anything else and for single numbers."""
    shape = getattr(value, "shape", ())
    return tuple(shape) if isinstance(shape, tuple) else ()


def _address(tensor: Any) -> int:
    with suppress(RuntimeError):  # one without a storage
        return int(tensor.data_ptr())
    return 0


MIN_BYTES = 64 * 1024
"""Smaller saves to memory are no checkpoint: a CUDA random state has 16 bytes, a CPU one 5 KB"""
DISTRIBUTED, SAFETENSORS = "torch.distributed.checkpoint", "safetensors.torch"
_SAVED_ARGUMENTS = ("obj", "tensors", "state_dict")
"""Keyword names of the first argument"""
_IMPLEMENTATIONS = ("state_dict_saver", "state_dict_loader")


@dataclass(slots=True)
class _Saving:
    """A save in progress."""

    format: str
    target: Any
    started_ns: int
    step: int
    early: bool = False
    """True before the first step has ended"""
    position: int | None = None
    """position in a file object at the start"""
    in_memory: bool = False
    pinned: bool = False
    group: Any = None
    """process group of a distributed save"""


class CheckpointProbe:
    """Times and sizes saves, and times loads."""

    name = "checkpoint"

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._imports: list[MetaPathFinder | None] = []
        self._inside = threading.local()
        self._span_limiter = span_limiter()
        self._lock = threading.RLock()  # a SIGTERM handler may save too, wherever it interrupts us
        renew_in_child(self, _lock=threading.RLock)
        self._step, self._seconds, self._bytes = -1, 0.0, 0
        self._failed_last = 0
        self._pending: partial[None] | None = None
        """Writes the span of the last checkpoint, if it was not written: a run may go on from it"""

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context, self._breaker = context, context.breaker(self.name)
        self._restored = Restored(context, self._breaker)
        for result in catalog.SAVE_RESULTS:
            context.count(catalog.CHECKPOINTS, 0, {"result": result})
        self._replace("save", partial(self._saver, "torch", 1, "f"), torch, torch.serialization)
        self._replace("load", partial(self._loader, "torch"), torch, torch.serialization)
        self._replace("load_state_dict", self._restored.watched, torch.nn.Module)
        self._imports = [after_import(SAFETENSORS, self._watch_safetensors), after_import(DISTRIBUTED, self._watch_distributed)]

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        for handle in self._imports:
            cancel(handle)
        for patch in self._patches:
            patch.undo()

    def _replace(self, attribute: str, watched: Any, *owners: Any) -> None:
        make, nests = once(watched), attribute != "load"
        self._patches += [Patch(owner, attribute, make, probe=self.name, nests=nests) for owner in owners]

    def _watch_safetensors(self) -> None:
        module = sys.modules[SAFETENSORS]
        self._replace("save_file", partial(self._saver, "safetensors", 1, "filename"), module)

    def _watch_distributed(self) -> None:
        package = sys.modules[DISTRIBUTED]
        saver, loader = (sys.modules[f"{DISTRIBUTED}.{name}"] for name in _IMPLEMENTATIONS)
        self._replace("save", partial(self._saver, "distributed", 9, "checkpoint_id"), package, saver)
        self._replace("async_save", partial(self._saver, "distributed", 9, "checkpoint_id"), package, saver)
        self._replace("load", partial(self._loader, "distributed"), package, loader)

    def _saver(self, kind: str, at: int, name: str, original: Any) -> Any:
        """Wrap a function that saves to its argument number ``at``, or to that ``name``."""
        breaker, inside = self._breaker, self._inside

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if breaker.is_open or getattr(inside, "save", False) or _calls_from_distributed():
                return original(*args, **kwargs)
            target = args[at] if len(args) > at else kwargs.get(name)
            saved = args[0] if args else next((kwargs[word] for word in _SAVED_ARGUMENTS if word in kwargs), None)
            saving = call(breaker, self._begin, kind, saved, target, kwargs.get("process_group"))
            inside.save, failed, result = True, True, None
            try:
                result = original(*args, **kwargs)
                failed = False
            finally:
                inside.save = False
                if saving is not None:
                    call(breaker, self._end, saving, result, sys.exc_info()[0] if failed else None)
            return result

        return save

    def _loader(self, kind: str, original: Any) -> Any:
        breaker, recorder, training = self._breaker, self._context.recorder, self._context.training
        write_span, read = self._context.write_span, self._restored.read

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            started_ns, inner = monotonic_ns(), _calls_from_distributed() or recorder.in_fetch()
            result = original(*args, **kwargs)
            call(breaker, read, result, args[0] if args else kwargs.get("f"))
            if not inner and monotonic_ns() - started_ns >= LONG_NS and threading.get_ident() == training.thread:
                attributes = {"format": kind, "step": recorder.steps_done()}
                call(breaker, write_span, catalog.SPAN_RESTORE.name, started_ns, monotonic_ns(), attributes, failed=False)
            return result

        return load

    def _begin(self, kind: str, saved: Any, target: Any, group: Any) -> _Saving | None:
        recorder = self._context.recorder
        step = recorder.steps_done()
        if kind != "distributed" and step != self._step and not holds_state(saved, self._context.trained()):
            return None  # a data cache or results; saved beside a checkpoint, it is part of it
        saving = _Saving(kind, target, monotonic_ns(), step, early=not recorder.ended, group=group)
        if kind == "torch" and not isinstance(target, (str, os.PathLike)):
            saving.position, saving.in_memory = _position(target), not _is_file(target)
        # a save to memory is recognized afterwards, by its size; before the first step no step is timed
        saving.pinned = not saving.in_memory and self._in_step()
        if saving.pinned:
            recorder.mark(PIN, saving.started_ns, CHECKPOINT)
        return saving

    def _in_step(self) -> bool:
        recorder = self._context.recorder
        return threading.get_ident() == self._context.training.thread and (bool(recorder.step) or recorder.has_begun())

    def _end(self, saving: _Saving, result: Any, error: type[BaseException] | None) -> None:
        now_ns, recorder = monotonic_ns(), self._context.recorder
        if saving.pinned:
            recorder.mark(UNPIN, now_ns)
        upload = getattr(result, "upload_completion", result)
        if error is None and hasattr(upload, "add_done_callback"):
            upload.add_done_callback(
                lambda future: call(self._breaker, self._uploaded, saving, future, now_ns - saving.started_ns)
            )
            return
        size = None if error is not None else _size(saving, result)
        if saving.in_memory:
            if (size or 0) < MIN_BYTES:
                return
            if self._in_step():
                recorder.mark(PIN, saving.started_ns, CHECKPOINT)
                recorder.mark(UNPIN, now_ns)
        self._record(saving, now_ns, size, error, {})

    def _uploaded(self, saving: _Saving, future: Any, blocked_ns: int) -> None:
        error = None if future.cancelled() else future.exception()
        size = _size(saving, future.result()) if error is None and not future.cancelled() else None
        self._record(saving, monotonic_ns(), size, type(error) if error else None, {"blocked_s": blocked_ns / 1e9})

    def _record(
        self, saving: _Saving, now_ns: int, size: int | None, error: type[BaseException] | None, more: dict[str, object]
    ) -> None:
        self._note_streak(failed=error is not None)
        if saving.early and error is None:
            return  # before the first step there is no progress to save
        attributes: dict[str, object] = {"format": saving.format, "step": saving.step, **more}
        if error is not None:
            attributes["exception.type"] = f"{error.__module__}.{error.__qualname__}"
            attributes |= self._room(saving)
            self._context.count(catalog.CHECKPOINTS, 1, {"result": "failed"})
            self._context.writer.event(catalog.EVENT_CHECKPOINT_FAILED.name, attributes, saving.step)
        else:
            self._show(saving, now_ns - saving.started_ns, size or 0)
        if size is not None:
            attributes["size"] = size
        if error is None and (stamp := stamp_of(saving.target)):
            attributes["file"] = stamp
        self._pending = partial(
            self._context.write_span, catalog.SPAN_CHECKPOINT.name, saving.started_ns, monotonic_ns(), attributes,
            failed=error is not None,
        )  # fmt: skip
        if now_ns - saving.started_ns >= LONG_NS or self._span_limiter.take(now_ns):
            self._write_pending()

    def observe(self) -> None:
        """Write the last checkpoint's span, and find the step of the one that was loaded."""
        self._write_pending()
        self._restored.find_step()

    def _write_pending(self) -> None:
        write, self._pending = self._pending, None
        if write is not None:
            write()

    def _room(self, saving: _Saving) -> dict[str, object]:
        """Return the last good checkpoint's step, and the room for another, as attributes: torch's writer has neither."""
        # nbytes raises of a sparse one
        needed = self._bytes or sum(parameter.numel() * parameter.element_size() for parameter in self._context.trained())
        attributes: dict[str, object] = {"saved_step": max(self._step, 0), "needed": needed}
        if isinstance(saving.target, (str, os.PathLike)):
            with suppress(OSError):
                there = os.statvfs(os.path.dirname(os.path.abspath(saving.target)))  # noqa: PTH100, PTH120  # any os.PathLike
                attributes["free"] = there.f_bavail * there.f_frsize
        return attributes

    def _note_streak(self, *, failed: bool) -> None:
        with self._lock:
            if failed or self._failed_last:
                self._failed_last = self._failed_last + 1 if failed else 0
                self._context.set_gauge(catalog.CHECKPOINT_FAILURE_STREAK, self._failed_last)

    def _show(self, saving: _Saving, length_ns: int, size: int) -> None:
        with self._lock:  # held briefly by an upload's thread and the training thread
            if saving.step != self._step:
                self._step, self._seconds, self._bytes = saving.step, 0.0, 0
                self._context.count(catalog.CHECKPOINTS, 1, {"result": "saved"})
            self._seconds += length_ns / 1e9
            self._bytes += size
            self._context.set_gauge(catalog.CHECKPOINT_TIMESTAMP, time.time())
            self._context.set_gauge(catalog.CHECKPOINT_DURATION, self._seconds)
            self._context.set_gauge(catalog.CHECKPOINT_SIZE, self._bytes or None)


def _calls_from_distributed() -> bool:
    """Return whether the wrapper was called by ``torch.distributed.checkpoint``: for a shard, or by an upload's own save."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(f"{DISTRIBUTED}.")


def _is_file(target: Any) -> bool:
    with suppress(AttributeError, OSError):
        return isinstance(target.fileno(), int)
    return False


def _position(target: Any) -> int | None:
    with suppress(AttributeError, OSError, ValueError):
        return int(target.tell())
    return None


def _size(saving: _Saving, result: Any) -> int | None:
    """Return the bytes that this rank has written, if known."""
    if saving.format == "distributed":
        return distributed_bytes(result, _rank(saving.group))
    if isinstance(saving.target, (str, os.PathLike)):
        with suppress(OSError):
            return os.stat(saving.target).st_size  # noqa: PTH116  # it may be any os.PathLike
        return None
    now = _position(saving.target)
    return None if now is None or saving.position is None else now - saving.position


def distributed_bytes(metadata: Any, rank: int) -> int | None:
    """Return the bytes of that rank's shards, from the metadata that every rank gets; ``None`` if file names do not fit."""
    entries = getattr(metadata, "storage_data", None)
    if not isinstance(entries, dict):
        return None
    prefix = f"__{rank}_"
    lengths = [info.length for info in entries.values() if str(getattr(info, "relative_path", "")).startswith(prefix)]
    return sum(lengths) if lengths else None


def _rank(group: Any) -> int:
    distributed = sys.modules["torch.distributed"]
    return int(distributed.get_rank(group)) if distributed.is_available() and distributed.is_initialized() else 0
