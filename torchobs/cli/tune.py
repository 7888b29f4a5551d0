"""``torchobs tune``: what would make a training script faster, tried on the script itself for some steps."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from torchobs.cli import arguments, run
from torchobs.cli.run_program import NoSuchProgramError
from torchobs.cli.table import Column, bullets, table
from torchobs.cli.terminal_style import TerminalStyle, style_for, tolerant
from torchobs.config import settings
from torchobs.diagnosis import text_format
from torchobs.tune.intervals import CONFIDENCE, Interval, least_values, median_interval
from torchobs.tune.measurements import Benchmark, LeftOut, ModeResult, recommend
from torchobs.tune.rounds import orders

_DESCRIPTION = """\
Run a training script for some steps, switch one technique after another on and off between its steps, and print what each of
them gained, with intervals of confidence. The script's files are not changed; what the script itself writes, it writes, and it
ends in the middle of its training: what comes after is not done.

A step is all that happens from one step of the first optimizer to the next, data loading included. Techniques change the model
whose training forward pass is called first. Outputs are not compared with float32: that needs torchobs.tune.benchmark() in the
script. So do larger batches, recomputed activations, fused optimizers and whatever else a script must be changed for."""

_EXAMPLES = """\
examples:
  torchobs tune train.py --lr 3e-4             instead of: python train.py --lr 3e-4
  torchobs tune --modes autocast,compile train.py
  torchobs tune --loader 4 train.py            also with 4 workers for each DataLoader that has none
  torchobs tune --json -m package.train | jq .recommended

The script's own output goes to stderr. Exit status: 1 if the script failed, or took too few steps."""

MODES = ("autocast", "tf32", "cudnn_benchmark", "channels_last", "threads", "compile")
AS_IT_IS = "as it is"
_WAITS = 0.05
"""Share of a step above which waiting for data is worth workers"""


def parser() -> arguments.Parser:
    """Return the parser for the options before the script."""
    usage = "torchobs tune [options] script.py [arguments …]\n       torchobs tune [options] -m module [arguments …]"
    made = arguments.parser("tune", usage, _DESCRIPTION, _EXAMPLES)
    made.add_argument("--modes", default=",".join(MODES), metavar="NAME,…", help="Techniques to try. [default: all]")
    made.add_argument("--rounds", type=int, default=15, metavar="N", help="Timed steps of each. [default: 15]")
    made.add_argument("--warmup", type=int, default=3, metavar="N", help="Steps of each before them. [default: 3]")
    made.add_argument("--loader", type=int, default=0, metavar="N", help="Try N workers per DataLoader: runs it 12 times more.")
    made.add_argument("--json", action="store_true", help="Print JSON for programs.")
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs tune`` with these arguments and return its exit status."""
    options, command = _parse(list(given))
    if settings.environment().get("WORLD_SIZE", "1") != "1":
        raise arguments.CommandError("several ranks would take turns each for itself: run it with one, without torchrun")
    modes = options.modes.split(",")
    found = _run(command, modes=modes, rounds=options.rounds, warmup=options.warmup)
    result = _benchmark(found, options.rounds)
    hints = _hints(found, asked=bool(options.loader))
    if options.loader:
        hints.append(_loader(command, options.loader, options.rounds))
    out = tolerant(sys.stdout)
    if options.json:
        out.write(json.dumps({**result.to_dict(), "hints": hints}, indent=2) + "\n")
    else:
        out.write("".join(f"{line}\n" for line in lines(result, hints, style_for(out))))
    return 0


def lines(result: Benchmark, hints: Sequence[str], style: TerminalStyle) -> list[str]:
    """Return the table, what was left out, and the hints."""
    rows = [
        [
            each.mode,
            f"{1e3 * each.step_s.median:.4g} ms",
            _factor(each.speedup_factor),
            _verdict(each),
            f"{each.first_step_s:.3g} s",
        ]
        for each in result.modes
    ]
    factor, verdict = Column("times as fast"), Column("which is", right=False)
    columns = [Column("mode", right=False), Column("step"), factor, verdict, Column("first step", dispensable=1)]
    left_out = [f"{each.mode} was not tried: {each.reason}" for each in result.left_out]
    recommended = f"recommended: {result.recommended} ({result.reason})"
    return [*table(columns, rows, style.width), *bullets([*left_out, *hints, recommended], style.width)]


def _factor(interval: Interval) -> str:
    return f"{interval.median:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


def _verdict(mode: ModeResult) -> str:
    if mode.mode == AS_IT_IS:
        return ""
    return "noise" if mode.is_noise else "faster" if mode.speedup_factor.low > 1 else "slower"


def _parse(given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    made = parser()
    valued = ("--modes", "--rounds", "--warmup", "--loader")
    own, command = run.split(given, valued)
    options = made.parse_args(own)
    if not command or command == ["-m"]:
        made.error("a script or `-m module` is missing")
    unknown = [mode for mode in options.modes.split(",") if mode not in MODES]
    if unknown:
        made.error(f"unknown mode {unknown[0]!r}: use some of {', '.join(MODES)}")
    least = _least(options.modes.count(",") + 2)
    if options.rounds < least:
        made.error(f"so many modes need at least {least} rounds, not {options.rounds}")
    if options.warmup < 0 or options.loader < 0:
        made.error("--warmup and --loader are at least 0")
    try:
        run.split_program(command)
    except NoSuchProgramError as problem:
        made.exit(2, f"torchobs tune: {problem}\n")
    return options, command


def _least(modes: int) -> int:
    return least_values(1 - (1 - CONFIDENCE) / max(1, modes - 1))


def _run(command: list[str], *, modes: list[str], rounds: int, warmup: int, workers: int = 0) -> dict[str, Any]:
    """Run the script in a process of its own; return what ``ScriptTrial.result`` says. Raises ``CommandError`` if it failed."""
    with tempfile.TemporaryDirectory(prefix="torchobs-tune-") as folder:
        path = Path(folder, "result.json")
        spec = {"modes": modes, "rounds": rounds, "warmup": warmup, "workers": workers, "result": str(path)}
        argv = [sys.executable, "-m", "torchobs.cli.tune_child", json.dumps(spec), *command]
        environ = {**settings.environment(), "TORCHOBS_ENABLED": "false"}  # its own recording would be measured, too
        status = subprocess.run(argv, check=False, stdout=sys.stderr.fileno(), env=environ).returncode
        nothing: dict[str, Any] = {"steps": 0, "times": {}, "first": {}}
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else nothing
    counts = [len(taken) for taken in found["times"].values()]
    if not counts or min(counts) < _least(len(counts)) or len(found["times"]) != len(found["first"]):
        ended = f"failed with status {status}" if status else "ended"
        what = f"the script {ended} after {text_format.plural(found['steps'], 'training step')}"
        remedy = "let it take more of them, or try fewer --modes, --rounds, --warmup"
        if not found["steps"]:
            remedy = "a step is one of a torch.optim optimizer after a model in training mode, in the script's own process"
        raise arguments.CommandError(f"{what}, too few to compare: {remedy}")
    return found


def _benchmark(found: dict[str, Any], rounds: int) -> Benchmark:
    times: dict[str, list[float]] = found["times"]
    count = min(map(len, times.values()))
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(times) - 1)
    base = times[AS_IT_IS]
    modes = [
        ModeResult(
            mode=mode,
            used=() if mode == AS_IT_IS or mode in found["skipped"] else (mode,),
            step_s=median_interval(taken[:count]),
            speedup_factor=median_interval([a / b for a, b in zip(base, taken[:count], strict=False)], confidence),
            first_step_s=found["first"][mode],
            peak_bytes=None,
            memory_savings=None,
            difference=None,
            accepted=True,
        )
        for mode, taken in times.items()
    ]
    left_out = tuple(LeftOut(mode, reason) for mode, reason in found["skipped"].items())
    kept = [mode for mode in modes if mode.mode == AS_IT_IS or mode.mode not in found["skipped"]]
    return Benchmark(found["device"], min(count, rounds), *recommend(kept), tuple(kept), left_out)


def _hints(found: dict[str, Any], *, asked: bool) -> list[str]:
    if not found["loader"]:
        return ["its data comes from no DataLoader that could be given workers"]
    share, workers = median(found["waits"]), found["loader"]["workers"]
    text = f"{100 * share:.1f} % of a step waits for the DataLoader, which has {text_format.plural(workers, 'worker')}"
    if share < _WAITS:
        return [f"{text}: more would gain no more than that"]
    return [text if asked else f"{text}: try --loader {max(2, 2 * workers)}"]


def _loader(command: list[str], workers: int, rounds: int) -> str:
    """Return what workers gain: medians of processes of their own, in turn, for a script's loaders cannot change at work."""
    ratios = []
    for order in islice(orders(2), least_values()):
        took = {}
        for changed in order:
            found = _run(command, modes=[], rounds=rounds, warmup=1, workers=workers * changed)
            took[changed] = median(found["times"][AS_IT_IS])
        ratios.append(took[0] / took[1])
    factor = median_interval(ratios)
    verdict = "noise" if factor.low <= 1 <= factor.high else "faster" if factor.low > 1 else "slower"
    changed_to = f"with {text_format.plural(workers, 'worker')} for each DataLoader that has none"
    return f"{changed_to}: {_factor(factor)} times as fast, {verdict}"
