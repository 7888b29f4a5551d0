"""``torchobs doctor``: a dozen checks whether torchobs can work here, each with its remedy, and a training of five steps.

Inputs of a check are arguments, so that tests can set them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import json
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from torchobs import catalog
from torchobs._version import __version__
from torchobs.cli import arguments
from torchobs.cli.arguments import tolerant
from torchobs.config import settings
from torchobs.document.text import TerminalStyle, bullets, style_for
from torchobs.exporter import config
from torchobs.flight import directory as location
from torchobs.flight import files
from torchobs.node import election
from torchobs.ranks import runs
from torchobs.ranks.rank_view import RankView
from torchobs.support import text as text_format

_DESCRIPTION = """\
Check whether torchobs can do its work on this machine, in this container or pod, and print a remedy for each problem: torch,
which probes work (by a training of five steps in another process), which flight directory is used and why, its permissions and
free space, the exporter, the OTLP endpoint, shared memory, GPUs, misspelt environment variables. It changes nothing."""

_EXAMPLES = """\
examples:
  torchobs doctor                                  with the Python that trains
  kubectl exec pod -c trainer -- torchobs doctor   in a pod: volumes, modes and fsGroup
  kubectl exec pod -c torchobs -- torchobs doctor  in its sidecar: whether it serves what the ranks write
  TORCHOBS_DIR=/data/flight torchobs doctor        would this directory do?
  torchobs doctor --no-training --json | jq '.checks[] | select(.status != "ok")'

Exit status: 1 if a check failed, else 0, also with warnings."""

OK, WARN, FAIL = "ok", "warn", "fail"
_MARKS = {OK: ("green", "ok  "), WARN: ("yellow", "warn"), FAIL: ("red", "FAIL")}
VERSION = 1
LEAST_TORCH = (2, 4)
"""Minimum version of torch, as stated in README.md."""
_LEAST_SHM = 1 << 30
_OWN_DIRECTORY = "set TORCHOBS_DIR to a local directory of your own"
_WANTS_CERTIFICATE = "it closes connections without a client certificate"
_STEPS, _LIMIT_S = 5, 120
_PACKAGES = Path(__file__).parents[2]
_TRAINING = f"""
import sys
sys.path.append(sys.argv[1])  # where torchobs is, be it a pod's volume
import torch, torchobs
torchobs.init(grad_interval=1, exporter=False)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({_STEPS}):
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(torch.version.cuda or torch.version.hip, torch.cuda.device_count())
"""


class Check(NamedTuple):
    """Result of a check. ``remedy`` is empty where nothing has to be done."""

    name: str
    status: str
    text: str
    remedy: str = ""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    command = arguments.parser("doctor", "torchobs doctor [options]", _DESCRIPTION, _EXAMPLES)
    command.add_argument(
        "--no-training", action="store_true", help="Leave out the training of five steps, which imports torch."
    )
    command.add_argument("--json", action="store_true", help="Print JSON for programs.")
    return command


def main(argv: Sequence[str]) -> int:
    """Run ``torchobs doctor`` with these arguments and return its exit status."""
    options = parser().parse_args(list(argv))
    out, checks = tolerant(sys.stdout), list[Check]()
    style = style_for(out)
    for check in examine(training=not options.no_training):
        checks.append(check)
        if not options.json:
            out.write("".join(f"{line}\n" for line in lines_of(check, style)))
            out.flush()
    if options.json:
        out.write(json.dumps({"version": VERSION, "checks": [check._asdict() for check in checks]}, indent=2) + "\n")
    else:
        out.write(f"\n{summary(checks)}\n")
    return int(any(check.status == FAIL for check in checks))


def examine(*, training: bool) -> Iterator[Check]:
    """Run the checks, the quick ones first."""
    environ = settings.environment()
    chosen, _ = settings.resolve({}, environ)
    flight_dir, runtime_dir = str(chosen.flight_dir) if chosen.flight_dir else None, environ.get("XDG_RUNTIME_DIR")
    version = torch_version()
    yield system()
    if "KUBERNETES_SERVICE_HOST" in environ and os.access(location.KUBERNETES_CONTROL, os.W_OK):  # the sidecar's alone
        yield from variables(environ)
        yield served(location.KUBERNETES_MOUNT)
        yield exporter(None, str(config.parse({}, environ).addresses[0]))
        yield from otlp_endpoint(environ)
        return
    yield torch(version)
    if not chosen.enabled:
        yield Check("torchobs", WARN, "switched off by the environment", "unset TORCHOBS_ENABLED and OTEL_SDK_DISABLED")
    yield from variables(environ)
    yield from kubernetes(environ)
    yield directory(flight_dir, runtime_dir)
    path = location.find_existing(flight_dir, runtime_dir)
    if path is not None:
        yield space(path, chosen.file_size)
    yield exporter(path, str(chosen.exporter_address or settings.EXPORTER_ADDRESS))
    yield from otlp_endpoint(environ)
    yield shared_memory()
    yield gpus()
    if training and version is not None:
        yield from selftest((None, "/dev/shm"))  # noqa: S108  # a private directory is created below it


def lines_of(check: Check, style: TerminalStyle) -> list[str]:
    """Return a check as lines: result and remedy."""
    colour, mark = _MARKS[check.status]
    first, *rest = bullets([f"{check.name}: {text_format.clean(check.text)}"], style.width, " " * 6)
    shown = [f"{style(colour, mark)}  {first[6:]}", *rest]
    return shown + bullets([text_format.clean(check.remedy)], style.width, "      -> ") if check.remedy else shown


def summary(checks: Sequence[Check]) -> str:
    """Return the last line, which counts the problems."""
    counts = ((FAIL, "failure"), (WARN, "warning"))
    numbers = [(sum(check.status == status for check in checks), word) for status, word in counts]
    problems = text_format.joined([text_format.plural(number, word) for number, word in numbers if number])
    return f"{problems}: each has its remedy above." if problems else "All is well."


def system(platform: str = sys.platform) -> Check:
    """Check that torchobs supports this system."""
    text = f"{__version__}, Python {'.'.join(map(str, sys.version_info[:3]))} on {platform}"
    if platform not in {"linux", "darwin"}:
        remedy = "torchobs records on Linux, and on macOS; here init() does nothing, and training goes on"
        return Check("torchobs", FAIL, text, remedy)
    return Check("torchobs", OK, text)


def torch(version: str | None) -> Check:
    """Check that torchobs supports this version of torch; ``None``: not installed."""
    if version is None:
        return Check("torch", WARN, "not installed in this environment", "run doctor with the Python that trains")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < LEAST_TORCH:
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
    _, invalid = settings.resolve({}, environ)
    problems = [*config.unknown_variables(environ), *map(text_format.clean, invalid)]
    for problem in problems:
        yield Check("variables", WARN, problem, "correct or unset it; until then the default holds")
    if not problems:
        names = {name for option in (*config.EVERY_OPTION, *settings.OPTIONS) for name in option.every_variable}
        valid = sorted(name for name in environ if name in names)
        yield Check("variables", OK, f"set and understood: {', '.join(valid)}" if valid else "none is set: the defaults hold")


def directory(flight_dir: str | None, runtime_dir: str | None, mountinfo: str | None = None) -> Check:
    """Check the flight directory: which one, why, and whether it is usable."""
    tried = location.candidates(flight_dir, runtime_dir)
    path = location.find_existing(flight_dir, runtime_dir)
    if path is None:
        problems = [_unmakeable(name, mountinfo) for name in tried]
        for name, problem in zip(tried, problems, strict=True):
            if not problem:
                return Check("directory", OK, f"{name} ({_why(name, flight_dir)}): the first training makes it")
        return Check("directory", FAIL, problems[0], _OWN_DIRECTORY)
    status = os.stat(path)  # noqa: PTH116  # the directory may be gone by now
    kind = location.mount_of(os.path.realpath(path), mountinfo)[1] or "unknown file system"
    text = f"{path} ({_why(path, flight_dir)}; {kind}, mode {stat.S_IMODE(status.st_mode):04o}, uid {status.st_uid})"
    if not os.access(path, os.W_OK | os.X_OK):
        remedy = "chown it, or set TORCHOBS_DIR to a directory of your own"
        if path == location.KUBERNETES_MOUNT:
            remedy = f"securityContext.fsGroup of the pod must be one of this user's groups; the volume's is {status.st_gid}"
        return Check("directory", FAIL, f"{text}: this user may not write there", remedy)
    try:
        opened = location.open_place(flight_dir, runtime_dir)
    except OSError as problem:
        return Check("directory", FAIL, text_format.clean(problem.strerror or problem), _OWN_DIRECTORY)
    opened.directory.close()
    if not opened.in_memory:
        remedy = "a tmpfs saves the disk a write each 0.1 s: TORCHOBS_DIR=/dev/shm/…"
        return Check("directory", WARN, f"{text}: no memory file system", remedy)
    return Check("directory", OK, text)


def _why(path: str, flight_dir: str | None) -> str:
    reasons = {location.KUBERNETES_MOUNT: "the pod's volume", "/run/": "of this user's session", "/dev/shm": "shared memory"}  # noqa: S108  # chosen by location.py
    reason = next((reason for begin, reason in reasons.items() if path.startswith(begin)), "no tmpfs has room")
    return "by TORCHOBS_DIR" if flight_dir else reason


def _unmakeable(path: str, mountinfo: str | None) -> str:
    """Return why a training could not create that directory; empty if it could."""
    above = Path(path)
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir():
        return f"{path} cannot be made: {above} is no directory"
    kind = location.mount_of(os.path.realpath(above), mountinfo)[1]
    if kind.partition(".")[0] in location.NETWORK:
        return f"{path}: {kind} is a network or FUSE file system, on which a training step could block"
    return "" if os.access(above, os.W_OK | os.X_OK) else f"{path} cannot be made: this user may not write in {above}"


def space(path: str, size: int) -> Check:
    """Check for ``size`` bytes of space for a flight file, on the file system and in the memory cgroup."""
    try:
        with location.opened(path) as fd:
            short = files.shortage(fd, size)
    except OSError as problem:  # a link, which the directory check reports
        return Check("room", WARN, f"{path} cannot be opened: {text_format.clean(problem.strerror)}", "see the directory above")
    if short:
        return Check("room", FAIL, short, "free some, raise the limit, or TORCHOBS_FILE_SIZE=256KiB")
    usage = os.statvfs(path)
    return Check("room", OK, f"{text_format.size(usage.f_bavail * usage.f_frsize)} free, a rank takes {text_format.size(size)}")


def kubernetes(
    environ: Mapping[str, str], mount: str = location.KUBERNETES_MOUNT, control: str = location.KUBERNETES_CONTROL
) -> Iterator[Check]:
    """Yield whether the pod's volumes are mounted where expected; nothing outside of Kubernetes."""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return
    if not Path(mount).is_dir():
        remedy = f"mount the sidecar's emptyDir at {mount}; without it the sidecar sees nothing of this container"
        yield Check("kubernetes", WARN, f"in a pod, and {mount} is no volume", remedy)
    elif not Path(mount).stat().st_mode & stat.S_ISGID:
        remedy = "set securityContext.fsGroup: the sidecar reads by group"
        yield Check("kubernetes", WARN, f"the group of {mount} is no fsGroup's", remedy)
    elif not Path(control).is_dir():
        yield Check("kubernetes", WARN, f"{control} is no volume", "mount the second emptyDir there: commands come by it")
    else:
        yield Check("kubernetes", OK, f"{mount} is a volume with an fsGroup")
    if Path(mount).parent / "site" / "packages" == _PACKAGES:
        yield injection()


def injection() -> Check:
    """Check that this Python begins torchobs, which a volume of the pod has, when it imports torch."""
    if {"torchobs_start", "sitecustomize"} & {type(finder).__module__ for finder in sys.meta_path}:
        return Check("injection", OK, "this Python begins torchobs when it imports torch")
    remedy = "the pod's annotation torchobs.io/pythonpath: what the image sets as PYTHONPATH, or an empty text"
    return Check("injection", WARN, "this Python ignores PYTHONUSERBASE (a virtual environment?) and trains unobserved", remedy)


def served(path: str) -> Check:
    """Check that a sidecar may read what the ranks write."""
    try:
        listed = runs.listing(Path(path))
    except OSError as problem:
        listed = runs.Listing([], [(path, runs.reason(problem))])
    if listed.bad:
        remedy = "securityContext.fsGroup of the pod lets the sidecar read what the trainer writes"
        return Check("flight files", FAIL, text_format.clean("{} cannot be read: {}".format(*listed.bad[0])), remedy)
    readable = sum(len(run.files) for run in listed.runs)
    remedy = "" if readable else "no rank has appeared: run doctor in the training's container"
    return Check(
        "flight files", OK if readable else WARN, f"{path} has {text_format.plural(readable, 'readable flight file')}", remedy
    )


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
    return Check("shared memory", OK, text)


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
        has_device = bool(list(Path("/dev").glob("nvidia[0-9]*")))
        text = f"no GPU is to be seen: {text_format.clean(problem)}"
        remedy = "NVIDIA_DRIVER_CAPABILITIES must have `utility` in a container" if has_device else ""
        return Check("nvml", WARN if has_device else OK, text, remedy)
    return Check("nvml", OK, f"{text_format.plural(count, 'GPU')}, driver {text_format.clean(driver)}")


def exporter(path: str | None, address: str) -> Check:
    """Check whether an exporter serves that directory: the announced one, else at the address where one is expected."""
    announced = None
    if path is not None:
        with contextlib.suppress(OSError), location.opened(path) as fd:
            announced = election.read(fd)
    urls = [announced.url] if announced else [election.url(address), election.url(address, tls=True)]
    answers = {url: _ready(url) for url in urls}
    for url, answer in answers.items():
        if answer in {"", _WANTS_CERTIFICATE}:
            state = f"has TLS: {answer}" if answer else "is ready"
            doubt = f"; it has not said whether it serves {path}" if path is not None and not announced else ""
            return Check("exporter", OK, f"{text_format.clean(url)} {state}{doubt}")
    if announced:
        text = f"{text_format.clean(announced.url)} was announced and does not answer ({answers[announced.url]})"
        return Check("exporter", FAIL, text, f"see {path}/exporter.log")
    remedy = "`torchobs run` starts one, `torchobs exporter` too, a pod has its sidecar; `torchobs top` and `inspect` need none"
    return Check("exporter", WARN, "none runs for this directory", remedy)


def _ready(url: str) -> str:
    """Return why the exporter is not ready; empty if it is. The timeout is generous: only a busy exporter uses it up."""
    # whether it answers, not who: a certificate is seldom for this name
    secure = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())  # noqa: S323, SLF001
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), secure)
    try:
        with opener.open(f"{url}-/ready", timeout=10):
            return ""
    except urllib.error.URLError as problem:
        return text_format.clean(problem.reason)
    except (OSError, http.client.HTTPException) as problem:  # in TLS 1.3 the client's certificate comes after its handshake
        return _WANTS_CERTIFICATE if url.startswith("https:") else text_format.clean(problem)


def otlp_endpoint(environ: Mapping[str, str]) -> Iterator[Check]:
    """Yield whether something listens where the exporter is to push to."""
    push, _ = config.parse_push({}, environ)
    places = {urlsplit(target.url)[:2] for _, target in push.targets()} if push is not None else set()
    for scheme, place in sorted(places):
        parts = urlsplit(f"//{place}")
        try:
            socket.create_connection((parts.hostname or "", parts.port or (443 if scheme == "https" else 80)), 5).close()
        except OSError as problem:
            remedy = "is the collector up, and reachable from here? an exporter elsewhere may reach it all the same"
            yield Check("otlp", WARN, f"{text_format.clean(place)} does not answer: {text_format.clean(problem)}", remedy)
        else:
            yield Check("otlp", OK, f"{text_format.clean(place)} accepts connections")


def selftest(parents: Sequence[str | None]) -> Iterator[Check]:
    """Check that a training is recorded in a directory below the first writable of ``parents``; ``None``: the temporary one."""
    for parent in parents:
        with contextlib.suppress(OSError):
            trial = tempfile.TemporaryDirectory(prefix="torchobs-doctor-", dir=parent)
            break
    else:
        yield Check("probes", WARN, "no place for a trial: no temporary directory can be made", "set TMPDIR to one of your own")
        return
    with trial as home:
        environ = {**settings.environment(), "TORCHOBS_DIR": home, "TORCHOBS_CONTROL_DIR": home, "TORCHOBS_ENABLED": "1"}
        try:
            argv = [sys.executable, "-c", _TRAINING, str(_PACKAGES)]
            ran = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            yield Check("probes", FAIL, f"five steps took more than {_LIMIT_S} s", "is the machine overloaded? try again")
            return
        reports, _ = runs.load(sorted(Path(home).glob("*.flight")))
        yield from evaluate(reports[0] if reports else None, ran.returncode, ran.stderr, ran.stdout)


def evaluate(report: RankView | None, status: int, stderr: str, stdout: str = "") -> Iterator[Check]:
    """Yield the results of the test, by what it recorded and printed."""
    lines = [text_format.clean(line) for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    if status:
        text = f"a training of five steps ended with status {status}: {last}"
        yield Check("probes", FAIL, text, "does `python -c 'import torch'` work?")
        return
    if report is None:
        yield Check("probes", FAIL, f"a training of five steps left no flight file: {last}", "see the checks above")
        return
    words = (stdout.splitlines() or [""])[-1].split()  # before it, what a sitecustomize or torch itself prints
    if len(words) == 2:  # noqa: PLR2004  # build and number
        yield devices(*words)
    probes = dict(sorted(report.by_attribute(catalog.PROBE_DISABLED).items()))
    complete = report.value(catalog.STEPS) == _STEPS and report.value(catalog.LOSS) is not None
    text = f"a training of five steps was recorded; at work: {', '.join(name for name in probes if not probes[name])}"
    yield Check("probes", OK if complete else WARN, text, "" if complete else f"only {len(report.steps)} steps were seen")
    for event in report.events_named(catalog.EVENT_PROBE_DISABLED):
        why = f"{event.text('exception.type')} at {event.text('location')}"
        yield Check("probes", WARN, f"{event.text('probe')} is off: {why}", "another version of torch? the log has the line")
    if missing := [name for name in settings.PROBES if name not in probes]:
        yield Check("probes", OK, f"not installed (TORCHOBS_DISABLE_PROBES, or TORCHOBS_LEVEL): {', '.join(missing)}")


def devices(build: str, count: str) -> Check:
    """Check that torch sees the GPUs that there are; ``build``: the CUDA or ROCm that it was built with, or ``None``."""
    text = f"torch is built {'without CUDA' if build == 'None' else f'with CUDA or ROCm {build}'} and sees {count} of the GPUs"
    if count == "0" and list(Path("/dev").glob("nvidia[0-9]*")):
        remedy = "a torch built with CUDA, a driver as new as that CUDA, CUDA_VISIBLE_DEVICES; in a container --gpus all"
        return Check("gpus of torch", WARN, text, remedy)
    return Check("gpus of torch", OK, text)
