"""Listeners that are no port: Unix sockets, and those of systemd."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.exporters import EXPORTER, Service
from tests.prometheus_server import PrometheusServer
from tests.support import clean_environment, free_port, wait_until
from tests.web_configs import USERS
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig, address_of
from torchobs.exporter.http import listeners, server
from torchobs.exporter.http.unix_socket import UnixAddress, bind_unix

STARTER = """
import os, socket, sys
bound = socket.create_server(("127.0.0.1", 0))
os.dup2(bound.fileno(), 3)
os.set_inheritable(3, True)
print(bound.getsockname()[1], flush=True)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execv(sys.executable, [sys.executable, "-m", "torchobs", "exporter", "--web.systemd-socket=true"])
"""


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


def test_a_socket_of_systemd_s_is_served(start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path) -> None:
    """As the file descriptor 3 of the process that LISTEN_PID names, and no other port is opened."""
    environ = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir)}
    with (tmp_path / "error").open("w") as error:
        running = start(sys.executable, "-c", STARTER, stdout=subprocess.PIPE, stderr=error, env=environ)
    assert running.stdout is not None
    port = int(running.stdout.readline())
    with socket.create_connection(("127.0.0.1", port), timeout=60) as asking:
        asking.sendall(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n")
        assert b"200 OK" in asking.recv(65536)
    assert (tmp_path / "error").read_text().count("listening on") == 1


def test_curl_asks_by_what_systemd_has_opened(
    start: Callable[..., subprocess.Popen[str]], program: Callable[[str], str], flight_dir: Path, path: Path
) -> None:
    """A port and a Unix socket of the real systemd's, the first question to which starts it; the socket stays systemd's."""
    curl, port = program("curl"), free_port()
    exporter = (*EXPORTER, "--web.systemd-socket=true")
    listen = ("-l", f"127.0.0.1:{port}", "-l", str(path))
    environ = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir)}
    kept = [f"--setenv={name}" for name in environ]
    running = start(program("systemd-socket-activate"), *kept, *listen, *exporter, env=environ)
    wait_until(path.exists)

    def said(*arguments: str) -> str:
        argv = (curl, "--silent", "--noproxy", "*", "--max-time", "30", "--compressed", *arguments)
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    for asked in (("--unix-socket", str(path), "http://localhost/metrics"), (f"http://127.0.0.1:{port}/metrics",)):
        assert "torchobs_exporter_config_ok 1.0" in said(*asked)
        assert said("--header", "Accept: application/openmetrics-text", *asked).endswith("# EOF\n")
    running.terminate()
    assert running.wait(timeout=20) == 0
    assert path.exists()


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


@pytest.mark.parametrize("environ", [{}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}, {"LISTEN_FDS": "x", "LISTEN_PID": "7"}])
def test_what_systemd_has_not_given_is_not_taken(environ: dict[str, str]) -> None:
    """The variables of a parent, or none."""
    with pytest.raises(OSError, match=r"systemd has given no socket"):
        server.systemd_sockets(environ, 7)


def test_without_systemd_s_socket_no_other_is_opened(flight_dir: Path) -> None:
    """Whoever let systemd choose the address did not ask for every interface."""
    with Service(
        ExporterConfig(flight_dir=str(flight_dir), systemd_socket=True, listen=(address_of("127.0.0.1:0"),))
    ) as exporter:
        assert "systemd has given no socket" in exporter.page("/")
        assert exporter.value("torchobs_exporter_config_ok") == 0
    assert os.environ.get("LISTEN_FDS") is None
