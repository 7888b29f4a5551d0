"""XIDs by whose affair they are."""

import pytest

from torchobs import catalog
from torchobs.probes.gpu.xids import MEANINGS, kind


@pytest.mark.parametrize("number", [13, 31, 32, 43, 45, 69])
def test_what_a_program_does_to_itself_is_no_fault_of_the_gpu(number: int) -> None:
    """NVIDIA's action is to restart or check the program: an illegal address, and the cleanup after it."""
    assert kind(number) == "xid_application"


@pytest.mark.parametrize("number", [48, 62, 64, 74, 79, 94, 95, 140, 149])
def test_what_needs_a_reset_or_a_technician_is_hardware(number: int) -> None:
    """Memory, NVLink, the bus, the GPU's own controllers."""
    assert kind(number) == "xid_hardware"


@pytest.mark.parametrize("number", [61, 63, 92, 119, 120, 154, 9999])
def test_the_rest_is_the_driver_s(number: int) -> None:
    """Firmware, what NVIDIA says to ignore, and numbers that nobody knows yet: none of them shall wake anybody."""
    assert kind(number) == "xid_driver"


def test_every_kind_is_one_of_the_catalog() -> None:
    """A closed attribute."""
    assert {kind(number) for number in range(200)} == set(catalog.XID_ERRORS) <= set(catalog.HW_ERROR.values)
    assert {kind(number) for number in MEANINGS} == set(catalog.XID_ERRORS)
