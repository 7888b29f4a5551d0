"""Fixtures for every test: a clean environment, programs from PATH, children that do not outlive their test."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import fork_server, support

if TYPE_CHECKING:
    from tests.training import Recording

pytest_plugins = ["tests.rank_files"]

# Asked for before the fixture that hides what begins with TORCHOBS_ from every test.
IN_A_CLUSTER = bool(os.environ.get("KUBECONFIG") and os.environ.get("TORCHOBS_TEST_EXPORTER_IMAGE"))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Golden files are written by the tests that compare with them; how often a long test repeats depends on the occasion."""
    if not pluginmanager.hasplugin("timeout"):  # on a machine with a GPU there may be nothing but torch and pytest
        parser.addini("timeout", "seconds a test may take, for pytest-timeout, which is not installed")
    parser.addoption("--update-golden", action="store_true", help="write the golden files again instead of comparing with them")
    parser.addoption("--seed", type=int, default=0, help="other random numbers for every test [%(default)s]")
    parser.addoption("--share", type=float, default=0.05, help="of the repetitions of tests marked `long` [%(default)s]")


def pytest_configure() -> None:
    """Take Ctrl-C as programs in a terminal do, and so children: `make test &` in a script leaves it ignored."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads would only spin beside other tests
    os.environ.setdefault("GOGC", "800")  # garbage is a quarter (promtool) to two fifths (Helm) of the time of programs in Go
    # no test but those of keeping writes where a person's runs are kept, and none reads them
    os.environ |= {"TORCHOBS_KEEP_RUNS": "0", "XDG_STATE_HOME": "/nonexistent"}
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(ImportError):  # which tests of an installed wheel do without
        from hypothesis import settings

        settings.register_profile("torchobs", deadline=None)  # by default 200 ms, which a busy machine exceeds
        settings.load_profile("torchobs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in tests/e2e and tests/faults, so that no file can forget to."""
    for item in items:
        folder = item.path.relative_to(support.ROOT).parts[1] if item.path.is_relative_to(support.ROOT) else ""
        if folder in {"e2e", "faults", "gpu"}:
            item.add_marker(folder)


def pytest_collection_finish() -> None:
    """What is imported by now stays: no test looks at it again and again."""
    support.freeze()


@pytest.fixture(autouse=True)
def _random_numbers(request: pytest.FixtureRequest) -> None:
    """Seed random, numpy and torch by the test's name and ``--seed``: a test draws the same alone, and beside any others."""
    seed = zlib.crc32(f"{request.config.getoption('--seed')} {request.node.nodeid}".encode())
    random.seed(seed)
    for library, function in {"numpy": "random.seed", "torch": "manual_seed"}.items():
        if library in sys.modules:  # most tests of the exporter do without
            attrgetter(function)(sys.modules[library])(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say with a failure which random numbers it had; in CI a skip that can be avoided is one."""
    report = yield
    _forbid(report)
    if report.failed:
        report.sections.append(("random numbers", f"--seed {item.config.getoption('--seed')}"))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself."""
    report = yield
    _forbid(report)
    return report


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skipped test is a promise nobody checked: on a person's machine their choice, in CI a hole that no one sees."""
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("CI") != "true":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    unavoidable = tuple(skip for skip in support.UNAVOIDABLE if not (IN_A_CLUSTER and skip == support.NEEDS_KUBERNETES))
    if not reason.removeprefix("Skipped: ").startswith(unavoidable):
        report.outcome = "failed"
        report.longrepr = f"A skip that CI can avoid: {reason}"


@pytest.fixture(autouse=True)
def _no_job_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test, and no child of one, learns its rank or its endpoint from where the tests happen to run."""
    for name in os.environ.keys() - support.clean_environment().keys():
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _log_level_of_one_test() -> Iterator[None]:
    """``init(log_level=...)`` sets the logger's level for the rest of the process, and other tests read its warnings."""
    logger = logging.getLogger("torchobs")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def checkout() -> Path:
    """The root of the source checkout; skips where only the tests are (`make wheel-test`)."""
    if not (support.ROOT / "pyproject.toml").is_file():
        pytest.skip(support.NEEDS_CHECKOUT)
    return support.ROOT


@pytest.fixture
def share_of(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """How many of so many repetitions to do: all of them with `make test-long`."""
    share = float(pytestconfig.getoption("--share"))
    return lambda repetitions: max(1, math.ceil(repetitions * share))


@pytest.fixture
def program() -> Callable[[str], str]:
    """Find a program on PATH, or skip the test and say how to get it."""

    def find(name: str) -> str:
        if reason := support.why_missing(name):
            pytest.skip(reason)
        return str(shutil.which(name))

    return find


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Ports nobody listens on; call it once per port."""
    return support.free_port


@pytest.fixture
def flight_dir() -> Iterator[Path]:
    """A private directory on tmpfs (where there is one), as a rank would choose it; removed afterwards."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="torchobs-test-", dir=shm if shm.is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def directory_fd(flight_dir: Path) -> Iterator[int]:
    """That directory, opened as an exporter opens it."""
    from torchobs.flight.directory import open_directory

    fd = open_directory(str(flight_dir))
    yield fd
    os.close(fd)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    import torch.distributed as dist  # most tests of the exporter do without torch

    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs forget it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A session that records every step with its norm; no probe may have failed by its end."""
    from tests.training import recording  # it imports torch, which most tests of the exporter do without

    yield from recording(flight_dir)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program that is killed when the test ends, if it has not ended by then.

    Output goes to `<tmp_path>/<number>.log` unless the caller says otherwise: an unread pipe would block the program. With
    `torch=True` it is a Python program that trains, and is spared the imports (`tests/fork_server.py`).
    """
    children: list[subprocess.Popen[str]] = []

    def run(*argv: str | Path, torch: bool = False, **options: object) -> subprocess.Popen[str]:
        popen: type[subprocess.Popen[str]] = fork_server.Python if torch else subprocess.Popen
        with (tmp_path / f"{len(children)}.log").open("w") as log:
            settings = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "text": True, **options}
            child: subprocess.Popen[str] = popen(argv, **settings)  # type: ignore[call-overload]
        children.append(child)
        return child

    yield run
    for child in reversed(children):
        child.kill()
        child.wait(timeout=10)
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream:
                stream.close()
