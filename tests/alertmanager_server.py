"""A real Alertmanager with the shipped configuration, and a webhook for it."""

from __future__ import annotations

import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support import NEEDS_MOUNT, ROOT, clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TEMPLATE = "prometheus/alertmanager/default.tmpl"


@contextmanager
def serving(
    handle: Callable[[BaseHTTPRequestHandler], bytes],
) -> Iterator[str]:
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
    start: Callable[..., subprocess.Popen[str]], command: list[str], folder: Path, port: int, receiver: str
) -> str:
    """Start it with the shipped configuration but short waits and `receiver` as its webhooks; return its address."""
    config = yaml.safe_load((ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text())
    for route in (config["route"], *config["route"]["routes"]):
        route |= {"group_wait": "3s", "group_interval": "1s"}
    for one in config["receivers"]:
        one["webhook_configs"][0]["url"] = f"http://{receiver}/"
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{port}"
    start(
        *command, f"--config.file={path}", f"--storage.path={folder / 'am'}", f"--web.listen-address={address}",
        "--cluster.listen-address=", env=clean_environment(),
    )  # fmt: skip
    return address
