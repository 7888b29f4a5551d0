"""A training loop as one would write it by hand: accumulation, AMP, clipping, schedule, DDP, checkpoints, recovery."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchobs.support.arguments import is_number, is_whole
from torchobs.support.import_hooks import imported
from torchobs.support.process_group import gradient_sync
from torchobs.support.result import Checked, Problem
from torchobs.tensors.batches import batch_sizes, rebuilt, walk
from torchobs.tensors.losses import check_trained, mean_loss
from torchobs.tensors.running import Buffers, length, samplers
from torchobs.tensors.values import greatest_magnitude, is_finite
from torchobs.tune import checkpoint_file
from torchobs.tune.choices import amp_dtype
from torchobs.tune.plan import check_name, model_device, optimize

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    LossFunction = Callable[..., torch.Tensor]
    """``loss_fn(model, batch)``, or ``loss_fn(output, target)``"""


_log = logging.getLogger("torchobs.tune")
OPTIMIZERS: dict[str, Any] = {
    kind.__name__.lower(): kind for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD)
}
SCHEDULERS = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class FitResult(Checked):
    """The result of :meth:`Pipeline.fit`; its problem is what stopped it before the last epoch."""

    problems: tuple[Problem, ...]
    losses: tuple[float | None, ...]
    """mean loss of each complete epoch, over the batches that were not skipped"""
    steps: int
    """of the optimizer"""
    skipped_steps: int
    """skipped by the loss scaler or the recovery"""
    nonfinite_at: str | None
    """epoch and batch of the first loss or gradient that was not finite"""
    duration_s: float
    samples_per_s: float | None
    """None if a batch's samples cannot be counted"""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of a pipeline's learning rate: its name, and the steps over which the rate first rises."""

    name: str
    warmup_steps: int

    @property
    def ends(self) -> bool:
        """Whether the rate depends on the total number of steps."""
        return self.name in {"cosine", "linear"}

    def scheduler(self, optimizer: Optimizer, total_steps: Callable[[], int | None], step: int = 0) -> LRScheduler:
        """Return torch's scheduler for an optimizer, at that step."""
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return LambdaLR(optimizer, lambda step: self.factor(total_steps(), step), last_epoch=step - 1)

    def factor(self, total_steps: int | None, step: int) -> float:
        """Return the factor of the learning rate at a step, counted from 0."""
        if step < self.warmup_steps or step == 0 or not self.ends:
            return min(1.0, (step + 1) / (self.warmup_steps + 1))
        if total_steps is None:
            raise ValueError(f"scheduler {self.name!r} ends at a step: pass total_steps to tune.pipeline(), or use fit()")
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        return (1 + math.cos(math.pi * progress)) / 2 if self.name == "cosine" else 1 - progress


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device, in any lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, PackedSequence):
        packed: Any = value
        return packed.to(device)  # the sizes of its batches stay on the host
    return rebuilt(value, lambda part: moved(part, device))


def distribute(model: nn.Module, *, ddp: str | bool) -> nn.Module:
    """Return the model in DDP, or as it is with one rank or after FSDP has sharded it."""
    launched = distributed.is_available() and (distributed.is_initialized() or distributed.is_torchelastic_launched())
    if is_sharded(model) or not (launched if ddp == "auto" else ddp):
        return model
    if not distributed.is_initialized():
        try:
            distributed.init_process_group()
        except ValueError as error:  # torch's error names the missing variable
            words = "ranks are started by torchrun, or call torch.distributed.init_process_group() first"
            raise ValueError(f"ddp=True needs a process group: {words} ({error})") from error
    if distributed.get_world_size() == 1:
        return model
    device = model_device(model)
    return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called with the model."""
    fsdp = imported("torch.distributed.fsdp")  # its import takes long, and without it nothing is sharded
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def check_whole(model: nn.Module) -> None:
    """Raise RuntimeError for a model in shards: a checkpoint is one process's file."""
    if is_sharded(model):
        raise RuntimeError("the model is sharded by FSDP: torch.distributed.checkpoint saves and loads it")


@dataclass(repr=False, eq=False)
class Pipeline:
    """Model, optimizer, scheduler and scaler of a training, and its loop, as :func:`pipeline` makes it. Parts may be replaced.

    ``step`` counts the optimizer's steps, ``epoch`` the complete epochs.
    """

    model: nn.Module
    loss_fn: LossFunction
    _optimizer: Optimizer
    _schedule: Schedule
    total_steps: int | None
    dtype: torch.dtype | None
    """what autocast computes in"""
    accumulate: int
    max_grad_norm: float | None
    _policy: Any
    recovery: Any = field(init=False, default=None)
    """recovery of the last ``fit``, with its evidence and counts"""
    step: int = field(init=False, default=0)
    epoch: int = field(init=False, default=0)
    _micro_steps: int = field(init=False, default=0)
    _batches_done: int = field(init=False, default=0)
    _loss_sum: float = field(init=False, default=0.0)
    _loss_count: int = field(init=False, default=0)
    """batches of the epoch so far, without skipped ones"""

    def __post_init__(self) -> None:
        self.device = model_device(self.model)
        self._counts_steps = self.total_steps is None
        self._own_scheduler = self._schedule.scheduler(self._optimizer, lambda: self.total_steps)
        self.scheduler: LRScheduler = self._own_scheduler
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. A new one continues the schedule at the same step, with its own learning rates."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        check_trained(self.model, optimizer=optimizer)
        keeps_schedule = self.scheduler is self._own_scheduler
        self._own_scheduler = self._schedule.scheduler(optimizer, lambda: self.total_steps, self._own_scheduler.last_epoch)
        self._optimizer = optimizer
        if keeps_schedule:
            self.scheduler = self._own_scheduler

    def train_step(self, batch: Any) -> torch.Tensor:
        """Train on one micro-batch; every ``accumulate``-th call steps the optimizer. Values that are not finite are ignored.

        Gradients from before the first micro-batch are dropped.

        Returns:
            The micro-batch's loss, detached and not divided, on the device.

        Raises:
            ValueError: the schedule has no end, or there is a recovery, which works in ``fit``; then nothing is trained.
        """
        if self._policy is not None:
            raise ValueError("recovery works in fit(): a loop of your own uses guard.Recovery(model, optimizer, policy).step()")
        self._check_schedule()
        if self._micro_steps % self.accumulate == 0:
            self.optimizer.zero_grad()
        last = (self._micro_steps + 1) % self.accumulate == 0
        loss = self._micro_step(batch, self.accumulate, last=last)
        self._micro_steps += 1
        if last:
            self._clip()
            self._update()
        return loss

    def _check_schedule(self) -> None:
        """Raise ValueError if the rate is unknown or another optimizer's, before the model changes."""
        if getattr(self.scheduler, "optimizer", self._optimizer) is not self._optimizer:
            raise ValueError("the scheduler is of another optimizer: make it of run.optimizer, once that is replaced")
        if self.scheduler is self._own_scheduler and self._schedule.ends and self.total_steps is None:
            self._schedule.factor(None, sys.maxsize)

    def fit(self, loader: Any, epochs: int, *, checkpoint: str | os.PathLike[str] | None = None, every: int = 0) -> FitResult:
        """Train until ``epochs`` epochs are complete, those before a resume included.

        A loss or gradient that is not finite stops it before the optimizer steps, with model and optimizer of the last step,
        unless a recovery skips the step. This waits for the device once in a step.

        Args:
            loader: a DataLoader, or a list of batches, sized unless ``total_steps`` was given. An epoch's last group may have
                fewer than ``accumulate`` batches: its gradient is the mean over them. On several ranks use a
                ``DistributedSampler``: without one each rank trains on all of the data.
            epochs: epochs in all. Unless ``total_steps`` was given, the schedule ends with the last of them; more epochs after
                a resume make it longer.
            checkpoint: file that is replaced after every epoch, and after every ``every`` optimizer steps.
            every: optimizer steps between checkpoints within an epoch; 0 for none.

        Raises:
            TypeError: the loader is a batch, or no iterable.
            ValueError: ``epochs`` or ``every`` is no whole number, there is no batch, or the number of batches is unknown.
            OSError: there is no folder for the checkpoint (raised before training), or a file cannot be written.
            RuntimeError: a checkpoint under FSDP, see :meth:`save` (raised before training).
        """
        if not (is_whole(epochs) and is_whole(every) and every >= 0):
            raise ValueError(f"epochs and every are whole numbers, every 0 or more, not {epochs!r} and {every!r}")
        _check_loader(loader)
        self._check_place(checkpoint)  # now, not after an epoch
        self._plan_steps(epochs, length(loader))
        self._check_schedule()
        self.model.train()
        if self._policy is not None:
            options = {"scaler": self.scaler, "extra": [self.scheduler], "max_grad_norm": self.max_grad_norm}
            self.recovery = self._policy.around(self.model, self.optimizer, **options)
        problems, losses, samples, skipped = list[Problem](), list[float | None](), 0, 0
        nonfinite_at: str | None = None
        started, first_step = perf_counter(), self.step
        while self.epoch < epochs and not problems:
            for group in self._groups(loader):
                train = self._train_group if self.recovery is None else self._recover_group
                problem, stepped, batch_losses = train(group)
                nonfinite_at = nonfinite_at or (None if problem is None else problem.where)
                if problem is not None and self.recovery is None:
                    problems.append(problem)
                    _log.error("fit() stopped: %s", problem)
                    break
                self._loss_sum, self._loss_count = self._loss_sum + sum(batch_losses), self._loss_count + len(batch_losses)
                self._batches_done += len(group)
                skipped += not stepped
                samples += sum(batch_sizes(batch).samples for batch in group)
                if checkpoint is not None and every and self.step % every == 0:
                    self.save(checkpoint)
            else:
                if not self._batches_done:
                    raise ValueError(
                        f"the loader has no batch for epoch {self.epoch + 1}: an iterator is used up after one epoch"
                    )
                losses.append(self._loss_sum / self._loss_count if self._loss_count else None)
                self.epoch, self._batches_done, self._loss_sum, self._loss_count = self.epoch + 1, 0, 0.0, 0
                if checkpoint is not None:
                    self.save(checkpoint)
        spent_s = perf_counter() - started
        speed = samples / spent_s if samples else None
        return FitResult(tuple(problems), tuple(losses), self.step - first_step, skipped, nonfinite_at, spent_s, speed)

    def _plan_steps(self, epochs: int, batches: int | None) -> None:
        """Let the schedule end with the last epoch, unless the caller gave ``total_steps``."""
        if not self._counts_steps:
            return
        ends = self._schedule.ends and self.scheduler is self._own_scheduler  # else the caller's scheduler sets the rates
        if batches is None:
            if ends:
                raise ValueError("the loader has no length: pass total_steps to tune.pipeline(), the optimizer's steps in all")
            return
        before, self.total_steps = self.total_steps, epochs * math.ceil(batches / self.accumulate)
        if ends and before not in {None, self.total_steps}:  # more epochs: the next step is on the new schedule
            factor = self._schedule.factor(self.total_steps, self.scheduler.last_epoch)
            for group, rate in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
                group["lr"] = rate * factor

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, complete or not at all; of several ranks rank 0 writes. It has no gradients.

        So call it after a step of the optimizer, not between micro-batches.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: the model is sharded by FSDP: use ``torch.distributed.checkpoint``.
        """
        check_whole(self.model)
        if _rank():
            return
        counts: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "batches": self._batches_done}
        counts |= {"total_steps": self.total_steps, "counts_steps": self._counts_steps}
        counts["losses"] = [self._loss_sum, self._loss_count]
        checkpoint_file.save({**{name: part.state_dict() for name, part in self._parts().items()}, "counts": counts}, path)

    def _check_place(self, checkpoint: str | os.PathLike[str] | None) -> None:
        if checkpoint is not None:
            check_whole(self.model)
            if not _rank():
                checkpoint_file.check_place(checkpoint)

    def resume(self, path: str | os.PathLike[str]) -> Pipeline:
        """Continue from a checkpoint, between its batches; random numbers, and so the order of a shuffled epoch, are new.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no checkpoint of a pipeline, damaged, or one of another model or optimizer.
            RuntimeError: the model is sharded by FSDP.
        """
        check_whole(self.model)
        parts = self._parts()
        state = checkpoint_file.load(path, self.device)
        checkpoint_file.check(state, parts, path)
        for name, part in parts.items():
            if state[name]:  # a scaler that was off has no state, and torch's refuses that
                part.load_state_dict(state[name])
        counts = state["counts"]
        self.step, self.epoch = counts["step"], counts["epoch"]
        if self._counts_steps:
            self.total_steps, self._counts_steps = counts["total_steps"], counts["counts_steps"]
        self._micro_steps, self._batches_done = 0, counts["batches"]
        self._loss_sum, self._loss_count = counts["losses"]
        self.optimizer.zero_grad()  # of earlier micro-batches
        return self

    def _parts(self) -> dict[str, Any]:
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return {"model": inner, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}

    def _loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        # FSDP has its own mixed precision in place of autocast
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None and not is_sharded(self.model)):
            return mean_loss(model, moved(batch, self.device), self.loss_fn)

    def _micro_step(self, batch: Any, parts: int, *, last: bool) -> torch.Tensor:
        with gradient_sync(self.model, on=last):
            loss = self._loss(self.model, batch)
            self.scaler.scale(loss / parts).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _clip(self) -> Any:
        """Unscale and clip the gradients; return their norm, or without clipping their greatest magnitude."""
        self.scaler.unscale_(self.optimizer)
        if self.max_grad_norm is None:
            return greatest_magnitude(weight.grad for weight in self.model.parameters() if weight.grad is not None)
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of all shards

    def _update(self) -> bool:
        """Step; return whether the optimizer stepped: the scaler skips a step if gradients overflow."""
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scaler.get_scale() < scale:
            return False
        self._count_step()
        return True

    def _count_step(self) -> None:
        self.step += 1
        self.scheduler.step()

    def _train_group(self, group: list[Any]) -> tuple[Problem | None, bool, list[float]]:
        """Do a step; return its problem, whether it stepped, and the losses. A problem leaves the model as it was."""
        buffers, size = Buffers(self.model), len(group)
        tensors = [self._micro_step(batch, size, last=number == size) for number, batch in enumerate(group, 1)]
        norm = self._clip()
        *losses, size_of_gradients = torch.stack([value.to(self.device).double() for value in (*tensors, norm)]).tolist()
        bad = next((number for number, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if bad is None and (math.isfinite(size_of_gradients) or self.scaler.is_enabled()):  # else it skips the step
            return None, self._update(), losses
        text = "a gradient is not finite" if bad is None else f"the loss is {losses[bad]}"
        if not all(is_finite(tensor) for _, tensor in walk(group[bad or 0])):
            text += ", and so is a value of the batch"
        self.scaler.update()  # it has unscaled these gradients
        self.optimizer.zero_grad()
        buffers.put_back()
        return Problem("nonfinite", self._place(bad or 0), text), False, losses

    def _recover_group(self, group: list[Any]) -> tuple[Problem | None, bool, list[float]]:
        outcome = self.recovery.step(group, self._loss, accumulate=True)
        if outcome.stepped:
            self._count_step()
        texts = [problem.text for problem in outcome.problems if problem.kind == "nonfinite"]
        problem = Problem("nonfinite", self._place(0), texts[0]) if texts else None
        return problem, outcome.stepped, [outcome.loss] * len(group) if outcome.stepped else []

    def _place(self, index: int) -> str:
        return f"epoch {self.epoch + 1}, batch {self._batches_done + index + 1}"

    def _groups(self, loader: Any) -> Iterator[list[Any]]:
        """Yield the micro-batches of each remaining step of the epoch: as many batches as are done are skipped."""
        for sampler in samplers(loader):
            if callable(shuffle := getattr(sampler, "set_epoch", None)):  # a DistributedSampler
                shuffle(self.epoch)
        batches: Iterator[Any] = iter(loader if self.recovery is None else self.recovery.batches(loader))
        for _ in islice(batches, self._batches_done):
            pass
        self.optimizer.zero_grad()  # of a group that an exception ended, in an earlier call of fit()
        while group := list(islice(batches, self.accumulate)):
            yield group

    def __repr__(self) -> str:
        model, optimizer = type(self.model).__name__, type(self.optimizer).__name__
        dtype = "float32" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        steps = f"{self.step}" if self.total_steps is None else f"{self.step} of {self.total_steps}"
        return f"Pipeline({model} on {self.device} in {dtype}, {optimizer}, accumulate={self.accumulate}, step {steps})"


def _check_loader(loader: Any) -> None:
    """Raise TypeError unless it is a loader: a loop over a batch would take its samples or parts for batches."""
    is_batch = isinstance(loader, (list, tuple)) and loader and all(isinstance(part, torch.Tensor) for part in loader)
    if is_batch or isinstance(loader, (torch.Tensor, dict, str)) or not hasattr(loader, "__iter__"):
        what = "a batch" if is_batch or isinstance(loader, (torch.Tensor, dict)) else type(loader).__name__
        raise TypeError(f"loader is a DataLoader, or a list of batches as [(input, target)], not {what}")


def pipeline(  # noqa: PLR0913  # one keyword for each thing that can be asked for
    model: nn.Module,
    loss_fn: LossFunction,
    *,
    optimizer: str | Optimizer = "adamw",
    lr: float | None = None,
    scheduler: str = "cosine",
    warmup_steps: int = 0,
    total_steps: int | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = 1.0,
    amp: str | torch.dtype = "auto",
    compile: bool = False,  # noqa: A002  # the field's word
    checkpointing: bool | type[nn.Module] | tuple[type[nn.Module], ...] = False,
    recovery: Any = None,
    ddp: str | bool = "auto",
    **optimizer_options: Any,
) -> Pipeline:
    """Return a training loop around a model that is on its device.

    Args:
        model: the model.
        loss_fn: ``loss_fn(model, batch)``, which calls the model itself, or ``loss_fn(output, target)`` for batches that end in
            the target; see :func:`torchobs.tensors.losses.compute_loss`.
        optimizer: ``adamw``, ``adam``, ``sgd`` or ``rmsprop``, or an optimizer over the model's parameters.
        lr: initial learning rate of an optimizer by name, 1e-3 by default.
        scheduler: ``cosine`` (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts) or ``linear`` to 0 at
            ``total_steps``, or ``constant``; for others replace ``Pipeline.scheduler``.
        warmup_steps: steps over which the rate first rises linearly.
        total_steps: the optimizer's steps in all; ``fit`` counts them itself.
        accumulate: micro-batches for each of the optimizer's steps.
        max_grad_norm: norm to which gradients are clipped; None for none.
        amp: type for autocast: ``bf16``, ``fp16``, ``off``, a dtype, or ``auto``: a type with instructions on the device.
        compile: compile the model; it runs eagerly if that fails.
        checkpointing: recompute activations of repeated blocks in the backward pass, or of modules of these classes.
        recovery: a ``guard.RecoveryPolicy``, for ``fit`` to recover from failed steps instead of stopping.
        ddp: ``auto`` (if launched by torchrun, or a process group of several ranks exists), True or False.
        optimizer_options: further arguments of an optimizer by name.

    Raises:
        TypeError: an argument has another type.
        ValueError: an unknown name, a number out of its range, a model on the device meta, an optimizer of another model, or
            blocks that cannot be recomputed.
    """
    check_trained(model, loss_fn=loss_fn, max_grad_norm=max_grad_norm)
    check_name("scheduler", scheduler, SCHEDULERS)
    if isinstance(optimizer, str):
        check_name("optimizer", optimizer, OPTIMIZERS)
    else:
        check_trained(model, optimizer=optimizer)
        if lr is not None or optimizer_options:
            raise ValueError("lr and other options go into the optimizer, where that is none by name")
    if recovery is not None and (isinstance(recovery, type) or not hasattr(recovery, "around")):
        raise TypeError(f"recovery is a guard.RecoveryPolicy, not {type(recovery).__name__}")
    if ddp not in {"auto", True, False}:
        raise ValueError(f"ddp is 'auto', True or False, not {ddp!r}")
    _check_numbers(accumulate, warmup_steps, total_steps, lr)
    dtype, _ = amp_dtype(amp, model_device(model))
    if checkpointing is not False:
        classes: Any = () if checkpointing is True else checkpointing
        plan = optimize(model, mode="memory_efficient", amp="off", checkpointing=classes)
        if "checkpointing" not in plan.used:
            raise ValueError(next(decision.reason for decision in plan.decisions if decision.technique == "checkpointing"))
        plan.apply()
    if compile:
        optimize(model, mode="compile").apply()
    trained = distribute(model, ddp=ddp)
    stepping: Any = optimizer
    if isinstance(optimizer, str):
        stepping = OPTIMIZERS[optimizer](trained.parameters(), lr=1e-3 if lr is None else lr, **optimizer_options)
    return Pipeline(
        trained, loss_fn, stepping, Schedule(scheduler, warmup_steps), total_steps, dtype, accumulate, max_grad_norm, recovery
    )


def _check_numbers(accumulate: Any, warmup_steps: Any, total_steps: Any, lr: Any) -> None:
    """Raise ValueError for a number that is out of its range."""
    for what, value, least in (
        ("accumulate", accumulate, 1),
        ("warmup_steps", warmup_steps, 0),
        ("total_steps", total_steps, 1),
    ):
        if not (what == "total_steps" and value is None) and not (is_whole(value) and value >= least):
            raise ValueError(f"{what} is a whole number, at least {least}, not {value!r}")
    if lr is not None and not (is_number(lr) and lr >= 0):
        raise ValueError(f"lr is a number, 0 or more, not {lr!r}")


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
