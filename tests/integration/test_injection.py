"""A real training in an environment without torchobs, given the volume that an init container fills."""

import subprocess
import sys
from pathlib import Path

import torch

from tests import support
from torchobs.flight.reader import reader
from torchobs.injection.copy_site import copy_site

STEPS = 7


def test_a_training_that_does_not_know_torchobs_is_recorded(tmp_path: Path) -> None:
    """Every step, from the first, with the settings of the environment; its output is what it is without."""
    site, image, flights = tmp_path / "site", tmp_path / "image", tmp_path / "flights"
    for made in (site, image, flights):
        made.mkdir(mode=0o700)
    copy_site(site)
    for path in Path(torch.__file__).parent.parent.iterdir():  # everything installed here but torchobs
        if "torchobs" not in path.name and path.suffix != ".pth":
            (image / path.name).symlink_to(path)
    environ = {"PYTHONPATH": f"{site / 'start'}:{image}", "TORCHOBS_DIR": str(flights), "OMP_NUM_THREADS": "1"}
    python = str(getattr(sys, "_base_executable", sys.executable))  # not the environment's, which has torchobs installed
    command = [python, str(support.ROOT / "tests" / "scripts" / "plain_training.py"), str(STEPS)]
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.split(), done.stderr) == ([str(step) for step in range(1, STEPS + 1)], "")
    (path,) = flights.glob("*.flight")
    file = reader.open_path(str(path))
    values = {point.series.name: point.value for point in file.read(final=True).points}
    file.close()
    assert values["torchobs.steps"] == STEPS
