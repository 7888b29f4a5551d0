"""What the push can be told, by options and by OpenTelemetry's own variables."""

import pytest

from torchobs.exporter.otlp import options
from torchobs.exporter.otlp.options import PushConfig, PushTarget

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def parsed(environ: dict[str, str], **given: str) -> PushConfig:
    """The configuration, which must be without problems."""
    found, problems = options.parse({f"otlp_{name}": [text] for name, text in given.items()}, environ)
    assert problems == ()
    assert found is not None
    return found


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"},
        {BASE: "  "},
        {BASE: "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"},
        {
            BASE: "http://c:4318",
            **dict.fromkeys(("OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER", "OTEL_LOGS_EXPORTER"), "none"),
        },
    ],
)
def test_without_an_endpoint_nothing_is_pushed(environ: dict[str, str]) -> None:
    """Nor with the SDK disabled, nor with none for every signal."""
    assert options.parse({}, environ) == (None, ())


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/metrics"),
        ("http://c:4318/", "http://c:4318/v1/metrics"),
        ("https://c/otlp/", "https://c/otlp/v1/metrics"),
        ("http://[::1]:1/a/b?k=v", "http://[::1]:1/a/b/v1/metrics?k=v"),
    ],
)
def test_the_signal_s_path_is_added_to_a_base(base: str, url: str) -> None:
    """As the specification says; gRPC has no paths."""
    assert parsed({BASE: base}).metrics == PushTarget(url)
    grpc = parsed({BASE: base, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}).metrics
    assert grpc is not None
    assert grpc.url == base


def test_a_signal_s_own_value_beats_that_of_all_and_an_option_its_variable() -> None:
    """In this order: the signal's option, its variable, the option of all, their variable."""
    environ = {
        BASE: "http://all:1",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://metrics:2/x",
        "OTEL_EXPORTER_OTLP_HEADERS": "a=all,b=x%2Cy",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=traces",
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://logs:5/v1/logs",
        "OTEL_EXPORTER_OTLP_LOGS_TIMEOUT": "1500",
        "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
        "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca",
        "OTEL_METRIC_EXPORT_INTERVAL": "15000",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "DELTA",
    }
    headers = (("a", "all"), ("b", "x,y"))
    found = parsed(environ)
    assert found.metrics == PushTarget("http://metrics:2/x", headers=headers, timeout_s=2.5, gzip=True, certificate="/ca")
    assert found.traces == PushTarget("http://all:1/v1/traces", headers=(("a", "traces"),), timeout_s=2.5, certificate="/ca")
    assert found.logs == PushTarget("http://logs:5/v1/logs", "grpc", headers, timeout_s=1.5, certificate="/ca")
    assert (found.interval_s, found.span_delay_s, found.delta) == (15.0, 0.5, True)
    given = {"endpoint": "http://told:3", "metrics_endpoint": "http://m:4", "timeout": "1m", "interval": "5s"}
    told = parsed(environ, **given, temporality="cumulative")
    assert told.metrics is not None
    assert told.traces is not None
    assert (told.metrics.url, told.traces.url, told.traces.timeout_s) == ("http://m:4", "http://told:3/v1/traces", 60.0)
    assert (told.interval_s, told.delta) == (5.0, False)


@pytest.mark.parametrize(("text", "wanted"), [("no", False), ("yes", True), ("", True)])
def test_span_events_may_be_switched_off(text: str, wanted: bool) -> None:  # noqa: FBT001  # a case
    """By option or by the exporter's variable; who says nothing has them."""
    assert parsed({BASE: "http://c:1", "TORCHOBS_EXPORTER_OTLP_SPAN_EVENTS": text}).span_events is wanted
    if text:
        assert parsed({BASE: "http://c:1"}, span_events=text).span_events is wanted


@pytest.mark.parametrize("signal", options.SIGNALS)
def test_one_signal_may_be_pushed_alone(signal: str) -> None:
    """By the others' exporters being none or prometheus, or by having the only endpoint."""
    others = (f"OTEL_{other.upper()}_EXPORTER" for other in options.SIGNALS if other != signal)
    for environ in (
        {BASE: "http://c:1", **dict.fromkeys(others, "prometheus,console")},
        {f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT": "http://c:1"},
    ):
        assert [name for name, _ in parsed(environ).targets()] == [signal]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (BASE, "collector:4318"),
        (BASE, "ftp://c"),
        (BASE, "http://"),
        (BASE, "http://c:99999"),
        (BASE, "http://c/a b"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-1"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "sometimes"),
    ],
)
def test_what_is_not_allowed_is_told_and_left_out(name: str, text: str) -> None:
    """The push goes on with the rest."""
    found, (problem, *_) = options.parse({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1", name: text})
    assert found is not None
    assert problem.startswith(f"{name}='{text}': expected ")


@pytest.mark.parametrize("text", ["secret", "a b=secret", "a=secret\n", "a=secret%0d%0aHost: x", "=secret"])
def test_a_header_s_value_is_never_repeated(text: str) -> None:
    """It may be a key; and none can forge another."""
    found, problems = options.parse({}, {BASE: "http://c:1", "OTEL_EXPORTER_OTLP_HEADERS": text})
    if text.endswith("\n"):  # what stands around it is taken off
        assert problems == ()
        return
    assert found is not None
    assert found.metrics == PushTarget("http://c:1/v1/metrics")
    assert problems
    assert not any("secret" in problem for problem in problems)


@pytest.mark.parametrize("user", ["user:secret", ":secret"])
def test_a_password_in_the_address_is_refused(user: str) -> None:
    """It would be on the log; one without a user was taken, and never sent."""
    found, (problem,) = options.parse({"otlp_endpoint": [f"http://{user}@c:1"]}, {})
    assert found is None
    assert "secret" not in problem
