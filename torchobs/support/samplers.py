"""A loader's length, its samplers, and the generators that they and the loader draw from instead of the global one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def samplers(loader: Any) -> list[Any]:
    """Return the loader's samplers, and those within: a batch sampler's, a wrapper's."""
    found: dict[int, Any] = {}
    owners = [loader]
    for owner in owners:
        for one in (getattr(owner, "sampler", None), getattr(owner, "batch_sampler", None)):
            if one is not None and id(one) not in found:
                found[id(one)] = one
                owners.append(one)
    return list(found.values())


def generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of the loader's own and of its samplers."""
    import torch  # torch is optional until training begins

    owned = [getattr(owner, "generator", None) for owner in (loader, *samplers(loader))]
    return list({id(one): one for one in owned if isinstance(one, torch.Generator)}.values())


def length(loader: Any) -> int | None:
    """Return the number of batches, or None where nobody knows: of a generator, of a DataLoader over an iterable data set."""
    try:
        return len(loader)
    except TypeError:
        return None
