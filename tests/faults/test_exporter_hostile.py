"""Flight files that are sound to the last CRC and hold whatever somebody chose: the page parses, and the scan goes on."""

import math
import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from tests.rank_files import Clock, File
from tests.scanners import scanner_of
from torchobs import catalog
from torchobs.catalog import Kind
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.prometheus import text_format
from torchobs.exporter.prometheus.exposition import Exposition
from torchobs.exporter.prometheus.text_format import Style
from torchobs.flight.format.layout import BLOCK_WORDS, HEADER_SIZE, SLOT_HEADER, SLOT_SIZE, Live, Region, words_crc
from torchobs.flight.format.series import Scope, Series, ValueType, encode

NAMES = st.one_of(
    st.text(max_size=20),
    st.sampled_from([metric.name for metric in catalog.METRICS]),
    st.sampled_from(["up", "a.b", "a_b", "a.b.total", "a_b_bucket", "a_b_count", "target_info", "", "__name__", "1"]),
)
SCALARS = st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
VALUES = SCALARS | st.lists(SCALARS, max_size=3)
KEYS = st.text(max_size=10) | st.sampled_from(["rank", "le", "__name__", "a.b", "a_b"])
ATTRIBUTES = st.dictionaries(KEYS, VALUES, max_size=4)
BOUNDS = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5, unique=True).map(sorted).map(tuple)


@st.composite
def hostile_series(draw: st.DrawFn) -> Series:
    """A series that the format admits, with any name, unit, attributes and bounds."""
    kind = draw(st.sampled_from(list(Kind)))
    numbers = st.sampled_from([ValueType.INT, ValueType.FLOAT, ValueType.EITHER])
    value_type = ValueType.HISTOGRAM if kind is Kind.HISTOGRAM else draw(numbers)
    return Series(
        name=draw(NAMES),
        kind=kind,
        unit=draw(st.one_of(st.text(max_size=8), st.sampled_from(["1", "s", "By", "By/s", "%", "{x}", "total", "_"]))),
        brief=draw(st.text(max_size=30)),
        attributes=tuple(sorted(draw(ATTRIBUTES).items())),
        bounds=draw(BOUNDS) if value_type == ValueType.HISTOGRAM else (),
        value_type=value_type,
        block=1,
        word=0,
        scope=draw(st.none() | st.just(Scope("x"))),
    )


def plant(file: File, series: list[Series], words: list[int]) -> None:
    """Put series and the words of block 1 into a file, with CRCs that match."""
    table = file.header.regions[Region.SERIES]
    at = file.writer.table._at
    word = 0
    for one in series:
        placed = replace(one, word=word)
        if word + placed.width > len(words):
            break
        entry = encode(placed, file.header.seed)
        file.buffer[table.offset + at : table.offset + at + len(entry)] = entry
        at, word = at + len(entry), word + placed.width
    raw = struct.pack(f"<{len(words)}Q", *words)
    offset = file.header.regions[Region.BLOCKS].offset + 2 * SLOT_SIZE
    slot = SLOT_HEADER.pack(2, len(raw), words_crc(2, raw, file.header.seed)) + raw
    file.buffer[offset : offset + len(slot)] = slot


def float_bits(value: float) -> int:
    """The word that holds a float."""
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


WORDS = st.lists(
    st.one_of(st.integers(0, (1 << 64) - 1), st.floats().map(float_bits), st.sampled_from([0, 1, 1 << 63, (1 << 62) - 1])),
    min_size=64,
    max_size=BLOCK_WORDS,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(series=st.lists(hostile_series(), min_size=1, max_size=12), words=WORDS, label=st.text(max_size=30))
def test_a_page_with_hostile_series_parses(series: list[Series], words: list[int], label: str) -> None:
    """In both formats, with nothing that is not finite, no family twice, and the rank's own series as they were."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        file = File(Path(home), job_name=label)
        file.step(1, 0.1)
        plant(file, series, words)
        file.save().hold()
        scanner = scanner_of(home, Clock(0.2))
        exposition, scrape = Exposition(), ScrapeInput(scanner.scan())
        page, classic = (
            b"".join(text_format.pieces(Style(is_openmetrics), foreign, exposition.families(scrape, Style(is_openmetrics))))
            for is_openmetrics, foreign in ((True, text_format.END.encode()), (False, b""))
        )
        families = list(openmetrics_parser.text_string_to_metric_families(page.decode()))  # type: ignore[no-untyped-call]
        plain = list(text_string_to_metric_families(classic.decode()))
        file.release()
        scanner.close()
    assert {family.name for family in families} == {family.name for family in plain}
    assert all(math.isfinite(sample.value) for family in families for sample in family.samples)
    (steps,) = next(family.samples for family in families if family.name == "torchobs_steps")
    assert (steps.value, len(families) >= 20) == (1, True)


ANYTHING = st.recursive(
    st.none() | SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner)
)
STEPS = st.integers(-1, 4) | st.integers() | ANYTHING
NUMBERS = st.sampled_from([0, 0.1, 0.125, 1e-300, 1e300, 10**400, -1.0, math.nan, 4.0, 5]) | st.floats() | ANYTHING
ATTRS = st.fixed_dictionaries({}, optional={"step": STEPS, "duration_s": NUMBERS, "grad_norm": NUMBERS}) | ANYTHING
GIVEN = st.fixed_dictionaries(
    {}, optional={"k": st.sampled_from(["span", "late", "event"]) | ANYTHING, "t1": STEPS, "flags": STEPS, "span_id": ANYTHING,
                  "trace_id": ANYTHING, "attrs": ATTRS, "step": STEPS, "duration_s": NUMBERS, "grad_norm": NUMBERS},
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    frames=st.lists(st.tuples(st.integers(1, 4), GIVEN | ATTRS.map(lambda attrs: {"attrs": attrs})), max_size=12), head=STEPS
)
def test_exemplars_of_hostile_spans_lie_in_their_buckets(frames: list[tuple[int, dict[str, Any]]], head: object) -> None:
    """Whatever the ring says, the page parses, and each exemplar is short, of a step, and within its bucket's bounds."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        file = File(Path(home))
        for step in range(1, 5):
            file.step(step, step / 10, duration_s=4.0 ** (step - 3), norm=4.0**step)
            file.span(step, step / 10, attrs={"duration_s": 4.0 ** (step - 3), "grad_norm": 4.0**step})
        for step, given_ in frames:
            file.span(step, 0.5, **given_)
        if isinstance(head, int) and 0 <= head < 1 << 64:
            file.memory.word(HEADER_SIZE // 8 + Live.EVENT_HEAD, head)
        file.save().hold()
        scanner = scanner_of(home, Clock(0.2))
        style = Style(openmetrics=True)
        texts = Exposition().families(ScrapeInput(scanner.scan()), style)
        page = b"".join(text_format.pieces(style, text_format.END.encode(), texts)).decode()
        file.release()
        scanner.close()
    families = openmetrics_parser.text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
    samples = [sample for family in families for sample in family.samples if sample.name.endswith("_bucket")]
    below, shown = 0.0, 0
    for sample in samples:
        edge = float(sample.labels["le"])
        if sample.exemplar is not None:
            shown += 1
            assert (below if math.isfinite(below) else 0.0) <= sample.exemplar.value <= edge
            assert sum(len(name) + len(text) for name, text in sample.exemplar.labels.items()) <= 128
            assert sample.exemplar.labels["step"].isdecimal()
        below = edge
    assert shown or head == 0


@pytest.mark.parametrize("raw", [b"", b"\x00" * 64, b"\xff" * 64])
def test_a_lock_that_is_none_is_not_held(flight_dir: Path, raw: bytes) -> None:
    """Whatever is in it: the kernel alone knows who holds it."""
    file = File(flight_dir).save()
    file.lock_path.write_bytes(raw)
    scanner = scanner_of(flight_dir, Clock(1.0))
    assert [rank.state for rank in scanner.scan().ranks] == ["lost"]
    scanner.close()
