"""The compiled part under AddressSanitizer and UndefinedBehaviorSanitizer, called with anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import NEEDS_COMPILER, ROOT

FLAGS = [
    "-std=c11",
    "-O1",
    "-g",
    "-fPIC",
    "-shared",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-Wall",
    "-Werror",
]
CALLS = 200_000


@pytest.mark.long
def test_no_call_with_anything_reads_or_writes_beyond(tmp_path: Path, share_of: Callable[[int], int]) -> None:
    """200,000 calls of the writer, two in five of which write a record, and 20,000 of hooks leave what Python's leave."""
    include = Path(sysconfig.get_paths()["include"])
    compiler = shutil.which("gcc")
    if compiler is None or not (include / "Python.h").exists():
        pytest.skip(NEEDS_COMPILER)
    module = tmp_path / "_native.abi3.so"
    command = [compiler, *FLAGS, f"-I{include}", *map(str, ROOT.glob("torchobs/_native*.c")), "-o", str(module), "-lm"]
    subprocess.run(command, check=True, timeout=120)
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    environment = {
        **os.environ, "LD_PRELOAD": runtime, "PYTHONMALLOC": "malloc", "PYTHONPATH": str(ROOT),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
    }  # fmt: skip
    script = [sys.executable, "-m", "tests.scripts.fuzz_native", str(module), str(share_of(CALLS)), "7"]
    done = subprocess.run(script, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=550)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "records" in done.stdout
