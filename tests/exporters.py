"""A running exporter for a test, in a thread of this process or as the real program, and questions to its API."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support import clean_environment, wait_until
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig, address_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from torchobs.node.lifetime import ServiceStatus

keep_survivors = daemon.keep_survivors
"""The real program's. An exporter in this process would let go of what the tests have frozen."""
vars(daemon)["keep_survivors"] = lambda: None

EXPORTER = (sys.executable, "-m", "torchobs", "exporter")
"""The real program, as far as its options."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def value_on(page: str, name: str, **labels: str) -> float | None:
    """The value of the first sample of a metrics page with that name and these labels."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None


def state_on(page: str, rank: str = "0") -> str:
    """A rank's state on a page; empty if it is not served."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "torchobs_rank_state" and sample.labels["rank"] == rank and sample.value == 1:
                return str(sample.labels["state"])
    return ""


class _Local(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """Asks an exporter; `address` is its `host:port`, or the path of its socket."""

    def __init__(self, address: str, timeout_s: float = 10.0) -> None:
        self.address, self._timeout_s = address, timeout_s

    def get(self, path: str = "/metrics", method: str = "GET", body: bytes | None = None, /, **headers: str) -> Answer:
        """Send a request of its own connection; `user_agent` is `User-Agent`."""
        kind: type[http.client.HTTPConnection] = _Local if self.address.startswith("/") else http.client.HTTPConnection
        connection = kind(self.address, timeout=self._timeout_s)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            got = connection.getresponse()
            return Answer(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
        finally:
            connection.close()

    def page(self, path: str = "/metrics", **headers: str) -> str:
        """The metrics page, which must be there."""
        answer = self.get(path, **headers)
        assert answer.status == 200, answer
        return answer.body.decode()

    def value(self, name: str, **labels: str) -> float | None:
        """As :func:`value_on`, of its page."""
        return value_on(self.page(), name, **labels)

    def state(self, rank: str = "0") -> str:
        return state_on(self.page(), rank)


class Service(Client):
    """`serve()` in a thread, inside a `with` block; `fleets` are those that `finished` was asked with."""

    def __init__(self, config: ExporterConfig, *, listen: str = "127.0.0.1:0") -> None:
        super().__init__("")
        self._config = config if config.listen else replace(config, listen=(address_of(listen),))
        self._stop = threading.Event()
        self.fleets: list[ServiceStatus] = []
        self.announced: list[str] = []
        self.has_tls: bool | None = None
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self.announced or not self._thread.is_alive())
        wait_until(lambda: self.fleets or not self._thread.is_alive())  # by then the API's socket is there, too
        self.address = f"127.0.0.1:{self.announced[0].rpartition(':')[2]}" if self.announced else ""
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Say that its duty is done, and wait for its end."""
        self._stop.set()
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self.code = daemon.serve(self._config, announce=self._announce, finished=self._finished)

    def _announce(self, address: str, tls: bool) -> None:  # noqa: FBT001  # as the exporter calls it
        self.announced.append(address)
        self.has_tls = tls

    def _finished(self, fleet: ServiceStatus) -> bool:
        self.fleets.append(fleet)
        return self._stop.is_set()


class Program(Client):
    """`torchobs exporter` as a process; `log` is what it has said so far."""

    def __init__(self, process: subprocess.Popen[str], address: str, log: Path) -> None:
        super().__init__(address)
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return self.get("/-/ready").status == 200
        except OSError:
            return False


def start_program(
    start: Callable[..., subprocess.Popen[str]], log: Path, port: int, *arguments: str, **environ: str
) -> Program:
    """Start the real program on a port of 127.0.0.1, and wait until it is ready."""
    argv = [*EXPORTER, "--web.listen-address", f"127.0.0.1:{port}", *arguments]
    with log.open("w") as error:
        process = start(*argv, stderr=error, env={**clean_environment(), **environ})
    program = Program(process, f"127.0.0.1:{port}", log)
    wait_until(program.is_ready, timeout_s=60)
    return program


class Caller:
    """Asks; `at` is `host:port` or the path of a socket."""

    def __init__(self, at: str | Path) -> None:
        self._client = Client(str(at))

    def ask(self, method: str, path: str, content: object = None, prefix: str = "/api/v1", **headers: str) -> Answer:
        """Send a request; with content it is JSON. `content_type` is `Content-Type`."""
        body = None
        if content is not None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            headers.setdefault("content_type", "application/json")
        return self._client.get(prefix + path, method, body, **headers)

    def get(self, path: str, **headers: str) -> Any:
        """What is read there, which must be there."""
        reply = self.ask("GET", path, **headers)
        assert reply.status == 200, reply
        return reply.json

    def post(self, path: str, content: object = None, **headers: str) -> Answer:
        return self.ask("POST", path, {} if content is None else content, **headers)
