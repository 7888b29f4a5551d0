"""Torch allows one profiler in a process: a script that profiles itself, beside each use that torchobs makes of torch's.

Each case is a process of its own: two profilers at once are a segmentation fault, often only when the interpreter exits.
"""

import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.support import clean_environment

TRAINING = """
import threading
import torch
from torch import nn
from torchobs import debug

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def step():
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def names(profiler):
    return {event.name for event in profiler.events() or ()}

def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def last(switch):
    return next(row for row in debug.status().switches if row.name == switch).last
"""
OWN_PROFILER = """
with torch.profiler.profile() as own:
    model(torch.randn(4, 8))
assert "aten::addmm" in names(own)
"""
OWN_SCHEDULE = """
schedule = torch.profiler.schedule(wait=1, warmup=2, active=2, repeat=2)
traces = []
with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda own: traces.append(names(own))) as own:
    for _ in range(11):
        step()
        own.step()
assert len(traces) == 2, len(traces)
assert all("aten::addmm" in trace for trace in traces)
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are written below the working directory."""
    monkeypatch.chdir(tmp_path)


def ends_well(code: str) -> None:
    """Run a script to the interpreter's own end, where torch crashes if a profiler is left."""
    command = [sys.executable, "-c", TRAINING + code + "\nprint('ok')"]
    environ = {**clean_environment(), "TORCHOBS_DIR": str(Path.cwd()), "TORCHOBS_EXPORTER": "false"}
    done = fork_server.run(command, capture_output=True, text=True, timeout=300, env=environ, finalized=True, cwd=Path.cwd())
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stderr[-3000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("preset", ["full", "autograd_profiler"])
@pytest.mark.parametrize("own", [OWN_PROFILER, OWN_SCHEDULE], ids=["one", "schedule"])
def test_a_script_profiles_itself_under_switches(preset: str, own: str) -> None:
    """Its profiler sees what it would see without ours, and the interpreter exits with 0, with the switches on or off."""
    ends_well(f"debug.enable({preset!r}, profile_every=2)\n{own}\nfor _ in range(3): step()\ndebug.disable()\n")


def test_both_profile_again_and_again() -> None:
    """Ours and the script's alternate, and neither is left when the interpreter exits with the switches on."""
    ends_well("""
debug.enable("full", profile_every=1)
for number in range(1, 14):
    if number % 3:
        step()
        continue
    with torch.profiler.profile() as own:
        step()
    assert "aten::mse_loss" not in names(own) and "aten::addmm" in names(own)
assert last("autograd_profiler"), "it never looked"
""")


@pytest.mark.parametrize("where", ["same", "other"])
def test_no_profile_beside_one_that_warms_up(where: str) -> None:
    """A profiler of the script's that is only prepared is seen too, though it began before torchobs was used."""
    ends_well(f"""
own = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1))
own.start()
def ours():
    try:
        with debug.profiling_context("ours"):
            raise AssertionError("it began")
    except RuntimeError as error:
        assert "the program's own" in str(error), error
{"ours()" if where == "same" else "in_thread(ours)"}
debug.enable("performance_profiling", profile_every=1)
step()
own.step()
step()
own.stop()
assert "aten::addmm" in names(own)
step(), step()
assert "top operator" in last("autograd_profiler"), last("autograd_profiler")
""")


def test_threads_that_train_under_switches() -> None:
    """Where several threads train no step is profiled, which the switch says: another thread's step would crash it."""
    ends_well("""
def train():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(20):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
debug.enable("full", profile_every=1)
threads = [threading.Thread(target=train) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for _ in range(3): step()
assert "steps come from several threads" in last("autograd_profiler"), last("autograd_profiler")
assert not [row.error for row in debug.status().switches if row.error]
""")


@pytest.mark.parametrize("ours", ["profile", "profiling_context", "emit_itt"])
def test_the_script_s_profiler_within_ours(ours: str) -> None:
    """Ours ends, with nothing kept, and says why; annotations for another tool use torch's one profiler, too."""
    own = OWN_PROFILER.replace("\n", "\n    ")
    block = {
        "profile": f"def take():{own}\nresult = debug.profile(take, wait=0, warmup=0, active=2)",
        "profiling_context": f"with debug.profiling_context('ours') as result:{own}",
        "emit_itt": "with debug.profiling_context('ours') as result, torch.autograd.profiler.emit_itt(): step()",
    }[ours]
    ends_well(f"{block}\nassert result.steps is None and 'own profiler began' in result.anomalies[0], result\n")


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "threading.Thread(target=raise_soon).start()"])
def test_a_profile_in_progress_at_the_exit(end: str) -> None:
    """A thread that still profiles with ours when the interpreter exits does not crash it."""
    ends_well(f"""
begun = threading.Event()
def forever():
    with debug.profiling_context("forever"):
        begun.set()
        threading.Event().wait()
def raise_soon():
    step()
threading.Thread(target=forever, daemon=True).start()
begun.wait()
print('ok', flush=True)
{end}
""")
