"""A real Prometheus for a test, with what is asked of it and written to it, and a real Alertmanager with a webhook."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml

from tests.support import NEEDS_MOUNT, ROOT, clean_environment, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

# The listener's own address: the port is left to the kernel, so that no other test can take it first.
LISTENING = re.compile(r'msg="Listening on".* address=(127\.0\.0\.1:\d+)')

# Every request is to this machine: no proxy of the environment.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def newest_prometheus(major: int) -> str | None:
    """The path of a Prometheus of this major version or a later one: `prometheus`, or `prometheus3` beside an older one."""
    for name in ("prometheus3", "prometheus"):
        path = shutil.which(name)
        if path and _major(path) >= major:
            return path
    return None


def _major(program: str) -> int:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"version v?(\d+)\.", said.stdout + said.stderr)
    return int(version[1]) if version else 0


class PrometheusError(RuntimeError):
    """Prometheus refused a question, or did not start; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels (`__name__` among them) and its (Unix time, value) points, oldest first."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def value(self) -> float:
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class Alert:
    """An active alert: `state` is `pending` or `firing`; `labels` holds `alertname`."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    state: str
    value: float

    @property
    def name(self) -> str:
        return self.labels["alertname"]


class PrometheusServer:
    """Runs `program` (a path or a name on PATH) inside a `with` block.

    The first scrape comes an interval after the start: what discovery has found is collected ten times a second, not every 5 s.

    Args:
        program: A Prometheus, version 2.42 or later.
        scrape: Targets, `host:port`, all scraped as job `torchobs`.
        rules: Rule files to load.
        interval: Of scrapes and of rule evaluations, e.g. `"1s"`.
        settings: More top-level sections of the configuration file, e.g. `{"otlp": {...}}`.
        arguments: More command line arguments, e.g. `"--web.enable-otlp-receiver"`.
        data: An existing TSDB directory, e.g. one made by `promtool tsdb create-blocks-from`; else an empty one.
    """

    def __init__(
        self,
        program: str,
        *,
        scrape: Sequence[str] = (),
        rules: Sequence[Path] = (),
        interval: str = "1s",
        settings: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        data: Path | None = None,
    ) -> None:
        self.program = program
        self.config = _config(scrape, rules, interval, settings or {})
        self.arguments = tuple(arguments)
        self.address = ""
        self._data = data
        self._process: subprocess.Popen[str] | None = None
        self._home = tempfile.TemporaryDirectory(prefix="torchobs-prometheus-")

    def __enter__(self) -> Self:
        try:
            self._process = self._start()
            self.address = wait_until(self._listening_on)
            wait_until(self._is_ready)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def query(self, expression: str, at: float | None = None) -> list[Series]:
        """Evaluate `expression` now, or at a Unix time; a scalar is one series without labels."""
        times = {} if at is None else {"time": f"{at:.3f}"}
        return _series(self.get("/api/v1/query", query=expression, **times))

    def query_range(self, expression: str, start: float, end: float, step: str = "1s") -> list[Series]:
        """Evaluate `expression` from `start` to `end` (Unix times), every `step`."""
        times = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": step}
        return _series(self.get("/api/v1/query_range", query=expression, **times))

    def value(self, expression: str) -> float:
        """The value of an expression that gives exactly one series."""
        series = self.query(expression)
        if len(series) != 1:
            raise PrometheusError(f"{expression} gives {len(series)} series: {[dict(entry.labels) for entry in series]}")
        return series[0].value

    def alerts(self, name: str | None = None) -> list[Alert]:
        """The pending and firing alerts, all of them or those of one `name`."""
        active = self.get("/api/v1/alerts")["alerts"]
        every = [Alert(alert["labels"], alert["annotations"], alert["state"], float(alert["value"])) for alert in active]
        return [alert for alert in every if name in (None, alert.name)]

    def wait_for_scrapes(self, number: int = 1) -> None:
        """Wait until every target has been scraped at least `number` more times, successfully."""
        since = time.time()
        expected = sum(len(group["targets"]) for job in self.config["scrape_configs"] for group in job["static_configs"])

        def scraped() -> bool:
            series = self.query(f"up[{int(time.time() - since) + 1}s]")
            return sum(sum(up for at, up in target.points if at > since) >= number for target in series) >= expected

        wait_until(scraped, interval_s=0.1)

    def wait_for_evaluation(self) -> None:
        """Wait until every group of rules that is evaluated as often as `interval` says has been evaluated again."""
        since = datetime.now(timezone.utc)

        def again() -> bool:
            groups = self.get("/api/v1/rules")["groups"]
            often = min(group["interval"] for group in groups)
            return all(_time(group["lastEvaluation"]) > since for group in groups if group["interval"] == often)

        wait_until(again, interval_s=0.1)

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of the HTTP API."""
        try:
            with DIRECT.open(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise PrometheusError(f"{path} {parameters}: {error.read().decode(errors='replace')}") from None

    @property
    def _log(self) -> Path:
        return Path(self._home.name) / "log"

    def _start(self) -> subprocess.Popen[str]:
        home = Path(self._home.name)
        (home / "prometheus.yml").write_text(yaml.safe_dump(self.config))
        argv = [
            self.program,
            f"--config.file={home / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._data or home / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            "--scrape.discovery-reload-interval=100ms",
            *self.arguments,
        ]
        with self._log.open("w") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, env=clean_environment())

    def _listening_on(self) -> str:
        self._require_life()
        match = LISTENING.search(self.log)
        return match[1] if match else ""

    def _is_ready(self) -> bool:
        try:
            with DIRECT.open(f"{self.url}/-/ready", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            self._require_life()
        return False

    def _require_life(self) -> None:
        assert self._process is not None, "not started"
        if self._process.poll() is not None:
            raise PrometheusError(f"{self.program} ended with {self._process.returncode}:\n{self.log}")

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=5)
        self._home.cleanup()


def _time(text: str) -> datetime:
    """A time to the second: Python 3.10 does not read Prometheus' fractions."""
    return datetime.fromisoformat(re.sub(r"\.\d+", "", text).replace("Z", "+00:00"))


def _config(scrape: Sequence[str], rules: Sequence[Path], interval: str, more: Mapping[str, object]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [{"job_name": "torchobs", "static_configs": [{"targets": list(scrape)}]}] if scrape else [],
        **more,
    }


def _series(answer: Mapping[str, Any]) -> list[Series]:
    if answer["resultType"] == "scalar":
        return [Series({}, (_point(answer["result"]),))]
    return [Series(series["metric"], tuple(_point(point) for point in _points(series))) for series in answer["result"]]


def _points(series: Mapping[str, Any]) -> Sequence[Any]:
    several: Sequence[Any] = [*series.get("values", ()), *series.get("histograms", ())]
    return several or [series[kind] for kind in ("value", "histogram") if kind in series]


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    """A native histogram's value is the number of its observations."""
    value = pair[1]["count"] if isinstance(pair[1], dict) else pair[1]
    return float(pair[0]), float(value)


TEMPLATE = "prometheus/alertmanager/default.tmpl"


@contextmanager
def serving(handle: Callable[[BaseHTTPRequestHandler], bytes]) -> Iterator[str]:
    """An HTTP server of this machine: its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = handle(self)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  # as http.server names it

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as http.server names it
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def alertmanager_command(binary: str) -> list[str]:
    """How to start Debian's Alertmanager. Unpacked and not installed, its templates are not where it looks for them."""
    share = Path(binary).resolve().parent.parent / "share"
    if (Path("/usr/share") / TEMPLATE).exists() or not (share / TEMPLATE).exists():
        return [binary]
    moved = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /usr/share && exec "$@"', str(share)]
    if subprocess.run([*moved, "true"], capture_output=True, check=False).returncode:
        pytest.skip(NEEDS_MOUNT)
    return [*moved, binary]


def start_alertmanager(
    start: Callable[..., subprocess.Popen[str]],
    command: list[str],
    folder: Path,
    port: int,
    receiver: str,
    group_wait_ms: int = 3000,
) -> str:
    """Start it with the shipped configuration but short waits and `receiver` as its webhooks; return its address."""
    config = yaml.safe_load((ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text())
    for route in (config["route"], *config["route"]["routes"]):
        route |= {"group_wait": f"{group_wait_ms}ms", "group_interval": f"{group_wait_ms // 3}ms"}
    for place in config["receivers"]:
        place["webhook_configs"][0]["url"] = f"http://{receiver}/"
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{port}"
    start(
        *command, f"--config.file={path}", f"--storage.path={folder / 'am'}", f"--web.listen-address={address}",
        "--cluster.listen-address=", env=clean_environment(),
    )  # fmt: skip
    return address


FLAG = "--web.enable-remote-write-receiver"
"""What Prometheus must be started with."""
STALE: float = np.array([0x7FF0000000000002], np.uint64).view(np.float64)[0]
"""The value that ends a series at once, as Prometheus itself writes it when a target is no more"""
BATCH = 4 << 20
"""Bytes of a request"""

_STALE_BITS = np.uint64(0x7FF0000000000002)
_SAMPLE = np.dtype([("head", "u1", 3), ("value", "<f8"), ("tag", "u1"), ("time", "u1", 6)])
"""A sample's 16 bytes with tag and length before them. A time in milliseconds has a varint of six bytes until the year 2109."""


def write(address: str, series: Iterable[tuple[Mapping[str, str], np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> int:
    """Write series (labels, Unix times in seconds, values), each in order of time; return the number of samples."""
    connection = http.client.HTTPConnection(address, timeout=60)
    headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
    headers["X-Prometheus-Remote-Write-Version"] = "0.1.0"
    samples = 0
    for body, number in _requests(series):
        connection.request("POST", "/api/v1/write", _snappy(body), headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{answer.status}: {said.decode(errors='replace')}")
        samples += number
    connection.close()
    return samples


def _requests(series: Iterable[tuple[Mapping[str, str], Any, Any]]) -> Iterator[tuple[bytes, int]]:
    body, samples = bytearray(), 0
    for labels, times, numbers in series:
        values = np.ascontiguousarray(numbers, np.float64)
        there = np.isfinite(values) | (values.view(np.uint64) == _STALE_BITS)
        if not there.any():
            continue
        message = _labels(labels) + _samples(times[there], values[there])
        body += b"\x0a" + _varint(len(message)) + message
        samples += int(there.sum())
        if len(body) > BATCH:
            yield bytes(body), samples
            body, samples = bytearray(), 0
    if body:
        yield bytes(body), samples


def _labels(labels: Mapping[str, str]) -> bytes:
    message = bytearray()
    for pair in sorted(labels.items()):
        label = b"".join(
            tag + _varint(len(text)) + text for tag, text in zip((b"\x0a", b"\x12"), map(str.encode, pair), strict=True)
        )
        message += b"\x0a" + _varint(len(label)) + label
    return bytes(message)


def _samples(times: Any, values: Any) -> bytes:
    rows = np.zeros(len(values), _SAMPLE)
    rows["head"], rows["tag"], rows["value"] = (0x12, 16, 0x09), 0x10, values
    milliseconds = np.round(times * 1000).astype(np.uint64)
    for index in range(6):
        rows["time"][:, index] = (milliseconds >> np.uint64(7 * index)) & np.uint64(0x7F) | np.uint64(0x80 if index < 5 else 0)
    return rows.tobytes()


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))


def _snappy(data: bytes) -> bytes:
    """Return a block of one literal: valid, and not compressed."""
    return _varint(len(data)) + b"\xfc" + (len(data) - 1).to_bytes(4, "little") + data
