"""The checks of ``torchobs doctor``, one function each; their inputs are arguments, so that tests can set them."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.metadata
import importlib.util
import os
import re
import ssl
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from torchobs.config import settings
from torchobs.diagnosis import text_format
from torchobs.exporter import config
from torchobs.flight.files import headroom, location
from torchobs.node import announcement

OK, WARN, FAIL = "ok", "warn", "fail"
LEAST_TORCH = (2, 4)
"""Minimum version of torch, as stated in README.md."""
_LEAST_SHM = 1 << 30
_OWN_DIRECTORY = "set TORCHOBS_DIR to a local directory of your own"
_OF_THE_KERNEL = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "configfs"})
"""File systems in which no directory can be created, even where access(2) permits it to root."""
_WANTS_CERTIFICATE = "it closes connections without a client certificate"
_YEAR_2020_S = 1_577_836_800
_TIME_ERROR = 5
"""Result of adjtimex(2) while the clock is not synchronised."""
_EXTRAS = {
    "exporter": (
        *("bcrypt", "msgspec", "prometheus_client", "starlette", "urllib3", "uvicorn", "yaml"),
        *("google.rpc", "opentelemetry.proto"),
    ),
    "otlp-grpc": ("grpc",),
    "report": ("matplotlib",),
}


class Check(NamedTuple):
    """Result of a check. ``remedy`` is empty where nothing has to be done."""

    name: str
    status: str
    text: str
    remedy: str = ""


def system(platform: str = sys.platform, version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Check that torchobs supports this system."""
    text = f"Python {'.'.join(map(str, version))} on {platform}"
    if platform not in {"linux", "darwin"}:
        remedy = "torchobs records on Linux, and on macOS; here init() does nothing, and training goes on"
        return Check("system", FAIL, text, remedy)
    return Check("system", OK, text)


def torch(version: str | None) -> Check:
    """Check that torchobs supports this version of torch; ``None``: not installed."""
    if version is None:
        return Check("torch", WARN, "not installed in this environment", "run doctor with the Python that trains")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return Check("torch", WARN, f"{version} is older than {least}", f"torch {least} or newer; else some probes are off")
    return Check("torch", OK, version)


def torch_version() -> str | None:
    """Return the version of the torch in this environment, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def variables(environ: Mapping[str, str]) -> Iterator[Check]:
    """Yield environment variables that would be ignored."""
    _, problems = settings.resolve({}, environ)
    known = {name for option in (*config.EVERY_OPTION, *settings.OPTIONS) for name in option.every_variable}
    for said in config.unknown_variables(environ):
        yield Check("variables", WARN, said, "correct or unset it")
    for problem in problems:
        yield Check("variables", WARN, text_format.clean(problem), "correct or unset it; until then the default holds")
    if not problems:
        given = sorted(name for name in environ if name in known)
        yield Check("variables", OK, f"set and understood: {', '.join(given)}" if given else "none is set: the defaults hold")


def directory(flight_dir: str | None, runtime_dir: str | None, mountinfo: str | None = None) -> Check:
    """Check the flight directory: which one, why, and whether it is usable."""
    if mountinfo is None:
        listed = Path("/proc/self/mountinfo")
        mountinfo = listed.read_text(errors="surrogateescape") if listed.exists() else ""
    tried = location.candidates(flight_dir, runtime_dir)
    found = location.find_existing(flight_dir, runtime_dir)
    why = _why(tried[0], flight_dir)
    if found is None:
        return _not_there(tried, flight_dir, mountinfo)
    status = os.stat(found)  # noqa: PTH116  # the directory may be gone by now
    kind = location.filesystem_type(mountinfo, os.path.realpath(found))
    about = f"{found} ({why}; {kind or 'unknown file system'}, mode {stat.S_IMODE(status.st_mode):04o}, uid {status.st_uid})"
    if not os.access(found, os.W_OK | os.X_OK):
        return Check("directory", FAIL, f"{about}: this user may not write there", _remedy_of_access(found, status))
    try:
        opened = location.open_place(flight_dir, runtime_dir)
    except OSError as problem:
        return Check("directory", FAIL, text_format.clean(problem.strerror or problem), _OWN_DIRECTORY)
    opened.directory.close()
    if not opened.in_memory:
        remedy = "a tmpfs saves the disk a write each 0.1 s: TORCHOBS_DIR=/dev/shm/…"
        return Check("directory", WARN, f"{about}: no memory file system", remedy)
    return Check("directory", OK, about)


def _why(path: str, flight_dir: str | None) -> str:
    if flight_dir:
        return "by TORCHOBS_DIR"
    if path == location.KUBERNETES_MOUNT:
        return "the pod's volume"
    return (
        "of this user's session"
        if path.startswith("/run/")
        else "shared memory"
        if path.startswith("/dev/shm")  # noqa: S108  # chosen by location.py
        else "no tmpfs has room"
    )


def _not_there(tried: list[str], flight_dir: str | None, mountinfo: str) -> Check:
    """Return which directory the first training would create, trying the candidates in order."""
    problems = []
    for path in tried:
        for name in (path,) if flight_dir else location.numbered_names(path):
            problem = _unmakeable(name, mountinfo, parents=bool(flight_dir))
            if not problem:
                return Check("directory", OK, f"{name} ({_why(path, flight_dir)}): the first training makes it")
            problems.append(problem)
    return Check("directory", FAIL, problems[0], _OWN_DIRECTORY)


def _unmakeable(path: str, mountinfo: str, *, parents: bool) -> str:
    """Return why a training could not create that directory; empty if it could."""
    if os.path.lexists(path):
        return f"{path} is no directory" if not Path(path).is_dir() else f"{path} belongs to another user, or others may use it"
    above = Path(path).parent
    while parents and not os.path.lexists(above):
        above = above.parent
    if not above.is_dir():
        return f"{path} cannot be made: {above} is no directory"
    kind = location.filesystem_type(mountinfo, os.path.realpath(above))
    if kind in _OF_THE_KERNEL:
        return f"{path} cannot be made: {above} is of the kernel's own ({kind})"
    if kind.partition(".")[0] in location.NETWORK:
        return f"{path}: {kind} is a network or FUSE file system, on which a training step could block"
    return "" if os.access(above, os.W_OK | os.X_OK) else f"{path} cannot be made: this user may not write in {above}"


def _remedy_of_access(path: str, status: os.stat_result) -> str:
    if path == location.KUBERNETES_MOUNT:
        return f"securityContext.fsGroup of the pod must be one of this user's groups; the volume's is {status.st_gid}"
    return "chown it, or set TORCHOBS_DIR to a directory of your own"


def space(path: str | None, size: int) -> Check:
    """Check for ``size`` bytes of space for a flight file, on the file system and in the memory cgroup."""
    if path is None:
        return Check("room", OK, f"{text_format.size(size)} for each rank, asked for when there is a directory")
    try:
        with location.opened(path) as fd:
            short = headroom.shortage(fd, size)
    except OSError as problem:  # a link, which the directory check reports
        return Check("room", WARN, f"{path} cannot be opened: {text_format.clean(problem.strerror)}", "see the directory above")
    if short:
        return Check("room", FAIL, short, "free some, raise the limit, or TORCHOBS_FILE_SIZE=256KiB")
    usage = os.statvfs(path)
    return Check("room", OK, f"{text_format.size(usage.f_bavail * usage.f_frsize)} free, a rank takes {text_format.size(size)}")


def kubernetes(
    environ: Mapping[str, str], mount: str = location.KUBERNETES_MOUNT, control: str = location.KUBERNETES_CONTROL
) -> Check | None:
    """Check that the pod's volumes are mounted where expected; ``None`` outside of Kubernetes."""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    if not Path(mount).is_dir():
        remedy = f"mount the sidecar's emptyDir at {mount}; without it the sidecar sees nothing of this container"
        return Check("kubernetes", WARN, f"in a pod, and {mount} is no volume", remedy)
    status = Path(mount).stat()
    text = f"{mount} has mode {stat.S_IMODE(status.st_mode):04o} and group {status.st_gid}"
    if not status.st_mode & stat.S_ISGID:
        remedy = "set securityContext.fsGroup: the sidecar reads by group"
        return Check("kubernetes", WARN, f"{text}, which is no fsGroup's", remedy)
    if not Path(control).is_dir():
        remedy = "mount the second emptyDir there: commands come by it"
        return Check("kubernetes", WARN, f"{text}; {control} is no volume", remedy)
    return Check("kubernetes", OK, text)


def shared_memory(path: str = "/dev/shm") -> Check:  # noqa: S108  # only its size is read
    """Check that shared memory is large enough for DataLoader workers and NCCL."""
    try:
        usage = os.statvfs(path)
    except OSError:
        return Check("shared memory", WARN, f"{path} is not there", "DataLoader workers need it: mount a tmpfs there")
    size, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    text = f"{path} has {text_format.size(size)}, {text_format.size(free)} of it free"
    if size < _LEAST_SHM:
        remedy = "docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory at /dev/shm"  # as above
        return Check("shared memory", WARN, f"{text}: workers of a DataLoader and NCCL share it", remedy)
    if free * 10 < size:
        return Check("shared memory", WARN, text, f"ls -l {path}: files of dead trainings may be removed")
    return Check("shared memory", OK, text)


def cgroup() -> Check:
    """Check the memory cgroup of this process and its limit."""
    from torchobs.support.cgroup import of_process, tightest

    groups = of_process("memory")
    found = tightest(groups) if groups else None
    if found is None:
        remedy = "a kill for memory is only judged by the machine's memory then"
        return Check("cgroup", WARN, "no memory cgroup can be read", remedy)
    level, memory = found
    limit = f"limit {text_format.size(memory.limit)}" if memory.limit is not None else "no limit"
    used = f"{text_format.size(memory.working_set)} in use, {limit}"
    if memory.limit and memory.pinned >= 0.9 * memory.limit:  # hardly any room for a training
        return Check("cgroup", WARN, f"{level}: {used}", "raise the limit: the kernel kills at 100 %")
    return Check("cgroup", OK, f"{level}: {used}")


def clock(now_s: float | None = None, synchronised: int | None = None) -> Check:
    """Check that the wall clock is synchronised: event times, and comparison across machines, depend on it."""
    now_s = time.time() if now_s is None else now_s
    state = _clock_state() if synchronised is None else synchronised
    text = f"{text_format.moment(now_s)} ({time.strftime('%Z')})"
    if now_s < _YEAR_2020_S:
        return Check("clock", FAIL, f"{text} is in the past", "set it; TLS and every date are wrong until then")
    if state == _TIME_ERROR:
        remedy = "run chrony or another NTP client on the machine"
        return Check("clock", WARN, f"{text}; the kernel says that nothing keeps it right", remedy)
    return Check("clock", OK, text)


def _clock_state() -> int:
    with contextlib.suppress(OSError, AttributeError):
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
    return 0


def gpus() -> Check:
    """Check the GPUs through NVML."""
    try:
        import pynvml
    except ImportError:
        remedy = "pip install nvidia-ml-py, for the GPUs' temperature, power and errors"
        return Check("nvml", WARN, "nvidia-ml-py is not installed", remedy)
    try:
        pynvml.nvmlInit()
        count, driver = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as problem:
        seen = bool(list(Path("/dev").glob("nvidia[0-9]*")))
        text = f"no GPU is to be seen: {text_format.clean(problem)}"
        remedy = "NVIDIA_DRIVER_CAPABILITIES must have `utility` in a container" if seen else ""
        return Check("nvml", WARN if seen else OK, text, remedy)
    return Check("nvml", OK, f"{text_format.plural(count, 'GPU')}, driver {text_format.clean(driver)}")


def exporter(path: str | None, address: str) -> Check:
    """Check whether an exporter serves that directory."""
    announced = None
    if path is not None:
        with contextlib.suppress(OSError), location.opened(path) as fd:
            announced = announcement.read(fd)
    answer: int | str = ""
    for url in [announced.url] if announced else [announcement.url(address), announcement.url(address, tls=True)]:
        answer, shown = _ready(url), text_format.clean(url)
        if answer == http.HTTPStatus.OK:
            return Check("exporter", OK, f"{shown} is ready{f', pid {announced.pid}' if announced else ''}")
        if answer == _WANTS_CERTIFICATE:
            return Check("exporter", OK, f"{shown} has TLS: {answer}")
    if announced:
        text = f"{text_format.clean(announced.url)} was announced and does not answer ({answer})"
        return Check("exporter", FAIL, text, f"see {path}/exporter.log")
    remedy = "`torchobs run` starts one, `torchobs exporter` another; `torchobs top` and `inspect` need none"
    return Check("exporter", WARN, "none runs for this directory", remedy)


def _ready(url: str) -> int | str:
    """Return the status of ``/-/ready``, or the error. The timeout is generous: only a busy exporter uses it up."""
    parts = urlsplit(url)
    host, port, secure = parts.hostname or "", parts.port, parts.scheme == "https"
    # whether it answers, not who: a certificate is seldom for this name
    anyone = ssl._create_unverified_context() if secure else None  # noqa: S323, SLF001
    connection = (
        http.client.HTTPSConnection(host, port, timeout=10, context=anyone)
        if secure
        else http.client.HTTPConnection(host, port, timeout=10)
    )
    try:
        connection.connect()
    except OSError as problem:
        connection.close()
        return text_format.clean(problem)
    try:
        connection.request("GET", "/-/ready")
        return connection.getresponse().status
    except TimeoutError as problem:
        return text_format.clean(problem)
    except (OSError, http.client.HTTPException) as problem:  # in TLS 1.3 the client's certificate comes after its handshake
        return _WANTS_CERTIFICATE if secure else text_format.clean(problem)
    finally:
        connection.close()


def extras() -> Iterator[Check]:
    """Yield the installed extras, complete or partial."""
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if not _is_there(module)]
        if not missing:
            yield Check("extras", OK, f"{extra} is installed")
        elif extra == "exporter":
            text = f"{extra} is not installed here ({', '.join(missing[:3])} missing)"
            yield Check("extras", WARN, text, "pip install 'torchobs[exporter]', unless a sidecar has it")
        else:
            yield Check("extras", OK, f"{extra} is not installed: pip install 'torchobs[{extra}]' if you want it")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
