"""Commands without a process: what top, inspect and the commands to ranks say."""

from __future__ import annotations

import math
import socket
import threading
from pathlib import Path

import pytest

from tests.diagnosis_files import facts, step
from tests.rank_files import Clock, File, scanner_of
from torchobs import catalog
from torchobs.cli import control
from torchobs.cli.arguments import CommandError
from torchobs.cli.top import Watch
from torchobs.document.run import run_document
from torchobs.document.text import TerminalStyle, render
from torchobs.ranks.runs import Chosen


def test_files_that_cannot_be_read_are_not_called_none(tmp_path: Path) -> None:
    """As those of a later version."""
    _, note = Watch(scanner_of(tmp_path, Clock(10.0))).look()
    assert note.startswith("no rank trains here")
    File(tmp_path).save().path.write_bytes(b"of a later version" * 1000)
    runs, note = Watch(scanner_of(tmp_path, Clock(10.0))).look()
    assert (runs, note) == ((), "1 flight file here cannot be read: `torchobs runs`, with the same --dir if any, says why")


def test_the_norm_of_a_shard_is_said_to_be_one() -> None:
    """FSDP's gradients that are not clipped: each rank has another norm, and none is the model's."""
    shard = "Gradient norms are of this rank's own shard; the squares of 4 ranks' norms add up to that of the whole's."
    for ranks in (1.0, 4.0, math.nan, 1e300):
        report = facts([step(number, 1.0, 0.5) for number in range(1, 4)], values={catalog.GRAD_NORM_RANKS: ranks})
        assert (shard in render(run_document(Chosen([report], [], [], [])), TerminalStyle(160))) is (ranks == 4.0)


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
            control.evidence(path, {"href": "/api/v1/evidence/0123456789abcdef"}, 5.0, "too late")
        server.join()
