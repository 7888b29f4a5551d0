"""Thresholds and severities of the alerts, from defaults and a person's own file: `torchobs rules render --values my.yml`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from torchobs._version import __version__
from torchobs.detect.learning import LEAST_SKIPPED

if TYPE_CHECKING:
    from pathlib import Path

RUNBOOKS = f"https://github.com/torchobs/torchobs/blob/v{__version__}/docs/runbooks"
"""Pages of the same version as the rules: those of another may be about other rules."""
Severity = Literal["page", "ticket"]
SEVERITIES = get_args(Severity)
_MOST = 1e9
# With a value outside of these an alert would fire always or never.
Share = Annotated[float, Meta(gt=0.0, lt=1.0)]
Ratio = Annotated[float, Meta(gt=1.0, le=_MOST)]
"""Relative to the usual, which is 1"""
Positive = Annotated[float, Meta(gt=0.0, le=_MOST)]
Address = Annotated[str, Meta(pattern="^(https?://.|$)")]
"""An address for a browser, or nothing"""


class ValuesError(ValueError):
    """A values file has an invalid entry; the message names it."""


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the alerts."""

    cpu: Share = 0.9
    """Share of the processors, or of the container's quota, in use"""
    memory: Share = 0.9
    """Share of the container's or the machine's memory that is in use and not reclaimable"""
    gpu_memory: Share = 0.9
    """Share of the device memory that the process may use, held by tensors"""
    shared_memory: Share = 0.9
    """Share of /dev/shm in use"""
    filesystem: Share = 0.9
    """Share of a file system in use, or of its inodes"""
    cpu_throttled: Share = 0.25
    """Share of the quota's periods in which the container was throttled"""
    gpu_throttled: Share = 0.1
    """Share of the time in which heat held the clocks down. By the power limit is normal, and may last all the time."""
    slower: Ratio = 1.5
    """Step time relative to the run's best: half as long again wastes a third of the machines' time"""
    straggler: Ratio = 1.5
    """Step time of a rank relative to its peers', both without waiting"""
    time_to_limit_s: Positive = 4 * 3600
    """Growing memory is extrapolated to at most 60 times its observed length (`torchobs/detect/growth.py`), so that four hours
    were observed for at least four minutes; and four hours suffice to let the run reach a checkpoint."""
    lived_s: Positive = 600
    """A run that lived for less in its last hour wakes nobody up when it fails (`TorchobsRankFailed` reports it), and one that
    did so in its last day wastes no machine"""
    restarts: Positive = 3
    """Restarts of a rank within fifteen minutes"""
    recompiles: Positive = 16
    """Recompilations within ten minutes, of all functions. torch stops at 8 for one function
    (`torch._dynamo.config.recompile_limit`); a model with a dynamic size has a handful in its first minutes."""
    skipped: Positive = LEAST_SKIPPED
    """Steps that a loss scaler skips. It starts at 2^16 and halves at each: 16 reduce it to 1, a starting job may need some."""
    checkpoint_cadences: Positive = 3
    """A checkpoint is overdue after this many times the run's own usual interval"""
    no_checkpoint_s: Positive = 6 * 3600
    """A run of this age should have saved something"""
    fragmented: Share = 0.2
    """Share of the reserved device memory in inactive split blocks, while allocations are retried"""
    goodput: Share = 0.8
    """Objective: share of world size times wall time that is productive"""

    @property
    def lived_within_s(self) -> float:
        """A window that still has the last hour of a run that is gone."""
        return 3600 + self.lived_s

    @property
    def lost(self) -> float:
        """Share of the time that may be lost."""
        return 1 - self.goodput

    @property
    def goodput_percent(self) -> float:
        """The objective for people."""
        return 100 * self.goodput


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values that a person may set."""

    thresholds: Thresholds = Thresholds()
    severities: dict[str, Severity] = {}
    """Other severities than the shipped ones, by the alert's name"""
    disabled: tuple[str, ...] = ()
    """Alerts to leave out"""
    grafana_url: Address = ""
    """Address of Grafana, for links to its dashboards; empty: no links"""
    runbooks: Address = RUNBOOKS
    """Folder of the runbooks"""

    def filled(self, text: str) -> str:
        """Return a text with ``@name@`` replaced by the threshold of that name. Raises ``AttributeError``."""
        return re.sub(r"@(\w+)@", lambda match: f"{getattr(self.thresholds, match[1]):g}", text)


DEFAULT = Values()


def load(path: Path) -> Values:
    """Read a values file. Raises :class:`ValuesError`, ``OSError`` or ``yaml.YAMLError``."""
    import yaml  # not needed for a help text with the thresholds

    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if isinstance(entries, dict):  # an address may end with a slash, and a section without an entry is null
        entries = {name: value.rstrip("/") if isinstance(value, str) else value for name, value in entries.items()}
        entries = {name: value for name, value in entries.items() if value not in (None, "")}
    try:
        return msgspec.convert(entries, Values)
    except msgspec.ValidationError as problem:
        raise ValuesError(str(problem)) from None
