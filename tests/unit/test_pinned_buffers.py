"""Numbers that a device delivers late, on a fake one that lands each copy on demand; and no CUDA call by who looks."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from tests.slow_device import SlowDevice
from torchobs.tensors.device_reads import DeviceValues, PendingCopies


@pytest.mark.parametrize("value", [2.5, 0.0, -0.0, math.inf, math.nan, 5e-324])
def test_a_value_is_delivered_when_it_has_landed(value: float) -> None:
    """Whatever it is: a NaN that was computed is a value like any other."""
    device, delivered = SlowDevice(), list[float]()
    values = DeviceValues(device, every_s=0.0)
    for _ in range(3):
        assert values.expect(torch.tensor(value, dtype=torch.float64), delivered.append)
        values.poll()
        assert not delivered
        device.land()
        values.poll()
        assert delivered.pop() == pytest.approx(value, abs=0, nan_ok=True)


def test_a_full_ring_drops_and_a_capture_takes_nothing() -> None:
    """A device that is far behind costs no more memory: to pin it would wait for the device."""
    device, delivered = SlowDevice(), list[float]()
    values = DeviceValues(device, every_s=0.0)
    taken = [values.expect(torch.tensor(float(number)), delivered.append) for number in range(65)]
    assert taken == [True] * 64 + [False]
    assert (values.dropped, device.made) == (1, 1)
    while device.sent:
        device.land()
    values.poll()
    assert delivered == [float(number) for number in range(64)]
    device.is_capturing = True
    assert not values.expect(torch.tensor(1.0), delivered.append)
    assert not device.sent


def test_memory_is_used_again_but_never_while_a_copy_is_on_its_way() -> None:
    """A copy that nobody waits for would land in the next one's words."""
    device = SlowDevice()
    landings = PendingCopies(device)
    for _ in range(5):
        landing = landings.send(torch.ones(100))
        device.land()
        landing.take()
    landing = landings.send(torch.ones(100))
    del landing
    gc.collect()
    second = landings.send(torch.full((100,), 2.0))
    device.land()
    assert not second.ready()
    device.land()
    assert second.take() == [2.0] * 100
    third = landings.send(torch.full((100,), 3.0))
    device.land()
    assert third.take() == [3.0] * 100
    assert device.made == 1


def test_a_slow_device_holds_up_no_other_and_no_other_stream() -> None:
    """Each has an order of its own."""
    device, delivered = SlowDevice(), list[float]()
    values = DeviceValues(device, every_s=0.0)
    values.expect(torch.tensor(1.0), delivered.append)
    device.current = 7
    values.expect(torch.tensor(2.0), delivered.append)
    slow = device.sent.pop(0)
    device.land()
    values.poll()
    assert delivered == [2.0]
    device.sent.append(slow)
    device.land()
    values.poll()
    assert delivered == [2.0, 1.0]
