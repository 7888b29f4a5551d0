"""Thresholds and severities of the alerts, from defaults and a person's own file: `torchobs rules render --values my.yml`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from torchobs._version import __version__
from torchobs.detect.learning import LEAST_SKIPPED

if TYPE_CHECKING:
    from pathlib import Path

RUNBOOKS = f"https://github.com/torchobs/torchobs/blob/v{__version__}/docs/runbooks"
"""Pages of the version that the rules are of: those of another may be about other rules."""
SEVERITIES = ("page", "ticket")
RATIOS = ("slower", "straggler")
"""Thresholds that compare with what is usual, which is 1"""
COUNTED = ("restarts", "recompiles", "skipped", "checkpoint_cadences")
"""Thresholds that are numbers of something; the others are shares, or times, whose names end with `_s`."""


class ValuesError(ValueError):
    """A values file has an entry that means nothing; the message says which."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits of the alerts. Shares are between 0 and 1, ratios above 1, times in seconds."""

    cpu: float = 0.9
    """Share of the processors, or of the container's quota, in use"""
    memory: float = 0.9
    """Share of the container's or the machine's memory that is in use and not reclaimable"""
    gpu_memory: float = 0.9
    """Share of the device memory that the process may use, held by tensors"""
    shared_memory: float = 0.9
    """Share of /dev/shm in use"""
    filesystem: float = 0.9
    """Share of a file system in use, or of its inodes"""
    cpu_throttled: float = 0.25
    """Share of the quota's periods in which the container was throttled"""
    gpu_throttled: float = 0.1
    """Share of the time in which heat held the clocks down. By the power limit is normal, and may last all the time."""
    slower: float = 1.5
    """Step time relative to the run's best: half as long again wastes a third of the machines' time"""
    straggler: float = 1.5
    """Step time of a rank relative to its peers', both without waiting"""
    time_to_limit_s: float = 4 * 3600
    """Growing memory is extrapolated to at most 60 times its observed length (`torchobs/detect/growth.py`), so that four hours
    were observed for at least four minutes; and four hours suffice to let the run reach a checkpoint."""
    lived_s: float = 600
    """A run that has lived for less in its last hour wakes nobody up when it fails (`TorchobsRankFailed` tells of it),
    and one that has in its last day wastes no machine"""
    restarts: float = 3
    """Restarts of a rank within fifteen minutes"""
    recompiles: float = 16
    """Recompilations within ten minutes, of all functions. torch stops at 8 for one function
    (`torch._dynamo.config.recompile_limit`); a model with a dynamic size has a handful in its first minutes."""
    skipped: float = LEAST_SKIPPED
    """Steps that a loss scaler skips. It starts at 2^16 and halves at each: 16 reduce it to 1, a starting job may need some."""
    checkpoint_cadences: float = 3
    """A checkpoint is overdue after this many times the run's own usual interval"""
    no_checkpoint_s: float = 6 * 3600
    """A run of this age should have saved something"""
    fragmented: float = 0.2
    """Share of the reserved device memory in inactive split blocks, while allocations are retried"""
    goodput: float = 0.8
    """Objective: share of world size times wall time that is productive"""


@dataclass(frozen=True, slots=True)
class Values:
    """What a person may set."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    severities: Mapping[str, str] = field(default_factory=dict)
    """Other severities than the shipped ones, by the alert's name"""
    disabled: tuple[str, ...] = ()
    """Alerts to leave out"""
    grafana_url: str = ""
    """Where Grafana is, for links to its dashboards; without it there are none"""
    runbooks: str = RUNBOOKS
    """Folder of the runbooks"""


DEFAULT = Values()


def load(path: Path) -> Values:
    """Read a values file. Raises :class:`ValuesError`, ``OSError`` or ``yaml.YAMLError``."""
    import yaml  # without it there is still a help text with the thresholds

    given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    _check(given, {one.name for one in fields(Values)}, "the file")
    thresholds = given.get("thresholds") or {}
    _check(thresholds, {one.name for one in fields(Thresholds)}, "thresholds")
    for name, value in thresholds.items():
        _check_threshold(name, value)
    severities = given.get("severities") or {}
    _check(severities, None, "severities")
    for name, severity in severities.items():
        if severity not in SEVERITIES:
            raise ValuesError(f"severities: {name} is {severity!r}, not one of {', '.join(SEVERITIES)}")
    disabled = given.get("disabled") or ()
    if not isinstance(disabled, list | tuple):
        raise ValuesError(f"disabled: a list of alerts is expected, not {disabled!r}")
    return Values(
        replace(DEFAULT.thresholds, **thresholds),
        {str(name): severity for name, severity in severities.items()},
        tuple(map(str, disabled)),
        _url(given, "grafana_url", ""),
        _url(given, "runbooks", RUNBOOKS),
    )


def _check_threshold(name: str, value: Any) -> None:
    """Raise for a value with which the alert would fire always or never, such as a share of 90."""
    least, most = 1.0 if name in RATIOS else 0.0, math.inf if name in (*RATIOS, *COUNTED) or name.endswith("_s") else 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < most:
        wanted = f"a number above {least:g}" if most == math.inf else f"a share between {least:g} and {most:g}"
        raise ValuesError(f"thresholds: {name} is {value!r}, not {wanted}")


def _url(given: Mapping[str, Any], name: str, default: str) -> str:
    """Return a URL without the slash at its end. Raises for what a browser would not open."""
    value = given.get(name) or default
    if value and not (isinstance(value, str) and value.startswith(("http://", "https://"))):
        raise ValuesError(f"{name}: a URL that begins with http:// or https:// is expected, not {value!r}")
    return str(value).rstrip("/")


def _check(given: Any, known: set[str] | None, where: str) -> None:
    """Raise for what is no mapping, or has a name that is not ``known``; None: any name will do."""
    if not isinstance(given, Mapping):
        raise ValuesError(f"{where}: names and values are expected")
    if known is not None and (unknown := sorted(set(map(str, given)) - known)):
        raise ValuesError(f"{where}: {', '.join(unknown)} means nothing here; there are {', '.join(sorted(known))}")
