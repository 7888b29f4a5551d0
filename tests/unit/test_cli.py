"""Commands without a process: what top, inspect, doctor and the commands to ranks say; a trial that is a real training."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from pathlib import Path

import pytest

from tests.diagnosis_files import fact, facts, step, steps
from tests.exporters import Service
from tests.rank_files import Clock, File, scanner_of
from torchobs import catalog
from torchobs.cli import control, doctor
from torchobs.cli.arguments import CommandError
from torchobs.cli.doctor import FAIL, OK, WARN, Check
from torchobs.cli.top import Watch
from torchobs.config import settings
from torchobs.document.run import run_document
from torchobs.document.text import TerminalStyle, render
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.directory import open_place
from torchobs.flight.layout import DEFAULT_SIZE
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


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (doctor.torch(None), WARN),
        (doctor.torch("2.3.1"), WARN),
        (doctor.torch("2.13.0+cpu"), OK),
        (doctor.torch("odd"), OK),
        (doctor.system("linux"), OK),
        (doctor.system("win32"), FAIL),
        (doctor.shared_memory("/nowhere"), WARN),
        (doctor.devices("None", "0"), WARN if list(Path("/dev").glob("nvidia[0-9]*")) else OK),
        (doctor.devices("12.6", "2"), OK),
        (doctor.injection(), WARN),
        (doctor.served("/nowhere"), FAIL),
    ],
)
def test_what_is_not_in_order_has_a_remedy(check: Check, status: str) -> None:
    """Promise: and what is in order has none."""
    assert (check.status, bool(check.remedy)) == (status, status != OK)


def test_variables_are_named_without_their_values() -> None:
    """Promise: those that are misspelt with the right name, ours and the exporter's; a value that is not allowed; else all."""
    environ = {"TORCHOBS_LEVLE": "basic", "TORCHOBS_EXPORTER_GARCE": "5m", "TORCHOBS_FILE_SIZE": "7", "TORCHOBS_DIR": "/x"}
    checks = list(doctor.variables(environ))
    assert [check.status for check in checks] == [WARN] * 3
    texts = " ".join(check.text for check in checks)
    assert "TORCHOBS_LEVLE is an unknown setting, did you mean TORCHOBS_LEVEL?" in texts
    assert "did you mean TORCHOBS_EXPORTER_GRACE?" in texts
    assert "TORCHOBS_FILE_SIZE='7'" in texts
    environ = {"TORCHOBS_LEVEL": "basic", "TORCHOBS_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "PATH": "/bin"}
    (check,) = doctor.variables(environ)
    assert (check.status, check.text) == (OK, "set and understood: TORCHOBS_EXPORTER_OTLP_ENDPOINT, TORCHOBS_LEVEL")


def test_the_directory_is_named_with_the_reason(flight_dir: Path) -> None:
    """Promise: the path, why it is that one, the file system, mode and owner, and room for a rank; nothing is made."""
    check = doctor.directory(str(flight_dir), None)
    assert check.status in {OK, WARN}
    assert all(words in check.text for words in (f"{flight_dir} (by TORCHOBS_DIR; ", "mode 0700"))
    assert doctor.directory(str(flight_dir / "a" / "b"), None).text.endswith("the first training makes it")
    assert not (flight_dir / "a").exists()
    assert doctor.space(str(flight_dir), DEFAULT_SIZE).status == OK
    full = doctor.space(str(flight_dir), 1 << 60)
    assert (full.status, "bytes left" in full.text) == (FAIL, True)


def test_what_a_training_could_not_make_a_directory_of_fails(tmp_path: Path) -> None:
    """Promise: as a training itself does: a plain file, a link, a path below a file; and a server that may be away."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    for path, named in ((str(file), file), (str(link), link), (str(file / "a" / "b"), file)):
        check = doctor.directory(path, None)
        assert (check.status, f"{named} is no directory" in check.text, "TORCHOBS_DIR" in check.remedy) == (FAIL, True, True)
        with pytest.raises(OSError, match=re.escape(path)):
            open_place(path, None)
    for kind, status in {"nfs4": FAIL, "fuse.sshfs": FAIL, "ext4": OK, "tmpfs": OK}.items():
        mountinfo = f"1 0 0:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:2 / {tmp_path} rw - {kind} server:/x rw\n"
        check = doctor.directory(str(tmp_path / "a" / "b"), None, mountinfo)
        assert (check.status, kind in check.text) == (status, status == FAIL)


def test_a_pod_s_volumes(tmp_path: Path) -> None:
    """Promise: in a pod alone: the mount, the fsGroup's bit, the second volume, and whether ranks' files can be read."""
    flight, control = tmp_path / "flight", tmp_path / "control"
    assert list(doctor.kubernetes({})) == []
    prepared = {"emptyDir": Path, "fsGroup": flight.mkdir, "second": lambda: flight.chmod(0o3777), "^$": control.mkdir}
    for remedy, prepare in prepared.items():
        prepare()  # type: ignore[operator]  # each without an argument
        (check,) = doctor.kubernetes({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, str(flight), str(control))
        assert re.search(remedy, check.remedy)
    assert doctor.served(str(flight)).status == WARN
    (flight / f"r0-{0:032x}.flight").write_bytes(b"no header")
    check = doctor.served(str(flight))
    assert (check.status, "r0-0" in check.text, "fsGroup" in check.remedy) == (FAIL, True, True)


def test_an_exporter_and_the_otlp_endpoint_are_tried(flight_dir: Path) -> None:
    """Promise: whether one answers at its address; the other, only where it is set, accepts connections, or the error."""
    with Service(ExporterConfig(flight_dir=str(flight_dir))) as service:
        assert doctor.exporter(str(flight_dir), service.address).text.endswith(f"has not said whether it serves {flight_dir}")
    assert doctor.exporter(None, service.address).text.startswith("none runs")
    assert list(doctor.otlp_endpoint({})) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {"TORCHOBS_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}"}
        (check,) = doctor.otlp_endpoint(environ)
        assert check.status == OK
    (check,) = doctor.otlp_endpoint(environ)
    assert (check.status, "does not answer" in check.text) == (WARN, True)


def test_the_trial_finds_every_probe_at_work(
    flight_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: five steps in a process of their own; every check for programs; nothing is left in the flight directory."""
    monkeypatch.setenv("TORCHOBS_DIR", str(flight_dir))
    assert doctor.main(["--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["version"] == 1
    assert {tuple(check) for check in answer["checks"]} == {("name", "status", "text", "remedy")}
    assert {check["name"] for check in answer["checks"]} >= {
        "torchobs", "torch", "variables", "directory", "room", "exporter", "shared memory", "nvml"
    }  # fmt: skip
    assert all(check["remedy"] for check in answer["checks"] if check["status"] != OK)
    (trial,) = [check for check in answer["checks"] if check["text"].startswith("a training of five steps")]
    assert trial["status"] == "ok"
    assert set(settings.PROBES) <= set(trial["text"].partition("at work: ")[2].split(", "))
    assert list(flight_dir.iterdir()) == []


def test_the_trial_is_judged(tmp_path: Path) -> None:
    """Promise: by its steps, its status, and the last line that it printed; a pod without a place for it gets a remedy."""
    trained = {steps_: facts(steps(steps_), values={catalog.STEPS: steps_, catalog.LOSS: 1.0}) for steps_ in (2, 5)}
    for report, status, said, expected in (
        (trained[2], 0, "", WARN),
        (None, 1, "Traceback\nImportError: libcudart.so.12", FAIL),
        (None, 0, "torchobs: off, no room", FAIL),
    ):
        first = next(doctor.evaluate(report, status, said))
        assert first.status == expected
        assert said.rpartition("\n")[2] in first.text
    for printed, count in (("None 0\n", 1), ("hello from sitecustomize\nNone 0\n", 1), ("x\n", 0)):
        names = [check.name for check in doctor.evaluate(trained[5], 0, "", printed)]
        assert names.count("gpus of torch") == count, "only a last line of two words is what torch says"
    (check,) = doctor.selftest([str(tmp_path / "read-only")])
    assert (check.status, check.text.startswith("no place for a trial"), "TMPDIR" in check.remedy) == (WARN, True, True)


def test_a_probe_that_is_off_is_named_with_its_reason() -> None:
    """Promise: with the error, and where it was raised."""
    event = fact(catalog.EVENT_PROBE_DISABLED, 1.0, probe="amp", exception__type="AttributeError", location="amp.py:7")
    values = {catalog.STEPS: 5, catalog.LOSS: 1.0, (catalog.PROBE_DISABLED, "amp"): 1.0, (catalog.PROBE_DISABLED, "loss"): 0.0}
    texts = [check.text for check in doctor.evaluate(facts(steps(5), values=values, events=[event]), 0, "")]
    assert "amp is off: AttributeError at amp.py:7" in texts
    assert any(text.startswith("not installed") and "gradients" in text for text in texts)


def test_a_failed_check_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: for scripts; the remedy is below it, within the width, without a control character; the last line counts."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHOBS_DIR", str(tmp_path / "file" / "flight"))
    assert doctor.main(["--no-training"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  directory: " in out
    assert "-> set TORCHOBS_DIR" in out
    lines = doctor.lines_of(Check("directory", FAIL, "a\x1b[2Jb " * 20, "do this " * 10), TerminalStyle(60))
    assert max(map(len, lines)) <= 60
    assert not any("\x1b" in line for line in lines)
    assert doctor.summary([Check("x", OK, "y")]) == "All is well."
    counts = [Check("x", status, "y") for status in (FAIL, WARN, WARN)]
    assert doctor.summary(counts) == "1 failure and 2 warnings: each has its remedy above."
