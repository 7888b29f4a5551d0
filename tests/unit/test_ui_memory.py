"""Memory in the page's table of ranks: bytes, and of what they are which share."""

import pytest

from torchobs import catalog
from torchobs.exporter.ui.view_model import _memory
from torchobs.ranks.metric_values import Readings

MIB = float(1 << 20)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({(catalog.MEMORY_HOST_RSS, ()): 324 * MIB}, (324 * MIB, "")),
        (
            {(catalog.MEMORY_HOST_RSS, ()): 324 * MIB, (catalog.MEMORY_HOST_UTILIZATION, ("machine",)): 0.31},
            (324 * MIB, "machine 31 % full"),
        ),
        (
            {
                (catalog.MEMORY_HOST_RSS, ()): 324 * MIB,
                (catalog.MEMORY_HOST_UTILIZATION, ("machine",)): 0.31,
                (catalog.MEMORY_HOST_UTILIZATION, ("cgroup",)): 0.8,
            },
            (324 * MIB, "container 80 % full"),
        ),
        (
            {
                (catalog.MEMORY_DEVICE_RESERVED, ("cuda:0",)): 300 * MIB,
                (catalog.MEMORY_DEVICE_RESERVED, ("cuda:1",)): 100 * MIB,
                (catalog.MEMORY_DEVICE_LIMIT, ("cuda:0",)): 400 * MIB,
                (catalog.MEMORY_DEVICE_LIMIT, ("cuda:1",)): 400 * MIB,
                (catalog.MEMORY_HOST_UTILIZATION, ("machine",)): 0.9,
            },
            (400 * MIB, "75 % of cuda:0"),
        ),
    ],
)
def test_a_percentage_says_of_what_it_is(
    values: dict[tuple[catalog.Metric, tuple[str, ...]], float], shown: tuple[float, str]
) -> None:
    """The process's bytes are not the machine's percentage: the words name the machine, the container or the device."""
    by_name: dict[str, dict[tuple[str, ...], float]] = {}
    for (metric, key), value in values.items():
        by_name.setdefault(metric.name, {})[key] = value
    assert _memory(Readings(by_name)) == shown
