"""Identity under a real torchrun: two ranks, one restart, with and without a name for the run."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from tests import fork_server, support

# Rank 1 fails once, when both have reported, so that torchrun restarts them. Neither imports torch: what torchrun sets is
# all that is asked here.
RANK = """
import json, pathlib, sys, time
from torchobs.config import settings
from torchobs.identity import identity, process
environ = settings.environment()
found, problems = identity.discover(environ, settings.resolve({}, environ)[0], process.this_process())
folder = pathlib.Path(sys.argv[1])
partial = folder / f"{found.restart}-{found.rank}.partial"
partial.write_text(json.dumps({**found.described(), "problems": [str(problem) for problem in problems]}))
partial.rename(partial.with_suffix(".json"))
while not (folder / f"{found.restart}-{1 - found.rank}.json").exists():
    time.sleep(0.01)
sys.exit(found.rank == 1 and found.restart == 0)
"""
# A shell that stays is what a wrapper script with a last line of its own is: the rank's parent is not torchrun.
SHELL = ("--no-python", "sh", "-c", f'{shlex.quote(sys.executable)} "$0" "$@"; exit $?')


def _launch(folder: Path, *options: str) -> list[dict[str, Any]]:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    fork_server.run(
        [*torchrun, "--monitor-interval=0.05", *options, str(script), str(folder)],
        env=support.clean_environment() | {"PYTHONPATH": str(support.ROOT)},
        check=True,
        capture_output=True,
        timeout=60,
    )
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_a_run_that_nobody_named_is_one_run_on_every_rank_and_after_a_restart(tmp_path: Path) -> None:
    """Without talking, two ranks and their successors agree on an id; the next launch, on the same port, has another."""
    port = f"--master-port={support.free_port()}"
    launches = _launch(tmp_path / "direct", port), _launch(tmp_path / "through a shell", port, *SHELL)
    for reports in launches:
        places = [(r["restart"], r["rank"], r["local_rank"], r["world_size"], r["local_world_size"]) for r in reports]
        assert places == [(0, 0, 0, 2, 2), (0, 1, 1, 2, 2), (1, 0, 0, 2, 2), (1, 1, 1, 2, 2)]
        assert {(r["launcher"], r["job_name"], *r["problems"]) for r in reports} == {("torchrun", "train")}
        assert len({report["run_id"] for report in reports}) == 1
    assert launches[0][0]["run_id"] != launches[1][0]["run_id"]
