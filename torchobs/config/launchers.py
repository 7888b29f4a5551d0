"""Recognizes the launcher and reads the process's placement among the ranks: pure functions of the environment.

The launcher nearest to the process wins: ``torchrun`` started by ``srun`` sets ``RANK``, while ``SLURM_PROCID`` still counts
the ``torchrun``s; ``mpirun`` starts its daemons by ``srun``, so its ranks inherit a daemon's ``SLURM_PROCID``. Contradictory
values are reported, and the next launcher is tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torchobs.config.settings import SettingsProblem

LAUNCHED_BY = "launched_by"
"""Resource attribute of a child's flight file: the incarnation of the process that launched it."""

LAUNCH = "launch"
"""Resource attribute that all processes of one launcher on a node share, also after a restart."""

# Slurm numbers its own steps (batch script, interactive shell) from here: SLURM_INTERACTIVE_STEP is 0xfffffffa.
_SLURM_STEPS = 0xFFFFFFF0
_COUNT = r"[0-9]{1,10}"
_TASKS = r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?"


class RankPlacement(NamedTuple):
    """A process's placement in its run; ``None`` where the launcher does not set it.

    ``local_rank`` is 0 then: such a launcher starts one process per node or container.
    """

    launcher: str
    rank: int = 0
    world_size: int | None = None
    local_rank: int = 0
    local_world_size: int | None = None
    node_rank: int | None = None


class _Launcher(NamedTuple):
    """A launcher's name, and the variables that it sets for a rank; the first that is set counts."""

    word: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()


# `env`: others that use torch.distributed's `env://`, such as DeepSpeed, a PyTorchJob without torchrun, a shell script.
_ENV = ("RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), ("GROUP_RANK", "NODE_RANK"))
_TORCHRUN = _Launcher("torchrun", *_ENV)
_SLURM = _Launcher("slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), (), ("SLURM_NODEID",))
# Lightning starts the command again for a node's other ranks and sets everything but RANK.
_LIGHTNING = _Launcher("lightning", "LOCAL_RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), (), ("NODE_RANK",))
_LAUNCHERS = (
    _TORCHRUN,
    _Launcher("env", *_ENV),
    # OMPI_COMM_WORLD_NODE_RANK is not a node's rank but the process's rank within its node over all jobs.
    _Launcher(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # `srun --mpi=pmi2` sets PMI_RANK as well, without a local rank.
    _Launcher("pmi", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "SLURM_LOCALID"), ("MPI_LOCALNRANKS",)),
    _SLURM,
    _LIGHTNING,
    _Launcher("kubernetes", "JOB_COMPLETION_INDEX", ("WORLD_SIZE",)),
)


def locate(environ: Mapping[str, str], problems: list[SettingsProblem]) -> RankPlacement:
    """Return this process's placement; invalid values are added to ``problems``, twice if two launchers read them."""
    for launcher in _LAUNCHERS:
        if _applies(launcher, environ) and (place := _place(launcher, environ, problems)):
            return place
    return RankPlacement("python", world_size=1, local_world_size=1, node_rank=0)


def count(names: tuple[str, ...], environ: Mapping[str, str], problems: list[SettingsProblem]) -> int | None:
    """Return the number in the first of these variables that is set; ``None`` if none is set, or if it is no number."""
    name, text = _first(names, environ)
    if re.fullmatch(_COUNT, text):
        return int(text)
    if text:
        problems.append(SettingsProblem(name, text, "expected an integer, at least 0"))
    return None


def tasks_on_node(layout: str, node: int) -> int | None:
    """Return the tasks that ``2(x3),1``, Slurm's notation, puts on a node (counted from 0); ``None``: not specified."""
    for part in layout.split(","):
        if not (match := re.fullmatch(_TASKS, part.strip())):
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def _applies(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    if launcher is _TORCHRUN:
        return bool(environ.get("TORCHELASTIC_RUN_ID"))
    if launcher is _LIGHTNING:  # on the first node; elsewhere the process group has the rank
        return environ.get("NODE_RANK") == "0" and bool(environ.get("WORLD_SIZE"))
    return launcher is not _SLURM or _in_step(environ)


def _in_step(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process: a batch script also has SLURM_PROCID=0 and SLURM_NTASKS=8, but runs once.

    The check of SLURM_STEP_ID is Open MPI's (``schizo_slurm.c``).
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    if re.fullmatch(_COUNT, step):
        return int(step) < _SLURM_STEPS
    return environ.get("SLURM_PROCID", "0") != "0"


def _place(launcher: _Launcher, environ: Mapping[str, str], problems: list[SettingsProblem]) -> RankPlacement | None:
    rank = count((launcher.rank,), environ, problems)
    if rank is None:
        return None
    world_size = count(launcher.world_size, environ, problems)
    if world_size is not None and rank >= world_size:
        reason = f"must be less than the world size, {world_size}"
        problems.append(SettingsProblem(launcher.rank, str(rank), reason))
        return None
    local_rank = count(launcher.local_rank, environ, problems) or 0
    node_rank = count(launcher.node_rank, environ, problems)
    local_world_size = count(launcher.local_world_size, environ, problems)
    if launcher is _SLURM and node_rank is not None:
        _, layout = _first(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), environ)
        local_world_size = tasks_on_node(layout, node_rank)
    return RankPlacement(launcher.word, rank, world_size, local_rank, local_world_size, node_rank)


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, str]:
    return next(((name, text) for name in names if (text := environ.get(name, "").strip())), ("", ""))
