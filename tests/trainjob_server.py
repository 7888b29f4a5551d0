"""A server that stands for Kubeflow Trainer's, which takes the status of TrainJobs (KEP-2779)."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/research/trainjobs/gpt/status"


@dataclass
class Trainer:
    """Kubeflow Trainer's status server."""

    certificate: Path
    host: str = "127.0.0.1"
    port: int = 0
    answer: int = 200
    got: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """path, authorization and content of each request"""

    @property
    def url(self) -> str:
        """Where it takes the status."""
        return f"https://{self.host}:{self.port}{PATH}"

    @property
    def last(self) -> dict[str, Any]:
        """The last status that it got; empty while there is none."""
        found: dict[str, Any] = self.got[-1][2]["trainerStatus"] if self.got else {}
        return found


@contextmanager
def serving(trainer: Trainer) -> Iterator[None]:
    """Let it listen."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # as http.server names it
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            trainer.got.append((self.path, self.headers["Authorization"], content))
            self.send_response(trainer.answer)
            self.send_header("Location", f"{trainer.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as http.server names it
            del format, args

    server = ThreadingHTTPServer((trainer.host, 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trainer.certificate, trainer.certificate.with_suffix(".key"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    trainer.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
