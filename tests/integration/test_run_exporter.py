"""`torchobs run` all the way: an untouched script, its flight file, the exporter that it starts."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests import fork_server
from tests.support import clean_environment, free_port, wait_until
from torchobs.flight.files.location import open_directory
from torchobs.flight.format.layout import Exit
from torchobs.flight.reader import reader
from torchobs.node import announcement

RUN = (sys.executable, "-m", "torchobs", "run")

TRAIN = """
import glob, os, sys, time
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
sys.stdout.write("trained\\n")  # in one piece, buffered or not: ranks share the pipe
sys.stdout.flush()
sys.stdin.readline()
rank = os.environ.get("RANK", "0")
open("trained-" + rank, "w").close()
while len(glob.glob("trained-*")) < int(os.environ.get("WORLD_SIZE", "1")):
    time.sleep(0.01)  # torchrun kills all others as soon as one has failed
sys.exit(int(sys.argv[2 + int(rank)]))
"""


@pytest.fixture
def environ(flight_dir: Path) -> Iterator[dict[str, str]]:
    """The environment of a run whose flight files and exporter are the test's own; the exporter ends with the test."""
    yield clean_environment() | {"TORCHOBS_DIR": str(flight_dir), "TORCHOBS_EXPORTER_ADDRESS": f"127.0.0.1:{free_port()}"}
    if found := announced(flight_dir):
        with contextlib.suppress(ProcessLookupError):  # it has left just now
            os.kill(found.pid, signal.SIGKILL)


def announced(flight_dir: Path) -> announcement.Announcement | None:
    """What the directory's exporter announces."""
    fd = open_directory(str(flight_dir))
    try:
        return announcement.read(fd)
    finally:
        os.close(fd)


def value(text: str, name: str, **labels: str) -> dict[str, float]:
    """A metric's samples on a page by rank, of those with these labels."""
    found = {}
    for line in re.findall(rf"^{name}{{.*", text, re.MULTILINE):
        has = dict(re.findall(r'(\w+)="([^"]*)"', line))
        if labels.items() <= has.items():
            found[has["rank"]] = float(line.rpartition(" ")[2])
    return found


def files(flight_dir: Path) -> list[reader.View]:
    """The flight files of runs that have ended."""
    directory_fd = open_directory(str(flight_dir))
    views = []
    for name in reader.names(directory_fd):
        file = reader.open_file(directory_fd, name)
        views.append(file.read(final=True))
        file.close()
    os.close(directory_fd)
    return views


def test_an_untouched_script_is_served_from_its_first_step(
    start: Callable[..., subprocess.Popen[str]], environ: dict[str, str], flight_dir: Path, tmp_path: Path
) -> None:
    """Steps counted, the exit status the script's own and on the page, and `| tee` ends with it."""
    (tmp_path / "train.py").write_text(TRAIN)
    child = start(*RUN, "train.py", "7", "3", cwd=tmp_path, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == "trained\n"
    found = wait_until(lambda: announced(flight_dir), 20)
    assert found is not None

    def page() -> str:
        return httpx.get(f"{found.url}metrics", trust_env=False, timeout=10).text

    # a look at the files serves whoever asks within a tenth of a second, and this one may be from before the steps
    wait_until(lambda: value(page(), "torchobs_steps_total") == {"0": 7.0})
    assert value(page(), "torchobs_rank_up") == {"0": 1.0}
    rest, _ = child.communicate("\n", timeout=20)
    assert (rest, child.returncode) == ("", 3)
    assert psutil.pid_exists(found.pid)

    def last_page() -> str:
        text = page()  # the exporter may leave once this was fetched
        return text if value(text, "torchobs_rank_exit", reason="exit_code") == {"0": 1.0} else ""

    assert value(wait_until(last_page), "torchobs_steps_total") == {"0": 7.0}


def test_torchrun_starts_it_on_every_rank(environ: dict[str, str], flight_dir: Path, tmp_path: Path) -> None:
    """`torchrun --no-python torchobs run train.py`: two ranks of one run, one exporter, torchrun's own verdict on a failure."""
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = fork_server.run(
        [*torchrun, "--no-python", *RUN, "train.py", "5", "0", "4"],
        cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout == "trained\ntrained\n"
    assert done.returncode == 1
    assert re.search(r"exitcode +: 4\b", done.stderr)
    views = files(flight_dir)
    assert sorted(view.header.resource["rank"] for view in views) == [0, 1]
    assert len({view.header.resource["run_id"] for view in views}) == 1
    assert {view.live.exit_code for view in views if view.header.resource["rank"] == 1} == {4}
    wait_until(lambda: announced(flight_dir), 20)


@pytest.mark.parametrize(
    ("last_line", "reason", "code"),
    [
        ("pass", Exit.FINISHED, 0),
        ("sys.exit()", Exit.FINISHED, 0),
        ("sys.exit(0)", Exit.FINISHED, 0),
        ("sys.exit(3)", Exit.EXIT_CODE, 3),
        ("sys.exit('bad')", Exit.EXIT_CODE, 1),
        ("1 / 0", Exit.EXCEPTION, 1),
        ("os._exit(5)", None, 0),
        ("os.kill(os.getpid(), 15)", None, 0),
    ],
)
def test_how_a_script_ended_is_in_its_flight_file(
    last_line: str, reason: Exit | None, code: int, environ: dict[str, str], flight_dir: Path, tmp_path: Path
) -> None:
    """In order, by `sys.exit`, by an exception; what leaves no chance leaves nothing, which the exporter shows as lost."""
    (tmp_path / "train.py").write_text(f"import os, sys\n{last_line}\n")
    subprocess.run([*RUN, "--no-exporter", "train.py"], cwd=tmp_path, env=environ, capture_output=True, check=False, timeout=60)
    (view,) = files(flight_dir)
    assert (view.live.exit_reason, view.live.exit_code) == (reason, code)
    assert view.header.resource["job_name"] == "train"


def test_options_reach_init(environ: dict[str, str], flight_dir: Path, tmp_path: Path) -> None:
    """`--dir` beats `TORCHOBS_DIR`, and with `--level off` there is a rank with nothing to say."""
    (tmp_path / "train.py").write_text("print('trained')")
    options = ("--no-exporter", "--dir", str(tmp_path / "elsewhere"))
    for number, more in enumerate(((), ("--level", "off")), start=1):
        argv = [*RUN, *options, *more, "train.py"]
        done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=60)
        assert (done.stdout, done.stderr) == ("trained\n", "")
        assert len(files(tmp_path / "elsewhere")) == number
    assert list(flight_dir.iterdir()) == []
