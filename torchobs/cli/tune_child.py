"""The process in which ``torchobs tune`` runs a script: ``python -m torchobs.cli.tune_child SPEC script.py …``."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from torchobs.cli import run_program
from torchobs.cli.run import split_program


def main(given: list[str]) -> None:
    """Run the script until it took its turns, and end the process there: nothing of what comes after is done."""
    spec = json.loads(given[0])
    program = split_program(given[1:])
    run_program.enter(program)
    from torchobs.tune import from_outside  # torch comes with it, as the script would import it

    if spec["workers"]:
        from_outside.give_loaders_workers(spec["workers"])
    trial = from_outside.ScriptTrial(spec["modes"], spec["rounds"], spec["warmup"], lambda: _end(trial, spec["result"]))
    trial.start()
    try:
        run_program.execute(program)
    finally:
        _write(trial, spec["result"])


def _end(trial: Any, path: str) -> None:
    _write(trial, path)
    for process in multiprocessing.active_children():  # workers of DataLoaders
        process.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _write(trial: Any, path: str) -> None:
    Path(path).write_text(json.dumps(trial.result()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
