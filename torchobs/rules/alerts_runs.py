"""The alerts about runs and ranks: down, hung, crashing, slow, without checkpoints."""

from __future__ import annotations

from torchobs import catalog
from torchobs.detect.speed import LEAST_EXCESS_S, SLOW
from torchobs.ranks.state import FIRST_STEP_S, UNRESPONSIVE_S
from torchobs.rules import recordings as recorded
from torchobs.rules.promql import (
    BY_GROUP,
    BY_RANK,
    BY_RUN,
    ON_GROUP,
    ONE_GROUP,
    ONE_RANK,
    ONE_RUN,
    grouped,
    lasting,
    select,
)
from torchobs.rules.recordings import gone, name, recent
from torchobs.rules.rule_file import (
    AT,
    DURATION,
    SEEN,
    SHARE,
    THIS_RUN,
    TIMES,
    WINDOW,
    Alert,
    Culprits,
    Group,
    Recording,
    amount,
    first,
)

WAITS_S = 1800
"""Default timeout of torch.distributed's process groups with gloo: after it, a peer's evaluation explains no wait."""
UNRESPONSIVE = f"{UNRESPONSIVE_S / 60:g}m"
HUNG_RUN = "5m"
STUCK = "run:torchobs_rank_state:stuck"
ABSENT = "10m"
WATCHED = "3m"
"""After its own downtime Prometheus has no living rank until it has scraped and evaluated again: by default a minute each"""
LOOP = "15m"
"""Kubernetes' back-off gives a pod five restarts in this time, torchrun any number"""
BURNS = (("6h", "30m", 2.0), ("1d", "2h", 1.0))
"""Long and short window, and how many times as fast as allowed the budget of lost time is used up in both"""
_SLOW = f"{select(recorded.SLOWDOWN, THIS_RUN)} > {SLOW:g}"
LEAST_SHARE = 0.05
"""Smaller shares of the time are left out."""
IDLE_S, IDLE_WITHIN = 60, "15m"
"""A pause outside of the training loop counts in the step that follows it. A shorter one makes the steps of ten minutes at most
a tenth longer. The pause may lie before those ten minutes, because it was counted before that step ended."""
RETRIED = "5m"
"""A script that saves again after an error has done so by then."""
PAST = "1d"
"""Time over which a run's own cadence is measured: three saves suffice."""


def _survivors() -> str:
    """Return a sentence about the living ranks of a group in which one has failed, and was not started again."""
    up, failed = grouped(select(catalog.RANK_UP, THIS_RUN)), grouped(gone(recorded.FAULTS, THIS_RUN))
    living = f"sum {BY_RUN} ({up} and {ON_GROUP} {failed}) > 0"
    live = amount("other rank lives", "other ranks live", "$v")
    return first(living, f" {live}: a collective that needs all of them waits until it times out.")


def _stuck() -> str:
    """Return ranks that hang or have not answered all the time, by their time without a step.

    Ranks in a phase that may last are not hung, nor ranks that wait for the evaluation of another rank of their replica group,
    even on another machine. Before its first step a rank may load a model, with Python's lock held, for as long as the exporter
    allows.
    """
    age, steps = select(catalog.RANK_PROGRESS_AGE), select(catalog.STEPS)
    hung, silent, others = (
        select(catalog.RANK_STATE_SET, f"state{which}") for which in ('="hung"', '="unresponsive"', '!="unresponsive"')
    )
    aside = select(catalog.GOODPUT_TIME, 'state=~"evaluation|checkpoint|compile"')
    return f"""
        {age} and on ({ONE_RANK}) (
            (
                {hung} == 1
              unless on ({ONE_RANK}) (
                  {grouped(f"{age} < {WAITS_S}")}
                and {ON_GROUP}
                  sum {BY_GROUP} ({grouped(f"rate({aside}[2m])")}) > 0
              )
            )
          or
            ({lasting(silent, "== 1", UNRESPONSIVE, ONE_RANK)}
            unless on ({ONE_RANK}) max_over_time({others}[{UNRESPONSIVE}]) == 1)
            and on ({ONE_RANK}) {age} > {UNRESPONSIVE[:-1]} * 60
            and on ({ONE_RANK}) (max_over_time({steps}[{UNRESPONSIVE}]) > 0 or {age} > {FIRST_STEP_S:g})
        )"""


_BEST = f"last_over_time({select(recorded.RUN_STEP_BEST, THIS_RUN)}[{recorded.GONE}])"
_USUAL_STEP = first(_BEST, " A step takes {{ $v | humanizeDuration }} at best.")


def _faults(range_: str) -> Culprits:
    """Return the ranks that failed, with the exception that ended them, else with the reason of their end."""
    matchers = (f'reason=~"{reasons}"' for reasons in (recorded.FAULTS, "exception"))
    exits, raised = (f"max_over_time({select(catalog.RANK_EXIT, THIS_RUN, matcher)}[{range_}])" for matcher in matchers)
    exceptions = f"topk by ({ONE_RANK}) (1, max_over_time({select(catalog.RANK_EXCEPTION, THIS_RUN)}[{range_}]))"
    explained = f"{raised} * on ({ONE_RANK}) group_left (exception_type, message, location) {exceptions}"
    show = (
        "{{ with $l.exception_type }}{{ . }}{{ with $l.message }}: {{ . }}{{ end }}{{ with $l.location }} ({{ . }}){{ end }}"
        "{{ else }}{{ $l.reason }}{{ end }}"
    )
    return Culprits(f"({explained} or on ({ONE_RANK}, reason) {exits})", show, "Among them")


_ENDS = Culprits(
    f"count by ({ONE_RUN}, reason) (max_over_time({select(catalog.RANK_EXIT, THIS_RUN)}[{recorded.GONE}]) == 1)",
    '{{ printf "%.0f" $v }} {{ $l.reason }}',
    "All ends",
    named=False,
)
"""Ends by reason: where one rank was terminated, its node may be drained, which made others fail."""


def _absent() -> str:
    """Return how many collectives a rank that waits in none is behind (:mod:`torchobs.detect.hangs`)."""
    called, back = (select(metric, THIS_RUN) for metric in (catalog.COLLECTIVE_ENQUEUED, catalog.COLLECTIVE_COMPLETED))
    group = "backend, group"
    waiting = f"{back} < on ({ONE_RANK}, {group}) {called}"
    waited_for = f"min by ({ONE_GROUP}, {group}) ({grouped(waiting)}) + 1"
    behind = f"({waited_for} - on ({ONE_GROUP}, {group}) group_right () {grouped(called)}) > 0"
    return f"{behind} unless on ({ONE_RANK}) ({waiting})"


_BEHIND = Culprits(select(catalog.RANK_PROGRESS_AGE, THIS_RUN), DURATION, "Longest without a step")
_NOT_ARRIVED = Culprits(
    _absent(), '{{ printf "%.0f" $v }} behind in group {{ $l.group }}', "Did not come to a collective in which others wait"
)


def _waited_for() -> Culprits:
    """Return the ranks of a hung run that are behind the furthest of their group and not where most of them are.

    None where torch's flight recorder shows the ranks that did not come to a collective.
    """
    place = grouped(select(catalog.RANK_STALL_POSITION, THIS_RUN))
    alike = f"count by ({ONE_GROUP}, phase) ({place})"
    most = f"{alike} > {ON_GROUP} group_left () (0.5 * count {BY_GROUP} ({place}))"
    behind = f"(max {BY_GROUP} ({place}) - {ON_GROUP} group_right () {place}) > 0"
    likely = f"{behind} unless on ({ONE_GROUP}, phase) ({most}) unless {ON_GROUP} ({_absent()})"
    return Culprits(likely, "in {{ $l.phase }}", "The others likely wait for")


def _lived(within: str = "@lived_within_s@s") -> str:
    """Return the condition that a run lived for some minutes ``within`` a time, by default its last hour.

    A shorter run has lost no time: a person who tries out a script sees it crash, and Kubernetes tries a Job with a mistake
    seven times by default. The window is longer than that for failures by as much, so that the latter ends the alert.
    """
    return f"60 * sum_over_time(({recorded.ALIVE} > bool 0)[{within}:1m]) >= @lived_s@"


def _crash_loop() -> Alert:
    """Return the alert. A pod that was replaced has another instance and a count of 0, so the start of its rank counts, too.

    After a rank that finished, or was stopped by hand, a person or a sweep starts the next one. And a rank that starts beside
    another of its number is a training of its own, such as a replica of a StatefulSet.
    """
    counted = f"increase({select(catalog.RANK_RESTARTS)}[{LOOP}])"
    ended = select(catalog.RANK_EXIT, 'reason=~"finished|interrupted"')
    return Alert(
        alert="TorchobsCrashLoop",
        expr=f"""
            (
                max {BY_RUN} ({counted}) >= @restarts@
              or
                max {BY_RUN} (
                    changes({recorded.STARTED}[{LOOP}])
                    unless on ({recorded.ONE_NUMBER}) max by ({recorded.ONE_NUMBER}) (max_over_time({ended}[{LOOP}])) == 1
                    unless on ({recorded.ONE_NUMBER}) max_over_time({recorded.TWINS}[{LOOP}]) > 1
                ) >= @restarts@
            )
            and on ({ONE_RUN})
            {_lived()}
        """,
        severity="page",
        summary="keeps crashing.",
        description=(
            f"It was restarted {amount('time', 'times')} in the last 15 minutes, and each restart repeats the work since the "
            "last checkpoint. Stop it until the cause is fixed."
        ),
        culprits=_faults(LOOP),
    )


def _slowdown() -> Alert:
    """Return the alert; the baseline is the run's best ten minutes, which begin anew with another model (the next fold).

    A notebook that was paused has not become slow.
    """
    idle = select(catalog.GOODPUT_TIME, 'state="idle"')
    means = f"avg by ({ONE_RUN}, phase) ({select(recorded.PHASE_MEAN, THIS_RUN)})"
    phases = f"{means} / on ({ONE_RUN}) group_left () sum {BY_RUN} ({means})"
    return Alert(
        alert="TorchobsSlowdown",
        expr=f"""
            {recorded.RUN_STEP_MEAN} / on ({ONE_RUN}) {recorded.RUN_STEP_BEST} > @slower@
            unless on ({ONE_RUN})
            increase({idle}[{IDLE_WITHIN}]) > {IDLE_S}
        """,
        summary="has become slower.",
        description=(
            'In the last 10 minutes a step took {{ printf "%.1f" $value }} times as long as in the run\'s best 10 minutes, '
            "without evaluation, checkpoints and compilation."
            f"{first(select(recorded.RUN_STEP_MEAN, THIS_RUN), ' It takes {{ $v | humanizeDuration }}')}"
            f"{first(select(recorded.RUN_STEP_BEST, THIS_RUN), ', at best {{ $v | humanizeDuration }}.')}"
        ),
        culprits=Culprits(_SLOW, TIMES, "Slowest, for which the others wait"),
        also=(Culprits(f"{phases} > {LEAST_SHARE:g}", f"{SHARE} {{{{ $l.phase }}}}", "A step's time now is", named=False),),
    )


def _late() -> Culprits:
    """Return the phases in which slow ranks are late: on one machine by its exporter, on several as recorded."""
    late = select(recorded.ABOVE, THIS_RUN, f'phase=~"{"|".join(catalog.LATE_PHASES)}"')
    phases = f"max by ({ONE_RANK}, phase) ({late} or {select(catalog.RANK_EXCESS, THIS_RUN)}) > {LEAST_EXCESS_S:g}"
    return Culprits(f"{phases} and on ({ONE_RANK}) {_SLOW}", f"{DURATION} a step in {{{{ $l.phase }}}}", "Late")


def _data() -> Alert:
    def waits(*matchers: str) -> str:
        data, all_phases = (select(catalog.STEP_PHASE_TIME, *matchers, *more) for more in (('phase="data"',), ()))
        share = f"sum {BY_RANK} (rate({data}[{WINDOW}])) / sum {BY_RANK} (rate({all_phases}[{WINDOW}]) > 0)"
        return f"{share} and on ({ONE_RANK}) min_over_time({select(catalog.DATA_STARVED, *matchers)}[{WINDOW}]) == 1"

    return Alert(
        alert="TorchobsDataStarvation",
        expr=f"{waits()} and on ({ONE_RANK}) time() - {select(catalog.RANK_START_TIME)} > 600",
        summary="waits for data.",
        description=(
            "One of its ranks spends {{ $value | humanizePercentage }} of its training time waiting for batches; less than 20 "
            "% is usual. Give the data loader more workers, or make loading a batch cheaper."
        ),
        culprits=Culprits(waits(THIS_RUN), SHARE),
    )


def _goodput() -> Alert:
    """Return the alert: the budget of lost time is used up faster than allowed over a long and a short window.

    A run that never trains (it serves a model, or only evaluates one) has no such objective, and a script that failed at once,
    and was given up, holds no machine. One that fails again and again does, and may wait for long in between: its life in the
    whole day counts.
    """
    used, states = (
        f"avg_over_time({select(recorded.RUN_GOODPUT_RATE, THIS_RUN, *more)}[{BURNS[0][0]}])"
        for more in ((), ('state!="productive"',))
    )
    lost = [
        f"""
            (1 - avg_over_time({recorded.GOODPUT_NOW}[{long}])) / @lost@ > {burn:g}
            and on ({ONE_RUN}) (1 - avg_over_time({recorded.GOODPUT_NOW}[{short}])) / @lost@ > {burn:g}
            and on ({ONE_RUN}) {recorded.GOODPUT_NOW} offset {short} >= 0
            and on ({ONE_RUN}) {recorded.GOODPUT_NOW} >= 0"""
        for long, short, burn in BURNS
    ]
    either, day = "\n          or".join(lost), BURNS[-1][0]
    return Alert(
        alert="TorchobsGoodputLow",
        expr=f"""
          ({either})
          and on ({ONE_RUN}) max_over_time({recorded.GOODPUT_NOW}[{day}]) > 0
          and on ({ONE_RUN}) {_lived(day)}
        """,
        summary="makes poor use of its machines.",
        description=(
            'It loses machine time {{ $value | printf "%.0f" }} times as fast as the objective of '
            "@goodput_percent@% productive time allows: to restarts, time without a rank, waiting, evaluation or compilation."
        ),
        culprits=Culprits(
            f"{states} / on ({ONE_RUN}) group_left () sum {BY_RUN} ({used}) > {LEAST_SHARE:g}",
            f"{SHARE} {{{{ $l.state }}}}",
            f"Of its ranks' time of the last {BURNS[0][0]}",
            named=False,
        ),
    )


def _checkpoints_failed() -> Alert:
    """Return the alert on saves that raised, and after which none has succeeded, in a window as long as that of the failures.

    A window of Prometheus 3 lacks its first moment, which is that of the failures.
    """
    failed, saved = (select(name(catalog.CHECKPOINTS), f'result="{result}"') for result in ("failed", "saved"))
    return Alert(
        alert="TorchobsCheckpointFailed",
        expr=f"""
            {failed} offset {RETRIED} > 0
            unless on ({ONE_RUN})
            (max_over_time({saved}[{RETRIED}]) > 0 or {saved} offset {RETRIED} > 0)
        """,
        severity="page",
        summary="cannot save its checkpoints.",
        description=(
            f"{amount('save', 'saves')} raised an exception within ten minutes, and none has succeeded since. If the run ends "
            "now, all work since the last checkpoint is lost: check the space and the permissions where it saves."
        ),
        culprits=Culprits(
            select(name(catalog.CHECKPOINTS), THIS_RUN, 'result="failed"'), amount("failed save", "failed saves", "$v"), "On"
        ),
    )


def _usual_s(saved: str) -> str:
    """Return the usual time between two saves, where three are known."""
    return f"(max_over_time({saved}[{PAST}]) - min_over_time({saved}[{PAST}])) / (changes({saved}[{PAST}]) >= 2)"


RANKS = Group(
    "torchobs.ranks",
    (
        # without ranks that Ctrl-C or SIGTERM ended: somebody wanted that
        Alert(
            "TorchobsRankFailed",
            f"""count {BY_RUN} (max_over_time({select(catalog.RANK_EXIT, f'reason=~"{recorded.FAULTS}"')}[{SEEN}]) == 1)""",
            "has lost a rank.",
            '{{ printf "%.0f" $value }} of its ranks ended with an exception or an exit code, crashed, or were killed (most '
            f"often because memory ran out). `torchobs inspect` on their machine has the details.{_survivors()}",
            culprits=_faults(SEEN),
        ),
        # a run that failed, has not come back, and was not ended by a signal
        Alert(
            "TorchobsRunDown",
            f"""
            last_over_time({recorded.FAILED}[{recorded.GONE}]) > 0
            and on ({ONE_RUN})
            {_lived()}
            unless on ({ONE_RUN})
            max_over_time({recorded.ALIVE}[{ABSENT}]) > 0
            """,
            "is down.",
            'No rank has been alive for ten minutes: {{ printf "%.0f" $value }} failed, the run has not finished, and nothing '
            "has restarted it. Look at how the first one ended, then restart from the last checkpoint.",
            "page",
            culprits=_faults(recorded.GONE),
            also=(_ENDS,),
            wait=WATCHED,
        ),
        _crash_loop(),
        Alert(
            "TorchobsRanksMissing",
            lasting(recorded.MISSING, "> 0", ABSENT, ONE_RUN),
            "is missing ranks.",
            f"{amount('of its ranks has', 'of its ranks have')} not been seen for ten minutes, while others are alive: never "
            "started, or behind an exporter that does not answer. Check the machines that are not listed here.",
            culprits=Culprits(
                f"count by ({ONE_RUN}, instance, pod) ({select(catalog.RANK_UP, THIS_RUN)} == 1)",
                f'{{{{ printf "%.0f" $v }}}} at {AT}',
                "Ranks seen",
                named=False,
            ),
        ),
        Alert(
            "TorchobsTelemetryGone",
            f"""
            last_over_time({recorded.ALIVE}[{recorded.GONE}]) > 0
            unless on ({ONE_RUN})
            max_over_time({recorded.ALIVE}[{ABSENT}]) > 0
            unless on ({ONE_RUN})
            last_over_time({recorded.LEFT}[{recorded.GONE}]) > 0
            """,
            "is no longer seen.",
            f"When it was last scraped, {amount('of its ranks was', 'of its ranks were')} alive, and none has reported its "
            "end. Either the machines are gone, or Prometheus does not reach the exporters: look at its targets first.",
            wait=WATCHED,
        ),
    ),
)
"""Ranks and runs that are not there"""

HUNG = Group(
    "torchobs.hung",
    (
        # recorded, since two alerts query it; 0 where no rank hangs, so that the series has no gaps
        Recording(STUCK, f"count {BY_RUN} ({_stuck()}\n) or 0 * sum {BY_RUN} ({select(catalog.RANK_UP)})"),
        # the exporter's state *hung*: no step for 20 times the 99th percentile, at least a minute
        Alert(
            "TorchobsRankHung",
            f"{STUCK} > 0",
            "has ranks that make no progress.",
            f"{amount('of its ranks is alive and has', 'of its ranks are alive and have')} finished no step for far longer "
            f"than one usually takes. `torchobs stacks` shows where they stand.{_USUAL_STEP}",
            culprits=_BEHIND,
            also=(_NOT_ARRIVED, _waited_for()),
        ),
        Alert(
            "TorchobsRunHung",
            f"""
            min {BY_RUN} ({select(catalog.RANK_PROGRESS_AGE)}) > {HUNG_RUN[:-1]} * 60
            and on ({ONE_RUN}) {lasting(STUCK, "> 0", HUNG_RUN, ONE_RUN)}
            """,
            "has stood still for {{ $value | humanizeDuration }}.",
            "No rank has finished a step for {{ $value | humanizeDuration }}, and at least one has been hung for five minutes. "
            f"Most such runs do not go on by themselves: look at the stacks, then restart it.{_USUAL_STEP}",
            "page",
            culprits=_BEHIND,
            also=(_NOT_ARRIVED, _waited_for()),
        ),
    ),
)
"""Ranks without progress; a group of their own, for these are the most expensive rules"""

SPEED = Group(
    "torchobs.slow",
    (
        _slowdown(),
        # a rank that the others wait for, on whatever machines they are
        Alert(
            "TorchobsStraggler",
            f"{recorded.SLOWDOWN} > @straggler@ and on ({ONE_RANK}) {recorded.EXCESS} > {LEAST_EXCESS_S:g}",
            "waits for one of its ranks.",
            'In the last 10 minutes a step took {{ printf "%.1f" $value }} times as long as it would if no rank waited for the '
            "slowest one. Compare it with the others: its data, its machine's clocks and processes, what it alone does.",
            culprits=Culprits(_SLOW, TIMES, "Slowest"),
            also=(_late(),),
        ),
        _data(),
        Alert(
            "TorchobsCpuThrottled",
            f"rate({select(catalog.CGROUP_CPU_THROTTLED_PERIODS)}[{WINDOW}]) "
            f"/ (rate({select(catalog.CGROUP_CPU_PERIODS)}[{WINDOW}]) > 0) > @cpu_throttled@",
            "is throttled by its CPU limit.",
            "In {{ $value | humanizePercentage }} of the quota's periods of the last 10 minutes a container was stopped. Raise "
            "its CPU limit, or use fewer workers and threads.",
            culprits=Culprits(
                f"rate({select(catalog.CGROUP_CPU_THROTTLED_TIME, THIS_RUN)}[{WINDOW}])",
                f"{AT}, whose threads lost {{{{ $v | humanizeDuration }}}} each second",
                "Most",
                named=False,
            ),
        ),
        _goodput(),
    ),
)
"""Steps and machines"""

COMPILATION = Group(
    "torchobs.compile",
    (
        recent(catalog.COMPILE_RECOMPILES, born_later=True),
        recent(catalog.COMPILE_FAILURES, 'reason="recompile_limit"', born_later=True),
        # also on functions at the recompile limit: they run uncompiled, and only a counter shows it
        Alert(
            "TorchobsRecompileStorm",
            f"""
            {name(catalog.COMPILE_FAILURES)} > 0
          or
            sum {BY_RANK} ({name(catalog.COMPILE_RECOMPILES)}) > @recompiles@
            """,
            "recompiles too often.",
            "In the last 10 minutes one of its ranks recompiled more than @recompiles@ times, or torch.compile gave up on a "
            "function, which runs uncompiled now. Mark what changes as dynamic, or pad it.",
            culprits=Culprits(
                f"max by ({ONE_RUN}, guard) ({select(name(catalog.COMPILE_RECOMPILES), THIS_RUN)})",
                '{{ printf "%.0f" $v }} by a guard of kind {{ $l.guard }}',
                "Most",
                named=False,
            ),
            also=(Culprits(select(name(catalog.COMPILE_FAILURES), THIS_RUN), amount("time", "times", "$v"), "Given up by"),),
        ),
    ),
)
"""Recompilation, by itself: there is a series for each guard of each rank"""

CHECKPOINTS = Group(
    "torchobs.checkpoints",
    (
        recent(catalog.CHECKPOINTS, born_later=True),
        _checkpoints_failed(),
        # the usual interval is the time between the first and the last of a day's over their number
        Alert(
            "TorchobsCheckpointOverdue",
            f"""
            (time() - last_over_time({recorded.CHECKPOINT}[{PAST}]))
            > on ({ONE_RUN}) @checkpoint_cadences@ * {_usual_s(recorded.CHECKPOINT)}
            and on ({ONE_RUN})
            time() - last_over_time({recorded.CHECKPOINT}[{PAST}]) > 600
            and on ({ONE_RUN})
            {recorded.ALIVE} > 0
            unless on ({ONE_RUN})
            max {BY_RUN} (increase({select(catalog.STEPS)}[{SEEN}])) == 0
            """,
            "has saved no checkpoint for {{ $value | humanizeDuration }}.",
            "That is more than @checkpoint_cadences@ times its usual interval. If it ends now, all work since then is lost."
            f"{first(_usual_s(select(recorded.CHECKPOINT, THIS_RUN)), ' Its usual interval is {{ $v | humanizeDuration }}.')}",
        ),
        Alert(
            "TorchobsCheckpointNever",
            f"""
            time() - {recorded.FIRST_START} > @no_checkpoint_s@
            and on ({ONE_RUN})
            {recorded.ALIVE} > 0
            and on ({ONE_RUN})
            max {BY_RUN} (max_over_time({select(catalog.STEPS)}[5m])) > 0
            unless on ({ONE_RUN})
            last_over_time({recorded.CHECKPOINT}[{PAST}]) > 0
            """,
            "has never saved a checkpoint.",
            "It has run for {{ $value | humanizeDuration }}, all of which is lost if it ends now: save one in between.",
        ),
    ),
)
