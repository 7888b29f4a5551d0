"""Here a warning is no failure: GPUs, drivers and builds of torch have their own, and the tests are to run on all of them."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Show warnings, of these tests."""
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"))
