"""Self-test: records five training steps in a separate process and temporary directory, and checks what was recorded."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchobs import catalog
from torchobs.cli.doctor_checks import FAIL, OK, WARN, Check
from torchobs.config import settings
from torchobs.diagnosis import load, text_format
from torchobs.diagnosis.rank_report import RankReport

_STEPS = 5
_LIMIT_S = 120
_TRAINING = f"""
import torch, torchobs
torchobs.init(grad_interval=1, exporter=False)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({_STEPS}):
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def places(flight_dir: str | None) -> tuple[str | None, ...]:
    """Return possible parents of the test directory: the temporary one, and others for pods without a writable one."""
    beside = (str(Path(flight_dir).parent),) if flight_dir else ()
    return (None, *beside, "/dev/shm")  # noqa: S108  # a private directory is created below it


def selftest(where: Sequence[str | None]) -> Iterator[Check]:
    """Check that a training is recorded, and which probes are off and why; ``where``: :func:`places`."""
    made = _home(where)
    if made is None:
        yield Check("probes", WARN, "no place for a trial: no temporary directory can be made", "set TMPDIR to one of your own")
        return
    with made as home:
        environ = {**settings.environment(), "TORCHOBS_DIR": home, "TORCHOBS_CONTROL_DIR": home, "TORCHOBS_ENABLED": "1"}
        try:
            argv = [sys.executable, "-c", _TRAINING]
            ran = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            yield Check("probes", FAIL, f"five steps took more than {_LIMIT_S} s", "is the machine overloaded? try again")
            return
        yield from evaluate(_report(Path(home)), ran.returncode, ran.stderr)


def _home(where: Sequence[str | None]) -> tempfile.TemporaryDirectory[str] | None:
    for directory in where:
        with contextlib.suppress(OSError):
            return tempfile.TemporaryDirectory(prefix="torchobs-doctor-", dir=directory)
    return None


def evaluate(report: RankReport | None, status: int, stderr: str) -> Iterator[Check]:
    """Yield the results of the test; ``stderr``: its output on standard error."""
    lines = [text_format.clean(line) for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    if status:
        text = f"a training of five steps ended with status {status}: {last}"
        yield Check("probes", FAIL, text, "does `python -c 'import torch'` work?")
        return
    if report is None:
        yield Check("probes", FAIL, f"a training of five steps left no flight file: {last}", "see the checks above")
        return
    off = {name: _reason(report, name) for name, value in report.by_attribute(catalog.PROBE_DISABLED).items() if value}
    known = sorted(report.by_attribute(catalog.PROBE_DISABLED))
    at_work = [name for name in known if name not in off]
    seen = report.value(catalog.STEPS) == _STEPS and report.value(catalog.LOSS) is not None
    text = f"a training of five steps was recorded; at work: {', '.join(at_work)}"
    yield Check("probes", OK if seen else WARN, text, "" if seen else f"only {len(report.steps)} steps were seen")
    for name, why in off.items():
        yield Check("probes", WARN, f"{name} is off: {why}", "another version of torch? the log has the line")
    for name in settings.PROBES:
        if name not in known:
            yield Check("probes", OK, f"{name} is not installed (TORCHOBS_DISABLE_PROBES, or TORCHOBS_LEVEL)")


def _reason(report: RankReport, probe: str) -> str:
    for fact in report.events_named(catalog.EVENT_PROBE_DISABLED):
        if fact.text("probe") == probe:
            return f"{fact.text('exception.type')} at {fact.text('location')}"
    return "unknown"


def _report(home: Path) -> RankReport | None:
    with contextlib.suppress(OSError):
        reports, _ = load.load_reports([item.path for item in load.listing(home).found])
        return reports[0] if reports else None
    return None
