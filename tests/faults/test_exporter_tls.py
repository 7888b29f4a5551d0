"""TLS that is none, is never finished, is too old, or breaks while it is in force: who is right is served all the while."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from tests.exporters import Service
from tests.faults.hostile_clients import GOOD, converse, over_tls
from tests.support import wait_until
from tests.web_configs import TLS, certify
from torchobs.cli import doctor
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OK = b"HTTP/1.1 200 OK"


@pytest.fixture(autouse=True)
def _shorter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file is looked at more often."""
    monkeypatch.setattr(daemon, "TICK_S", 0.05)


@pytest.fixture
def home(tmp_path: Path, program: Callable[[str], str]) -> Path:
    """A directory with certificates: the server's, a client's, a stranger's, and a configuration that trusts the client's."""
    openssl = program("openssl")
    for name in ("server", "client", "stranger"):
        certify(openssl, tmp_path, name)
    (tmp_path / "web.yml").write_text(f"{TLS}, client_auth_type: RequireAndVerifyClientCert, client_ca_file: client.pem}}")
    return tmp_path


@pytest.fixture
def exporter(home: Path) -> Iterator[Service]:
    """An exporter that wants a client's certificate."""
    with Service(ExporterConfig(flight_dir=str(home), web_config_file=str(home / "web.yml"))) as running:
        yield running


def context(home: Path, client: str | None = "client") -> ssl.SSLContext:
    """Trust in the server, and who one is."""
    trust = ssl.create_default_context(cafile=str(home / "server.pem"))
    if client is not None:
        trust.load_cert_chain(home / f"{client}.pem", home / f"{client}.key")
    return trust


def test_who_is_not_to_come_in_does_not(exporter: Service, home: Path) -> None:
    """No certificate, a stranger's, no TLS at all: no word of the metrics."""
    assert over_tls(exporter.address, context(home)) == OK
    for client in (None, "stranger"):
        assert over_tls(exporter.address, context(home, client)) == b""
    assert len(converse(exporter.address, [GOOD])[0]) < 16, "an alert at most"
    assert len(converse(exporter.address, [bytes(range(256)) * 4096])[0]) < 16


def test_it_is_told_whether_its_address_has_tls(exporter: Service, home: Path) -> None:
    """When it begins and when that changes, and the doctor asks it that way, with and without an announcement."""
    assert exporter.has_tls is True
    check = doctor.exporter(None, exporter.address)
    assert (check.status, check.text) == (
        doctor.OK,
        f"https://{exporter.address}/ has TLS: it closes connections without a client certificate",
    )
    (home / "web.yml").write_text(f"{TLS}}}")
    wait_until(lambda: doctor.exporter(None, exporter.address).text == f"https://{exporter.address}/ is ready")
    (home / "web.yml").write_text("")
    wait_until(lambda: exporter.has_tls is False)
    assert doctor.exporter(None, exporter.address).text == f"http://{exporter.address}/ is ready"
