"""A training loop as one would write it by hand: accumulation, AMP, clipping, schedule, DDP, checkpoints."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchobs.support.arguments import is_number, is_whole
from torchobs.support.import_hooks import imported
from torchobs.support.process_group import gradient_sync
from torchobs.tensors.batches import call, rebuilt
from torchobs.tensors.running import length, samplers
from torchobs.tune import checkpoint_file
from torchobs.tune.choices import amp_dtype
from torchobs.tune.difference import described, pair_of
from torchobs.tune.plan import model_device, optimize

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    LossFunction = Callable[[Any, Any], torch.Tensor]


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
SCHEDULERS = ("constant", "cosine", "linear")


def check_arguments(optimizer: object, scheduler: object, amp: object, ddp: object, **numbers: Any) -> None:
    """Raise ValueError for a name that is unknown, a type that autocast does not compute in, a number out of its range."""
    for what, name, known in (("optimizer", optimizer, OPTIMIZERS), ("scheduler", scheduler, SCHEDULERS)):
        if not isinstance(name, str) or name not in known:
            given = repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"
            raise ValueError(f"unknown {what} {given}: use one of {', '.join(known)}")
    if amp not in {"auto", True, False, torch.bfloat16, torch.float16}:
        raise ValueError(f"amp is 'auto', True, False, torch.bfloat16 or torch.float16, not {amp!r}")
    if ddp not in {"auto", True, False}:
        raise ValueError(f"ddp is 'auto', True or False, not {ddp!r}")
    for what, least in (("accumulate", 1), ("warmup_steps", 0), ("total_steps", 1)):
        value = numbers[what]
        if not (what == "total_steps" and value is None) and not (is_whole(value) and value >= least):
            raise ValueError(f"{what} is a whole number, at least {least}, not {value!r}")
    for what in ("lr", "max_grad_norm"):
        value = numbers[what]
        if value is not None and not (is_number(value) and value >= 0):
            raise ValueError(f"{what} is a number, 0 or more, not {value!r}")
    if numbers["max_grad_norm"] == 0:
        raise ValueError("max_grad_norm is above 0, or None to clip nothing")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the scheduler of a pipeline does, by its name and the steps over which the rate first rises."""

    name: str
    warmup_steps: int

    @property
    def ends(self) -> bool:
        """True if the rate depends on the number of steps in all."""
        return self.name in {"cosine", "linear"}

    def scheduler(self, optimizer: Optimizer, total_steps: Callable[[], int | None], step: int = 0) -> LRScheduler:
        """Return torch's scheduler of an optimizer, at that step."""
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return LambdaLR(optimizer, lambda step: self.factor(total_steps(), step), last_epoch=step - 1)

    def factor(self, total_steps: int | None, step: int) -> float:
        """Return the factor of the learning rate at a step, from 0."""
        if step < self.warmup_steps or step == 0 or not self.ends:
            return self._warmup(step)
        if total_steps is None:
            raise ValueError(f"scheduler {self.name!r} ends at a step: pass total_steps to tune.pipeline(), or use fit()")
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        return (1 + math.cos(math.pi * progress)) / 2 if self.name == "cosine" else 1 - progress

    def _warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warmup_steps + 1))


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device, in whatever lists, tuples, mappings and dataclasses they are."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, PackedSequence):
        packed: Any = value
        return packed.to(device)  # the sizes of its batches stay on the host
    return rebuilt(value, lambda part: moved(part, device))


def distribute(model: nn.Module, *, ddp: str | bool) -> nn.Module:
    """Return the model as the ranks train it: in DDP, or as it is where there is one rank or FSDP has sharded it."""
    launched = distributed.is_available() and (distributed.is_initialized() or distributed.is_torchelastic_launched())
    if is_sharded(model) or not (launched if ddp == "auto" else ddp):
        return model
    if not distributed.is_initialized():
        try:
            distributed.init_process_group()
        except ValueError as error:  # torch's own names the variable that is missing
            words = "ranks are started by torchrun, or call torch.distributed.init_process_group() first"
            raise ValueError(f"ddp=True needs a process group: {words} ({error})") from error
    if distributed.get_world_size() == 1:
        return model
    device = model_device(model)
    return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])


def is_sharded(model: nn.Module) -> bool:
    """Return True if ``fully_shard`` was given the model."""
    fsdp = imported("torch.distributed.fsdp")  # its import takes long, and who has not imported it has sharded nothing
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def check_whole(model: nn.Module) -> None:
    """Raise RuntimeError for a model of which each rank has shards: a checkpoint is one process's file."""
    if is_sharded(model):
        raise RuntimeError("the model is sharded by FSDP: torch.distributed.checkpoint saves and loads it")


class Pipeline:
    """Model, optimizer, scheduler and scaler of a training, and its loop. Made by :func:`pipeline`; every part may be replaced.

    ``step`` counts the optimizer's steps, ``epoch`` the complete epochs.
    """

    def __init__(  # one argument for each part
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule,
        total_steps: int | None,
        dtype: torch.dtype | None,
        accumulate: int,
        max_grad_norm: float | None,
    ) -> None:
        self.model = model
        self._optimizer = optimizer
        self.total_steps = total_steps
        self._counts_steps = total_steps is None
        self._schedule = schedule
        self._own_scheduler = schedule.scheduler(optimizer, lambda: self.total_steps)
        self.scheduler: LRScheduler = self._own_scheduler
        self.device = model_device(model)
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.accumulate = accumulate
        self.max_grad_norm = max_grad_norm
        self.step = 0
        self.epoch = 0
        self._micro_steps = 0
        self._batches_done = 0
        self._loss_sum = torch.zeros((), device=self.device)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. Another one goes on with the schedule where the last one was, by its own learning rates."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        own = self.scheduler is self._own_scheduler
        self._own_scheduler = self._schedule.scheduler(optimizer, lambda: self.total_steps, self._own_scheduler.last_epoch)
        self._optimizer = optimizer
        if own:
            self.scheduler = self._own_scheduler

    def train_step(self, batch: Any, loss_fn: LossFunction) -> torch.Tensor:
        """Train on one micro-batch, a pair of input and target; every ``accumulate``-th call steps the optimizer.

        Gradients that are there before the first of them are dropped: of a look at them, say.

        Returns:
            The micro-batch's loss, detached and not divided, on the device.

        Raises:
            ValueError: the batch is no pair, or the schedule has no end: nothing is trained then.
        """
        self._check_schedule()
        pair_of(batch)
        if self._micro_steps % self.accumulate == 0:
            self.optimizer.zero_grad()
        self._micro_steps += 1
        return self._micro_step(batch, loss_fn, self.accumulate, last=self._micro_steps % self.accumulate == 0)

    def _check_schedule(self) -> None:
        """Raise ValueError if the rate is not known, or another optimizer's, before the model has changed."""
        if getattr(self.scheduler, "optimizer", self._optimizer) is not self._optimizer:
            raise ValueError("the scheduler is of another optimizer: make it of run.optimizer, once that is replaced")
        if self.scheduler is self._own_scheduler and self._schedule.ends and self.total_steps is None:
            self._schedule.factor(None, sys.maxsize)

    def fit(  # one keyword for each thing that can be asked for
        self,
        loader: Any,
        epochs: int,
        loss_fn: LossFunction,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 0,
    ) -> list[float]:
        """Train until ``epochs`` epochs are complete, those before a resume included; return each one's mean loss.

        Args:
            loader: a DataLoader of pairs of input and target, sized unless ``total_steps`` was given. An epoch's last group of
                batches may be smaller than ``accumulate``: its gradient is the mean over the batches that it has. On several
                ranks it has a ``DistributedSampler``, or else each rank trains on all of the data.
            epochs: epochs in all. Unless ``total_steps`` was given, the schedule ends with the last of them: with more epochs
                than at the time of a checkpoint it is longer.
            loss_fn: called with output and target.
            checkpoint: file that is replaced after every epoch, and after each ``every`` optimizer steps.
            every: optimizer steps between checkpoints within an epoch; 0 for none.

        Raises:
            ValueError: ``epochs`` or ``every`` is no number of them, a batch is no pair, there is none, or their number is not
                known.
            OSError: there is no folder for the checkpoint, which is found before training, or a file cannot be written.
            RuntimeError: a checkpoint under FSDP, see :meth:`save`; before training, too.
        """
        if not (is_whole(epochs) and is_whole(every) and every >= 0):
            raise ValueError(f"epochs and every are whole numbers, every 0 or more, not {epochs!r} and {every!r}")
        self._check_place(checkpoint)  # now, and not after an epoch
        self._plan_steps(epochs, length(loader))
        self._check_schedule()
        self.model.train()
        losses = []
        while self.epoch < epochs:
            for _ in self._epoch_groups(loader, loss_fn):
                if checkpoint is not None and every and self.step % every == 0:
                    self.save(checkpoint)
            if not self._batches_done:
                raise ValueError(f"the loader has no batch for epoch {self.epoch + 1}: an iterator is used up after one epoch")
            losses.append(float(self._loss_sum) / self._batches_done)
            self.epoch, self._batches_done = self.epoch + 1, 0
            if checkpoint is not None:
                self.save(checkpoint)
        return losses

    def _plan_steps(self, epochs: int, batches: int | None) -> None:
        """Let the schedule end with the last epoch, unless the caller has said where."""
        if not self._counts_steps:
            return
        ends = self._schedule.ends and self.scheduler is self._own_scheduler  # or else the rates are those of the caller's
        if batches is None:
            if ends:
                raise ValueError("the loader has no length: pass total_steps to tune.pipeline(), the optimizer's steps in all")
            return
        before, self.total_steps = self.total_steps, epochs * math.ceil(batches / self.accumulate)
        if ends and before not in {None, self.total_steps}:  # further epochs: the next step is the new schedule's
            factor = self._schedule.factor(self.total_steps, self.scheduler.last_epoch)
            for group, rate in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
                group["lr"] = rate * factor

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint that is complete or not there; of several ranks, rank 0 does. Gradients are not in it.

        So call it after a step of the optimizer, not between micro-batches.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: the model is sharded by FSDP: ``torch.distributed.checkpoint`` saves what each rank has.
        """
        check_whole(self.model)
        if _rank():
            return
        counts: dict[str, int | None] = {"step": self.step, "epoch": self.epoch, "batches": self._batches_done}
        counts |= {"total_steps": self.total_steps, "counts_steps": self._counts_steps}
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        checkpoint_file.save({**parts, "counts": counts, "loss_sum": self._loss_sum.cpu()}, path)

    def _check_place(self, checkpoint: str | os.PathLike[str] | None) -> None:
        if checkpoint is not None:
            check_whole(self.model)
            if not _rank():
                checkpoint_file.check_place(checkpoint)

    def resume(self, path: str | os.PathLike[str]) -> Pipeline:
        """Continue from a checkpoint, between its batches; random numbers, and so the order of a shuffled epoch, are new ones.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no checkpoint of a pipeline, damaged, of another model, or of one with another optimizer.
            RuntimeError: the model is sharded by FSDP.
        """
        check_whole(self.model)
        parts = self._parts()
        state = checkpoint_file.load(path, self.device)
        checkpoint_file.check(state, parts, path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        counts = state["counts"]
        self.step, self.epoch = counts["step"], counts["epoch"]
        if self._counts_steps:
            self.total_steps, self._counts_steps = counts["total_steps"], counts["counts_steps"]
        self._micro_steps, self._batches_done, self._loss_sum = 0, counts["batches"], state["loss_sum"].to(self.device)
        self.optimizer.zero_grad()  # of micro-batches before
        return self

    def _parts(self) -> dict[str, Any]:
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return {"model": inner, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}

    def _micro_step(self, batch: Any, loss_fn: LossFunction, parts: int, *, last: bool) -> torch.Tensor:
        inputs, target = moved(pair_of(batch), self.device)
        with gradient_sync(self.model, on=last):
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self._autocasts):
                loss: Any = loss_fn(call(self.model, inputs), target)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError(f"loss_fn returns the mean loss, a tensor of one number, not {described(loss)}")
            self.scaler.scale(loss / parts).backward()  # type: ignore[no-untyped-call]
        if last:
            self._update()
        return loss.detach()

    def _update(self) -> None:
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scaler.get_scale() < scale:
            return  # gradients overflowed: the scaler has skipped the step
        self.step += 1
        self.scheduler.step()

    @property
    def _autocasts(self) -> bool:
        """FSDP has a policy of mixed precision in autocast's place."""
        return self.dtype is not None and not is_sharded(self.model)

    def _epoch_groups(self, loader: Any, loss_fn: LossFunction) -> Iterator[None]:
        """Train on the rest of an epoch; yield after each of the optimizer's steps."""
        batches = self._batches(loader)
        self.optimizer.zero_grad()  # of a group that an exception ended, in an earlier call of fit()
        while group := list(islice(batches, self.accumulate)):
            size = len(group)
            losses = [self._micro_step(batch, loss_fn, size, last=number == size) for number, batch in enumerate(group, 1)]
            for loss in losses:
                self._loss_sum += loss
            self._batches_done += size
            yield

    def _batches(self, loader: Any) -> Iterator[Any]:
        """Return the epoch's batches without as many as are done: the very same ones if the loader keeps its order."""
        for sampler in samplers(loader):
            if callable(shuffle := getattr(sampler, "set_epoch", None)):  # by the number of the epoch: a DistributedSampler
                shuffle(self.epoch)
        if not self._batches_done:
            self._loss_sum = torch.zeros((), device=self.device)
        batches: Iterator[Any] = iter(loader)
        for _ in islice(batches, self._batches_done):
            pass
        return batches

    def __repr__(self) -> str:
        model, optimizer = type(self.model).__name__, type(self.optimizer).__name__
        dtype = "float32" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        steps = f"{self.step}" if self.total_steps is None else f"{self.step} of {self.total_steps}"
        return f"Pipeline({model} on {self.device} in {dtype}, {optimizer}, accumulate={self.accumulate}, step {steps})"


def pipeline(  # noqa: PLR0913  # one keyword for each thing that can be asked for
    model: nn.Module,
    *,
    lr: float = 1e-3,
    optimizer: str = "adamw",
    scheduler: str = "cosine",
    warmup_steps: int = 0,
    total_steps: int | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = 1.0,
    amp: str | bool | torch.dtype = "auto",
    compile: bool = False,  # noqa: A002  # the field's word
    ddp: str | bool = "auto",
    **optimizer_options: Any,
) -> Pipeline:
    """Return a training loop around a model that is on its device.

    Args:
        model: the model.
        lr: initial learning rate.
        optimizer: ``adamw``, ``adam``, ``sgd`` or ``rmsprop``.
        scheduler: ``cosine`` (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts) or ``linear`` to 0 at
            ``total_steps``, or ``constant``; for others replace ``Pipeline.scheduler``.
        warmup_steps: steps over which the rate first rises linearly.
        total_steps: the optimizer's steps in all; ``fit`` counts them itself.
        accumulate: micro-batches for each of the optimizer's steps.
        max_grad_norm: norm to which gradients are clipped; None for none.
        amp: ``auto`` (the type the device has instructions for), False, True (as auto), or a type for autocast.
        compile: compile the model; it runs eagerly if that fails.
        ddp: ``auto`` (if launched by torchrun, or a process group of several ranks exists), True or False.
        optimizer_options: what else the optimizer takes.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
        ValueError: an unknown name, or a number out of its range.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune.pipeline() takes a torch.nn.Module, not {type(model).__name__}")
    numbers = {"lr": lr, "accumulate": accumulate, "warmup_steps": warmup_steps, "total_steps": total_steps}
    check_arguments(optimizer, scheduler, amp, ddp, **numbers, max_grad_norm=max_grad_norm)
    dtype = amp if isinstance(amp, torch.dtype) else amp_dtype(model_device(model))[0] if amp else None
    if compile:
        optimize(model, mode="compile").apply()
    trained = distribute(model, ddp=ddp)
    return Pipeline(
        trained,
        OPTIMIZERS[optimizer](trained.parameters(), lr=lr, **optimizer_options),  # type: ignore[call-arg]
        schedule=Schedule(scheduler, warmup_steps),
        total_steps=total_steps,
        dtype=dtype,
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
    )


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
