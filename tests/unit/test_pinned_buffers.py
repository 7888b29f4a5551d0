"""Numbers that a device delivers late, on a fake one that lands each copy when it is told to; and no CUDA call by who looks."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from tests.slow_device import SlowDevice
from torchobs.probes.core.device_scalars import DeviceValues
from torchobs.probes.core.pinned_buffers import UNSET, PendingCopies


@pytest.mark.parametrize("value", [2.5, 0.0, -0.0, math.inf, math.nan, 5e-324])
def test_a_value_is_delivered_when_it_has_landed(value: float) -> None:
    """Whatever it is: a NaN that was computed is a value like any other."""
    device, found = SlowDevice(), list[float]()
    values = DeviceValues(device)
    for _ in range(3):
        assert values.expect(torch.tensor(value, dtype=torch.float64), found.append)
        values.poll()
        assert not found
        device.land()
        values.poll()
        assert found.pop() == pytest.approx(value, abs=0, nan_ok=True)


def test_values_come_in_order() -> None:
    """One that overtook another waits for it."""
    device, found = SlowDevice(), list[float]()
    values = DeviceValues(device)
    for number in range(3):
        values.expect(torch.tensor(float(number)), found.append)
    device.sent.reverse()
    device.land()
    values.poll()
    assert found == []
    device.land()
    device.land()
    values.poll()
    assert found == [0.0, 1.0, 2.0]


def test_a_full_ring_drops_and_a_capture_takes_nothing() -> None:
    """And no slot is used again before its value was delivered."""
    device, found = SlowDevice(), list[float]()
    values = DeviceValues(device)
    taken = [values.expect(torch.tensor(float(number)), found.append) for number in range(1025)]
    assert taken == [True] * 1024 + [False]
    assert values.dropped == 1
    while device.sent:
        device.land()
    values.poll()
    assert found == [float(number) for number in range(1024)]
    device.is_capturing = True
    assert not values.expect(torch.tensor(1.0), found.append)
    assert not device.sent


def test_a_vector_is_there_when_all_of_it_is() -> None:
    """In whatever order its words come."""
    device = SlowDevice()
    landing = PendingCopies(device).send(torch.tensor([1.0, 2.0, math.nan]))
    assert not landing.ready()
    device.sent.insert(0, (device.sent[0][0], device.sent[0][1]))
    device.land(2)
    assert not landing.ready()
    device.land()
    assert landing.ready()
    assert landing.take() == pytest.approx([1.0, 2.0, math.nan], nan_ok=True)
    assert not landing.ready()


def test_memory_is_used_again_but_never_while_a_copy_is_on_its_way() -> None:
    """One that nobody waits for any more would land in the next one's words."""
    device = SlowDevice()
    landings = PendingCopies(device)
    for _ in range(5):
        landing = landings.send(torch.ones(100))
        device.land()
        landing.take()
    assert device.made == 1
    landing = landings.send(torch.ones(100))
    del landing
    gc.collect()
    second = landings.send(torch.full((100,), 2.0))
    assert device.made == 2
    device.land()
    assert not second.ready()
    device.land()
    assert second.take() == [2.0] * 100
    third = landings.send(torch.full((100,), 3.0))
    assert device.made == 2
    device.land()
    assert third.take() == [3.0] * 100


def test_what_is_not_there_is_a_signalling_nan() -> None:
    """A NaN whose first bit of the fraction is clear, and whose fraction is not zero: no result of any operation."""
    assert UNSET >> 52 == 0x7FF
    assert not UNSET >> 51 & 1
    assert UNSET & ((1 << 51) - 1)


def test_the_end_gives_numbers_under_way_a_moment_and_no_more() -> None:
    """The last step's are written if they come at once; a device that is far behind is not waited for."""
    device, found, rests = SlowDevice(), list[float](), list[float]()
    values = DeviceValues(device)
    values.settle(rests.append)
    assert rests == []
    values.expect(torch.tensor(2.0), found.append)
    values.settle(lambda _: device.land())
    assert found == [2.0]
    values.expect(torch.tensor(3.0), found.append)
    values.settle(rests.append)
    assert found == [2.0]
    assert sum(rests) == pytest.approx(0.05)
