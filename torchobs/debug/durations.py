"""``performance``: time of a part of the program, and a finding if it is slow."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchobs.debug import resources
from torchobs.debug.findings import found, history
from torchobs.support.arguments import is_number, is_text, is_whole
from torchobs.support.result import Result, fill

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Performance(Result):
    """Time of one operation; ``None`` before its end."""

    operation: str
    slow_s: float
    samples: int | None = None
    time: float | None = None
    """Seconds by the clock; of what was launched on a device only the launch, unless ``synchronize``"""
    cpu_time: float | None = None
    """Seconds that this process's threads computed: far less than ``time`` is waiting"""
    time_per_sample: float | None = None
    throughput: float | None = None
    """Samples a second"""
    slow: bool = False
    error: str | None = None
    """Class of the exception that ended it"""


@contextmanager
def performance(
    operation: str, slow_s: float = 10.0, *, samples: int | None = None, synchronize: bool = False
) -> Iterator[Performance]:
    """Time a ``with`` block, or a function that it decorates; one that takes longer than ``slow_s`` is a finding.

    It yields a :class:`Performance` that the end fills, and counts in ``debug.summary()``.

    Args:
        operation: name to count it by; a few names, not one for each step.
        slow_s: seconds above which it is slow.
        samples: that it processes, for the time by sample.
        synchronize: wait for the CUDA device before and after, so that its work is in the time.

    Raises:
        ValueError: ``slow_s`` or ``samples`` is not above 0, or the operation has no name.
    """
    is_named, is_counted = is_text(operation) and bool(operation), samples is None or (is_whole(samples) and samples >= 1)
    if not (is_named and is_counted and is_number(slow_s) and slow_s > 0):
        found = f"{operation!r}, {slow_s!r}, {samples!r}"
        raise ValueError(f"performance() needs a name, slow_s > 0 and samples >= 1, not {found}")
    measured, before = Performance(operation, slow_s, samples), resources.read()
    if synchronize:
        resources.synchronize()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    try:
        yield measured
    finally:
        raised = sys.exc_info()[0]
        error = raised.__name__ if raised is not None else None
        if synchronize and error is None:
            resources.synchronize()
        elapsed, cpu = time.perf_counter() - begun, time.process_time() - cpu_begun
        fill(
            measured, time=elapsed, cpu_time=cpu, slow=elapsed > slow_s, error=error,
            time_per_sample=elapsed / samples if samples else None,
            throughput=samples / elapsed if samples and elapsed else None,
        )  # fmt: skip
        _tell(measured, before)


def _tell(measured: Performance, before: resources.Reading) -> None:
    host, device = resources.use(before, resources.read())
    elapsed, texts = measured.time or 0.0, tuple[str, ...]()
    if measured.slow:
        texts = (f"{measured.operation} took {elapsed:.3g} s, more than {measured.slow_s:g} s",)
        found("slow_operation", texts[0], function="performance", name=measured.operation, seconds=elapsed)
    history.add_operation(measured.operation, elapsed, host.peak, device.peak if device is not None else 0, texts)
