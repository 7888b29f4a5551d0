"""Find all optimizers of the process, also those that have not stepped."""

from __future__ import annotations

from typing import Any

from torchobs.support.living_objects import living


def living_optimizers() -> list[Any]:
    """Return them. Looks at all objects, which holds the GIL for some 100 ms: seldom, and in the sampler thread."""
    import torch  # torch is optional until training begins

    return living(torch.optim.Optimizer)
