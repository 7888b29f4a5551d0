"""Arguments of ``tune.pipeline()``: what it takes, and errors that say so before the first step."""

from __future__ import annotations

import torch

from torchobs.support.arguments import is_number, is_whole

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
SCHEDULERS = ("constant", "cosine", "linear", "plateau")


def check_names(optimizer: object, scheduler: object, amp: object, ddp: object) -> None:
    """Raise ValueError for a name that is unknown, or a type that autocast does not compute in."""
    for what, name, known in (("optimizer", optimizer, OPTIMIZERS), ("scheduler", scheduler, SCHEDULERS)):
        if not isinstance(name, str) or name not in known:
            given = repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"
            raise ValueError(f"unknown {what} {given}: use one of {', '.join(known)}")
    if amp not in {"auto", True, False, torch.bfloat16, torch.float16}:
        raise ValueError(f"amp is 'auto', True, False, torch.bfloat16 or torch.float16, not {amp!r}")
    if ddp not in {"auto", True, False}:
        raise ValueError(f"ddp is 'auto', True or False, not {ddp!r}")


def check_numbers(  # one argument for each number
    lr: object, accumulate: object, warmup_steps: object, total_steps: object, max_grad_norm: object
) -> None:
    """Raise ValueError for a number out of its range, or what is none."""
    for what, value, least, optional in (
        ("accumulate", accumulate, 1, False),
        ("warmup_steps", warmup_steps, 0, False),
        ("total_steps", total_steps, 1, True),
    ):
        if not (optional and value is None) and not (is_whole(value) and value >= least):  # type: ignore[operator]
            raise ValueError(f"{what} is a whole number, at least {least}, not {value!r}")
    for what, value in (("lr", lr), ("max_grad_norm", max_grad_norm)):
        if value is not None and not (is_number(value) and value >= 0):  # type: ignore[operator]
            raise ValueError(f"{what} is a number, 0 or more, not {value!r}")
    if max_grad_norm == 0:
        raise ValueError("max_grad_norm is above 0, or None to clip nothing")
