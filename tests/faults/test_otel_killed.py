"""A process killed right after a measurement or a span: what its calls returned from is in the file."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from torchobs.flight.reader.decode import Distribution
from torchobs.flight.reader.reader import FlightFile, names, open_path

VICTIM = """
import os, signal, sys
from pathlib import Path
from tests import otel
from torchobs.otel import FlightMeterProvider, FlightTracerProvider

writer = otel.new_file(Path(sys.argv[1]))
meter = FlightMeterProvider(lambda: writer).get_meter("m")
tracer = FlightTracerProvider(lambda: writer).get_tracer("t")
counter, histogram, gauge = meter.create_counter("c"), meter.create_histogram("h"), meter.create_gauge("g")
unfinished = tracer.start_span("unfinished")
for step in range(int(sys.argv[2])):
    counter.add(1, {"step": "all"})
    histogram.record(step, {"step": "all"})
    gauge.set(step)
    with tracer.start_as_current_span(f"step {step}"):
        pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def file(flight_dir: Path) -> Iterator[FlightFile]:
    """What a victim of 57 steps left behind."""
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, flight_dir, "57"], cwd=support.ROOT, env=support.clean_environment(), check=False
    )
    assert done.returncode == -9
    fd = os.open(flight_dir, os.O_RDONLY)
    (name,) = names(fd)
    os.close(fd)
    opened = open_path(str(flight_dir / name))
    yield opened
    opened.close()


def test_every_measurement_survives(file: FlightFile) -> None:
    """The last one included, though no thread of ours ever ran and nothing was flushed."""
    found = {point.series.name: point.value for point in file.read(final=True).points if point.series.scope}
    assert found["c"] == 57
    assert found["g"] == 56
    assert isinstance(found["h"], Distribution)
    assert sum(found["h"].counts) == 57


def test_every_ended_span_survives(file: FlightFile) -> None:
    """A span that was not ended leaves nothing."""
    found = [(fields["k"], fields["name"]) for _, fields in file.events()]
    assert found == [("span", f"step {step}") for step in range(57)]
