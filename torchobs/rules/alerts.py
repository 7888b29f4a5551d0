"""The alerts about what a run learns.

Each alert has a runbook in docs/runbooks, and test cases that fire and that do not in tests/rules.
"""

from __future__ import annotations

from math import exp

from torchobs import catalog
from torchobs.detect.spikes import LASTING, LEAST_EXPLOSIONS, LEAST_LOSS_SPIKES, LEAST_NORM_EXCESS
from torchobs.rules.promql import BY_GROUP, BY_RUN, ON_GROUP, ONE_GROUP, ONE_RANK, ONE_RUN, grouped, lasting, select
from torchobs.rules.recordings import ONE_NUMBER, TWINS, name, recent
from torchobs.rules.rule_file import THIS_RUN, WINDOW, Alert, Culprits, Group, amount

DIVERGED = "5m"
"""How long a loss has to be away: a person who tries out a learning rate sees it and ends the run"""
LEAST_NONFINITE_LOSSES = 10
"""So many, and more than half of the steps: the loss stays so. Two suffice if all of the window was."""


_NAN, _EXPLOSIONS, _SPIKES, _VANISHING = (
    select(name(catalog.ANOMALIES), f'kind="{kind}"')
    for kind in ("nonfinite_loss", "gradient_explosion", "loss_spike", "gradient_vanishing")
)
_NAN_NOW, _DIVERGED = (select(catalog.ANOMALY_ACTIVE, f'kind="{kind}"') for kind in ("nonfinite_loss", "diverged"))


def _gradient_explosion() -> Alert:
    """Return one alert per run, however many of its ranks see the same gradient.

    One step that was not finite and skipped, or survived in bfloat16, has happened to many a good run.
    With a loss scaler, non-finite gradients are normal: where it has skipped steps, only skipping most of them is an explosion.
    The maximum over the window is used, not the counter's present value, because that ends with the job.
    """
    nonfinite = select(name(catalog.ANOMALIES), 'kind=~"nonfinite_gradient|nonfinite_loss"')
    skipped = select(catalog.AMP_STEPS_SKIPPED)
    lately, steps = name(catalog.AMP_STEPS_SKIPPED), name(catalog.STEPS)
    expr = f"""
        {_EXPLOSIONS} >= {LEAST_EXPLOSIONS}
      or
        {_SPIKES} >= {LEAST_LOSS_SPIKES}
      or
        {nonfinite} >= {LEAST_EXPLOSIONS}
        unless on ({ONE_RANK})
        max_over_time({skipped}[{WINDOW}]) > 0
      or
        {lately} > @skipped@
        and
        {lately} > 0.5 * {steps}
    """
    return Alert(
        alert="TorchobsGradientExplosion",
        expr=expr,
        summary="has steps with an exploding gradient or loss, or one that is not finite.",
        description=(
            'One of its ranks had {{ printf "%.0f" $value }} steps of one kind in the last 10 minutes; a sound run has few. '
            "Lower the learning rate, clip the gradients, or look at the batches of these steps."
        ),
        culprits=_kinds(),
        also=(
            Culprits(f"{select(lately, THIS_RUN)} > @skipped@", '{{ printf "%.0f" $v }} steps', "Skipped by a loss scaler"),
            Culprits(
                f"{select(catalog.GRAD_LAYER_GROWTH, THIS_RUN)} >= {exp(LEAST_NORM_EXCESS):g}",
                'layer {{ $l.layer }} of rank {{ $l.rank }} whose gradient grew {{ printf "%.3g" $v }} times',
                "Look at",
                named=False,
            ),
        ),
    )


_STEPS_OF_KIND = {
    "gradient_explosion": "whose gradient is far above its past",
    "loss_spike": "whose loss is far above its past",
    "nonfinite_gradient": "whose gradient is NaN or infinite",
    "nonfinite_loss": "whose loss is NaN or infinite",
}
"""Words for the anomalous steps of each kind; layers are named only where their own gradients grew."""


def _kinds() -> Culprits:
    """Return the number of steps of each kind, on the rank with most."""
    of_kind = 'kind=~"{}"'.format("|".join(_STEPS_OF_KIND))
    words = "{{ else ".join(f'if eq $l.kind "{kind}" }}}}{words}' for kind, words in _STEPS_OF_KIND.items())
    return Culprits(
        f"max by ({ONE_RUN}, kind) ({select(name(catalog.ANOMALIES), THIS_RUN, of_kind)})",
        f'{{{{ printf "%.0f" $v }}}} {{{{ {words}{{{{ end }}}}',
        "By kind",
        named=False,
    )


def _ranks_disagree() -> Alert:
    """Return the alert on what must be equal on all ranks of a replica group: learning rate, world size, versions of torch.

    And on living ranks of one number that all train: separate runs without a difference in their labels.
    """
    rates = select(catalog.LEARNING_RATE)
    lowest, highest = (grouped(f"({of}_over_time({rates}[{WINDOW}]) and {rates} offset {WINDOW})") for of in ("min", "max"))
    training = f"count by ({ONE_NUMBER}) (rate({select(catalog.STEPS)}[5m]) > 0)"
    of_group = f"by ({ONE_GROUP}, group)"
    sizes, infos = grouped(select(catalog.DISTRIBUTED_WORLD_SIZE)), grouped(select(catalog.RANK_INFO))
    return Alert(
        alert="TorchobsRanksDisagree",
        expr=f"""
            min {of_group} ({highest}) > 0
            and
            min {of_group} ({highest}) < 0.9 * max {of_group} ({lowest})
          or
            max {BY_GROUP} ({sizes}) != min {BY_GROUP} ({sizes})
          or
            count {BY_GROUP} (count by ({ONE_GROUP}, torch_version) ({infos})) > 1
          or
            max {BY_RUN} (
                {lasting(TWINS, "> 1", WINDOW, ONE_NUMBER)}
                and on ({ONE_NUMBER}) {training} > 1
            )
        """,
        summary="has ranks that do not train the same model.",
        description=(
            "Their learning rates have differed by more than 10 % for 10 minutes, or their world sizes or versions of torch "
            "differ, or several ranks with the same number train at once. Restart all of them with one configuration."
        ),
        culprits=Culprits(_extremes(), '{{ printf "%.3g" $v }} in group {{ $l.group }}', "Learning rates are"),
        also=(
            _differing("torch_version", select(catalog.RANK_INFO, THIS_RUN), "torch"),
            _differing("size", select(catalog.DISTRIBUTED_WORLD_SIZE, THIS_RUN), "a world of", of_value=True),
            Culprits(select(TWINS, THIS_RUN), '{{ printf "%.0f" $v }} ranks {{ $l.rank }}', "At once there are", named=False),
        ),
    )


def _extremes() -> str:
    """Return the highest and the lowest learning rate of each group in which they differ."""
    rates, of = grouped(select(catalog.LEARNING_RATE, THIS_RUN)), f"by ({ONE_GROUP}, group)"
    apart = f"min {of} ({rates}) < 0.9 * max {of} ({rates})"
    return f"(topk {of} (1, {rates}) or bottomk {of} (1, {rates})) and on ({ONE_GROUP}, group) ({apart})"


def _differing(label: str, ranks: str, what: str, *, of_value: bool = False) -> Culprits:
    """Return the number of a group's ranks with each value of a label (or of the series), where there are several values."""
    series = grouped(ranks)
    counts = f'count_values {BY_GROUP} ("{label}", {series})' if of_value else f"count by ({ONE_GROUP}, {label}) ({series})"
    show = f"{amount('rank', 'ranks', '$v')} with {what} {{{{ $l.{label} }}}}"
    return Culprits(f"{counts} unless {ON_GROUP} (count {BY_GROUP} ({counts}) == 1)", show, "There are", named=False)


ANOMALIES = Group(
    "torchobs.anomalies",
    (
        *map(recent, (catalog.ANOMALIES, catalog.AMP_STEPS_SKIPPED)),
        recent(catalog.STEPS, moves=True),
        Alert(
            "TorchobsLossNotFinite",
            f"""
            {_NAN} >= {LEAST_NONFINITE_LOSSES}
            and on ({ONE_RANK})
            {_NAN} > on ({ONE_RANK}) 0.5 * {name(catalog.STEPS)}
          or
            {_NAN} > 1.5 and on ({ONE_RANK}) {lasting(_NAN_NOW, "== 1", WINDOW, ONE_RANK)}
            """,
            "trains on with a loss that is NaN or infinite.",
            'In the last 10 minutes {{ printf "%.0f" $value }} steps, more than half, had a loss that is NaN or infinite; no '
            "step of a sound run has. Unless a loss scaler skipped them, the weights are lost: go back to the last checkpoint "
            "before them.",
            "page",
            culprits=Culprits(_NAN.replace("{", f"{{{THIS_RUN}, "), '{{ printf "%.0f" $v }} losses', "Most on"),
        ),
        # a loss that stays far above that of the untrained model, and is finite
        Alert(
            "TorchobsLossDiverged",
            f"count {BY_RUN} ({lasting(_DIVERGED, '== 1', DIVERGED, ONE_RANK)} and on ({ONE_RANK}) {_DIVERGED} == 1)",
            "diverged in its first steps.",
            'On {{ printf "%.0f" $value }} of its ranks the loss rose to ten times its first value, and has stayed there for 5 '
            "minutes. Lower the learning rate or lengthen its warm-up, and check that the loss is computed as meant.",
            culprits=Culprits(
                select(catalog.LOSS, THIS_RUN), 'rank {{ $l.rank }} with a loss of {{ printf "%.3g" $v }}', "Now", named=False
            ),
        ),
        _gradient_explosion(),
        # one verdict suffices, because each needs several measured steps in a row, or a hundred steps
        Alert(
            "TorchobsGradientVanishing",
            f"""
            {_VANISHING} >= {LASTING}
          or
            {select(catalog.GRAD_UNMOVED_LAYERS)} > 0
            """,
            "learns nothing, or parts of its model learn nothing.",
            "Its gradient was close to zero in steps of the last 10 minutes, or layers have weights that do not change. Look "
            "for a detached graph, dead units, or saturated activations.",
            culprits=Culprits(
                _VANISHING.replace("{", f"{{{THIS_RUN}, "), amount("step", "steps", "$v"), "With a gradient close to zero"
            ),
            also=(
                Culprits(
                    f"{select(catalog.GRAD_UNMOVED_LAYERS, THIS_RUN)} > 0", amount("layer", "layers", "$v"), "Without a change"
                ),
                Culprits(
                    f"bottomk(3, {select(catalog.GRAD_LAYER_NORM, THIS_RUN)})",
                    'layer {{ $l.layer }} of rank {{ $l.rank }} with a gradient norm of {{ printf "%.3g" $v }}',
                    "Smallest at present",
                    named=False,
                ),
            ),
        ),
    ),
)
DISAGREEMENT = Group("torchobs.disagreement", (_ranks_disagree(),))
"""Ranks that differ; evaluated beside the others"""
