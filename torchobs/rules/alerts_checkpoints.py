"""Alerts about checkpoints that fail, do not come, or never came."""

from __future__ import annotations

from torchobs import catalog
from torchobs.rules.alert_texts import THIS_RUN, Culprits, amount, first
from torchobs.rules.promql import BY_RUN, ONE_RUN, select
from torchobs.rules.recent import name, recent
from torchobs.rules.recordings import ALIVE, CHECKPOINT, FIRST_START
from torchobs.rules.rule_file import Alert, Group
from torchobs.rules.values import DEFAULT, Values

RETRIED = "5m"
"""Whoever saves again after an error has done so by then."""
PAST = "1d"
"""From which a run's own cadence is known: three saves suffice."""


def checkpoints(values: Values = DEFAULT) -> Group:
    """Return the rules."""
    counted = recent(catalog.CHECKPOINTS, born_later=True)
    return Group("torchobs.checkpoints", (counted, _failed(), _overdue(values), _never(values)))


def _failed() -> Alert:
    """Return the alert on saves that raised, and after which none has succeeded: what was saved is looked for as far back."""
    failed, saved = (select(name(catalog.CHECKPOINTS), f'result="{result}"') for result in ("failed", "saved"))
    return Alert(
        alert="TorchobsCheckpointFailed",
        expr=f"""
            max {BY_RUN} (
                {failed} offset {RETRIED} > 0
                unless on ({ONE_RUN})
                max_over_time({saved}[{RETRIED}]) > 0
            )
        """,
        severity="page",
        summary="cannot save its checkpoints.",
        description=(
            f"{amount('save', 'saves')} raised an exception within ten minutes, and none has succeeded since. "
            "If the run ends now, all since the last checkpoint is lost."
        ),
        culprits=Culprits(
            select(name(catalog.CHECKPOINTS), THIS_RUN, 'result="failed"'), amount("failed save", "failed saves", "$v"), "On"
        ),
    )


def _overdue(values: Values) -> Alert:
    """Return the alert: the usual interval is the time between the first and the last of a day's over their number."""
    return Alert(
        alert="TorchobsCheckpointOverdue",
        expr=f"""
            max {BY_RUN} (
                (time() - last_over_time({CHECKPOINT}[{PAST}]))
                > on ({ONE_RUN}) {values.thresholds.checkpoint_cadences:g} * {_usual_s(CHECKPOINT)}
                and on ({ONE_RUN})
                time() - last_over_time({CHECKPOINT}[{PAST}]) > 600
                and on ({ONE_RUN})
                {ALIVE} > 0
            )
        """,
        summary="has saved no checkpoint for {{ $value | humanizeDuration }}.",
        description=(
            f"That is more than {values.thresholds.checkpoint_cadences:g} times its usual interval. If it ends now, all since "
            "then is lost."
            f"{first(_usual_s(select(CHECKPOINT, THIS_RUN)), ' Its usual interval is {{ $v | humanizeDuration }}.')}"
        ),
    )


def _usual_s(saved: str) -> str:
    """Return the usual time between two saves, where three are known."""
    return f"(max_over_time({saved}[{PAST}]) - min_over_time({saved}[{PAST}])) / (changes({saved}[{PAST}]) >= 2)"


def _never(values: Values) -> Alert:
    return Alert(
        alert="TorchobsCheckpointNever",
        expr=f"""
            max {BY_RUN} (
                time() - {FIRST_START} > {values.thresholds.no_checkpoint_s:g}
                and on ({ONE_RUN})
                {ALIVE} > 0
                and on ({ONE_RUN})
                max {BY_RUN} (max_over_time({select(catalog.STEPS)}[5m])) > 0
                unless on ({ONE_RUN})
                last_over_time({CHECKPOINT}[{PAST}]) > 0
            )
        """,
        summary="has never saved a checkpoint.",
        description="It has run for {{ $value | humanizeDuration }}, all of which is lost if it ends now.",
    )
