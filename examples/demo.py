"""Train a small GPT on two ranks and watch it live: `make demo`, or `python -m examples.demo`.

Runs `examples/char_gpt.py` under torchrun and `torchobs run`, with a throw-away Prometheus if one is on PATH, and shows
the ranks once a second. Late in the run the learning rate is multiplied by a thousand, so that there is something to
catch. Ends by itself within two minutes; Ctrl-C ends everything at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from examples._demo.job import Job
from examples._demo.prometheus import HOW_TO_INSTALL, Prometheus
from examples._demo.table import Screen, anomalies_text, total_anomalies
from examples._demo.watcher import Watcher
from torchobs import catalog

RANKS = 2
TIME_LIMIT_S = 105.0  # two minutes, less what ending takes
EXPORTER_LIMIT_S = 60.0  # importing torch twice on a slow disk
LAST_LINES = 60  # of a failed job: torchrun's own traceback has half of them
LAST_LOOKS = 4  # seconds after the end: Prometheus scrapes and evaluates its rules once a second
HEALTHY_SHARE = 0.6  # of the steps, then the learning rate is blown up: early enough to see it on a slow machine, too


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; None reads `sys.argv`."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.demo", description=__doc__, formatter_class=style)
    parser.add_argument("--steps", type=int, default=500, help="training steps [%(default)s]")
    parser.add_argument("--hold", action="store_true", help="at the end leave Prometheus up until Ctrl-C")
    parser.add_argument("--no-prometheus", action="store_true", help="do without, even if it is installed")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return 0 if the training went well, 1 if not, 130 after Ctrl-C."""
    options = parse_options(arguments)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: sys.exit(128 + number))  # so that `with` ends what it started
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(private_directory()))
        try:
            return demonstrate(options, home, stack, Screen(sys.stdout))
        except KeyboardInterrupt:
            print("\nInterrupted: ending everything.", flush=True)
            return 130
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the cleaning up


def demonstrate(options: argparse.Namespace, home: Path, stack: contextlib.ExitStack, screen: Screen) -> int:
    """Start everything, watch it to its end and say what was seen; what was started ends with the stack."""
    deadline = time.monotonic() + TIME_LIMIT_S
    blow_up_at = max(1, int(options.steps * HEALTHY_SHARE))
    job = Job(home, RANKS, ["--steps", str(options.steps), "--blow-up-at", str(blow_up_at), "--sample", "0"])
    screen.say(f"$ {job}\n\nThe ranks import torch; this takes some seconds.")
    stack.enter_context(job)
    address = wait_for_exporter(job)
    if not address:
        return fail(screen, job, "No exporter announced itself.")
    prometheus = None if options.no_prometheus else start_prometheus(screen, home, address, stack)
    screen.say(where_to_look(address, prometheus))
    screen.say(f"At step {blow_up_at} the learning rate is multiplied by 1000, on purpose: watch loss, norm and alerts.")

    watcher = Watcher(address, prometheus)
    watch(job, watcher, screen, deadline)
    if job.exit_code is None:
        screen.say(f"Time is up after {TIME_LIMIT_S:.0f} s; this machine needs longer for {options.steps} steps.")
    report(screen, watcher, prometheus)
    if job.exit_code:
        return fail(screen, job, f"The training failed with exit code {job.exit_code}.")
    if not any(row.steps for row in watcher.rows):
        return fail(screen, job, "torchobs saw no training step.")
    if options.hold and prometheus:
        hold(screen, prometheus)
    return 0


def private_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a directory that is gone after the demo, in memory if possible: a flight file is best kept there."""
    shm = "/dev/shm"  # noqa: S108 - the name in it is random, and nobody else may enter
    return tempfile.TemporaryDirectory(
        prefix="torchobs-demo-", dir=shm if os.access(shm, os.W_OK) else None, ignore_cleanup_errors=True
    )


def wait_for_exporter(job: Job) -> str:
    """Return the exporter's address as soon as it is announced; empty if the job ends or takes too long before."""
    deadline = time.monotonic() + EXPORTER_LIMIT_S
    while not (address := job.exporter_address()) and job.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return address


def start_prometheus(screen: Screen, home: Path, address: str, stack: contextlib.ExitStack) -> Prometheus | None:
    """Start one if there is one, else say what is missing."""
    program = shutil.which("prometheus")
    if not program:
        screen.say(f"No `prometheus` on PATH, so nothing evaluates the alert rules. To have it:\n{HOW_TO_INSTALL}")
        return None
    return stack.enter_context(Prometheus(program, home, address))


def where_to_look(address: str, prometheus: Prometheus | None) -> str:
    """Return the addresses to open in a browser."""
    lines = [f"  metrics     http://{address}/metrics"]
    if prometheus:
        loss, norm, phases = catalog.LOSS, catalog.GRAD_NORM, catalog.STEP_PHASE_TIME
        graph = prometheus.graph(loss.prometheus, norm.prometheus, f"rate({phases.prometheus}[5s])")
        lines += [f"  alerts      {prometheus.url}/alerts", f"  graphs      {graph}"]
    return "\n".join(["", "Look here:", *lines, ""])


def watch(job: Job, watcher: Watcher, screen: Screen, deadline: float) -> None:
    """Look once a second until the job ends, and a little longer: Prometheus is to see the end, too."""
    looks_left = LAST_LOOKS
    while looks_left and time.monotonic() < deadline:
        looks_left -= job.exit_code is not None
        watcher.look()
        screen.show(watcher.rows, watcher.alerts, job.output)
        time.sleep(1.0)


def report(screen: Screen, watcher: Watcher, prometheus: Prometheus | None) -> None:
    """Say what was seen."""
    screen.say("\nWhat torchobs saw:")
    for row in watcher.rows:
        screen.say(f"  rank {row.rank}: {row.state} after {row.steps} steps, last loss {row.loss:.3f}")
    screen.say(f"  anomalies: {anomalies_text(total_anomalies(watcher.rows))}")
    for (name, state), seconds in watcher.first_seen.items():
        screen.say(f"  alert {name}: {state} after {seconds:.0f} s")
    if prometheus and not prometheus.is_running:
        screen.say(f"  Prometheus ended before its time: {prometheus.last_words}")
    elif prometheus and not watcher.first_seen:
        screen.say("  no alert")


def fail(screen: Screen, job: Job, reason: str) -> int:
    """Say why, with what the ranks and the exporter said last."""
    screen.say(f"\n{reason}")
    for origin, lines in (("exporter", job.exporter_log[-LAST_LINES:]), ("job", job.output[-LAST_LINES:])):
        screen.say("\n".join([f"--- the {origin}'s last lines:", *lines]))
    return 1


def hold(screen: Screen, prometheus: Prometheus) -> None:
    """Keep Prometheus up until Ctrl-C."""
    screen.say(f"\nPrometheus stays up at {prometheus.url} until Ctrl-C.")
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
