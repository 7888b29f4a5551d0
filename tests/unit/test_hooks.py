"""What probes tell each other: the lists, and who is called."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest

from torchobs.config import settings
from torchobs.probes import factories
from torchobs.probes.amp import LossScaling
from torchobs.probes.context import HookList, Hooks
from torchobs.support.error_guard import CircuitBreaker


def test_listeners_are_called_in_the_order_of_registration_at_their_probes_cost() -> None:
    """Each gets the arguments, and its time counts as its probe's."""
    spent: dict[str, int] = {"one": 5}
    hook: HookList[[int, str]] = HookList(spent)
    seen: list[tuple[object, ...]] = []
    for probe in ("two", "one"):
        hook.register(CircuitBreaker(probe), partial(lambda *args: seen.append(args), probe))
    hook.notify(1, "a")
    assert seen == [("two", 1, "a"), ("one", 1, "a")]
    assert spent["one"] > 5
    assert spent["two"] > 0


def test_a_listener_that_raises_trips_its_own_probe_only() -> None:
    """It is not called again; the others are."""
    hook: HookList[[int]] = HookList({})
    broken, fine = CircuitBreaker("broken"), CircuitBreaker("fine")
    seen: list[int] = []
    hook.register(broken, lambda number: seen.insert(1 // (2 - number), number))
    hook.register(fine, seen.append)
    for number in (1, 2, 3):
        hook.notify(number)
    assert seen == [1, 1, 2, 3]
    assert (broken.is_open, broken.errors, fine.is_open) == (True, 1, False)


def test_a_removed_probe_is_in_no_list_and_who_holds_a_list_sees_it() -> None:
    """The hot path binds ``listeners`` once, when it is installed."""
    hooks, seen = Hooks({}), list[object]()
    held = hooks.takes_loss.listeners
    for probe in ("gone", "stays"):
        breaker = CircuitBreaker(probe)
        note = partial(lambda probe, *_: seen.append(probe), probe)
        hooks.takes_loss.register(breaker, note)
        hooks.iterated.register(breaker, note)
        hooks.level.register(breaker, note)
    hooks.unregister("gone")
    for listener in held:
        listener(None, None, True)  # noqa: FBT003  # as the hook calls it
    hooks.iterated.notify(None, None)
    hooks.level.notify(2)
    assert seen == ["stays"] * 3


def test_a_capture_takes_the_losses_from_the_listeners_and_gives_them_back() -> None:
    """One that is registered meanwhile is called afterwards."""
    hook, seen = Hooks({}).takes_loss, list[object]()
    hook.register(CircuitBreaker("one"), lambda *_: seen.append("one"))
    hook.divert(lambda *_: seen.append("capture"))
    hook.register(CircuitBreaker("two"), lambda *_: seen.append("two"))
    for _ in range(2):
        for listener in hook.listeners:
            listener(None, None, True)  # noqa: FBT003  # as the hook calls it
        hook.divert(None)
    assert seen == ["capture", "one", "two"]


def test_every_probe_of_the_settings_is_made_under_its_name() -> None:
    """All but the exit probe, which needs no torch and which the session makes."""
    made = factories(LossScaling())
    assert {*made, "exits"} == set(settings.PROBES)
    assert [make().name for make in made.values()] == list(made)


def test_probes_that_depend_on_each_other_share_an_object_of_one_session_only() -> None:
    """Clipping reads what the AMP probe writes, also after one of them was made anew."""
    one, other = factories(LossScaling()), factories(LossScaling())
    scalings = {id(vars(made[name]())["_scaling"]) for made in (one, other) for name in ("amp", "gradients", "amp")}
    assert len(scalings) == 2
    assert vars(one["step"]())["_rates"] is vars(one["optimizer"]())["_rates"]
    assert vars(one["epochs"]())["_epochs"] is vars(one["schedulers"]())["_epochs"]


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
