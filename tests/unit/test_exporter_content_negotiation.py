"""What a scraper asks for is what it gets: formats, escaping, compression."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchobs.exporter.http.content_negotiation import accept_items, accepts_gzip
from torchobs.exporter.prometheus.text_format import negotiate

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", PLAIN),
        ("text/html,*/*;q=0.8", PLAIN),
        ("application/json", PLAIN),
        ("text/*;q=0.9, application/openmetrics-text;q=0.8", PLAIN),
        ("*/*", PLAIN),
        ("text/plain;version=1.0.0", "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"),
        ("text/plain;version=9.0.0", PLAIN),
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0", f"{OPENMETRICS}; escaping=underscores"),
        ('application/openmetrics-text;version="1.0.0";escaping="dots"', f"{OPENMETRICS}; escaping=dots"),
        ("application/openmetrics-text;version=1.0.0;escaping=nonsense", f"{OPENMETRICS}; escaping=underscores"),
        ("application/openmetrics-text;q=0,text/plain", PLAIN),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.3", PLAIN),
        ("text/plain;q=0.2,application/openmetrics-text;q=0.3", OPENMETRICS),
        ("application/openmetrics-text;version=2.0.0", PLAIN),
        ("application/openmetrics-text;version=2.0.0,application/openmetrics-text;version=1.0.0;q=0.5", OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.5", PLAIN),
        ("application/openmetrics-text;version=a.b", PLAIN),
        (f"{PROTOBUF};q=0.7,{PROMETHEUS_3}", f"{OPENMETRICS}; escaping=allow-utf-8"),
        (";;;,,,=", PLAIN),
    ],
)
def test_the_format_is_the_dearest_that_we_have(accept: str, content_type: str) -> None:
    """By its weight; no version is claimed that is not written, and what is refused is not sent."""
    found = negotiate(accept)
    if content_type == OPENMETRICS and "version" in accept:
        content_type = f"{OPENMETRICS}; escaping=underscores"
    assert found.content_type == content_type
    assert found.style.openmetrics == content_type.startswith(OPENMETRICS)
    assert found.style.escaping in {"underscores", content_type.rpartition("escaping=")[2]}


@given(st.text(max_size=60) | st.lists(st.sampled_from([*";,=*/", "q", "version", "1.0.0", "text/plain", "nan"])).map("".join))
def test_nonsense_gets_what_everyone_understands(accept: str) -> None:
    """And fails nothing."""
    assert negotiate(accept).content_type.startswith(("text/plain; version=", "application/openmetrics-text; version=1.0.0"))
    assert accepts_gzip(accept) in {True, False}


def test_a_long_header_is_not_looked_at_for_long() -> None:
    """Whoever sends ten thousand formats is no scraper."""
    assert len(accept_items("text/plain," * 10_000)) == 64


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("GZIP", True),
        ("x-gzip", True),
        ("deflate, gzip;q=0.5", True),
        ("*", True),
        ("gzip;q=1.0", True),
        ("gzip;q=0.001", True),
        ("*;q=0, gzip", True),
        ("gzip;q=nonsense", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("gzip;Q=0", False),
        ("gzip;q=0, *", False),
        ("*;q=0", False),
        ("br, deflate", False),
        ("identity", False),
        ("", False),
    ],
)
def test_compression_is_negotiated(header: str, accepted: bool) -> None:  # noqa: FBT001  # a parameter of the table above
    """A name beats the star, and a weight of nothing refuses."""
    assert accepts_gzip(header) is accepted
