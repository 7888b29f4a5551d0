"""Listeners that are no port."""

from __future__ import annotations

import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.exporters import Service
from tests.prometheus_server import PrometheusServer
from tests.support import wait_until
from tests.web_configs import USERS
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig, address_of
from torchobs.exporter.http import listeners
from torchobs.exporter.http.unix_socket import UnixAddress, bind_unix


@pytest.fixture(autouse=True)
def _shorter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an exporter ends sooner when its test has, and tries sooner again."""
    monkeypatch.setattr(daemon, "TICK_S", 0.05)
    monkeypatch.setattr(listeners, "RETRY_S", 0.1)


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
        found = b""
        while part := asking.recv(65536):
            found += part
        return found


def config(flight_dir: Path, path: Path, **more: str) -> ExporterConfig:
    """One that listens on the socket and on a port."""
    made = ExporterConfig(flight_dir=str(flight_dir), listen=(UnixAddress(str(path)), address_of("127.0.0.1:0")))
    return replace(made, **more)  # type: ignore[arg-type]  # each is its field's


def test_a_unix_socket_serves_its_group_and_is_removed_at_the_end(flight_dir: Path, path: Path) -> None:
    """Mode 0660, beside a port; no other name is left behind."""
    with Service(config(flight_dir, path)) as exporter:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert b"torchobs_build_info" in ask(path)
        assert exporter.get().status == 200
        assert [one.name for one in flight_dir.iterdir()] == [path.name]
    assert not path.exists()


def test_a_unix_socket_needs_no_password_where_a_port_does(flight_dir: Path, path: Path, tmp_path: Path) -> None:
    """Its mode says who may ask."""
    (tmp_path / "web.yml").write_text(USERS)
    with Service(config(flight_dir, path, web_config_file=str(tmp_path / "web.yml"))) as exporter:
        assert exporter.get().status == 401
        assert b"torchobs_build_info" in ask(path)


def test_what_a_killed_exporter_left_behind_is_replaced(flight_dir: Path, path: Path) -> None:
    """Nobody listens there any more."""
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with Service(config(flight_dir, path)):
        assert b"torchobs_build_info" in ask(path)


def test_a_socket_on_which_somebody_listens_is_left_alone_and_waited_for(flight_dir: Path, path: Path) -> None:
    """It says so, and takes the name when it is free."""
    other = bind_unix(path)
    with Service(config(flight_dir, path)) as exporter:
        assert f"cannot listen on unix:{path}" in exporter.page("/")
        assert exporter.value("torchobs_exporter_config_ok") == 0
        other.remove()
        other.close()
        wait_until(lambda: b"torchobs_build_info" in ask(path))


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_never_replaced(flight_dir: Path, path: Path, kind: str) -> None:
    """A file with that name is somebody's, and so is what a link leads to."""
    precious = flight_dir / "precious"
    precious.write_text("mine")
    if kind == "file":
        path.write_text("mine")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(precious)
    with pytest.raises(FileExistsError):
        bind_unix(path)
    assert precious.read_text() == "mine"
    assert {one.name for one in flight_dir.iterdir()} == {path.name, "precious"}


def test_a_name_that_was_deleted_is_taken_again(flight_dir: Path, path: Path) -> None:
    """Somebody was tidy, or the directory was made anew: that of the metrics, and that of commands."""
    with Service(config(flight_dir, path, api_socket=str(flight_dir / "x" / "api.sock"))) as exporter:
        for _ in range(2):
            if (flight_dir / "x").exists():
                (flight_dir / "x").rename(flight_dir / "deleted")  # at once: the socket would be made again while it is emptied
                shutil.rmtree(flight_dir / "deleted")
            path.unlink()
            (flight_dir / "x").mkdir()
            wait_until(lambda: b"torchobs_build_info" in ask(path))
            wait_until(lambda: b"torchobs_build_info" in ask(flight_dir / "x" / "api.sock"))
        wait_until(lambda: exporter.value("torchobs_exporter_config_ok") == 1)
    assert not list(flight_dir.glob("**/*.sock"))


def test_two_exporters_take_turns(flight_dir: Path, path: Path) -> None:
    """The second waits, and has the name when the first has left; the first does not take it along."""
    with Service(config(flight_dir, path)) as first, Service(config(flight_dir, path)) as second:
        wait_until(lambda: f"cannot listen on unix:{path}" in second.page("/"))
        first.stop()
        wait_until(lambda: b"torchobs_build_info" in ask(path))
        wait_until(lambda: second.value("torchobs_exporter_config_ok") == 1)
    assert not path.exists()


def test_prometheus_finds_the_exporter_by_its_file(flight_dir: Path, tmp_path: Path, program: Callable[[str], str]) -> None:
    """A real one, with file_sd_configs and nothing else; after the end there is no target."""
    made = config(flight_dir, flight_dir / "x.sock", file_sd=str(tmp_path / "torchobs-%h.json"), telemetry_path="/telemetry")
    job = {
        "job_name": "torchobs",
        "file_sd_configs": [{"files": [str(tmp_path / "torchobs-*.json")], "refresh_interval": "1s"}],
    }
    with Service(made) as exporter, PrometheusServer(program("prometheus3"), settings={"scrape_configs": [job]}) as prometheus:
        wait_until(lambda: prometheus.query("up == 1"), timeout_s=30)
        (found,) = prometheus.query("torchobs_exporter_config_ok")
        assert (found.value, found.labels["instance"]) == (1.0, exporter.address)
        assert found.labels["torchobs_host"] == socket.gethostname()
        exporter.stop()
        assert not list(tmp_path.glob("torchobs-*"))
