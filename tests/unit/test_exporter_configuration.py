"""The exporter's and the push's options, and what is around its pages: Prometheus' file, sockets, log, advice to a pod."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from torchobs.catalog import HOST_COLLECTORS
from torchobs.config.options import Address, duration_s
from torchobs.exporter import config
from torchobs.exporter.config import ExporterConfig, PushConfig, PushTarget, UnixAddress
from torchobs.exporter.daemon import NO_RANK, NO_RANK_S, LogFormatter, PodAdvice
from torchobs.exporter.file_sd import TargetFile
from torchobs.exporter.http import UnixSocket, bind_unix
from torchobs.exporter.metrics_page import ScrapeTracker
from torchobs.ranks.snapshot import EMPTY, Rank


def test_durations_are_prometheus_own_and_collectors_are_chosen_by_name() -> None:
    """Durations with units, or in seconds; collectors by all, none, or a list; a refusal says which there are."""
    read = {"90": 90, "90s": 90, "0": 0, "1.5s": 1.5, "5m": 300, "1h30m": 5400, "1h2m3s": 3723}
    assert {text: duration_s(text) for text in read} == read
    for text in ("", "s", "-1", "5 m", "1d2", "m", "1e3", "nan", "9" * 400, "1s1h", "٣s"):
        with pytest.raises(ValueError, match=f"^{re.escape(text[:10])}"):
            duration_s(text)
    for text, chosen in {"all": HOST_COLLECTORS, "none": (), "network, cpu ,": ("cpu", "network"), "CPU": ("cpu",)}.items():
        assert config.parse({"collect_host": [text]}, {}).collect_host == chosen
    for text in ("cpus", "cpu,meminfo", "all,cpu", "cpu memory", "infiniband", "true"):
        refused = config.parse({"collect_host": [text]}, {})
        assert refused.collect_host == ()
        assert all(name in refused.problems[0] for name in HOST_COLLECTORS)


def test_nothing_given_is_the_default_and_every_option_sets_its_field() -> None:
    """A sidecar on every interface, a node's exporter on loopback; options as text, as command line and environment give it."""
    assert config.parse({}, {}) == ExporterConfig()
    assert ExporterConfig().addresses == (Address("", 10960),)
    assert ExporterConfig(mode="node").addresses == (Address("127.0.0.1", 10960),)
    assert SET.keys() == {option.name for option in config.OPTIONS}
    values: dict[str, Any] = {name: value for name, (_, value) in SET.items()}
    options = {name: texts for name, (texts, _) in SET.items()}
    expected = ExporterConfig(**values, runtime_dir="/run/user/1")
    assert config.parse(options, {"XDG_RUNTIME_DIR": "/run/user/1"}) == expected
    assert config.parse({"hang_timeout_s": ["auto"]}, {}).hang_timeout_s is None
    several = config.parse({}, {"TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS": ":1 x [::1]:2"})
    assert (several.addresses, len(several.problems)) == ((Address("", 1), Address("::1", 2)), 1)


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


def test_what_is_not_allowed_is_left_out_and_named() -> None:
    """The problem names the flag, the value and what is allowed; the rest of the configuration holds."""
    cases: list[tuple[str, str]] = [
        *(("listen", text) for text in ("10960", ":99999", "unix:relative", "unix:/x/")),
        *(("telemetry_path", text) for text in ("metrics", "/", "/-/healthy", "/api/v1", "/live/stream", "/a{b}")),
        *(("grace_s", "soon"), ("mode", "daemon"), ("hang_timeout_s", "never"), ("allow_foreign_owner", "maybe")),
        *(("series_limit_total", "0"), ("series_limit_total", "many"), ("memory_limit", "128M"), ("memory_limit", "-1")),
        *(("drop_metrics", text) for text in ("torchobs_gpu_.*", "a|b", "*_layer_*", "*")),
        *(("flight_dir", ""), ("flight_dir", "a\0b")),
    ]
    for field, text in cases:
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


BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
NONE = dict.fromkeys(("OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER", "OTEL_LOGS_EXPORTER"), "none")


def parsed(environ: dict[str, str], **options: str) -> PushConfig:
    """The configuration, which must be without problems."""
    push, problems = config.parse_push({f"otlp_{name}": [text] for name, text in options.items()}, environ)
    assert problems == ()
    assert push is not None
    return push


def test_without_an_endpoint_nothing_is_pushed_and_one_signal_may_be_alone() -> None:
    """Nor with the SDK disabled, nor with none for every signal; one may have the only endpoint, or the others none."""
    set_ = {BASE: "http://c:4318"}
    for environ in ({}, {BASE: "  "}, {**set_, "OTEL_SDK_DISABLED": "TRUE"}, {**set_, **NONE}):
        assert config.parse_push({}, environ) == (None, ())
    for signal in config.SIGNALS:
        others = (f"OTEL_{other.upper()}_EXPORTER" for other in config.SIGNALS if other != signal)
        alone = {f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT": "http://c:1"}
        for environ in ({BASE: "http://c:1", **dict.fromkeys(others, "prometheus,console")}, alone):
            assert [name for name, _ in parsed(environ).targets()] == [signal]


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
    push = parsed(environ)
    assert push.metrics == PushTarget("http://metrics:2/x", headers=headers, timeout_s=2.5, gzip=True, certificate="/ca")
    assert push.traces == PushTarget("http://all:1/v1/traces", headers=(("a", "traces"),), timeout_s=2.5, certificate="/ca")
    assert push.logs == PushTarget("http://logs:5/v1/logs", "grpc", headers, timeout_s=1.5, certificate="/ca")
    assert (push.interval_s, push.span_delay_s) == (15.0, 0.5)
    options = {"endpoint": "http://told:3", "metrics_endpoint": "http://m:4", "timeout": "1m", "interval": "5s"}
    chosen = parsed(environ, **options)
    assert [target.url for _, target in chosen.targets()][:2] == ["http://m:4", "http://told:3/v1/traces"]
    assert ({target.timeout_s for _, target in chosen.targets()}, chosen.interval_s) == ({60.0, 1.5}, 5.0)


def test_what_is_not_allowed_is_told_and_left_out() -> None:
    """The push goes on with the rest."""
    cases: list[tuple[str, str]] = [
        *((BASE, url) for url in ("collector:4318", "ftp://c", "http://", "http://c:99999", "http://c/a b")),
        *(("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"), ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd")),
        *(("OTEL_EXPORTER_OTLP_TIMEOUT", text) for text in ("10s", "0")),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-1"),
    ]
    for name, text in cases:
        push, (problem, *_) = config.parse_push({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1", name: text})
        assert push is not None
        assert problem.startswith(f"{name}='{text}': expected ")


def test_what_may_be_a_key_or_a_password_is_never_repeated() -> None:
    """The value of a header, which cannot forge another, and a password in the address, with a user or without."""
    for text in ("secret", "a b=secret", "a=secret%0d%0aHost: x", "=secret"):
        push, problems = config.parse_push({}, {BASE: "http://c:1", "OTEL_EXPORTER_OTLP_HEADERS": text})
        assert push is not None
        assert push.metrics == PushTarget("http://c:1/v1/metrics")
        assert problems
        assert not any("secret" in problem for problem in problems)
    for user in ("user:secret", ":secret"):
        push, (problem,) = config.parse_push({"otlp_endpoint": [f"http://{user}@c:1"]}, {})
        assert push is None
        assert "secret" not in problem


EVERYWHERE = [Address("::", 10960)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A name for the file, in a directory that is made later."""
    return tmp_path / "later" / "torchobs-node-1.json"


@pytest.fixture
def file(path: Path) -> TargetFile:
    """The file of a machine called node-1; what cannot be written is a problem until it can."""
    target = TargetFile(str(path.with_name("torchobs-%h.json")), "node-1")
    target.update(EVERYWHERE, "/metrics", tls=False)
    assert target.problem == f"--web.file-sd {path}: No such file or directory"
    path.parent.mkdir()
    target.update(EVERYWHERE, "/metrics", tls=False)
    assert not target.problem
    return target


def test_an_address_that_was_chosen_is_said_as_it_is(file: TargetFile, path: Path) -> None:
    """With brackets where it is IPv6, each once, and with the scheme that TLS has."""
    chosen = (Address("10.0.0.7", 1), Address("fd00::7", 2), Address("0.0.0.0", 3), Address("::", 3))
    file.update(chosen, "/telemetry", tls=True)
    (group,) = json.loads(path.read_text())
    assert group["targets"] == ["10.0.0.7:1", "[fd00::7]:2", "node-1:3"]
    assert group["labels"] == {"torchobs_host": "node-1", "__metrics_path__": "/telemetry", "__scheme__": "https"}


def test_it_is_written_when_it_changes_and_removed_at_the_end(file: TargetFile, path: Path) -> None:
    """Prometheus reads it whenever it is touched; an exporter without a port is no target; a successor's file stays."""
    before = path.stat()
    file.update(EVERYWHERE, "/metrics", tls=False)
    assert path.stat() == before
    file.update([], "/metrics", tls=False)
    assert json.loads(path.read_text()) == []
    file.remove()
    file.remove()
    assert not path.exists()
    other = path.with_name("other")
    other.write_text("[]")
    other.replace(path)
    file.remove()
    assert path.read_text() == "[]"


def answers(path: Path, listening: UnixSocket) -> bool:
    """Whether that path leads to that socket."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(path))
        listening.settimeout(0)
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def test_a_successor_s_socket_keeps_its_name_in_whatever_order(flight_dir: Path) -> None:
    """Who leaves gives its name up while it listens still; a killed exporter leaves it behind, and it is replaced."""
    name = flight_dir / "exporter.sock"
    bind_unix(name).close()
    assert name.is_socket()
    old = bind_unix(name)
    assert answers(name, old)
    with pytest.raises(OSError, match="another process listens there"):
        bind_unix(name)
    old.remove()
    assert not name.exists()
    new = bind_unix(name)
    old.remove()
    assert answers(name, new)
    old.close()
    new.close()


def record(message: str, *arguments: object) -> logging.LogRecord:
    """A record as a logger makes it."""
    logged = logging.LogRecord("torchobs.ranks.scanner", logging.WARNING, __file__, 1, message, arguments, None)
    logged.created, logged.msecs = 1_700_000_000.25, 250
    return logged


def test_a_line_of_the_log() -> None:
    """Time in UTC, level, source, message, quoted where it has to be; the trace of an exception is in JSON's one line."""
    line = LogFormatter("logfmt").format(record("cannot listen on %s", ":80"))
    assert line == 'time=2023-11-14T22:13:20.250Z level=warn source=torchobs.ranks.scanner msg="cannot listen on :80"'
    problem = record("a scan failed")
    try:
        int("why")
    except ValueError:
        problem.exc_info = sys.exc_info()
    assert "ValueError: invalid literal" in json.loads(LogFormatter("json").format(problem))["trace"]
    assert len(LogFormatter("logfmt").format(problem).splitlines()) == 1


def test_nothing_in_a_message_makes_a_second_line_or_field() -> None:
    """File names are whatever somebody chose."""
    for text in ('a"b', "a\nb level=error", "a=b", "\x1b[31m", ""):
        line = LogFormatter("logfmt").format(record("%s", text))
        assert len(line.splitlines()) == 1
        assert line.endswith(f"msg={json.dumps(text)}")
        assert json.loads(LogFormatter("json").format(record("%s", text)))["msg"] == text


WITH_RANK = replace(EMPTY, ranks=(cast("Rank", object()),))


def test_a_pod_without_a_rank_says_so_and_one_whose_grace_does_not_last_for_a_scrape(caplog: pytest.LogCaptureFixture) -> None:
    """Once in the log, after two minutes or at its end. A scrape takes its interval, its timeout and 5 s; a restart is none."""
    pod, scrapers = PodAdvice(ExporterConfig()), ScrapeTracker()
    pod.review(EMPTY, scrapers, 100.0)
    assert not pod.advice
    for _ in range(2):
        pod.review(EMPTY, scrapers, 100.0 + NO_RANK_S)
    assert list(pod.advice) == [NO_RANK]
    assert caplog.text.count(NO_RANK) == 1
    pod.review(WITH_RANK, scrapers, 300.0)
    pod.review(EMPTY, scrapers, 600.0, ends=True)
    assert not pod.advice
    early = PodAdvice(ExporterConfig())
    early.review(EMPTY, scrapers, 1.0, ends=True)
    assert list(early.advice) == [NO_RANK]
    for interval_s, is_short in ((15.0, False), (30.0, False), (31.0, True), (60.0, True)):
        pod, scrapers = PodAdvice(ExporterConfig(drain_timeout_s=40.0)), ScrapeTracker(lambda _: True)
        for at_s in (0.0, interval_s, 2 * interval_s, 2 * interval_s + 200.0):
            scrapers.record(("10.0.0.1", 4000), "Prometheus/3", 1, at_s, timeout_s=10.0)
        pod.review(WITH_RANK, scrapers, 2 * interval_s + 201.0)
        assert ["the pod's grace of 45 s is too short" in words for words in pod.advice] == [True] * is_short
