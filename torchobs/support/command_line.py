"""Recognizes from a command line the processes that start or help a training without being a rank of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

_LAUNCHERS = frozenset({"torchrun", "accelerate", "accelerate-launch", "deepspeed", "lightning", "fabric"})
_LAUNCHER_MODULES = ("torch.distributed.", "accelerate.commands.", "torch._inductor.")


def starts_others(command: Sequence[str]) -> bool:
    """Return whether this process starts or helps a training without being a rank: all of them inherit the instrumentation.

    A launcher, a process of ``multiprocessing`` (DataLoader workers, its resource tracker), or one of the compiler's pool.
    """
    arguments = list(command[1:])
    while arguments and arguments[0].startswith("-") and arguments[0] not in {"-c", "-m"}:
        arguments = arguments[2:] if arguments[0] in {"-W", "-X"} else arguments[1:]
    first, second, *_ = [*arguments, "", ""]
    if first == "-c":
        return "multiprocessing" in second
    if first == "-m":
        return f"{second}.".startswith(_LAUNCHER_MODULES)
    return PurePath(first).name in _LAUNCHERS or "/torch/_inductor/" in first
