"""`deploy/systemd`: units that systemd understands, and that have no more rights than an exporter needs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import NEEDS_PROGRAM

EXPOSURE = 20
"""Of 100, as `systemd-analyze security` counts: "OK" ends at 40; a unit without any directive has 96."""


@pytest.fixture
def unit(checkout: Path, tmp_path: Path) -> Path:
    """The system's unit for this user, with this environment's program: one that is not there is an error of the unit."""
    if not shutil.which("systemd-analyze"):
        pytest.skip(f"{NEEDS_PROGRAM}: systemd-analyze, on PATH")
    return installed(checkout / "deploy/systemd/torchobs-exporter@.service", tmp_path / "torchobs-exporter@root.service")


def installed(shipped: Path, path: Path) -> Path:
    """Write the unit with this environment's program in place of its own."""
    (command,) = (line for line in shipped.read_text().splitlines() if line.startswith("ExecStart="))
    program = command.removeprefix("ExecStart=").split()[0]
    assert program.endswith("/bin/torchobs")
    path.write_text(shipped.read_text().replace(program, f"{Path(sys.executable).parent}/torchobs"))
    return path


def analyze(*arguments: str | Path, **environ: str) -> tuple[int, str]:
    """Run systemd-analyze: its status, and what it has said."""
    argv = ["systemd-analyze", *arguments]
    done = subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_systemd_understands_the_units(unit: Path, checkout: Path, tmp_path: Path) -> None:
    """No directive is misspelt, in the system's unit and in the user's."""
    assert analyze("verify", unit) == (0, "")
    user = installed(checkout / "deploy/systemd/user/torchobs-exporter.service", tmp_path / "torchobs-exporter.service")
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    assert analyze("--user", "verify", user, XDG_RUNTIME_DIR=str(runtime)) == (0, "")
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHouse="))
    assert "'ProtectHouse'" in analyze("verify", unit)[1]


def test_the_unit_is_hardened(unit: Path) -> None:
    """What is left is to open files and to listen; without its sandbox the same unit is told to be exposed."""
    threshold = f"--threshold={EXPOSURE}"
    assert analyze("security", "--offline=true", threshold, unit)[0] == 0
    kept = [
        line for line in unit.read_text().splitlines() if not line.startswith(("Protect", "Private", "SystemCall", "Capab"))
    ]
    unit.write_text("\n".join(kept))
    assert analyze("security", "--offline=true", threshold, unit)[0] != 0


def test_both_sides_look_into_the_same_directory(checkout: Path) -> None:
    """What the profile tells a user's trainings is what the unit tells that user's exporter, which makes it."""
    unit = (checkout / "deploy/systemd/torchobs-exporter@.service").read_text()
    assert "Environment=TORCHOBS_DIR=/run/torchobs/%i\n" in unit
    assert "RuntimeDirectory=torchobs/%i\n" in unit
    profile = checkout / "deploy/systemd/torchobs.sh"
    said: list[str | Path] = ["sh", "-c", '[ -d /run ] && . "$0" && echo "${TORCHOBS_DIR:-none}"', profile]
    assert subprocess.run(said, env={"USER": "nobody-here"}, capture_output=True, text=True, check=True).stdout == "none\n"
    assert 'TORCHOBS_DIR="/run/torchobs/$USER"' in profile.read_text()
