"""What an exporter can be told: every option once, for the command line, the environment and the tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from torchobs import settings, values
from torchobs.catalog import HOST_COLLECTORS
from torchobs.exporter import unixsocket
from torchobs.exporter.unixsocket import UnixAddress, unix_address_of
from torchobs.values import Address, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchobs.exporter.otlp.options import PushConfig

Mode = Literal["sidecar", "node"]
PORT = 10960
"""9464 is the OpenTelemetry SDK's own and would collide in a pod; 9100-9999 is all taken."""

PREFIX = "TORCHOBS_EXPORTER_"
PROTECTION = f"{PREFIX}WEB_CONFIG"
"""What the variable of ``--web.config.file`` begins with: one that is misspelt closes the door, or everyone could ask."""

_SIZE = re.compile(r"(\d{1,15})(Ki|Mi|Gi)?", re.ASCII)
_SHIFTS = {"": 0, "Ki": 10, "Mi": 20, "Gi": 30}
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", re.ASCII)
_TELEMETRY_PATH = re.compile(r"/[A-Za-z0-9._~/-]*[A-Za-z0-9._~-]", re.ASCII)
_NAME_OR_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?", re.ASCII)
_RESERVED_PATHS = ("/-/healthy", "/-/ready")
_RESERVED = "/api/"


@dataclass(frozen=True, slots=True)
class ExporterConfig:
    """An exporter's configuration. Times in seconds."""

    flight_dir: str | None = None
    """None: where trainers of this user, or of this pod, put their files"""
    listen: tuple[Address | UnixAddress, ...] = ()
    systemd_socket: bool = False
    """listen on what systemd has opened, and on nothing else that is not asked for"""
    telemetry_path: str = "/metrics"
    web_config_file: str | None = None
    """None: everyone may ask, without TLS; one that cannot be read closes the door"""
    mode: Mode = "sidecar"
    grace_s: float = 300.0
    """how long a dead rank stays on the page"""
    drain_timeout_s: float = 90.0
    """how long SIGTERM waits for the last scrapes"""
    hang_timeout_s: float | None = None
    """None: learned from each rank's own steps"""
    allow_foreign_owner: bool = False
    created_samples: bool = False
    series_limit: int = 20_000
    """series of one rank"""
    series_limit_total: int | None = None
    """lines of all ranks; None: as many as there is memory for"""
    memory_limit: int | None = None
    """bytes; None: the memory cgroup's"""
    file_sd: str | None = None
    """where to write what Prometheus' file_sd_configs read"""
    drop_metrics: tuple[str, ...] = ()
    """names of samples that are not served, and beginnings of names that end in ``*``"""
    api_socket: str | None = None
    """None: in the flight directory of a node, and none in a sidecar"""
    api_token_file: str | None = None
    control_dir: str | None = None
    """None: where trainers look for commands by themselves"""
    runtime_dir: str | None = None
    """``$XDG_RUNTIME_DIR``"""
    collect_host: tuple[str, ...] = ()
    """of ``catalog.HOST_COLLECTORS``; none: nothing of the machine is collected"""
    host_paths: tuple[str, ...] = ()
    """directories whose file systems are told of, besides that of the flight files"""
    procfs: str = "/proc"
    sysfs: str = "/sys"
    push: PushConfig | None = None
    """None: nothing is pushed over OTLP"""
    problems: tuple[str, ...] = ()
    """what of the configuration could not be honoured"""

    @property
    def addresses(self) -> tuple[Address | UnixAddress, ...]:
        """Where to listen: a sidecar's scraper comes from another machine, a node's from this one."""
        if self.listen or self.systemd_socket:
            return self.listen
        return (Address("" if self.mode == "sidecar" else "127.0.0.1", PORT),)


class Option(NamedTuple):
    """One option: the field it sets, its flag, what it takes, what it is for."""

    field: str
    flag: str
    metavar: str
    kind: Kind
    brief: str
    several: bool = False
    bare: str | None = None
    """what it means without a value; None: it needs one"""

    @property
    def variable(self) -> str:
        """The environment variable that does the same."""
        return PREFIX + re.sub(r"[.-]+", "_", self.flag.lstrip("-")).upper()


def duration_s(text: str) -> float:
    """Return seconds for ``90``, ``90s``, ``1m30s``, ``2h``. Raises ``ValueError`` for anything else."""
    found = _DURATION.fullmatch(text) if text else None
    if not found:
        raise ValueError(text)
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if not isfinite(total):
        raise ValueError(text)
    return total


def size_bytes(text: str) -> int:
    """Return bytes for ``134217728`` and ``128Mi``, as Kubernetes writes them. Raises ``ValueError`` for anything else."""
    found = _SIZE.fullmatch(text)
    if not found:
        raise ValueError(text)
    return int(found[1]) << _SHIFTS[found[2] or ""]


def address_of(text: str) -> Address:
    """Return the address for ``host:port``; an empty host is every interface. Raises ``ValueError``."""
    return cast("Address", values.ADDRESS.parse(text))


def _listen_address(text: str) -> Address | UnixAddress:
    return unix_address_of(text) if text.startswith(unixsocket.PREFIX) else address_of(text)


def _name_or_prefix(text: str) -> str:
    if not _NAME_OR_PREFIX.fullmatch(text):
        raise ValueError(text)
    return text


def _telemetry_path(text: str) -> str:
    if not _TELEMETRY_PATH.fullmatch(text) or text in _RESERVED_PATHS or text.startswith(_RESERVED):
        raise ValueError(text)
    return text


def _mode(text: str) -> Mode:
    if text not in get_args(Mode):
        raise ValueError(text)
    return cast("Mode", text)


def _hang_timeout(text: str) -> float | None:
    return None if text == "auto" else duration_s(text)


def _collectors(text: str) -> tuple[str, ...]:
    word = text.lower()
    if word in {_ALL, "none"}:
        return HOST_COLLECTORS if word == _ALL else ()
    if "," not in word and word not in HOST_COLLECTORS:
        return HOST_COLLECTORS if values.BOOLEAN.parse(word) else ()
    named = {name.strip() for name in word.split(",")} - {""}
    if not named <= set(HOST_COLLECTORS):
        raise ValueError(text)
    return tuple(name for name in HOST_COLLECTORS if name in named)


_ALL = "all"
_COLLECTORS = Kind(f"all, none, or a comma-separated list of {', '.join(HOST_COLLECTORS)}", _collectors)
_PATH = Kind("a path", lambda text: str(values.PATH.parse(text)))
_SECONDS = Kind("a duration such as 90s, 5m or 1h30m", duration_s)

OPTIONS = (
    Option(
        "flight_dir", "--flight-dir", "DIR", _PATH,
        "Directory of the flight files. [default: where trainers of this user, or of this pod, put them]",
    ),
    Option(
        "listen", "--web.listen-address", "ADDRESS", Kind("host:port or unix:/path", _listen_address),
        "HOST:PORT or unix:/PATH to listen on; may be given several times. [default: :10960, with --mode node 127.0.0.1:10960]",
        several=True,
    ),
    Option(
        "systemd_socket", "--web.systemd-socket", "BOOLEAN", values.BOOLEAN,
        "Listen on the sockets that systemd has opened (a .socket unit). [default: false]",
    ),
    Option(
        "telemetry_path", "--web.telemetry-path", "PATH", Kind("a path that begins with / and has an end", _telemetry_path),
        "Path of the metrics. [default: /metrics]",
    ),
    Option(
        "web_config_file", "--web.config.file", "FILE", _PATH,
        "TLS, client certificates and passwords, in the format of Prometheus' exporters; read again when it changes.",
    ),
    Option(
        "file_sd", "--web.file-sd", "FILE", _PATH,
        "Write this exporter's address there for Prometheus' file_sd_configs; %h is the machine's name.",
    ),
    Option(
        "grace_s", "--grace", "DURATION", _SECONDS,
        "How long a dead rank keeps its counters, its last loss and the way it ended on the page. [default: 5m]",
    ),
    Option(
        "drain_timeout_s", "--drain-timeout", "DURATION", _SECONDS,
        "How long SIGTERM waits for every scraper to fetch the final state; a second one ends at once. [default: 90s]",
    ),
    Option(
        "hang_timeout_s", "--hang-timeout", "DURATION", Kind("auto, or a duration such as 10m", _hang_timeout),
        "How long a rank may take for a step before it is hung. [default: auto, 20 times its usual step, at least 1m]",
    ),
    Option(
        "mode", "--mode", "[sidecar|node]", Kind("sidecar or node", _mode),
        "sidecar: never leaves by itself, waits for a port that is taken. node: takes the next one. [default: sidecar]",
    ),
    Option(
        "allow_foreign_owner", "--allow-foreign-owner", "BOOLEAN", values.BOOLEAN,
        "Let an exporter that runs as root read the directory and the files of another user. [default: false]",
    ),
    Option(
        "created_samples", "--created-samples", "BOOLEAN", values.BOOLEAN,
        "Add a _created sample to every counter and histogram. [default: false]",
    ),
    Option(
        "series_limit", "--series-limit", "NUMBER", values.integer(1),
        "Most series of one rank that are served; a histogram is one. [default: 20000]",
    ),
    Option(
        "series_limit_total", "--series-limit-total", "NUMBER", values.integer(1),
        "Most series of all ranks together, each bucket of a histogram being one. [default: as many as there is memory for, "
        "1000000 at most]",
    ),
    Option(
        "memory_limit", "--memory-limit", "SIZE", Kind("bytes, such as 134217728 or 128Mi", size_bytes),
        "Memory to get by with: --series-limit-total follows from it. [default: the container's limit]",
    ),
    Option(
        "drop_metrics", "--drop-metrics", "NAME",
        Kind(
            "a metric's name on the page, or the beginning of one and a * (torchobs_grad_layer_*); regular expressions are for "
            "metric_relabel_configs of the scraper",
            _name_or_prefix,
        ),
        "Metric of the ranks not to serve, by the name it has on the page, or by its beginning and a *; may be given several "
        "times.",
        several=True,
    ),
    Option(
        "api_socket", "--api.socket", "PATH", Kind("a path, or off", lambda text: str(values.PATH.parse(text))),
        "Unix socket for the API, over which commands are taken; its mode is 0660. [default: exporter.sock beside the flight "
        "files with --mode node, else off]",
    ),
    Option(
        "api_token_file", "--api.token-file", "FILE", _PATH,
        "File with a bearer token: whoever sends it may command, also from other machines. [default: none]",
    ),
    Option(
        "control_dir", "--control.dir", "DIR", _PATH,
        "Directory for commands to the ranks, where they look for them. [default: that of the pod, or control beside the "
        "flight files]",
    ),
    Option(
        "collect_host", "--collect.host", "LIST", _COLLECTORS,
        f"Collect the machine's numbers, too, where there is no node_exporter: all, or some of {', '.join(HOST_COLLECTORS)}. "
        "[default: none]",
        bare=_ALL,
    ),
    Option(
        "host_paths", "--collect.host.path", "DIR", _PATH,
        "Directory of checkpoints, to tell of its file system; may be given several times. That of the flight files is told of "
        "anyway.",
        several=True,
    ),
    Option("procfs", "--path.procfs", "DIR", _PATH, "Where the machine's /proc is mounted. [default: /proc]"),
    Option("sysfs", "--path.sysfs", "DIR", _PATH, "Where the machine's /sys is mounted. [default: /sys]"),
)  # fmt: skip


def unknown_variables(environ: Mapping[str, str], options: Iterable[Option]) -> list[str]:
    """Return what is wrong with the variables that begin like those of the options, and are none's and no setting's."""
    known = [option.variable for option in options]
    others = {variable for setting in settings.listing() for variable in setting.variables}
    return [
        f"{name} is no option{values.closest(name, known, PREFIX)}"  # its value may be a secret
        for name in sorted(environ.keys() - others - {*known})
        if name.startswith(PREFIX) and not settings.is_service_link(name)
    ]


def parse(given: Mapping[str, Sequence[str]], runtime_dir: str | None = None, problems: Iterable[str] = ()) -> ExporterConfig:
    """Return the configuration for what was given, as text, by field.

    A value that is not allowed is left out, and ``problems`` of the configuration says so: a sidecar that exits keeps the
    pod's training from starting.
    """
    chosen: dict[str, object] = {}
    complaints = list(problems)
    for option in OPTIONS:
        parsed = []
        for text in given.get(option.field, ()):
            try:
                parsed.append(option.kind.parse(text.strip()))
            except ValueError:
                complaints.append(f"{option.flag} {text!r}: allowed is {option.kind.allowed}")
        if not parsed and given.get(option.field) and option.field == "web_config_file":
            parsed = [""]  # no file: what was meant to be protected is not served instead of being served to everyone
        if parsed:
            chosen[option.field] = tuple(parsed) if option.several else parsed[-1]
    return ExporterConfig(**chosen, runtime_dir=runtime_dir, problems=tuple(complaints))  # type: ignore[arg-type]  # each kind is its field's
