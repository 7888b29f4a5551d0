"""``compare_ranks``: whether all ranks have the same parameters, gradients and buffers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch

from torchobs.debug.findings import record_findings
from torchobs.debug.tensors import require
from torchobs.support.process_group import let_backend_finish
from torchobs.support.result import Checked, Problem, Result

_CHUNK = 1 << 20
_PERIOD = 8191
"""A prime: a checksum weights elements by their place modulo it, so that swapped elements change it"""
KINDS = ("parameter", "gradient", "buffer")


@dataclass(frozen=True, slots=True)
class Disagreement(Result):
    """A tensor that is not the same, to the bit, on all ranks."""

    kind: str
    """``parameter``, ``gradient`` or ``buffer``"""
    name: str
    ranks: tuple[int, ...]
    """Ranks that differ from most, or, with no majority, from the lowest rank"""
    norms: tuple[float | None, ...]
    """L2 norm on each rank, in order; ``None`` where it is missing"""


@dataclass(frozen=True, slots=True)
class RankAgreement(Checked):
    """What the ranks of one group have in common."""

    model: str
    rank: int
    world_size: int
    structure_differs: tuple[int, ...]
    """Ranks with other names, shapes or types of parameters, or another train mode, than most"""
    disagreements: tuple[Disagreement, ...]
    sharded: int
    """Parameters in shards (FSDP, tensor parallel): not compared"""
    problems: tuple[Problem, ...]


class _Fingerprint(NamedTuple):
    checksum: int
    norm: float


class _Side(NamedTuple):
    """What one rank has."""

    structure: int
    prints: dict[tuple[str, str], _Fingerprint]
    sharded: int


def compare_ranks(model: Any, *, group: Any = None) -> RankAgreement:
    """Compare parameters, gradients and buffers of all ranks of a group. All of them must call it.

    One collective gathers two numbers for each tensor; every rank returns the same answer. To compare gradients, call it after
    ``backward()``: all ranks must have them. Buffers that differ are reported, and are a problem unless DDP broadcasts them at
    each forward pass. With one rank, or without a process group, all agree.

    Args:
        model: ``DistributedDataParallel`` or the module in it.
        group: process group; the default group without it.

    Raises:
        TypeError: ``model`` is no module.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    require(model, "nn.Module", "compare_ranks")
    side = _side(model.module if isinstance(model, DistributedDataParallel) else model)
    together = dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if together else (0, 1)
    sides: list[Any] = [side] * size
    if size > 1:
        dist.all_gather_object(sides, side, group=group)
        let_backend_finish()
    return _compare(type(model).__name__, rank, sides, broadcast=bool(getattr(model, "broadcast_buffers", False)))


def _side(model: Any) -> _Side:
    named = list(model.named_parameters())
    replicated = [(name, x) for name, x in named if not _is_part(x)]
    tensors = [(("parameter", name), x) for name, x in replicated]
    tensors += [(("gradient", name), x.grad) for name, x in replicated if x.grad is not None]
    tensors += [(("buffer", name), x) for name, x in model.named_buffers()]
    plain = ((key, x) for key, x in tensors if x.layout is torch.strided and not x.is_nested and x.device.type != "meta")
    whole = [(key, x) for key, x in plain if not hasattr(x, "placements")]
    whole = [(key, x.dequantize() if x.is_quantized else x) for key, x in whole]  # a view of its bits ends the process
    with torch.no_grad():
        sums: dict[Any, list[Any]] = {}
        for key, x in whole:
            magnitudes = (x.detach().abs() if x.is_complex() else x.detach()).to(torch.float32).reshape(-1)
            sums.setdefault(x.device, []).append((key, _checksum(x), torch.linalg.vector_norm(magnitudes)))
    prints = {}
    for rows in sums.values():
        checksums = torch.stack([checksum for _, checksum, _ in rows]).tolist()
        norms = torch.stack([norm for _, _, norm in rows]).tolist()
        prints.update({key: _Fingerprint(c, n) for (key, _, _), c, n in zip(rows, checksums, norms, strict=True)})
    shapes = [None if _is_part(x) else tuple(x.shape) for _, x in named]
    described = [(name, shape, str(x.dtype), x.requires_grad) for (name, x), shape in zip(named, shapes, strict=True)]
    modes = [(name, module.training) for name, module in model.named_modules()]
    return _Side(crc32(repr((described, modes)).encode()), prints, len(named) - len(replicated))


def _is_part(parameter: Any) -> bool:
    """Return whether each rank has a part of the parameter: a DTensor, or one of ``FullyShardedDataParallel``."""
    return hasattr(parameter, "placements") or bool(getattr(parameter, "_fsdp_flattened", False))


def _checksum(x: Any) -> Any:
    """Return a checksum of the bits, on the tensor's device; different tensors almost never have the same."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    flat = flat.contiguous().reshape(-1).view(integers[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for chunk in flat.split(_CHUNK) if flat.numel() else ():
        weights = torch.arange(1, chunk.numel() + 1, device=x.device) % _PERIOD + 1
        total = total * 31 + (chunk.to(torch.int64) * weights).sum()  # wraps, the same way everywhere
    return total


def _compare(model: str, rank: int, sides: list[_Side], *, broadcast: bool) -> RankAgreement:
    structure = _minority([side.structure for side in sides])
    keys = list(dict.fromkeys(key for side in sides for key in side.prints))
    rows = []
    for key in sorted(keys, key=lambda key: KINDS.index(key[0])):
        prints = [side.prints.get(key) for side in sides]
        if key[0] == "gradient" and None in prints:
            continue  # not all ranks are behind their backward
        if ranks := _minority([fingerprint and fingerprint.checksum for fingerprint in prints]):
            norms = tuple(None if fingerprint is None else fingerprint.norm for fingerprint in prints)
            rows.append(Disagreement(*key, ranks, norms))
    texts = [("rank_structure", model, f"ranks {_joined(structure)} have another structure or train mode")] * bool(structure)
    for row in rows:
        if row.kind != "buffer" or not broadcast:
            by_rank = ", ".join("-" if norm is None else f"{norm:.6g}" for norm in row.norms[:8])
            text = f"the {row.kind} of rank {_joined(row.ranks)} differs (norms by rank: {by_rank})"
            texts.append((f"rank_{row.kind}", row.name, text))
    sharded = max(side.sharded for side in sides)
    return RankAgreement(model, rank, len(sides), structure, tuple(rows), sharded, record_findings("compare_ranks", texts))


def _joined(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def _minority(values: list[Any]) -> tuple[int, ...]:
    """Return the ranks that do not have the most common value, or the first of equally common ones."""
    usual = Counter(values).most_common(1)[0][0]
    return tuple(rank for rank, value in enumerate(values) if value != usual)
