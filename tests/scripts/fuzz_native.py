"""Compare the compiled part with Python's on random input, ``python fuzz_native.py MODULE EXAMPLES SEED``.

For a module that is built with sanitizers, which end the process at the first fault.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from hypothesis import HealthCheck, seed, settings


def main(path: str, examples: int, number: int) -> None:
    """Run the property tests of ``tests/unit/test_native.py`` with the module at that path."""
    spec = importlib.util.spec_from_file_location("torchobs._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["torchobs._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from tests.unit import test_native

    assert module is test_native.NATIVE
    tests: tuple[Any, ...] = (
        test_native.test_both_leave_the_same_bytes,
        test_native.test_both_leave_the_same_in_any_state,
        test_native.test_any_value_that_its_fields_hold_is_read_back,
    )
    for test in tests:
        settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))(
            seed(number)(test)
        )()
    print(f"{len(tests)} properties, {examples} examples each")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
