"""What tests and the programs that tests start have in common: plain functions, no fixtures."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import inspect
import itertools
import os
import random
import shutil
import socket
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pytest

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
"""Where `tests` lies: the checkout, unless the tests were copied away from it to run against an installed wheel."""

NEEDS_CUDA = "needs a CUDA device"
NEEDS_MEMORY_CGROUP = "needs a memory cgroup it may create"
NEEDS_MOUNT = "needs a mount namespace it may create"
NEEDS_CHECKOUT = "needs the source checkout"
NEEDS_PROGRAM = "needs a program that Debian does not package"
NEEDS_COMPILER = "needs a C++ compiler, and Python's headers for what is compiled for Python"
NEEDS_KUBERNETES = "needs a Kubernetes cluster"
NEEDS_CONTAINERS = "needs podman and podman-compose, and the right to run containers"
UNAVOIDABLE = (
    *(NEEDS_CUDA, NEEDS_MEMORY_CGROUP, NEEDS_MOUNT, NEEDS_CHECKOUT, NEEDS_PROGRAM, NEEDS_COMPILER),
    *(NEEDS_KUBERNETES, NEEDS_CONTAINERS),
)
"""Beginnings of the only reasons for which a test may be skipped in CI (`tests/conftest.py`)."""

FETCHED_BY_MAKE = frozenset(
    {"prometheus", "promtool", "prometheus-alertmanager", "amtool", "prometheus-node-exporter", "docker-registry"}
)
"""Programs that `make test-tools` provides, so that there is no excuse for skipping their tests."""

INSTALLED_BY_HAND = {
    "chromium": "chromium",
    "buildah": "buildah",
    "skopeo": "skopeo",
    **dict.fromkeys(("munged", "slurmctld", "slurmd", "srun"), "munge slurmctld slurmd slurm-client"),
}
"""Programs that depend on too much to be unpacked, and Debian's packages of them: without them CI fails."""

OF_THE_TESTS = frozenset({"TORCHOBS_NATIVE", "TORCHOBS_KEEP_RUNS"})
"""What the tests run with, not what a job has said: `TORCHOBS_NATIVE=0 make test` is without the compiled part."""
JOB_PREFIXES = ("TORCHOBS_", "OTEL_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "KUBERNETES_", "ROLE_")
JOB_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX", "TRACEPARENT", "TRACESTATE", "XDG_RUNTIME_DIR"),
        *("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    }
)


def describes_a_job(variable: str) -> bool:
    """Whether `variable` would tell torchobs something about the job, or send a request to 127.0.0.1 elsewhere."""
    return variable in JOB_VARIABLES or (variable.startswith(JOB_PREFIXES) and variable not in OF_THE_TESTS)


def clean_environment() -> dict[str, str]:
    """The environment without what describes a job, for a child process whose identity the test decides."""
    return {name: value for name, value in os.environ.items() if not describes_a_job(name)}


def freeze() -> None:
    """Leave all living objects to no garbage collection and no scan of all objects any more.

    With torch and all tests they are a million: a full collection, or torchobs' search for models, takes a second, and a
    collection in a forked child copies their pages.
    """
    gc.collect()
    gc.freeze()


_ports = itertools.cycle(random.Random().sample(range(20_000, 30_000), 10_000))  # the kernel gives none of them by itself


@functools.cache
def _ports_file() -> int:
    """A descriptor that is open as long as this process lives, and with it the locks on its file: a byte for each port."""
    path = Path(tempfile.gettempdir()) / f"torchobs-test-ports-{os.getuid()}.lock"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on, nor will: no test gets it, of whatever process, and no connection."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            fcntl.lockf(_ports_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def wait_until(condition: Callable[[], T], timeout_s: float = 30.0, interval_s: float | None = None) -> T:
    """The first true value of `condition()`, asked for every `interval_s`.

    By default that is 20 ms at first, and then a tenth of the time that it has waited, up to 0.2 s: asking costs processor
    time, which is taken from what is waited for.
    """
    begun = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - begun
        if waited_s > timeout_s:
            name = getattr(condition, "__qualname__", repr(condition))
            msg = f"{name} was still {value!r} after {timeout_s:g} s"
            raise TimeoutError(msg)
        time.sleep(min(max(0.02, waited_s / 10), 0.2) if interval_s is None else interval_s)
    return value


def finish(threads: Sequence[threading.Thread]) -> None:
    """Start them all, and wait for their ends."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def why_missing(program: str) -> str | None:
    """None if `program` is on PATH, else the reason to give for a skip: what is missing and how to get it."""
    if shutil.which(program):
        return None
    if program in FETCHED_BY_MAKE:
        return f"needs {program} on PATH: `make test` fetches it"
    if program in INSTALLED_BY_HAND:
        return f"needs {program} on PATH: `apt-get install {INSTALLED_BY_HAND[program]}`"
    return f"{NEEDS_PROGRAM}: {program}, on PATH"


@contextlib.contextmanager
def quick_inductor(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The inductor, with a cache of its own, without the compilations that it tries the compiler with."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    from torch._inductor import config  # it takes a second

    # by its own means: a monkeypatch that is undone leaves the setting missing, and later tests without an inductor
    less = {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}
    with config.patch({name: value for name, value in less.items() if name in config.get_config_copy()}):
        yield


def for_each(things: Mapping[str, tuple[Any, ...]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that checks one of the things, given by name: its first arguments; others are fixtures."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        width = len(next(iter(things.values())))
        fixtures = list(inspect.signature(check).parameters.values())[width:]

        @functools.wraps(check)
        def test(**values: Any) -> None:
            failures = []
            for name, thing in things.items():
                try:
                    check(*thing, **values)
                except (AssertionError, LookupError, TypeError, ValueError) as problem:
                    failures.append(f"{name}: {''.join(traceback.format_exception_only(problem))}")
            assert not failures, "\n".join(failures)

        test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]  # pytest asks for the fixtures by it
        return test

    return decorate
