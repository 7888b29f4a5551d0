"""What the commands say of an exporter that answers in a strange way."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from torchobs.cli import control
from torchobs.cli.arguments import CommandError


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf a trace", b"no HTTP\r\n", b""])
def test_an_answer_that_breaks_off_is_an_error_in_words(tmp_path: Path, answer: bytes) -> None:
    """An exporter that is killed in the midst of a trace: what was raised was Python's own."""
    path = tmp_path / "s"

    def serve() -> None:
        accepted, _ = listening.accept()
        with accepted:
            accepted.recv(4096)
            accepted.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(CommandError, match="no exporter answers at"):
            control.evidence(path, "/api/v1/evidence/0123456789abcdef", 5.0)
        server.join()
