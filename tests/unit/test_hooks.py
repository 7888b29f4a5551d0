"""What probes tell each other: the lists, and who is called."""

from __future__ import annotations

import contextlib

import pytest

from torchobs.config import settings
from torchobs.probes import factories
from torchobs.probes.amp import LossScaling
from torchobs.support.error_guard import CircuitBreaker


def test_every_probe_of_the_settings_is_made_under_its_name() -> None:
    """All but the exit probe, which needs no torch and which the session makes."""
    made = factories(LossScaling())
    assert {*made, "exits"} == set(settings.PROBES)
    assert [make().name for make in made.values()] == list(made)


@pytest.mark.parametrize(
    ("text", "is_users"),
    [
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later", True),
        ("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`", True),
        ("HIP error: unspecified launch failure", True),
        ("CUDA error: operation not permitted when stream is capturing\n", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("the loss had an illegal memory access", False),
    ],
)
def test_a_failure_of_the_user_s_work_on_a_device_is_handed_on(text: str, is_users: bool) -> None:  # noqa: FBT001  # a parameter
    """It is told by whichever call comes next, and some are told once; it is none of the probe's errors."""
    breaker = CircuitBreaker("gradients")

    def query() -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError) if is_users else contextlib.nullcontext():
        breaker.guard(query)()
    assert breaker.is_open
    assert breaker.errors == (not is_users)
