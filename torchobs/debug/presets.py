"""Names of the switches of ``debug.enable``, and the modes and levels that are presets of them."""

from __future__ import annotations

from dataclasses import dataclass

SWITCHES = (
    "autograd_anomaly", "autograd_profiler", "tensorboard_traces", "memory_usage", "gradient_norms", "forward_pass",
    "backward_pass", "device_placement", "mixed_precision", "data_loading", "validation", "early_stopping", "lr_scheduling",
)  # fmt: skip
_BASIC = ("gradient_norms", "lr_scheduling")
_INTERMEDIATE = (*_BASIC, "memory_usage", "data_loading", "validation", "early_stopping")
_ADVANCED = (*_INTERMEDIATE, "forward_pass", "backward_pass", "device_placement", "mixed_precision")
PRESETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "anomaly_detection": ("autograd_anomaly", "forward_pass", "backward_pass"),
    "gradient_checking": ("gradient_norms", "backward_pass"),
    "memory_profiling": ("memory_usage",),
    "performance_profiling": ("autograd_profiler", "data_loading", "memory_usage"),
    "full": SWITCHES,
    "basic": _BASIC,
    "intermediate": _INTERMEDIATE,
    "advanced": _ADVANCED,
    "expert": SWITCHES,
    "extreme": SWITCHES,
}
"""Modes, then levels"""


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Steps between two looks."""

    gradients: int = 100
    memory: int = 50
    performance: int = 10
    profile: int = 1000

    def of(self, switch: str) -> int:
        """Return those of a switch; 0 for one that is torch's own and always on."""
        groups = {
            "memory_usage": self.memory, "data_loading": self.performance, "lr_scheduling": self.performance,
            "early_stopping": self.performance, "autograd_profiler": self.profile, "tensorboard_traces": self.profile,
            "autograd_anomaly": 0, "validation": 1,
        }  # fmt: skip
        return groups.get(switch, self.gradients)


def names_of(wanted: object) -> tuple[str, ...]:
    """Return the switches that a preset's name, a switch's name or a sequence of both means.

    Raises:
        ValueError: a name is unknown.
    """
    words = (wanted,) if isinstance(wanted, str) else tuple(wanted) if isinstance(wanted, (list, tuple, set, frozenset)) else ()
    if not words and wanted not in ((), [], set(), frozenset()):
        raise TypeError(f"switches are names in a list, or the name of a mode or level, not {type(wanted).__name__}")
    chosen = set[str]()
    for word in words:
        if word not in SWITCHES and word not in PRESETS:
            known = ", ".join((*SWITCHES, *PRESETS))
            raise ValueError(f"{word!r} is no switch, mode or level: there are {known}")
        chosen.update(PRESETS.get(str(word), (str(word),)))
    return tuple(name for name in SWITCHES if name in chosen)
