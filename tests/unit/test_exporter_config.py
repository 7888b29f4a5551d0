"""The exporter's and the push's options: how they are read, and that the documentation has them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from torchobs.catalog import HOST_COLLECTORS
from torchobs.config.options import Address, duration_s
from torchobs.exporter import config
from torchobs.exporter.config import ExporterConfig, PushConfig, PushTarget, UnixAddress


def test_durations_are_prometheus_own() -> None:
    """With units, or in seconds; what is none is refused, for guessing would be worse."""
    read = {"90": 90, "90s": 90, "0": 0, "1.5s": 1.5, "5m": 300, "1h30m": 5400, "1h2m3s": 3723}
    assert {text: duration_s(text) for text in read} == read
    for text in ("", "s", "-1", "5 m", "1d2", "m", "1e3", "nan", "9" * 400, "1s1h", "٣s"):
        with pytest.raises(ValueError, match=f"^{re.escape(text[:10])}"):
            duration_s(text)


def test_nothing_given_is_the_default() -> None:
    """A sidecar on every interface, a node's exporter on loopback."""
    assert config.parse({}, {}) == ExporterConfig()
    assert ExporterConfig().addresses == (Address("", 10960),)
    assert ExporterConfig(mode="node").addresses == (Address("127.0.0.1", 10960),)


SET: dict[str, tuple[list[str], object]] = {
    "flight_dir": (["/dev/shm/x"], "/dev/shm/x"),
    "listen": ([":1", "[::1]:2", "unix:/run/x/y.sock"], (Address("", 1), Address("::1", 2), UnixAddress("/run/x/y.sock"))),
    "telemetry_path": (["/telemetry/metrics"], "/telemetry/metrics"),
    "web_config_file": (["web.yml"], "web.yml"),
    "file_sd": (["/shared/torchobs-%h.json"], "/shared/torchobs-%h.json"),
    "mode": (["node"], "node"),
    "grace_s": (["1m"], 60.0),
    "drain_timeout_s": (["5"], 5.0),
    "hang_timeout_s": (["10m"], 600.0),
    "allow_foreign_owner": (["true"], True),
    "series_limit_total": (["20"], 20),
    "memory_limit": (["128Mi"], 128 << 20),
    "drop_metrics": (["torchobs_gpu_*", "hw_power_watts"], ("torchobs_gpu_*", "hw_power_watts")),
    "api_socket": (["/run/api.sock"], "/run/api.sock"),
    "api_token_file": (["/run/secrets/token"], "/run/secrets/token"),
    "control_dir": (["/run/control"], "/run/control"),
    "pod_uid": (["a-uid"], "a-uid"),
    "collect_host": (["disk, cpu"], ("cpu", "disk")),
    "host_paths": (["/lustre/checkpoints", "/nfs"], ("/lustre/checkpoints", "/nfs")),
    "procfs": (["/host/proc"], "/host/proc"),
    "sysfs": (["/host/sys"], "/host/sys"),
    "log_level": (["warn"], "warn"),
    "notify": (["https://hooks.example/x"], "https://hooks.example/x"),
    "log_format": (["json"], "json"),
}
"""By its option, texts and the value that they give."""


def test_every_option_sets_its_field() -> None:
    """As text, as the command line and the environment give it."""
    assert SET.keys() == {option.name for option in config.OPTIONS}
    values: dict[str, Any] = {name: value for name, (_, value) in SET.items()}
    given = {name: texts for name, (texts, _) in SET.items()}
    expected = ExporterConfig(**values, runtime_dir="/run/user/1")
    assert config.parse(given, {"XDG_RUNTIME_DIR": "/run/user/1"}) == expected
    assert config.parse({"hang_timeout_s": ["auto"]}, {}).hang_timeout_s is None


@pytest.mark.parametrize(
    ("field", "text"),
    [
        *(("listen", text) for text in ("10960", ":99999", "unix:relative", "unix:/x/")),
        *(("telemetry_path", text) for text in ("metrics", "/", "/-/healthy", "/api/v1", "/live/stream", "/a{b}")),
        *(("grace_s", "soon"), ("mode", "daemon"), ("hang_timeout_s", "never"), ("allow_foreign_owner", "maybe")),
        *(("series_limit_total", "0"), ("series_limit_total", "many"), ("memory_limit", "128M"), ("memory_limit", "-1")),
        *(("drop_metrics", text) for text in ("torchobs_gpu_.*", "a|b", "*_layer_*", "*")),
        *(("flight_dir", ""), ("flight_dir", "a\0b")),
    ],
)
def test_what_is_not_allowed_is_left_out_and_named(field: str, text: str) -> None:
    """The problem names the flag, the value and what is allowed; the rest of the configuration holds."""
    chosen = config.parse({field: [text], "drain_timeout_s": ["7"]}, {})
    (option,) = (option for option in config.OPTIONS if option.name == field)
    assert chosen.problems == (f"{option.flag} {text!r}: expected {option.kind.allowed}",)
    if field != "listen":  # it has a test of its own
        assert getattr(chosen, field) == getattr(ExporterConfig(), field)
    assert chosen.drain_timeout_s == 7.0


def test_a_variable_that_is_no_option_s_is_named_without_its_value() -> None:
    """With the option that may be meant. A setting of the trainer's is none of them, and a Service of Kubernetes neither."""
    ours = ("GARCE", "NOTHING_OF_THE_KIND", "GRACE", "ADDRESS", "PORT_10960_TCP", "WEB_CONFIG_SERVICE_HOST")
    environ = dict.fromkeys([*(f"TORCHOBS_EXPORTER_{name}" for name in ours), "TORCHOBS_LEVLE"], "secret")
    assert config.unknown_variables(environ) == [
        "TORCHOBS_EXPORTER_GARCE is an unknown option, did you mean TORCHOBS_EXPORTER_GRACE?",
        "TORCHOBS_EXPORTER_NOTHING_OF_THE_KIND is an unknown option",
    ]


def test_collectors_are_chosen_by_name() -> None:
    """All, none, or a list in any order; a refusal says which there are, of which those of earlier versions are none."""
    for text, chosen in {"all": HOST_COLLECTORS, "none": (), "network, cpu ,": ("cpu", "network"), "CPU": ("cpu",)}.items():
        assert config.parse({"collect_host": [text]}, {}).collect_host == chosen
    for text in ("cpus", "cpu,meminfo", "all,cpu", "cpu memory", "infiniband", "true"):
        refused = config.parse({"collect_host": [text]}, {})
        assert refused.collect_host == ()
        assert all(name in refused.problems[0] for name in HOST_COLLECTORS)


BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
NONE = dict.fromkeys(("OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER", "OTEL_LOGS_EXPORTER"), "none")


def parsed(environ: dict[str, str], **given: str) -> PushConfig:
    """The configuration, which must be without problems."""
    found, problems = config.parse_push({f"otlp_{name}": [text] for name, text in given.items()}, environ)
    assert problems == ()
    assert found is not None
    return found


def test_without_an_endpoint_nothing_is_pushed() -> None:
    """Nor with the SDK disabled, nor with none for every signal."""
    set_ = {BASE: "http://c:4318"}
    for environ in ({}, {BASE: "  "}, {**set_, "OTEL_SDK_DISABLED": "TRUE"}, {**set_, **NONE}):
        assert config.parse_push({}, environ) == (None, ())


def test_the_signal_s_path_is_added_to_a_base() -> None:
    """As the specification says; gRPC has no paths."""
    for base, url in {
        "http://c:4318": "http://c:4318/v1/metrics",
        "http://c:4318/": "http://c:4318/v1/metrics",
        "https://c/otlp/": "https://c/otlp/v1/metrics",
        "http://[::1]:1/a/b?k=v": "http://[::1]:1/a/b/v1/metrics?k=v",
    }.items():
        assert parsed({BASE: base}).metrics == PushTarget(url)
        assert parsed({BASE: base, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}).metrics == PushTarget(base, "grpc")


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
    }
    headers = (("a", "all"), ("b", "x,y"))
    found = parsed(environ)
    assert found.metrics == PushTarget("http://metrics:2/x", headers=headers, timeout_s=2.5, gzip=True, certificate="/ca")
    assert found.traces == PushTarget("http://all:1/v1/traces", headers=(("a", "traces"),), timeout_s=2.5, certificate="/ca")
    assert found.logs == PushTarget("http://logs:5/v1/logs", "grpc", headers, timeout_s=1.5, certificate="/ca")
    assert (found.interval_s, found.span_delay_s) == (15.0, 0.5)
    given = {"endpoint": "http://told:3", "metrics_endpoint": "http://m:4", "timeout": "1m", "interval": "5s"}
    told = parsed(environ, **given)
    assert [target.url for _, target in told.targets()][:2] == ["http://m:4", "http://told:3/v1/traces"]
    assert ({target.timeout_s for _, target in told.targets()}, told.interval_s) == ({60.0, 1.5}, 5.0)


def test_one_signal_may_be_pushed_alone() -> None:
    """By the others' exporters being none or prometheus, or by having the only endpoint."""
    for signal in config.SIGNALS:
        others = (f"OTEL_{other.upper()}_EXPORTER" for other in config.SIGNALS if other != signal)
        alone = {f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT": "http://c:1"}
        for environ in ({BASE: "http://c:1", **dict.fromkeys(others, "prometheus,console")}, alone):
            assert [name for name, _ in parsed(environ).targets()] == [signal]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((BASE, url) for url in ("collector:4318", "ftp://c", "http://", "http://c:99999", "http://c/a b")),
        *(("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"), ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd")),
        *(("OTEL_EXPORTER_OTLP_TIMEOUT", text) for text in ("10s", "0")),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-1"),
    ],
)
def test_what_is_not_allowed_is_told_and_left_out(name: str, text: str) -> None:
    """The push goes on with the rest."""
    found, (problem, *_) = config.parse_push({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1", name: text})
    assert found is not None
    assert problem.startswith(f"{name}='{text}': expected ")


def test_what_may_be_a_key_or_a_password_is_never_repeated() -> None:
    """The value of a header, of which none can forge another, and a password in the address, with a user or without."""
    for text in ("secret", "a b=secret", "a=secret%0d%0aHost: x", "=secret"):
        found, problems = config.parse_push({}, {BASE: "http://c:1", "OTEL_EXPORTER_OTLP_HEADERS": text})
        assert found is not None
        assert found.metrics == PushTarget("http://c:1/v1/metrics")
        assert problems
        assert not any("secret" in problem for problem in problems)
    for user in ("user:secret", ":secret"):
        found, (problem,) = config.parse_push({"otlp_endpoint": [f"http://{user}@c:1"]}, {})
        assert found is None
        assert "secret" not in problem
