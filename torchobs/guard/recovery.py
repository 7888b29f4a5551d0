"""Training steps that go on after errors: out of memory, NaN, loss spikes, unreadable batches, transient errors.

Errors are distinguished by type, never by message. Each kind has a budget; once it is spent the original
error is raised, so that a hopeless training ends.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter, deque
from collections.abc import Sized
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchobs.detect.spikes import UsualValues
from torchobs.guard.records import Category, LossSpikeError, NonFiniteLossError, Severity, is_transient, record_recovery
from torchobs.support.arguments import are_exceptions, is_number, is_whole
from torchobs.support.process_group import gradient_sync, greatest, is_shared
from torchobs.support.result import Checked, Problem
from torchobs.tensors.batches import rebuilt, walk
from torchobs.tensors.losses import check_trained, mean_loss, parameters_of
from torchobs.tensors.running import Buffers
from torchobs.tensors.values import greatest_magnitude

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


@dataclass(frozen=True)
class RecoveryPolicy:
    """What may be done about which errors, and how often. With a budget of 0 the error is raised."""

    oom: int = 100
    """times that batches may be halved because they did not fit"""
    nonfinite: int = 10
    """batches that may be skipped because their loss or gradient is not finite"""
    spikes: int = 3
    """times that a snapshot may be restored because the loss jumped"""
    data: int = 10
    """batches that may be skipped because they cannot be read"""
    io: int = 5
    """repetitions in a row of an operation that failed for a moment"""
    data_errors: tuple[type[Exception], ...] = (ValueError, TypeError, KeyError, IndexError, EOFError, UnicodeError)
    """errors of a data loader that concern one batch. The ``OSError`` of a loader's worker arrives without its number: add
    ``OSError`` here to skip it, too"""
    snapshot_every: int = 100
    """steps between two snapshots in the host's memory; only taken if ``spikes`` is not 0"""
    least_excess: float = 0.5
    """least distance of a spike above the usual loss; see :func:`torchobs.detect.spikes.judge`"""
    backoff_s: float = 0.5
    """wait before the first repetition; doubled each time"""
    agree: bool = False
    """under DDP: all ranks skip together, by an all-reduce of one number in each step; without it nothing is skipped"""

    def __post_init__(self) -> None:
        for name in ("oom", "nonfinite", "spikes", "data", "io", "snapshot_every"):
            value, least = getattr(self, name), 1 if name == "snapshot_every" else 0
            if not is_whole(value) or value < least:
                raise ValueError(f"{name} is {value!r}: a whole number; a budget is 0 or more, and snapshot_every at least 1")
        for name in ("backoff_s", "least_excess"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < inf:
                raise ValueError(f"{name} is {value!r}: a number, 0 or more")
        if not isinstance(self.agree, bool):
            raise ValueError(f"agree is {self.agree!r}: True or False")  # noqa: TRY004  # as of every other field
        if not are_exceptions(self.data_errors):
            raise ValueError(f"data_errors is {self.data_errors!r}: a tuple of exception classes, as (ValueError, KeyError)")

    def around(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Recovery:
        """Return a :class:`Recovery` with this policy, as ``tune.pipeline(recovery=policy)`` makes one."""
        return Recovery(model, optimizer, self, **options)


@dataclass(frozen=True)
class StepOutcome(Checked):
    """The outcome of one step."""

    problems: tuple[Problem, ...]
    """of the kind ``nonfinite`` or ``spike``: why the step was skipped or undone"""
    loss: float
    """mean over the batch"""
    stepped: bool
    """True if the optimizer stepped"""
    action: str
    """``none``, ``split``, ``skip`` or ``restore``"""
    parts: int = 1
    """backward passes of the step: its micro-batches, or the parts that they were split into"""


@dataclass(frozen=True)
class BadBatch:
    """A batch that was skipped, kept as evidence."""

    step: int
    reason: str
    batch: Any
    """on the CPU; of several micro-batches the one with a loss that is not finite, or else all"""


def samples_in(batch: Any) -> int:
    """Return the number of samples: the first dimension that all tensors of the batch share; 0 if there is none."""
    sizes = {tensor.shape[0] for _, tensor in walk(batch) if tensor.dim()}
    return int(sizes.pop()) if len(sizes) == 1 else 0


def split(batch: Any, most: int) -> list[tuple[Any, float]]:
    """Return parts of at most ``most`` samples, each with its share of them; each part has all values that are no tensors.

    Parts are as equal as possible: a part of a single sample would be refused by batch norm.

    Raises:
        ValueError: its tensors cannot be cut.
    """
    size = samples_in(batch)
    number = -(-size // most)
    edges = [size * index // number for index in range(number + 1)]
    parts = []
    for start, end in pairwise(edges):
        part = _slice(batch, start, end)
        if samples_in(part) != end - start:  # all parts would be the whole batch
            raise ValueError(f"a batch of the class {type(batch).__name__} cannot be split")
        parts.append((part, (end - start) / size))
    return parts


def shares_of(batches: Sequence[Any]) -> list[float]:
    """Return the share of each batch in all samples; equal shares if a number of samples is unknown."""
    sizes = [samples_in(batch) for batch in batches]
    return [size / sum(sizes) for size in sizes] if all(sizes) else [1 / len(batches)] * len(batches)


class Part(NamedTuple):
    """A micro-batch, or a part of one, that goes through the model at once."""

    batch: Any
    share: float
    """share of the step's samples"""
    micro_batch: int
    """index of the micro-batch that it belongs to"""


def parts_of(micro_batches: Sequence[Any], most: int | None) -> Iterator[Part]:
    """Yield the micro-batches, those of more than ``most`` samples in parts, with their shares of all samples."""
    for index, (micro_batch, share) in enumerate(zip(micro_batches, shares_of(micro_batches), strict=True)):
        is_too_large = most is not None and samples_in(micro_batch) > most
        within = split(micro_batch, most) if most is not None and is_too_large else [(micro_batch, 1.0)]
        yield from (Part(part, share * part_share, index) for part, part_share in within)


def on_cpu(value: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return the same structure with its tensors copied to the CPU, and new lists and mappings. ``leaf`` copies all else."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.is_meta else value.detach().to("cpu", copy=True)  # on the device meta is nothing to copy
    parts = rebuilt(value, lambda part: on_cpu(part, leaf), anew=True)
    return leaf(value) if parts is value else parts


def free_memory() -> None:
    """Collect garbage, and return memory that torch caches to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _slice(batch: Any, start: int, end: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start:end] if batch.dim() else batch
    return rebuilt(batch, lambda part: _slice(part, start, end))


_log = logging.getLogger("torchobs.guard")
EVIDENCE = 8
"""Most bad batches that are kept"""


@dataclass(slots=True)
class Recovery:
    """Runs training steps, and goes on after errors that :class:`RecoveryPolicy` allows.

    ::

        recovery = guard.Recovery(model, optimizer)
        for batch in recovery.batches(loader):
            outcome = recovery.step(batch, loss_fn)  # loss_fn(model, batch), or loss_fn(output, target)

    ``step`` does what a loop does: it clears gradients, computes the loss, goes backward, clips and steps. The loss function
    gets a batch, or a part of it, and returns the mean loss over its samples. A batch is a tensor, or a structure of tensors
    that have the samples in their first dimension. A step of several micro-batches gets all of them, and is skipped as a
    whole::

        batches = recovery.batches(loader)
        while micro_batches := list(islice(batches, 4)):
            recovery.step(micro_batches, loss_fn, accumulate=True)

    Under DDP nothing is skipped unless ``agree`` is set: other ranks would wait for ever. Out of memory is always an error
    there, since the gradients are already being exchanged.

    Args:
        model: the module that is trained; its buffers are put back when a step is skipped.
        optimizer: the optimizer of its parameters.
        policy: the budgets.
        scaler: the loss scaler, if there is one; it skips steps by itself.
        extra: further objects with ``state_dict`` and ``load_state_dict`` for the snapshot: a scheduler, EMA weights.
        max_grad_norm: gradients are clipped to this norm, unscaled, before the optimizer steps. For another kind of clipping
            use ``optimizer.register_step_pre_hook``.

    Raises:
        TypeError: an argument has another type, or the optimizer needs a closure.
        ValueError: ``max_grad_norm`` is no norm, or the optimizer has no parameter of the model.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    scaler: torch.amp.GradScaler | None = None
    extra: Sequence[Any] = ()
    max_grad_norm: float | None = None
    steps: int = field(init=False, default=0)
    """steps begun"""
    counts: Counter[str] = field(init=False, default_factory=Counter)
    """actions by category"""
    evidence: deque[BadBatch] = field(init=False, default_factory=lambda: deque(maxlen=EVIDENCE))
    """the last batches that were skipped"""
    _baseline: UsualValues = field(init=False, default_factory=UsualValues)
    _snapshot: tuple[int, list[dict[str, Any]]] | None = field(init=False, default=None)
    """the step before which it was taken, and its states"""
    _most: int | None = field(init=False, default=None)
    """most samples that fit through the model at once; None until a batch did not fit"""

    def __post_init__(self) -> None:
        _check_arguments(self)

    def step(self, batch: Any, loss_fn: Callable[..., torch.Tensor], *, accumulate: bool = False) -> StepOutcome:
        """Do one training step.

        Args:
            batch: the batch; with ``accumulate`` a list of micro-batches.
            loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(output, target)``: returns the mean loss of a micro-batch, or of a
                part of one, as one number; see :func:`torchobs.tensors.losses.compute_loss`.
            accumulate: add up the gradients of all micro-batches, weighted by their shares of the samples (equal shares if
                their numbers are unknown), as for one large batch; then step once, or skip all of it. DDP averages the
                gradients with the last one.

        Raises:
            torch.OutOfMemoryError: a single sample does not fit, or the budget is spent; always under DDP.
            NonFiniteLossError: the budget is spent. The optimizer has not stepped, and the gradients are still there.
            LossSpikeError: likewise.
            TypeError: ``accumulate`` without a list of micro-batches, or ``loss_fn`` is no function, or returns no number.
        """
        parameters_of(loss_fn)  # raises unless it is a function
        if accumulate and not (isinstance(batch, (list, tuple)) and batch):
            raise TypeError(f"accumulate=True takes a list of micro-batches, at least one, not {type(batch).__name__}")
        micro_batches: Sequence[Any] = batch if accumulate else [batch]
        self.steps += 1
        snapshot, buffers = self._snapshot, Buffers(self.model)
        is_due = snapshot is None or self.steps - snapshot[0] >= self.policy.snapshot_every
        if is_due and self._judges_spikes():
            snapshot = self.steps, [on_cpu(stateful.state_dict(), deepcopy) for stateful in self._stateful()]
        parts, losses = self._forward_backward(micro_batches, loss_fn, buffers)
        loss = sum(part_loss * part.share for part_loss, part in zip(losses, parts, strict=True))
        problem = self._problem(loss)
        verdict = _GO_ON if problem is None else _SKIP if isinstance(problem, NonFiniteLossError) else _RESTORE
        if is_shared() and self.policy.agree:  # the most severe verdict of any rank
            verdict = int(greatest(verdict, next(self.model.parameters()).device))
        if verdict == _GO_ON:
            stepped = self._optimizer_step()
            self._snapshot = snapshot if stepped else self._snapshot  # the loss with these weights was usual
            action = "split" if len(parts) > len(micro_batches) else "none"
            return StepOutcome((), loss, stepped=stepped, action=action, parts=len(parts))
        if problem is None or verdict == _RESTORE:
            problem = problem if isinstance(problem, LossSpikeError) else _OTHERS[verdict]("another rank found it")
        lost = (part.micro_batch for part_loss, part in zip(losses, parts, strict=True) if not isfinite(part_loss))
        bad = next((micro_batches[index] for index in lost), batch)
        self.evidence.append(BadBatch(self.steps, str(problem), on_cpu(bad)))
        buffers.put_back()
        action = self._pay_for(problem)
        self.optimizer.zero_grad(set_to_none=True)
        text = str(problem)
        if action == "restore" and self._snapshot is not None:
            for stateful, state in zip(self._stateful(), self._snapshot[1], strict=True):
                stateful.load_state_dict(on_cpu(state, deepcopy))  # an optimizer keeps the state it loads
            text = f"{problem}; back to step {self._snapshot[0]}"
        kind = "spike" if isinstance(problem, LossSpikeError) else "nonfinite"
        return StepOutcome((Problem(kind, f"step {self.steps}", text),), loss, stepped=False, action=action, parts=len(parts))

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's batches without those that cannot be read.

        A loader goes on after the error of one batch. A generator ends, and its error is raised: else nobody would notice the
        missing batches. The original error is also raised once the budget is spent.
        """
        iterator, position = iter(loader), 0
        try:
            expected = len(loader) if isinstance(loader, Sized) else None
        except TypeError:  # a DataLoader over an iterable data set
            expected = None
        failed: Exception | None = None
        survivable: tuple[type[Exception], ...] = (*self.policy.data_errors, OSError)
        while True:
            try:
                batch = next(iterator, _END)
            except survivable as error:
                if is_shared() or not (isinstance(error, self.policy.data_errors) or is_transient(error)):
                    raise  # with a batch less, this rank would leave the others waiting
                self._spend(Category.DATA, self.policy.data, error, "skip")
                failed, position = error, position + 1
                continue
            if batch is _END:
                if failed is not None and (expected is None or position < expected):
                    raise failed
                return
            failed, position = None, position + 1
            yield batch

    def retry(self, operation: Callable[[], Any]) -> Any:
        """Call an operation, such as writing a checkpoint; repeat it after transient errors, with a growing wait.

        Transient are ``ConnectionError``, ``TimeoutError``, ``InterruptedError``, ``BlockingIOError`` and ``TRANSIENT_ERRNOS``.
        """
        for attempt in range(self.policy.io + 1):
            try:
                return operation()
            except OSError as error:
                if not is_transient(error) or attempt == self.policy.io:
                    raise
                self.counts["io.retry"] += 1
                self._report(Category.IO, Severity.INFO, error, "retry")
                time.sleep(self.policy.backoff_s * 2**attempt)
        raise AssertionError("unreachable")  # the last attempt returned or raised

    def _judges_spikes(self) -> bool:
        """Return whether spikes are undone: without ``agree`` a rank cannot go back alone, and spikes are left to the user."""
        return self.policy.spikes > 0 and (self.policy.agree or not is_shared())

    def _forward_backward(
        self, micro_batches: Sequence[Any], loss_fn: Callable[..., torch.Tensor], buffers: Buffers
    ) -> tuple[list[Part], list[float]]:
        """Return the parts that went through the model, and the mean loss of each."""
        while True:
            parts = list(parts_of(micro_batches, self._most))
            largest = max(samples_in(part.batch) for part in parts)
            self.optimizer.zero_grad(set_to_none=True)
            try:
                losses = [self._run_part(part, loss_fn, last=part is parts[-1]) for part in parts]
                return parts, [float(loss) for loss in losses]  # read together: one wait for the device
            except torch.OutOfMemoryError as error:
                if is_shared() or largest <= 1:
                    raise
                too_large = error.with_traceback(None)
            # outside the handler: its traceback keeps the forward's tensors alive
            self._spend(Category.MEMORY, self.policy.oom, too_large, "split")
            self._most = -(-largest // 2)
            self.optimizer.zero_grad(set_to_none=True)
            buffers.put_back()
            free_memory()

    def _run_part(self, part: Part, loss_fn: Callable[..., torch.Tensor], *, last: bool) -> torch.Tensor:
        with gradient_sync(self.model, on=last):
            loss = mean_loss(self.model, part.batch, loss_fn)
            scaled = loss * part.share if part.share != 1.0 else loss
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _problem(self, loss: float) -> NonFiniteLossError | LossSpikeError | None:
        """Return the error of this step, if any. A scaler judges the gradients itself."""
        if not isfinite(loss):
            return NonFiniteLossError(f"the loss is {loss}")
        if not (self.scaler is not None and self.scaler.is_enabled()) and not self._gradients_are_finite():
            return NonFiniteLossError("a gradient is not finite")
        if self._judges_spikes() and self._baseline.judge(loss, self.policy.least_excess, learns=False):  # it is undone
            return LossSpikeError(f"the loss is {loss:g}, and {self._baseline.mean:g} is usual")
        return None

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _gradients_are_finite(self) -> bool:
        """Return whether all gradients (in shards: this rank's) are finite: one number is read."""
        return isfinite(greatest_magnitude(x.grad for x in self._parameters() if x.grad is not None))

    def _optimizer_step(self) -> bool:
        """Clip and step; return whether it stepped: a scaler that skips a step lowers its scale."""
        if self.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self._parameters(), self.max_grad_norm)
        if self.scaler is None:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def _pay_for(self, problem: NonFiniteLossError | LossSpikeError) -> str:
        """Return the action; raise the problem if its budget is spent, or other ranks would wait for this one."""
        if is_shared() and not self.policy.agree:
            self._report(Category.NUMERICS, Severity.ERROR, problem, "raise")
            raise problem
        if isinstance(problem, LossSpikeError):
            self._spend(Category.NUMERICS, self.policy.spikes, problem, "restore")
            return "restore"
        self._spend(Category.NUMERICS, self.policy.nonfinite, problem, "skip")
        return "skip"

    def _stateful(self) -> list[Any]:
        return [self.model, self.optimizer, *([self.scaler] if self.scaler is not None else []), *self.extra]

    def _spend(self, category: Category, budget: int, error: Exception, action: str) -> None:
        """Count one use of a budget; raise the error if the budget is spent."""
        key = f"{category.value}.{action}"
        if self.counts[key] >= budget:
            self._report(category, Severity.ERROR, error, "raise")
            raise error
        self.counts[key] += 1
        self._report(category, Severity.WARNING, error, action)

    def _report(self, category: Category, severity: Severity, error: Exception, action: str) -> None:
        record_recovery(category, severity, action, error)
        _log.warning("step %d: %s: %s (%s)", self.steps, type(error).__name__, error, action)


_END = object()
_GO_ON, _SKIP, _RESTORE = range(3)
"""Verdicts on a step, the most severe last"""
_OTHERS: dict[int, type[NonFiniteLossError | LossSpikeError]] = {_SKIP: NonFiniteLossError, _RESTORE: LossSpikeError}


def _check_arguments(recovery: Recovery) -> None:
    if not isinstance(recovery.policy, RecoveryPolicy):
        raise TypeError(f"policy is a guard.RecoveryPolicy, not {type(recovery.policy).__name__}")
    check_trained(recovery.model, optimizer=recovery.optimizer, max_grad_norm=recovery.max_grad_norm)
    if recovery.scaler is not None and not isinstance(recovery.scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is {type(recovery.scaler).__name__}, and a torch.amp.GradScaler, or None, is needed")
    if not isinstance(recovery.extra, (list, tuple)) or any(not hasattr(item, "load_state_dict") for item in recovery.extra):
        raise TypeError("extra is a list of objects that have state_dict() and load_state_dict(), as (scheduler, ema)")
