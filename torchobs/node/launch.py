"""Starts the node's exporter from a trainer, unless there is one, and detaches it.

The exporter must not be a child of the training: a killed process group, a launcher that ends all descendants, or ``train |
tee``, which reads a pipe to its end, would kill it or wait for it. So it is started by exec (a process that uses CUDA must not
go on in a forked child), through a shell that exits at once and leaves it to init, in a session of its own, with no
descriptor but its log. Session, descriptors, umask, working directory and environment can only be set by the trainer; the rest
is reset by the process itself (:func:`detach`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.config import settings
from torchobs.flight.directory import KUBERNETES_MOUNT, opened
from torchobs.node.election import is_decided
from torchobs.support.descriptors import Descriptor

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterable, Mapping


LOG = "exporter.log"
"""In the flight directory"""
NAME = "torchobs-export"
"""Process name in ``ps`` and ``top``; Linux keeps 15 bytes."""
_NICENESS = 5


def detach() -> None:
    """Reset inherited state: blocked and ignored signals, a pinned rank's CPUs; set the priority and the name."""
    reset_signals()
    widen_affinity()
    os.nice(_NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write(NAME)


def reset_signals() -> None:
    """Unblock every signal, and restore the default action of ignored ones.

    SIGPIPE and SIGXFSZ stay ignored, as in every Python: a failing write raises instead of killing the process.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def widen_affinity() -> None:
    """Allow every CPU; the kernel restricts this to the cpuset, which is how a scheduler confines a job."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))


def open_log(directory_fd: int) -> Descriptor:
    """Open the exporter's log for appending. Raises ``OSError``."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    return Descriptor("", LOG, flags, directory=directory_fd)


NEEDED = ("msgspec", "prometheus_client", "starlette", "uvicorn", "yaml")
"""Modules of the extra ``exporter`` that it needs."""

_INHERITED = frozenset(
    {
        *("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
        # A Python from an HPC site's modules finds its own libpython by it.
        "LD_LIBRARY_PATH",
        *("OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER", "OTEL_LOGS_EXPORTER"),
        "TORCHOBS_NOTIFY",
        *("OTEL_SDK_DISABLED", "OTEL_METRIC_EXPORT_INTERVAL"),
        *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    }
)
_INHERITED_PREFIXES = ("LC_", "TORCHOBS_EXPORTER_", "TORCHOBS_KEEP_", "OTEL_EXPORTER_", "OTEL_BSP_", "SSL_CERT_")

_SHELL = ("/bin/sh", "-c", 'exec "$@" &', "sh")
# -I ignores PYTHON* and the working directory. The trainer's own torchobs is imported whatever else is installed, but its
# directory is taken off the path: a checkout may hold a queue.py.
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); from torchobs.cli.node_exporter_process import main; del sys.path[0]; main()"
)
_SHELL_TIMEOUT_S = 5.0

_warned: set[str] = set()
"""What was warned of already: the sampler calls every ten seconds"""

GRACE_S = 90.0
"""How long a rank's last state is kept for a scraper: longer than Prometheus' default scrape interval, a minute."""


def in_kubernetes(environ: Mapping[str, str]) -> bool:
    """Return whether this is a container of a pod, where kubelet starts the exporter as a sidecar that never ends by itself."""
    return "KUBERNETES_SERVICE_HOST" in environ or Path(KUBERNETES_MOUNT).is_dir()


def ensure_exporter(flight_dir: str, address: str, log: logging.Logger, grace_s: float = GRACE_S) -> None:
    """Start an exporter for the flight directory unless there is one. Failures are logged, each once, and never raised.

    Call it after this rank's flight file was published (:mod:`.election`). It costs the trainer some 3 ms. The exporter listens
    within a second and announces its address in ``exporter.json``: on ``address`` (``host:port``) only, or if that is "", on
    the default address or the next free port.
    """
    environ = settings.environment()
    if in_kubernetes(environ):
        _warn_once(log, "no exporter is started in Kubernetes: there it is a sidecar of the pod")
        return
    try:
        with opened(flight_dir) as directory_fd:
            if not is_decided(directory_fd) and _is_free(address, directory_fd, log):
                _start(os.path.abspath(flight_dir), directory_fd, address, grace_s, environ, log)
    except (OSError, subprocess.SubprocessError) as problem:
        _warn_once(log, f"the exporter could not be started: {problem}")


def locate(modules: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the directories to import these modules from, and the missing modules. Imports none of them."""
    directories: dict[str, None] = {}
    missing = []
    for module in modules:
        if where := _directory(module):
            directories[where] = None
        else:
            missing.append(module)
    return list(directories), missing


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the trainer's environment variables that the exporter inherits.

    Not LD_PRELOAD and CUDA_INJECTION64_PATH (profilers of the training), not PYTHON*, not those that describe one rank or job.
    """
    return {name: value for name, value in environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)}


def _warn_once(log: logging.Logger, message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)


def _is_free(address: str, directory_fd: int, log: logging.Logger) -> bool:
    """Return whether an exporter can listen there; if not, warn here rather than only in the exporter's log."""
    problem = _bind_error(address) if address else None
    if problem is None or is_decided(directory_fd):  # taken by the exporter that another rank has just started
        return problem is None
    _warn_once(log, f"no exporter: it cannot listen on {address}: {problem.strerror or problem}; the training goes on")
    return False


def _bind_error(address: str) -> OSError | None:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host.strip("[]"), int(port)))  # not listening, so concurrent checks do not collide
    except OSError as problem:
        return problem
    return None


def _start(
    flight_dir: str, directory_fd: int, address: str, grace_s: float, environ: Mapping[str, str], log: logging.Logger
) -> None:
    directories, missing = locate(NEEDED)
    if missing:
        _warn_once(log, f"no exporter: {', '.join(missing)} missing; pip install 'torchobs[exporter]'")
        return
    if not sys.executable or getattr(sys, "frozen", False):
        _warn_once(log, "no exporter: this program is no Python that could run one; start `torchobs exporter` beside it")
        return
    root = str(Path(__file__).parents[2])
    argv = [*_SHELL, sys.executable, "-I", "-c", _BOOTSTRAP, root, flight_dir, address, str(grace_s), *directories]
    with contextlib.closing(open_log(directory_fd)) as log_file:
        # No preexec_fn: with it Popen forks and runs Python in the child instead of vfork and exec.
        shell = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log_file.number(),
            stderr=log_file.number(),
            close_fds=True,
            cwd="/",
            env=inherited(environ),
            start_new_session=True,
            umask=0o077,
        )
        shell.wait(_SHELL_TIMEOUT_S)


def _directory(module: str) -> str | None:
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = spec.submodule_search_locations or [spec.origin or ""]
    return str(Path(next(iter(places))).absolute().parents[module.count(".")])
