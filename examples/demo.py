"""Train a small GPT on two ranks and watch it live: `make demo`, or `python -m examples.demo`.

Starts an exporter, says where its live page is, and runs `examples/char_gpt.py` under torchrun and `torchobs run`, beside a
throw-away Prometheus with the shipped rules if that is on PATH. Late in the run the learning rate is multiplied by a
thousand, so that there is something to catch. On a terminal the page stays open until Ctrl-C; elsewhere all ends within
two minutes. Options that are not the demo's are given to the training script: `--layers 2 --width 64` for a smaller model.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from examples._demo.exporter import Exporter
from examples._demo.job import Job
from examples._demo.prometheus import HOW_TO_INSTALL, Prometheus
from examples._demo.table import Screen, anomalies_text, total_anomalies
from examples._demo.watcher import Watcher
from torchobs import catalog

RANKS = 2
TIME_LIMIT_S = 105.0  # two minutes, less what ending takes
EXPORTER_LIMIT_S = 60.0  # it listens within a second; on a slow disk its imports take longer
LAST_LINES = 60  # of a failed job: torchrun's own traceback has half of them
FINAL_POLLS = 4  # seconds after the end: Prometheus scrapes and evaluates its rules once a second
HEALTHY_SHARE = 0.6  # of the steps, then the learning rate is blown up: early enough to see it on a slow machine, too


def parse_options(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line, and return what is the training script's; None reads `sys.argv`."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.demo", description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=500, help="training steps [%(default)s]")
    parser.add_argument(
        "--hold",
        action=argparse.BooleanOptionalAction,
        default=is_attended(),
        help="keep the page open after the end, until Ctrl-C [on a terminal, but not in CI]",
    )
    parser.add_argument("--no-prometheus", action="store_true", help="do without, even if it is installed")
    return parser.parse_known_args(arguments)


def is_attended() -> bool:
    """Return True if a person is there to press Ctrl-C."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return 0 if the training went well, 1 if not, 130 after Ctrl-C before its end."""
    options, more = parse_options(arguments)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: sys.exit(128 + number))  # so that `with` ends what it started
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(private_directory()))
        try:
            return demonstrate(options, more, home, stack, Screen(sys.stdout))
        except KeyboardInterrupt:
            print("\nInterrupted: ending everything.", flush=True)
            return 130
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the cleaning up


def demonstrate(options: argparse.Namespace, more: list[str], home: Path, stack: contextlib.ExitStack, screen: Screen) -> int:
    """Start everything, watch it to its end and report what was seen; what was started ends with the stack."""
    deadline = math.inf if options.hold else time.monotonic() + TIME_LIMIT_S
    blow_up_at = max(1, int(options.steps * HEALTHY_SHARE))
    flight_dir = home / "flight"
    flight_dir.mkdir(mode=0o700)
    exporter = stack.enter_context(Exporter(home, flight_dir))
    given = ["--steps", str(options.steps), "--blow-up-at", str(blow_up_at), "--sample", "0", *more]
    job = Job(home, flight_dir, RANKS, given)
    address = wait_for_address(exporter)
    if not address:
        return fail(screen, exporter, job, "The exporter does not listen.")
    screen.print(f"Live page: http://{address}/")
    prometheus = None if options.no_prometheus else start_prometheus(screen, home, address, stack)
    screen.print(other_addresses(address, prometheus))
    screen.print(f"$ {job}\n\nThe ranks import torch; this takes some seconds.")
    screen.print(f"At step {blow_up_at} the learning rate is multiplied by 1000, on purpose: watch loss, norm and alerts.")
    stack.enter_context(job)

    watcher = Watcher(address, prometheus)
    watch(job, watcher, screen, deadline)
    if job.exit_code is None:
        screen.print(f"Time is up after {TIME_LIMIT_S:.0f} s; this machine needs longer for {options.steps} steps.")
    report(screen, watcher, prometheus)
    if job.exit_code:
        return fail(screen, exporter, job, f"The training failed with exit code {job.exit_code}.")
    if not any(row.steps for row in watcher.rows):
        return fail(screen, exporter, job, "torchobs saw no training step.")
    if options.hold:
        hold(screen, address)
    return 0


def private_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a directory that is gone after the demo, in memory if possible: a flight file is best kept there."""
    shm = "/dev/shm"  # noqa: S108 - the name in it is random, and nobody else may enter
    return tempfile.TemporaryDirectory(
        prefix="torchobs-demo-", dir=shm if os.access(shm, os.W_OK) else None, ignore_cleanup_errors=True
    )


def wait_for_address(exporter: Exporter) -> str:
    """Return the exporter's address as soon as it listens; empty if it ends or takes too long before."""
    deadline = time.monotonic() + EXPORTER_LIMIT_S
    while not (address := exporter.address) and exporter.is_running and time.monotonic() < deadline:
        time.sleep(0.05)
    return address


def start_prometheus(screen: Screen, home: Path, address: str, stack: contextlib.ExitStack) -> Prometheus | None:
    """Start Prometheus if it is on PATH, else print how to install it."""
    program = shutil.which("prometheus")
    if not program:
        screen.print(f"No `prometheus` on PATH, so nothing evaluates the alert rules. To have it:\n{HOW_TO_INSTALL}")
        return None
    return stack.enter_context(Prometheus(program, home, address))


def other_addresses(address: str, prometheus: Prometheus | None) -> str:
    """Return what else can be opened in a browser."""
    lines = [f"  metrics: http://{address}/metrics"]
    if prometheus:
        loss, norm, phases = catalog.LOSS, catalog.GRAD_NORM, catalog.STEP_PHASE_TIME
        graphs = prometheus.graph(loss.prometheus, norm.prometheus, f"rate({phases.prometheus}[5s])")
        lines += [f"  alerts:  {prometheus.url}/alerts", f"  graphs:  {graphs}"]
    return "\n".join([*lines, ""])


def watch(job: Job, watcher: Watcher, screen: Screen, deadline: float) -> None:
    """Poll once a second until the job ends, and a little longer, so that Prometheus scrapes the end, too."""
    polls_left = FINAL_POLLS
    while polls_left and time.monotonic() < deadline:
        polls_left -= job.exit_code is not None
        watcher.poll()
        screen.show(watcher.rows, watcher.alerts, job.output)
        time.sleep(1.0)


def report(screen: Screen, watcher: Watcher, prometheus: Prometheus | None) -> None:
    """Print what was seen."""
    screen.print("\nWhat torchobs saw:")
    for row in watcher.rows:
        screen.print(f"  rank {row.rank}: {row.state} after {row.steps} steps, last loss {row.loss:.3f}")
    screen.print(f"  anomalies: {anomalies_text(total_anomalies(watcher.rows))}")
    for (name, state), seconds in watcher.first_seen.items():
        screen.print(f"  alert {name}: {state} after {seconds:.0f} s")
    if prometheus and not prometheus.is_running:
        screen.print(f"  Prometheus ended before its time: {next(reversed(prometheus.output), '')}")
    elif prometheus and not watcher.first_seen:
        screen.print("  no alert")


def fail(screen: Screen, exporter: Exporter, job: Job, reason: str) -> int:
    """Print why, with the last lines of the exporter and of the ranks; return the exit code."""
    screen.print(f"\n{reason}")
    for origin, lines in (("exporter", exporter.output[-LAST_LINES:]), ("job", job.output[-LAST_LINES:])):
        screen.print("\n".join([f"--- the {origin}'s last lines:", *lines]))
    return 1


def hold(screen: Screen, address: str) -> None:
    """Keep the exporter and Prometheus up until Ctrl-C."""
    screen.print(f"\nThe live page stays open until Ctrl-C: http://{address}/")
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
