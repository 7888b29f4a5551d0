"""What to do after a run has ended: start it again, leave it, or start it elsewhere. One table over how its ranks ended. Pure.

A row holds only where its ends prove it; where none holds the action is ``unknown``, and whoever asks decides.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

RESTART, DO_NOT_RESTART, EXCLUDE_NODE, UNKNOWN = "restart", "do_not_restart", "exclude_node", "unknown"
ACTIONS = (RESTART, DO_NOT_RESTART, EXCLUDE_NODE, UNKNOWN)
HARDWARE_XIDS = frozenset(
    {46, 48, 54, 62, 64, 74, 79, 94, 95, 136, 140, 143, *range(144, 151), 156, 157, 158, 167, 168, 171, 172}
)
"""XIDs after which the hardware is to be reset, restarted or examined, by NVIDIA's catalog ("Resolution Bucket")"""
_FAULT = re.compile(
    r"uncorrectable (?:ECC|NVLink)|fallen off the bus|GPU is lost|over nvlink or a hardware error|Network is down"
    r"|NET/IB.*(?:No such device|device fatal|port error)"
)
"""What CUDA, NCCL and the kernel say of a GPU or a network card that has failed"""
_OUTSIDE = re.compile(
    r"CUDA|cuDNN|CUBLAS|NCCL|\bHIP\b|out of memory|DataLoader worker|shared memory|Too many open|No space left|[Cc]onnection"
    r"|[Tt]imed? ?out|allocate memory"
)
"""Words of errors that the surroundings of a program may have caused"""
_SURROUNDINGS = frozenset(
    {"OutOfMemoryError", "AcceleratorError", "MemoryError", "KeyboardInterrupt", "SystemExit"}
    | {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, OSError)}
)
"""Classes of such errors"""
_MISTAKES = frozenset(
    {"AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError", "NotImplementedError"}
    | {"SyntaxError", "TypeError", "UnboundLocalError", "ValueError", "AssertionError"}
)
"""Classes of errors that are the program's own, also where a library raises them"""


class End(NamedTuple):
    """How a rank ended, as far as it matters for starting it again."""

    rank: str = ""
    reason: str = ""
    """one of ``catalog.EXIT_REASONS``; empty: it has not ended, or how is unknown"""
    up: bool = False
    step: int = 0
    """of the run, those before a resume included"""
    errors: tuple[tuple[str, str], ...] = ()
    """class and message of the exception that ended it, and of the one at its root"""
    place: str = ""
    """line that raised, or crashed"""
    of_program: bool = False
    """that line is the program's own, not a library's"""
    in_collective: bool = False
    """a peer's end may have caused the exception"""
    signal: str = ""
    """the signal that it ended on, or that raised by its handler"""
    xids: tuple[int, ...] = ()
    """reported shortly before its end"""
    gpu_lost: bool = False
    """a GPU did not answer shortly before its end"""
    rebooted: bool = False
    """its machine has been started again since"""
    killed_beside: bool = False
    """the kernel had killed another process of its container for memory shortly before"""


class Ends(NamedTuple):
    """How a run ended: its ranks, which of them failed first, and how that one ended in the attempt before."""

    ranks: tuple[End, ...]
    first: End
    before: End | None = None
    complete: bool = True
    """False: the run has ranks on other machines, which may have failed before"""


class Row(NamedTuple):
    """A cause, and what to do about it."""

    cause: str
    action: str
    reason: str
    proof: Callable[[Ends], Iterable[End]]
    """returns the ends that prove it; none: the row does not hold"""


def _hardware(ends: Ends) -> list[End]:
    return [
        end
        for end in ends.ranks
        if end.reason and (end.gpu_lost or HARDWARE_XIDS & {*end.xids} or any(_FAULT.search(said) for _, said in end.errors))
    ]


def _repeated(ends: Ends) -> list[End]:
    first, before = ends.first, ends.before
    if before is None or not first.place or first.reason not in {"exception", "crashed"} or first.in_collective:
        return []
    kinds = [[kind for kind, _ in end.errors] for end in (first, before)]
    same = (first.reason, first.step, first.place) == (before.reason, before.step, before.place)
    return [first] if same and kinds[0] == kinds[1] else []


def _beside(ends: Ends) -> list[End]:
    first = ends.first
    worker = first.reason == "exception" and any("DataLoader worker" in said for _, said in first.errors)
    return [first] if first.killed_beside and (first.reason == "out_of_memory" or worker) else []


def _peer_died(ends: Ends) -> list[End]:
    waited = [end for end in ends.ranks if end.reason == "exception" and end.in_collective]
    return [ends.first, *waited] if ends.first.reason == "lost" and waited else []


def _preempted(ends: Ends) -> list[End]:
    ended = [end for end in ends.ranks if end.reason != "finished"]
    return ended if ends.complete and all((end.reason, end.signal) == ("terminated", "SIGTERM") for end in ended) else []


def _own_mistake(ends: Ends) -> list[End]:
    first = ends.first
    if first.reason != "exception" or first.in_collective or first.signal or not first.errors:
        return []
    names = [kind.rpartition(".")[2] for kind, _ in first.errors]
    if _SURROUNDINGS & {*names} or any(_OUTSIDE.search(f"{kind} {said}") for kind, said in first.errors):
        return []
    has_message = bool(first.errors[0][1])  # without its message nothing shows that it is not of the surroundings
    return [first] if names[0] in _MISTAKES or (first.of_program and has_message) else []


def _only(reason: str) -> Callable[[Ends], list[End]]:
    """Return the proof that all ranks ended so."""
    return lambda ends: [*ends.ranks] if all(end.reason == reason for end in ends.ranks) else []


TABLE = (
    Row("running", UNKNOWN, "It has not ended.", lambda ends: [end for end in ends.ranks if end.up]),
    Row("finished", DO_NOT_RESTART, "It finished in order.", _only("finished")),
    Row(
        "interrupted", UNKNOWN, "Somebody interrupted it, who knows whether it is to go on.",
        lambda ends: [ends.first] if ends.first.reason == "interrupted" else [],
    ),
    Row("hardware", EXCLUDE_NODE, "Hardware has failed: a GPU, its memory, or the network card.", _hardware),
    Row(
        "node_lost", EXCLUDE_NODE, "A machine went down under it, and has been started again.",
        lambda ends: [end for end in ends.ranks if end.rebooted and end.reason == "lost"],
    ),
    Row("repeated", DO_NOT_RESTART, "It failed at the same step and line as in the attempt before.", _repeated),
    Row("killed_beside", RESTART, "The kernel killed another process of its container for memory.", _beside),
    Row("peer_died", RESTART, "A rank vanished, and the others waited for it in vain.", _peer_died),
    Row("preempted", RESTART, "SIGTERM ended it from outside: preemption, a time limit, a deleted pod.", _preempted),
    Row("program", DO_NOT_RESTART, "The program itself raised an exception: it would do so again.", _own_mistake),
    Row("unknown", UNKNOWN, "Nothing proves whether it would end so again.", lambda ends: [ends.first]),
)  # fmt: skip
"""The first row with a proof holds."""


def decide(ends: Ends) -> tuple[Row, tuple[End, ...]]:
    """Return the row that holds, and the ends that prove it."""
    proofs = ((row, tuple(row.proof(ends))) for row in TABLE)
    return next((row, proof) for row, proof in proofs if proof)
