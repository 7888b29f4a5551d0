"""A real Prometheus for a test: its own directory, a port of its own choosing, and the questions that tests ask it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml

from tests.support import clean_environment, wait_until

if TYPE_CHECKING:
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
    found = re.search(r"version v?(\d+)\.", said.stdout + said.stderr)
    return int(found[1]) if found else 0


class PrometheusError(RuntimeError):
    """Prometheus refused a question, or did not start; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels (`__name__` among them) and its (Unix time, value) points, oldest first."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def value(self) -> float:
        """The newest value."""
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
        """The alert's name."""
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

    Raises:
        PrometheusError: On entering, if it does not become ready.
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
            self.address = wait_until(self._listening_on, timeout_s=30)
            wait_until(self._is_ready, timeout_s=30)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    @property
    def url(self) -> str:
        """Where it listens, without a slash at the end."""
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text(errors="replace")

    def query(self, expression: str, at: float | None = None) -> list[Series]:
        """Evaluate `expression` now, or at a Unix time; a scalar is one series without labels."""
        given = {} if at is None else {"time": f"{at:.3f}"}
        return _series(self.get("/api/v1/query", query=expression, **given))

    def query_range(self, expression: str, start: float, end: float, step: str = "1s") -> list[Series]:
        """Evaluate `expression` from `start` to `end` (Unix times), every `step`."""
        times = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": step}
        return _series(self.get("/api/v1/query_range", query=expression, **times))

    def value(self, expression: str) -> float:
        """The value of an expression that gives exactly one series.

        Raises:
            PrometheusError: It gave none, or several.
        """
        found = self.query(expression)
        if len(found) != 1:
            raise PrometheusError(f"{expression} gives {len(found)} series: {[dict(one.labels) for one in found]}")
        return found[0].value

    def alerts(self, name: str | None = None) -> list[Alert]:
        """The pending and firing alerts, all of them or those of one `name`."""
        given = self.get("/api/v1/alerts")["alerts"]
        found = [Alert(one["labels"], one["annotations"], one["state"], float(one["value"])) for one in given]
        return [alert for alert in found if name in (None, alert.name)]

    def targets(self) -> dict[str, str]:
        """The health (`up`, `down`, `unknown`) of every scrape target by its address."""
        active = self.get("/api/v1/targets", state="active")["activeTargets"]
        return {target["discoveredLabels"]["__address__"]: target["health"] for target in active}

    def wait_for_scrapes(self, number: int = 1, timeout_s: float = 30.0) -> None:
        """Wait until every target has been scraped at least `number` more times, successfully.

        Raises:
            TimeoutError: It was not in time.
        """
        since = time.time()
        expected = sum(len(group["targets"]) for job in self.config["scrape_configs"] for group in job["static_configs"])

        def scraped() -> bool:
            found = self.query(f"up[{int(time.time() - since) + 1}s]")
            return sum(sum(up for at, up in one.points if at > since) >= number for one in found) >= expected

        wait_until(scraped, timeout_s=timeout_s, interval_s=0.1)

    def wait_for_evaluation(self, timeout_s: float = 30.0) -> None:
        """Wait until every group of rules that is evaluated as often as `interval` says has been evaluated again.

        Raises:
            TimeoutError: It was not in time.
        """
        since = datetime.now(timezone.utc)

        def again() -> bool:
            groups = self.get("/api/v1/rules")["groups"]
            often = min(group["interval"] for group in groups)
            return all(_time(group["lastEvaluation"]) > since for group in groups if group["interval"] == often)

        wait_until(again, timeout_s=timeout_s, interval_s=0.1)

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of the HTTP API.

        Raises:
            PrometheusError: The API said no.
        """
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
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, text=True, env=clean_environment()
            )

    def _listening_on(self) -> str:
        self._require_life()
        found = LISTENING.search(self.log)
        return found[1] if found else ""

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
    return [Series(one["metric"], tuple(_point(point) for point in _points(one))) for one in answer["result"]]


def _points(one: Mapping[str, Any]) -> Sequence[Any]:
    several: Sequence[Any] = [*one.get("values", ()), *one.get("histograms", ())]
    return several or [one[kind] for kind in ("value", "histogram") if kind in one]


def _point(given: Sequence[Any]) -> tuple[float, float]:
    """A native histogram's value is the number of its observations."""
    value = given[1]["count"] if isinstance(given[1], dict) else given[1]
    return float(given[0]), float(value)
