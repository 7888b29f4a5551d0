"""The series table: what is written is read, what cannot be is passed over."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import flights
from torchobs import catalog
from torchobs.flight.format.series import Scope, Series, ValueType, decode, encode

SEED = flights.header().seed
TEXT = st.text(max_size=30)
SCALARS = TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


def one_series(**given_fields: Any) -> Series:
    """A counter, except for what is given."""
    fields = {
        "name": "x",
        "kind": catalog.Kind.COUNTER,
        "unit": "",
        "brief": "",
        "attributes": (),
        "bounds": (),
        "value_type": ValueType.INT,
        "block": 0,
        "word": 200,
        **given_fields,
    }
    return Series(**fields)


@given(
    TEXT,
    TEXT,
    st.dictionaries(TEXT, SCALARS | st.lists(SCALARS, max_size=3), max_size=4),
    st.none() | st.builds(Scope, TEXT, TEXT, TEXT, st.just(())),
)
def test_a_series_is_what_was_put_in(name: str, brief: str, attributes: dict[str, Any], scope: Scope | None) -> None:
    """Any text, any attribute that OpenTelemetry has; lists become tuples, so that a series can be a key."""
    pairs = tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in attributes.items()))
    made = one_series(name=name, brief=brief, attributes=pairs, scope=scope)
    ((back, end),) = decode(encode(made, SEED), SEED)
    assert back == made
    assert hash(back) == hash(made)
    assert end == len(encode(made, SEED))


def test_entries_follow_each_other_and_the_first_bad_one_ends_the_table() -> None:
    """Append-only, counted by their CRCs alone."""
    entries = [encode(one_series(name=f"n{index}", word=200 + index), SEED) for index in range(5)]
    table = b"".join(entries) + bytes(64)
    assert [made.name for made, _ in decode(table, SEED)] == ["n0", "n1", "n2", "n3", "n4"]
    broken = bytearray(table)
    broken[len(entries[0]) + len(entries[1]) + 20] ^= 1
    assert [made.name for made, _ in decode(bytes(broken), SEED)] == ["n0", "n1"]
    assert list(decode(table, SEED ^ 1)) == []


def test_a_series_over_16_kib_is_refused() -> None:
    """ValueError; one series cannot take the table."""
    with pytest.raises(ValueError, match="series table"):
        encode(one_series(brief="x" * 17_000), SEED)
