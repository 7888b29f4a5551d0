"""The push within the exporter: nothing of it where it is off, and nothing that it does holds anything else up."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.exporters import Service, start_program
from tests.otlp import Answer, Pushing, Receiver, points, to
from tests.rank_files import File, live_rank, train
from tests.support import clean_environment, free_port, wait_until
from tests.web_configs import certify
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.otlp.http_transport import HttpTransport
from torchobs.exporter.otlp.options import PushConfig, PushTarget

if TYPE_CHECKING:
    from typing_extensions import Self

OFF = """
import sys
from torchobs.cli.exporter import main
import torchobs.exporter.daemon
from torchobs.exporter.config import ExporterConfig
torchobs.exporter.daemon._optional(ExporterConfig())
heavy = ("google", "grpc", "requests", "urllib3", "opentelemetry.proto", "opentelemetry.sdk", "psutil")
print([name for name in sys.modules if name.startswith(heavy)])
"""


def test_nothing_of_it_is_imported_where_it_is_off() -> None:
    """An exporter that is scraped pays nothing for those that push, or that tell of the machine."""
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=True, env=clean_environment())
    assert done.stdout == "[]\n"


def test_the_page_has_no_word_of_it_where_it_is_off(flight_dir: Path) -> None:
    """Series of a thing that is not there would only puzzle."""
    with Service(ExporterConfig(flight_dir=str(flight_dir))) as service:
        assert "otlp" not in service.page()


@pytest.mark.serial
def test_a_receiver_that_hangs_holds_up_no_scrape_and_no_end(flight_dir: Path) -> None:
    """While requests hang, the page comes as ever; an exporter that has done its duty leaves in its time."""
    for seed in range(1, 9):
        File(flight_dir, seed=seed, rank=seed).save()
    with Receiver(lambda _: Answer(hold_s=120.0)) as receiver:
        push = PushConfig(metrics=to(receiver), traces=to(receiver, path="/v1/traces"), interval_s=0.5)
        config = ExporterConfig(flight_dir=str(flight_dir), push=push, drain_timeout_s=1.0, grace_s=1e9)
        with Service(config) as service:
            wait_until(lambda: receiver.requests)
            times_s = []
            for _ in range(20):
                began_s = time.perf_counter()
                service.page()
                times_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
        assert time.perf_counter() - began_s < 5.0
    assert statistics.median(times_s) < 0.1


def test_sigterm_waits_for_the_final_state_to_be_pushed(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path
) -> None:
    """A sidecar's last word: what the rank counted last, and how it ended; sent within the drain, after a first failure."""
    writer = live_rank(flight_dir)
    train(writer, range(1, 3))
    with Receiver() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret%20key"}
        exporter = start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir), **environ)
        wait_until(lambda: receiver.of("/v1/metrics"))
        failures = iter([Answer(503)] * 2)
        receiver.answer = lambda _: next(failures, Answer())
        train(writer, range(3, 8))
        writer.exit(1, 0)
        writer.close()
        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(timeout=30) == 0
        last = {one.metric.name: one.point for one in points(receiver.of("/v1/metrics"))}
        states = [one for one in points(receiver.of("/v1/metrics")) if one.attributes.get("state") == "finished"]
        assert last["torchobs.steps"].as_int == 7
        assert states[-1].point.as_double == 1
        assert receiver.of("/v1/traces")
        assert {request.headers["api-key"] for request in receiver.requests} == {"secret key"}
    assert "secret" not in exporter.log


def test_a_receiver_that_is_not_there_is_no_reason_to_stay(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path
) -> None:
    """SIGTERM ends the exporter within the drain, and the log says what was left behind."""
    live_rank(flight_dir).close()
    with socket.socket() as held:  # bound, so that nobody else gets the port, and not listening
        held.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
        options = ("--flight-dir", str(flight_dir), "--otlp.endpoint", endpoint, "--drain-timeout", "2s")
        exporter = start_program(start, tmp_path / "log", free_port(), *options)
        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(timeout=20) == 0
    assert "OTLP" in exporter.log


def test_a_wrong_option_of_a_sidecar_is_a_problem_and_no_end(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path
) -> None:
    """The exporter serves; the page says that the configuration is not honoured."""
    options = ("--flight-dir", str(flight_dir), "--otlp.endpoint", "collector:4318")
    exporter = start_program(start, tmp_path / "log", free_port(), *options, KUBERNETES_SERVICE_HOST="10.96.0.1")
    assert exporter.value("torchobs_exporter_config_ok") == 0
    assert "--otlp.endpoint" in exporter.log


def test_tls_trusts_whom_it_is_told_to_and_shows_its_own_certificate(
    program: Callable[[str], str], flight_dir: Path, tmp_path: Path
) -> None:
    """A receiver that wants a certificate gets it; one that nobody vouches for gets nothing, and the log says why."""
    server, client = (certify(program("openssl"), tmp_path, name) for name in ("server", "client"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server, tmp_path / "server.key")
    context.load_verify_locations(client)
    context.verify_mode = ssl.CERT_REQUIRED
    File(flight_dir).save()
    own = {"client_certificate": str(client), "client_key": str(tmp_path / "client.key")}
    with Receiver(tls=context) as receiver:
        trusting, doubting = to(receiver, certificate=str(server), **own), to(receiver, **own)
        push = PushConfig(metrics=trusting, traces=doubting)
        with Pushing(flight_dir, push) as pushing:
            pushing.look(1.0, wait=False)
            wait_until(lambda: pushing.push.counts["metrics"].sent and pushing.push.counts["traces"].failures)
            assert pushing.push.counts["traces"].sent == 0
        counts = pushing.push.counts["traces"]
        assert counts.recorded == counts.dropped["shutdown"] > 0
        assert [*points(receiver.taken)]
        anonymous = PushConfig(metrics=to(receiver, certificate=str(server)))
        with Pushing(flight_dir, anonymous) as pushing:
            pushing.look(1.0, wait=False)
            wait_until(lambda: pushing.push.counts["metrics"].failures)
            assert pushing.push.counts["metrics"].sent == 0


def test_a_proxy_of_the_environment_is_used(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for the whole address, with its own user; NO_PROXY goes around it."""
    File(flight_dir).save()
    with Receiver() as proxy, Receiver() as direct:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//user:pass%20word@"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        push = PushConfig(metrics=PushTarget("http://collector.example:4318/v1/metrics"), traces=to(direct, path="/v1/traces"))
        with Service(ExporterConfig(flight_dir=str(flight_dir), push=push, grace_s=1e9)):
            wait_until(lambda: proxy.taken and direct.taken)
    (request, *_) = proxy.taken
    assert request.path == "http://collector.example:4318/v1/metrics"
    assert request.headers["host"] == "collector.example:4318"
    assert request.headers["proxy-authorization"] == "Basic dXNlcjpwYXNzIHdvcmQ="
    assert "proxy-authorization" not in direct.taken[0].headers


class Tunnel:
    """A proxy for CONNECT that leads wherever it is told, inside a `with` block; `asked` is the head of the last request."""

    def __init__(self, to_url: str) -> None:
        self._to = ("127.0.0.1", int(to_url.rpartition(":")[2]))
        self.asked = b""

    def __enter__(self) -> Self:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://user:pass@127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._lead)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _lead(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._server.accept()
            with near, socket.create_connection(self._to) as far:
                while b"\r\n\r\n" not in self.asked:
                    self.asked += near.recv(4096)
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                while (ready := select.select([near, far], [], [])[0]) and (data := ready[0].recv(65536)):
                    (far if ready[0] is near else near).sendall(data)


def test_tls_goes_through_a_proxy_s_tunnel(
    program: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy hears where to, and its own user; the receiver, whose certificate is checked, hears nothing of that."""
    certificate = certify(program("openssl"), tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "server.key")
    with Receiver(tls=context) as receiver, Tunnel(receiver.url) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        url = receiver.url + "/v1/metrics"
        web = HttpTransport("metrics", PushTarget(url, certificate=str(certificate)))
        outcomes = [web.send(b"1"), web.send(b"2")]
        web.close()
    assert [outcome.kind for outcome in outcomes] == ["sent", "sent"], outcomes
    assert proxy.asked.startswith(f"CONNECT {url.split('/')[2]} HTTP/1.".encode())
    assert b"Proxy-Authorization: Basic dXNlcjpwYXNz\r\n" in proxy.asked.replace(b"proxy-authorization", b"Proxy-Authorization")
    assert [request.body for request in receiver.taken] == [b"1", b"2"]
    assert not any("proxy-authorization" in request.headers for request in receiver.taken)


def test_a_certificate_may_be_renewed(program: Callable[[str], str], tmp_path: Path) -> None:
    """The files are read for each connection; nothing has to be started again."""
    certificate, other = (certify(program("openssl"), tmp_path, name) for name in ("server", "other"))
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(other.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "server.key")
    with Receiver(tls=context) as receiver:
        web = HttpTransport("metrics", to(receiver, certificate=str(trusted)))
        before = web.send(b"x")
        trusted.write_bytes(certificate.read_bytes())
        after = web.send(b"x")
        web.close()
    assert (before.kind, after.kind) == ("retry", "sent")
    assert "CERTIFICATE_VERIFY_FAILED" in before.words
