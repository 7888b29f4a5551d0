"""The exporter's listeners: responses, addresses, Unix sockets, which connections are closed; and one scan for all who ask."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from prometheus_client.openmetrics import parser as openmetrics_parser
from starlette.responses import PlainTextResponse

from tests.diagnosis_files import Parsed
from tests.exporters import Service, value_on
from tests.rank_files import Clock
from tests.support import wait_until
from tests.web_configs import USERS, certify
from torchobs.config.options import Address
from torchobs.exporter import daemon
from torchobs.exporter import http as server
from torchobs.exporter.config import ExporterConfig, UnixAddress, address_of
from torchobs.exporter.http import Listeners, bind_unix
from torchobs.exporter.snapshot_cache import SnapshotCache
from torchobs.exporter.web_config import WebConfigMiddleware
from torchobs.ranks.scanner import system_clock
from torchobs.ranks.snapshot import EMPTY, Snapshot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from torchobs.flight.writer import FlightWriter
    from torchobs.ranks.rank_file import Now


@pytest.fixture(autouse=True)
def _shorter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an exporter ends sooner when its test has, and tries sooner again."""
    monkeypatch.setattr(daemon, "TICK_S", 0.05)
    monkeypatch.setattr(server, "RETRY_S", 0.1)


def test_the_metrics_in_each_format(writer: FlightWriter, exporter: Service) -> None:
    """OpenMetrics for whoever asks for it, plain text for everyone else, each compressed on request."""
    plain = exporter.get()
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "content-encoding" not in plain.headers
    assert b"torchobs_steps_total" in plain.body
    asked = exporter.get(Accept="application/openmetrics-text;version=1.0.0", Accept_Encoding="gzip")
    assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert (asked.headers["content-encoding"], asked.headers["vary"]) == ("gzip", "Accept, Accept-Encoding")
    page = gzip.decompress(asked.body).decode()
    names = {family.name for family in openmetrics_parser.text_string_to_metric_families(page)}  # type: ignore[no-untyped-call]
    assert {"torchobs_steps", "process_resident_memory_bytes", "python_info", "torchobs_build_info"} <= names
    assert writer.name


def test_a_page_is_compressed_where_gzip_is_accepted(exporter: Service) -> None:
    """With any weight but 0, by which a client refuses it."""
    accepted = {"gzip": "gzip", "br, GZIP ; q=0.1": "gzip", "gzip;q=0": None, "gzip; q=0.000, deflate": None, "x-gzip": None}
    assert {name: exporter.get(Accept_Encoding=name).headers.get("content-encoding") for name in accepted} == accepted


def test_other_requests_are_refused(exporter: Service) -> None:
    """With the right status; HEAD has no body."""
    for method, path, status in (
        ("POST", "/metrics", 405), ("DELETE", "/-/healthy", 405), ("GET", "/nope", 404), ("GET", "/metrics/x", 404),
        ("GET", "/../etc/passwd", 404), ("HEAD", "/metrics", 200),
    ):  # fmt: skip
        answer = exporter.get(path, method)
        assert (answer.status, method != "HEAD" or answer.body == b"") == (status, True), path
        assert status != 405 or set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_the_exporter_counts_its_own_scrapes(flight_dir: Path) -> None:
    """The page has how many were served before it, up to a second ago, and how long they took."""
    with Service(ExporterConfig(flight_dir=str(flight_dir))) as exporter:
        first = exporter.page()
        assert value_on(first, "torchobs_exporter_scrapes_total") == 0
        assert value_on(first, "torchobs_exporter_scrape_time_seconds_total") == 0
        wait_until(lambda: (exporter.value("torchobs_exporter_scrapes_total") or 0) >= 2)
        spent_s = exporter.value("torchobs_exporter_scrape_time_seconds_total")
        assert spent_s is not None
        assert spent_s > 0


def test_the_metrics_may_have_another_path(flight_dir: Path) -> None:
    """`--web.telemetry-path`; the usual one is then not there, and the landing page links to the new one."""
    with Service(ExporterConfig(flight_dir=str(flight_dir), telemetry_path="/telemetry")) as exporter:
        assert "torchobs_build_info" in exporter.page("/telemetry")
        assert exporter.get("/metrics").status == 404
        assert "./telemetry" in Parsed(exporter.page("/")).links


def test_a_sidecar_waits_for_its_port(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves on the other one meanwhile, says what is wrong, and takes it as soon as it is free."""
    monkeypatch.setattr(server, "RETRY_S", 0.1)
    blocker = server.bind(address_of("127.0.0.1:0"))
    port = blocker.getsockname()[1]
    addresses = (address_of(f"127.0.0.1:{port}"), address_of("127.0.0.1:0"))
    with Service(ExporterConfig(flight_dir=str(flight_dir), listen=addresses)) as exporter:
        assert exporter.value("torchobs_exporter_config_ok") == 0
        assert f"cannot listen on 127.0.0.1:{port}" in exporter.page("/")
        blocker.close()
        wait_until(lambda: exporter.value("torchobs_exporter_config_ok") == 1)
        exporter.address = f"127.0.0.1:{port}"
        assert exporter.get("/-/healthy").status == 200


def test_every_interface_is_both_families(flight_dir: Path) -> None:
    """`:PORT` answers on 127.0.0.1, and on ::1 where there is IPv6."""
    with Service(ExporterConfig(flight_dir=str(flight_dir)), listen=":0") as exporter:
        assert exporter.announced[0].startswith(":")
        assert exporter.get("/-/healthy").status == 200
        if socket.has_dualstack_ipv6() and Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
            exporter.address = f"[::1]:{exporter.address.rpartition(':')[2]}"
            assert exporter.get("/-/healthy").status == 200


@pytest.fixture
def path(flight_dir: Path) -> Path:
    """A name for a socket; the temporary directory's is too long."""
    return flight_dir / "exporter.sock"


def ask(path: Path) -> bytes:
    """The metrics, by a Unix socket; nothing if nobody answers."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(10)
        try:
            asking.connect(str(path))
        except OSError:
            return b""
        asking.sendall(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n")
        answer = b""
        while part := asking.recv(65536):
            answer += part
        return answer


def test_a_unix_socket_serves_its_group_and_is_removed_at_the_end(flight_dir: Path, path: Path, tmp_path: Path) -> None:
    """Mode 0660, which says who may ask: no password, where a port beside it takes one; no other name is left behind."""
    (tmp_path / "web.yml").write_text(USERS)
    listen = (UnixAddress(str(path)), address_of("127.0.0.1:0"))
    config = ExporterConfig(flight_dir=str(flight_dir), listen=listen, web_config_file=str(tmp_path / "web.yml"))
    with Service(config) as exporter:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert b"torchobs_build_info" in ask(path)
        assert exporter.get().status == 401
        assert [file.name for file in flight_dir.iterdir()] == [path.name]
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_socket_is_never_replaced(flight_dir: Path, path: Path, kind: str) -> None:
    """A file with that name is somebody's, and so is what a link leads to."""
    precious = flight_dir / "precious" if kind == "link" else path
    precious.write_text("mine")
    if kind == "link":
        path.symlink_to(precious)
    with pytest.raises(FileExistsError):
        bind_unix(path)
    assert precious.read_text() == "mine"
    assert {file.name for file in flight_dir.iterdir()} == {path.name, precious.name}


APP = PlainTextResponse("page")
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Address4 = tuple[str, int]


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp = APP, protection: WebConfigMiddleware | None = None
) -> AsyncIterator[tuple[Listeners, Address4]]:
    """A server on a free port, and its address."""
    config = ExporterConfig(listen=(Address("127.0.0.1", 0),))
    running = Listeners(config, protection or WebConfigMiddleware(None), app, None, None)
    await running.open()
    yield running, running.sockets[0].getsockname()
    await running.close()


@pytest.fixture
def certificate(tmp_path: Path, program: Callable[[str], str]) -> Path:
    """A certificate of this machine, beside its key."""
    return certify(program("openssl"), tmp_path, "server")


def contexts(certificate: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What a server has with that certificate, and a client that trusts it."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return server, ssl.create_default_context(cafile=str(certificate))


async def asked(
    address: Address4, trust: ssl.SSLContext | None = None, head: bytes = HEAD
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has got a page."""
    reader, writer = await asyncio.open_connection(*address, ssl=trust)
    writer.write(head)
    assert (await asyncio.wait_for(reader.readuntil(b"page"), 10)).startswith(b"HTTP/1.1 200 OK")
    return reader, writer


def test_an_idle_connection_ends_when_tls_changes(certificate: Path) -> None:
    """Or what has been asked without TLS could be asked so for ever."""
    protection = WebConfigMiddleware(None)

    async def ends() -> bytes:
        async with serving(APP, protection) as (running, address):
            reader, writer = await asked(address)
            protection.context, _ = contexts(certificate)
            await running.tick()
            left = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return left

    assert asyncio.run(ends()) == b""


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Responses that are pages, but for one that begins like a page and never ends."""
    if scope["path"] != "/stream":
        await APP(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"page", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


def test_who_has_asked_for_least_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the oldest that is silent, else the oldest that is idle after a response, else the oldest response that runs."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 4)

    async def closed(kinds: str) -> list[int]:
        async with serving(stream) as (_, address):
            connections = []
            for kind in kinds:
                if kind == "s":
                    connections.append(await asyncio.open_connection(*address))
                else:
                    head = HEAD if kind == "i" else HEAD.replace(b"GET /", b"GET /stream")
                    connections.append(await asked(address, head=head))
            connections.append(await asked(address))
            ended = [number for number, (reader, _) in enumerate(connections[:-1]) if reader.at_eof()]
            for _, writer in connections:
                writer.close()
            return ended

    expected = {"ssss": [0], "iiss": [2], "rsii": [1], "riri": [1], "rrrr": [0], "iiii": [0]}
    assert {kinds: asyncio.run(closed(kinds)) for kinds in expected} == expected


def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: of a first request; a scraper between two requests is left alone."""
    monkeypatch.setattr(server, "HEAD_S", 0.2)

    async def ends() -> None:
        async with serving() as (_, address):
            idle_reader, idle = await asked(address)
            reader, writer = await asyncio.open_connection(*address)
            writer.write(HEAD[:10])
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)  # to its end
            idle.write(HEAD)
            assert (await asyncio.wait_for(idle_reader.readuntil(b"page"), 10)).startswith(b"HTTP/1.1 200 OK")
            writer.close()
            idle.close()

    asyncio.run(ends())


def test_a_handshake_that_does_not_come_ends_the_connection(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: nothing of it is left, as of one that a client breaks off, and of garbage."""
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    protection = WebConfigMiddleware(None)
    protection.context, trust = contexts(certificate)

    async def ends() -> None:
        async with serving(APP, protection) as (running, address):
            for first in (b"", b"\x16\x03\x01\x02\x00\x01", HEAD):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(first)
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), 10)  # to its end
                writer.close()
            _, gone = await asyncio.open_connection(*address)
            gone.close()
            _, writer = await asked(address, trust)
            writer.close()
            while running.server_state.connections:  # noqa: ASYNC110  # nothing else shows it
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(ends(), 60))


class Scanner:
    """Takes snapshots that only have a number, and as long as a test wants."""

    def __init__(self) -> None:
        self.scans, self.fails = 0, False
        self.answers = threading.Event()
        self.answers.set()
        self.clock: Callable[[], Now] = system_clock

    def scan(self) -> Snapshot:
        """Count, wait, fail if that is wanted."""
        self.scans += 1
        taken_ns = self.clock().monotonic_ns
        assert self.answers.wait(10)
        if self.fails:
            raise ZeroDivisionError("a fault of ours")
        return replace(EMPTY, number=self.scans, taken_ns=taken_ns)

    def close(self) -> None:
        """It has nothing open."""


@pytest.fixture
def scanner() -> Iterator[Scanner]:
    """A scanner that a test may keep waiting, and that never waits after it."""
    fake = Scanner()
    yield fake
    fake.answers.set()


def test_scrapes_that_come_together_share_a_scan(scanner: Scanner) -> None:
    """A hundred at once, and those of the next 100 ms."""
    scanner.clock = clock = Clock()

    async def ask() -> set[int]:
        watch = SnapshotCache(cast("Any", scanner), clock)
        got = await asyncio.gather(*(watch.fresh(deadline_s=30.0) for _ in range(100)))
        clock.seconds += 0.1
        got.append(await watch.fresh(deadline_s=30.0))
        clock.seconds += 0.01
        got.append(await watch.fresh(deadline_s=30.0))
        watch.close()
        return {snapshot.number for snapshot in got}

    assert asyncio.run(ask()) == {1, 2}
    assert scanner.scans == 2


def test_a_directory_that_does_not_answer_costs_a_scrape_its_deadline(scanner: Scanner) -> None:
    """It gets the last snapshot then; every one that gave up is counted; no second scan is started beside the first."""

    async def ask() -> tuple[list[int], int, int, int]:
        watch = SnapshotCache(cast("Any", scanner))
        await watch.fresh(deadline_s=30.0)
        scanner.answers.clear()
        began = asyncio.get_running_loop().time()
        stale = await asyncio.gather(*(watch.fresh(0.0, 0.05) for _ in range(5)))
        assert 0.05 <= asyncio.get_running_loop().time() - began < 10.0
        wait_until(lambda: scanner.scans > 1)
        during = scanner.scans
        scanner.answers.set()
        fresh = await watch.fresh(0.0, 30.0)
        watch.close()
        return [snapshot.number for snapshot in stale], fresh.number, watch.timeouts, during

    assert asyncio.run(ask()) == ([1] * 5, 2, 5, 2)


def test_a_scan_that_fails_is_logged_and_the_last_snapshot_served(scanner: Scanner, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of ours costs no scrape, and does not stop the next scan."""

    async def ask() -> list[int]:
        watch = SnapshotCache(cast("Any", scanner))
        numbers = []
        for fails in (False, True, True, False):
            scanner.fails = fails
            numbers.append((await watch.fresh(0.0, 30.0)).number)
        watch.close()
        return numbers

    assert asyncio.run(ask()) == [1, 1, 1, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "a scan failed, the last snapshot is served: ZeroDivisionError('a fault of ours')"
    ] * 2
