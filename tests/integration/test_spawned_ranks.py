"""Ranks that a script starts itself, by `multiprocessing`, under `torchobs run`: nothing in the script knows of torchobs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.support import clean_environment
from torchobs.flight import reader
from torchobs.flight.layout import Exit

SCRIPT = """
import sys
import torch
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group

def rank(index, place):
    # a file: a port may be taken by now, and the store behind it ends with the rank that has it, asked for or not
    init_process_group("gloo", init_method=f"file://{place}", rank=index, world_size=2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    destroy_process_group()

def double(x):
    return 2 * x

if __name__ == "__main__":
    method, place = sys.argv[1:]
    with mp.get_context(method).Pool(1) as pool:
        print(pool.map(double, [1]))
    if method == "spawn":
        mp.spawn(rank, (place,), nprocs=2)
    else:
        ranks = [mp.get_context(method).Process(target=rank, args=(index, place)) for index in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        print([each.exitcode for each in ranks])
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_ranks_of_multiprocessing_are_seen_without_their_help(method: str, tmp_path: Path, flight_dir: Path) -> None:
    """Each is a rank of one run, from its process group to its end; neither a pool's worker nor who started them is one."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torchobs", "run", "--no-exporter", "--dir", str(flight_dir), str(script), method]
    place = str(tmp_path / "rendezvous")
    done = fork_server.run([*command, place], env=clean_environment(), capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("[2]\n" if method == "spawn" else "[2]\n[0, 0]\n")
    assert sorted(map(told, flight_dir.glob("*.flight"))) == [(0, 2, 3, Exit.FINISHED), (1, 2, 3, Exit.FINISHED)]
    assert len({run_of(path) for path in flight_dir.glob("*.flight")}) == 1


def told(path: Path) -> tuple[object, ...]:
    """Rank, world size, steps and the reason of the end."""
    file = reader.open_path(str(path))
    view = file.read(final=True)
    steps = {point.series.name: point.value for point in view.points}["torchobs.steps"]
    resource = file.header.resource
    file.close()
    return resource["rank"], resource["world_size"], steps, view.live.exit_reason


def run_of(path: Path) -> object:
    """Its run."""
    file = reader.open_path(str(path))
    file.close()
    return file.header.resource["job_name"], file.header.resource["run_id"]


FAILING = """
import sys
import torch.multiprocessing as mp
import train

if __name__ == "__main__":
    mp.start_processes(train.rank, (sys.argv[2],), nprocs=2, start_method=sys.argv[1])
    raise RuntimeError("behind the training")
"""


def test_a_launcher_that_fails_behind_its_ranks_is_told_of(tmp_path: Path, flight_dir: Path) -> None:
    """They finished in order, all their steps stay theirs; the process that started them did not, and neither did the run."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "launch.py").write_text(FAILING)
    command = [sys.executable, "-m", "torchobs", "run", "--no-exporter", "--dir", str(flight_dir), str(tmp_path / "launch.py")]
    environment = clean_environment()
    done = subprocess.run(
        [*command, "fork", str(tmp_path / "rendezvous")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 1
    told = subprocess.run(
        [sys.executable, "-m", "torchobs", "inspect", str(flight_dir)],
        env=environment, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert told.returncode == 1
    assert "2 ranks" in told.stdout
    assert "Rank 0 finished in order after step 3" in told.stdout
    assert "- The process that started the ranks ended by RuntimeError" in told.stdout
    assert "Trouble. Finished: 2 ranks" in told.stdout
    assert "earlier attempt" not in told.stdout
