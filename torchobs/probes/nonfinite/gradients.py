"""Find the parameters whose gradients are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs.probes.nonfinite.values import Condition, condition, plain

if TYPE_CHECKING:
    from collections.abc import Iterable


def bad_gradients(parameters: Iterable[Any]) -> list[Any]:
    """Return the parameters with a gradient that is not finite; on a device with one transfer for all of them."""
    import torch  # torch is optional until training begins

    found, later = [], list[tuple[Any, Any]]()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = plain(gradient)
        if values is not None and not values.is_cpu and values.numel():
            later.append((parameter, values))
        elif condition(gradient) in {Condition.BAD, Condition.MASKED}:
            found.append(parameter)
    if later:
        device = later[0][1].device
        sound = torch.stack([values.abs().amax().isfinite().to(device) for _, values in later]).tolist()
        found += [parameter for (parameter, _), is_sound in zip(later, sound, strict=True) if not is_sound]
    return found
