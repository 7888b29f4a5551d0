"""Health of a run in a sentence or two, and the findings behind it. Pure: status in, text out.

The live page, ``torchobs top``, ``torchobs inspect`` and the summary of ``torchobs run`` all use these texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from torchobs import catalog
from torchobs.catalog import PHASES, Severity
from torchobs.catalog.findings import Finding, finding
from torchobs.detect.disagreement import differing, drifted, same_batches
from torchobs.detect.hangs import PATIENT_PHASES
from torchobs.detect.learning import NEGLIGIBLE, ZeroRate, is_stuck
from torchobs.detect.spikes import LEAST_EXPLOSIONS, LEAST_LOSS_SPIKES
from torchobs.diagnosis import hangs, text_format
from torchobs.diagnosis.status import WORKER_DIED, RankStatus, RunStatus, StuckLayers
from torchobs.ranks import labels

AT_WORK = {"evaluation": "Evaluating", "checkpoint": "Saving a checkpoint", "compile": "Compiling", "idle": "Idle"}
ENDINGS = {
    "exception": "failed{ago} with an exception",
    "exit_code": "failed{ago} with an exit status",
    "interrupted": "was interrupted{ago}",
    "terminated": "was told to end{ago}",
    "crashed": "crashed{ago}",
    "out_of_memory": "was lost{ago}, likely out of memory",
}
ANOMALIES = {
    "nonfinite_loss": "The loss is not finite",
    "nonfinite_gradient": "Gradients are not finite",
    "gradient_explosion": "Gradients explode",
    "loss_spike": "The loss has jumped",
    "gradient_vanishing": "Gradients vanish",
    "diverged": "The loss has diverged: it left its start for good in the first steps",
}
PAST = {
    "nonfinite_loss": ("loss that was not finite", "losses that were not finite"),
    "nonfinite_gradient": ("gradient that was not finite", "gradients that were not finite"),
    "gradient_explosion": ("gradient explosion", "gradient explosions"),
    "loss_spike": ("loss spike", "loss spikes"),
    "gradient_vanishing": ("vanishing gradient", "vanishing gradients"),
    "diverged": ("loss that diverged", "losses that diverged"),
}
STUCK = {
    "cut_off": "no gradient reaches {them}",
    "vanishing": "only a tiny gradient reaches {them}",
    "dead_units": "only zeros come into {them}, from dead units",
    "no_gradient": "the optimizer gets no gradient for {them}",
}
"""Why layers learn nothing"""
MISTAKES = {
    "gradients_kept": "Gradients are never set to zero (optimizer.zero_grad()).",
    "evaluation_mode": "It trains in evaluation mode: model.train() is not called again.",
    "never_stepped": "The optimizer never steps.",
    "losses_kept": "Losses are kept with their graphs.",
    "same_order": "Each epoch has the same order: sampler.set_epoch() is not called.",
    "clipped_late": "Gradients are clipped after the optimizer's step, which has used them.",
    "left_out": "Parameters get gradients and are in no optimizer that steps: nothing is learned there.",
    "scheduler_before_optimizer": "A learning-rate scheduler is stepped before its optimizer's first step.",
    "scheduler_never_stepped": "A learning-rate scheduler is never stepped: the rate does not follow it.",
    "scheduler_idle_optimizer": "A learning-rate scheduler is stepped whose optimizer does not step.",
}
"""What ``loop_mistakes`` says at more length, and ``numerics`` of schedulers"""
UNTIL_A_STEP = frozenset({"never_stepped"})
"""Those of a run without a step: a first one may come after hundreds of micro-batches"""


ERROR, WARNING, INFO = "error", "warning", "info"
LEVELS = {INFO: Severity.INFO, WARNING: Severity.WARNING, ERROR: Severity.ERROR}
BADGES = {Severity.INFO: "All well", Severity.WARNING: "Worth a look", Severity.ERROR: "Trouble"}

_MOST_NAMED = 4
_NOW_S = 1.5
"""Page and terminal are updated every second"""
LEAST_NOTABLE = {"gradient_explosion": LEAST_EXPLOSIONS, "loss_spike": LEAST_LOSS_SPIKES}
"""Least number of past anomalies that is reported, as for the alert; one for the other kinds."""


def stated(severity: str, kind: str, text: str, gist: str = "") -> Finding:
    """Return a finding in these words; ``gist``: without figures that change all the time, if it has any."""
    return finding(kind, severity=LEVELS[severity], text=text, gist=gist or text)


class Health(NamedTuple):
    """Text and severity of a run's health."""

    level: Severity
    text: str
    gist: str
    """the same without figures that change all the time, for screen readers to announce"""
    headline: str = ""
    """the first sentence"""


def health(run: RunStatus) -> Health:
    """Return the health of a run."""
    head = headline(run)
    found = [head, *findings(run)]
    level = max((LEVELS[one.severity] for one in found), key=lambda level: level.value)
    return Health(level, " ".join(one.long for one in found), " ".join(one.short for one in found), head.long)


def findings(run: RunStatus) -> list[Finding]:
    """Return the findings on a run, the worst first."""
    return sorted(_findings(run.ranks, run.expected), key=lambda one: -LEVELS[one.severity].value)


def headline(run: RunStatus) -> Finding:
    """Return the run's progress, that it makes none, or how it ended: ranks, step, loss, speed."""
    up = [rank for rank in run.ranks if rank.up]
    if not up:
        word, ranks = _end(run.ranks), text_format.plural(len(run.ranks), "rank")
        known = ", ".join(filter(None, [ranks, _steps_done(run), _loss(run, "last loss")]))
        return stated(INFO, "headline", f"{word}: {known}.", f"{word}.")
    alive = [rank for rank in up if rank.state != "unresponsive"]
    still = standing_still(run)
    word = _activity(run, alive) if any(rank.recorded for rank in alive) else "Not recorded" if alive else "Not responding"
    word, gist, severity = _no_step(still, alive) if still and word != "Hanging" else (word, word, INFO)
    here = "" if run.world_size <= run.expected else f" on this node, {run.world_size:,} in all"
    ranks = f"{len(alive):,} of {text_format.plural(run.expected, 'rank')} alive{here}"
    speeds = [rank.per_s for rank in alive if rank.per_s]
    speed = text_format.rate(min(speeds), "steps") if speeds and run.steps and not still else ""
    step = f"step {run.steps:,}" if run.steps else "no step yet"
    known = ", ".join(filter(None, [ranks, step, _loss(run, "loss"), speed]))
    return stated(severity, "headline", f"{word}: {known}.", f"{gist}, {ranks}.")


def _end(ranks: Sequence[RankStatus]) -> str:
    if all(rank.state == "finished" for rank in ranks):
        return "Finished"
    if _request(ranks) == "interrupted":
        return f"Interrupted by Ctrl-C after {text_format.span(max(rank.ran_s for rank in ranks))}"
    return "Ended"


def _request(ranks: Iterable[RankStatus]) -> str:
    """Return by which request the whole run ended: ``interrupted`` by a person, ``terminated``; empty if it did otherwise."""
    reasons = {"up" if rank.up else rank.reason for rank in ranks} - {"finished"}
    return min(reasons) if reasons and reasons <= {"interrupted", "terminated"} else ""


def standing_still(run: RunStatus) -> list[RankStatus]:
    """Return the ranks that stand still; none of a replica group in which one does what the others may wait for."""
    teams = labels.teams(run.ranks)
    patient = [team for team in teams if not any(rank.up and rank.phase in PATIENT_PHASES for rank in team)]
    return [rank for team in patient for rank in team if rank.standstill]


def _no_step(still: Sequence[RankStatus], alive: Sequence[RankStatus]) -> tuple[str, str, str]:
    """Return that no step ends, the same without figures, and its severity."""
    longest = max((rank.standstill for rank in still if rank.standstill), key=lambda found: found.seconds)
    gist = "No step" if len(still) == len(alive) else f"No step on {_ranks(still).lower()}"
    before = "" if not longest.habitual else "; it paused as long before"
    usual = f"usual: {text_format.duration(longest.usual_step)}{before}"
    return f"{gist} for {text_format.span(longest.seconds)} ({usual})", gist, INFO if longest.habitual else WARNING


def last_step(status: RankStatus) -> str:
    """Return when a rank's last step ended, or the rank."""
    if not status.up:
        return f"ended {text_format.span(status.beat_age_s)} ago"
    if status.progress_age_s is None:
        return text_format.NONE
    if not status.steps:
        return f"none for {text_format.span(status.progress_age_s)}"
    return "now" if status.progress_age_s < _NOW_S else f"{text_format.span(status.progress_age_s)} ago"


def _steps_done(run: RunStatus) -> str:
    exact = any(rank.steps == run.steps and not rank.unwritten for rank in run.ranks)
    at_least = "" if exact else " at least"
    return text_format.plural(run.steps, "step") + at_least if run.steps or exact else "no step written"


def _activity(run: RunStatus, alive: Sequence[RankStatus]) -> str:
    if all(rank.state == "hung" for rank in alive):
        return "Hanging"
    still = [rank for rank in alive if rank.standstill]
    waited_for = [rank for rank in alive if rank.phase in PATIENT_PHASES] if still else []
    phase, _ = Counter(rank.phase for rank in waited_for or alive).most_common(1)[0]
    return AT_WORK.get(phase or "", "Training" if run.steps else "Starting")


def _loss(run: RunStatus, word: str) -> str:
    told = next((rank.loss for rank in run.ranks if rank.loss is not None), None)
    return "" if told is None else f"{word} {text_format.number(told)}"


def _findings(ranks: Sequence[RankStatus], expected: int) -> Iterator[Finding]:
    yield from _deaths(ranks)
    yield from _silences(ranks)
    yield from _unrecorded(ranks)
    missing = expected - len(ranks)
    if missing > 0:
        text = f"{text_format.plural(missing, 'rank')} {'has' if missing == 1 else 'have'} not appeared."
        yield stated(WARNING, "ranks_missing", text)
    for team in labels.teams(ranks):
        yield from disagreeing(team)
        yield from weights_apart(team)
        yield from batches_alike(team)
    yield from _anomalies(ranks)
    yield from _lost(ranks)
    yield from _spoiled(ranks)
    yield from _past(ranks)
    yield from _skips(ranks)
    yield from _mistakes(ranks)
    yield from [zero_learning_rate(rank.zero_rate) for rank in ranks if rank.zero_rate is not None][:1]
    yield from _unmoved(ranks)
    yield from failed_saves(ranks)
    yield from _growing(ranks)
    yield from broken(ranks)
    yield from _given_up(ranks)
    yield from waiting(ranks)
    yield from slowest(ranks)
    yield from probes_off(ranks)


def _deaths(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    alike: dict[tuple[str, str], list[RankStatus]] = {}
    request = _request(ranks)
    for rank in ranks if request != "interrupted" else ():
        if rank.state in {"lost", "failed"}:
            alike.setdefault((rank.reason, rank.exception), []).append(rank)
    for (reason, exception), dead in alike.items():
        who, ago = _ranks(dead), text_format.span(min(rank.beat_age_s for rank in dead))
        how = "failed{ago}: {exception}" if exception else ENDINGS.get(reason, "was lost{ago}")
        how = how if len(dead) == 1 else how.replace("was ", "were ")
        text, gist = (how.format(ago=when, exception=exception) for when in (f" {ago} ago", ""))
        yield stated(WARNING if request else ERROR, "ended", f"{who} {text}.", f"{who} {gist}.")


def _silences(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    hung = [rank for rank in ranks if rank.state == "hung"]
    if hung:
        who, since = _ranks(hung), text_format.span(max(rank.progress_age_s or 0.0 for rank in hung))
        verb = "hangs" if len(hung) == 1 else "hang"
        yield stated(ERROR, "hung", f"{who} {verb}: no step for {since}.", f"{who} {verb}.")
        yield from waited_for(ranks)
    silent = [rank for rank in ranks if rank.state == "unresponsive"]
    if silent:
        who, since = _ranks(silent), text_format.span(max(rank.beat_age_s for rank in silent))
        verb = "does not respond" if len(silent) == 1 else "do not respond"
        yield stated(ERROR, "unresponsive", f"{who} {verb}: silent for {since}.", f"{who} {verb}.")


def waited_for(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield the ranks that the others of a hung replica group wait for, and who called another collective than the others."""
    found = hangs.blamed(ranks)
    if found:
        yield stated(ERROR, "waited_for", hangs.sentences(ranks, found))
    for text in hangs.mismatches(ranks):
        yield stated(ERROR, "collectives_differ", text)


def _unrecorded(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield ranks with recording off, about which nothing is known."""
    off = [rank for rank in ranks if rank.up and not rank.recorded]
    if off:
        verb = "does" if len(off) == 1 else "do"
        yield stated(WARNING, "unrecorded", f"{_ranks(off)} {verb} not record steps: switched off.")


def disagreeing(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield the ranks whose gradient differs though DistributedDataParallel makes it the same on all."""
    norms = {rank.rank: rank.alike_norms for rank in ranks}
    odd = differing(norms) if all(norms.values()) else ()
    if not odd:
        return
    step = max(set.intersection(*(set(own) for own in norms.values())))
    usual = next((own[step] for name, own in norms.items() if name not in odd), None)
    values = text_format.joined([f"{name}: {text_format.number(norms[name][step])}" for name in odd], 2 * _MOST_NAMED)
    others = "" if usual is None else f", and {text_format.number(usual)} on the others"
    where = f"its norm in step {step:,} is not the same (rank {values}{others})"
    text = "Ranks do not agree: DDP averages the gradient, and"
    end = "They do not train one model: is the last backward of a step within no_sync(), or model.module called?"
    gist = f"{text} its norm is not the same on {_ranks([rank for rank in ranks if rank.rank in odd]).lower()}. {end}"
    yield stated(ERROR, "ranks_disagree", f"{text} {where}. {end}", gist)


def weights_apart(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield the ranks whose weights differ though DistributedDataParallel trains one model."""
    found = drifted({rank.rank: rank.replicas.weights for rank in ranks})
    if found is None:
        return
    since, alike, odd = found
    same = "not the same" if len(odd) == len(ranks) else "not those of the others"
    before = f" (in step {alike:,} they were)" if alike else ""
    named = f"{'ranks' if len(odd) > 1 else 'rank'} {text_format.joined(odd, 2 * _MOST_NAMED)}"
    text = f"Ranks do not train one model: in step {since:,} the weights of {named} are {same}"
    yield stated(ERROR, "weights_differ", f"{text}{before}, and DDP averages gradients alone.")


def batches_alike(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield that all ranks are given the same data."""
    since = same_batches(
        {rank.rank: rank.replicas.batches for rank in ranks}, {rank.rank: rank.replicas.losses for rank in ranks}
    )
    if since is not None:
        text = f"All ranks train on the same data: from step {since:,} on their batches were the same, and their losses are"
        how = "give the data loader a DistributedSampler, and call its set_epoch() in each epoch"
        yield stated(WARNING, "same_batches", f"{text} equal to the last bit. Each rank repeats the work of the others: {how}.")


def zero_learning_rate(found: ZeroRate) -> Finding:
    """Return that the learning rate of all parameter groups is zero, or next to it, since some step."""
    or_before = " or before" if found.is_begun_before else ""
    since = "in all steps" if found.first == 1 else f"from step {found.first:,}{or_before} on"
    steps = text_format.plural(found.steps, "step")
    if not found.highest:
        gist, then = f"The learning rate was 0 {since}", f"{steps} changed nothing."
    else:
        rate = text_format.number(NEGLIGIBLE * found.highest)
        gist = f"The learning rate was below {rate} {since}, after {text_format.number(found.highest)}"
        then = f"{steps} may have changed next to nothing. Is a scheduler that counts epochs stepped in each batch?"
    text = f"{gist}: {then}"
    return stated(WARNING, "zero_learning_rate", text, f"{gist}.")


def _anomalies(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    for kind in catalog.ANOMALY_KINDS:
        affected = [rank for rank in ranks if rank.up and kind in rank.anomalies]
        if affected:
            severity = ERROR if catalog.ANOMALY_SEVERITY[kind] is Severity.ERROR else WARNING
            yield stated(severity, kind, f"{ANOMALIES[kind]}{_where(affected, ranks)}.")


def _lost(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield runs that ended with a non-finite loss: their result is unusable, even if they finished in order."""
    lost = [rank for rank in ranks if rank.loss is not None and not isfinite(rank.loss)]
    if lost and not any(rank.up for rank in ranks):
        yield stated(ERROR, "nonfinite_loss", f"The loss was not finite at the end{_where(lost, ranks)}.")


def _spoiled(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield parameters that were not finite, of a run where no loss shows that."""
    shown = any("nonfinite_loss" in rank.anomalies or (rank.loss is not None and not isfinite(rank.loss)) for rank in ranks)
    spoiled = [rank for rank in ranks if rank.events.spoiled]
    if spoiled and not shown:
        name = spoiled[0].events.spoiled
        text = f"{name} held NaN or infinity{_where(spoiled, ranks)}, and was not found to be finite since."
        yield stated(ERROR, "nonfinite_parameters", text)


def _past(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield past anomalies; one from which the training has not recovered for certain is a warning, if it is a recent one."""
    ended = not any(rank.up for rank in ranks)
    active = {kind for rank in ranks if rank.up for kind in rank.anomalies}
    counts = {kind: max((rank.counted.get(kind, 0) for rank in ranks), default=0) for kind in PAST}
    if any(rank.scaled for rank in ranks):
        del counts["nonfinite_gradient"]  # part of normal loss scaling
    counts = {kind: number for kind, number in counts.items() if number and kind not in active}
    unsettled = {kind for rank in ranks for kind, number in rank.counted.items() if number and kind not in rank.past}
    past = {kind: number for kind, number in counts.items() if kind not in unsettled}
    recent = {kind: number for kind, number in counts.items() if kind not in past}
    if recent:
        what = [f"{number:,} {PAST[kind][number > 1]}" for kind, number in recent.items()]
        lately = {kind: max((rank.lately.get(kind, 0) for rank in ranks), default=0) for kind in recent}
        notable = any(number >= LEAST_NOTABLE.get(kind, 1) for kind, number in (recent if ended else lately).items())
        word = "There have been" if ended else "Lately:" if notable else "Earlier:"
        text = f"{word} {text_format.joined(what)}."
        yield stated(WARNING if notable else INFO, "past_anomalies", text, f"{word} anomalies.")
    if past:
        what = [f"{number:,} {PAST[kind][number > 1]}{_last_step(ranks, kind, number)}" for kind, number in past.items()]
        healthy = min(rank.past[kind] for rank in ranks for kind in past if kind in rank.past)
        text = f"Past: {text_format.joined(what)}; the last {healthy:,} steps were healthy."
        yield stated(INFO, "past_anomalies", text, "Past: anomalies.")


def _last_step(ranks: Sequence[RankStatus], kind: str, number: int) -> str:
    """Return in words the step of a kind's last anomaly, if each rank still has reports of all that it has counted."""
    reports = [(rank.events.anomalies.get(kind), rank.counted.get(kind, 0)) for rank in ranks]
    last = [one for one, _ in reports if one is not None]
    if not last or any(counted > (one.reported if one else 0) for one, counted in reports):
        return ""
    return f" ({'step' if number == 1 else 'until step'} {max(one.step for one in last):,})"


def _skips(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield that a loss scaler skips every step; also of an ended run, whose last steps changed nothing."""
    stuck = [rank for rank in ranks if is_stuck(rank.skip_streak, rank.scale)]
    if stuck:
        gist = f"The loss scaler {'skips' if any(rank.up for rank in stuck) else 'skipped'} every step{_where(stuck, ranks)}"
        text = f"{gist}: {max(rank.skip_streak for rank in stuck):,} in a row, in which nothing was learned."
        collapsed = any(rank.scale is not None and rank.scale < 1 for rank in stuck)
        yield stated(ERROR if collapsed else WARNING, "amp_skips", text, f"{gist}.")


def _growing(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield that memory is soon full."""
    for space in catalog.SPACE.values:
        growing = [rank for rank in ranks if rank.up and space in rank.full_in_s]
        if growing:
            gist = f"{space.capitalize()} memory grows with the steps{_where(growing, ranks)}"
            left = text_format.span(min(rank.full_in_s[space] for rank in growing))
            yield stated(WARNING, "memory_growth", f"{gist}, and is full in {left}.", f"{gist}.")


def broken(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield that GPUs have failed, and that workers of data loaders have died, even if the script goes on with new ones.

    Once it has gone on for some time, or has finished, that is no trouble any more.
    """
    if gpus := sorted({gpu for rank in ranks if rank.up for gpu in rank.failed_gpus}):
        verb = "has" if len(gpus) == 1 else "have"
        named = text_format.joined([text_format.clean(gpu) for gpu in gpus], _MOST_NAMED)
        yield stated(ERROR, "gpu_failed", f"{text_format.plural(len(gpus), 'GPU')} {verb} failed: {named}.")
    died = [rank for rank in ranks if rank.workers_died]
    if died:
        workers = text_format.plural(sum(rank.workers_died for rank in died), "worker")
        lately = any(rank.lately.get(WORKER_DIED) for rank in died) and any(rank.state != "finished" for rank in ranks)
        word = "" if lately or not any(rank.up for rank in ranks) else "Earlier: "
        text = f"{word}{workers} of data loaders died{_where(died, ranks)}."
        yield stated(WARNING if lately else INFO, "workers_died", text)


def _mistakes(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield mistakes of the training loop, also of an ended run."""
    stepped = any(rank.steps for rank in ranks)
    for kind in dict.fromkeys(kind for rank in ranks for kind in rank.events.mistakes):
        if not (kind in UNTIL_A_STEP and stepped):
            yield stated(WARNING, kind, MISTAKES[kind])


def _unmoved(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield stuck layers, also of an ended run, for its result suffers."""
    layers = max((rank.unmoved_layers for rank in ranks), default=0)
    if layers:
        stuck = max((rank.events.stuck for rank in ranks), key=lambda stuck: sum(one.layers for one in stuck))
        text = f"{text_format.plural(layers, 'layer')} {'learns' if layers == 1 else 'learn'} nothing."
        yield stated(WARNING, "unmoved_layers", stuck_layers(stuck) if stuck else text)


def stuck_layers(stuck: Sequence[StuckLayers]) -> str:
    """Return how many layers learn nothing, and how many of them for each cause."""
    count = sum(one.layers for one in stuck)
    them = ["it" if count == 1 else "them"] if len(stuck) == 1 else [f"{one.layers:,}" for one in stuck]
    causes = [STUCK[one.cause].format(them=each) for one, each in zip(stuck, them, strict=True)]
    verb = "learns" if count == 1 else "learn"
    return f"{count:,} of {text_format.plural(max(one.total for one in stuck), 'layer')} {verb} nothing: {'; '.join(causes)}."


def failed_saves(ranks: Sequence[RankStatus], why: str = "", last_good: str = "None was since.") -> Iterator[Finding]:
    """Yield that checkpoints could not be saved, an error if none was since; a script that catches the exception goes on.

    ``why``: the exception; ``last_good``: which checkpoint was saved before, as a sentence.
    """
    saves = max((rank.saves_failed for rank in ranks), default=0)
    if not saves:
        return
    text = f"{text_format.plural(saves, 'checkpoint')} could not be saved{f' ({why})' if why else ''}"
    last = [rank.saves_failed_last for rank in ranks if rank.saves_failed]
    if any(last):
        yield stated(ERROR, "checkpoint_failed", f"{text}. {last_good}", "Checkpoints cannot be saved.")
    elif None in last:  # of a damaged file
        yield stated(WARNING, "checkpoint_failed", f"{text}.", "Checkpoints could not be saved.")
    else:
        yield stated(INFO, "checkpoint_failed", f"{text}; a later one was.", "Checkpoints could not be saved for a time.")


def _given_up(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield functions recompiled up to torch's limit; their events name the place and the failed guard."""
    functions = max((rank.given_up for rank in ranks), default=0)
    if functions:
        text = f"torch.compile has given {text_format.plural(functions, 'function')} up, recompiled again and again."
        yield stated(WARNING, "compile_failure", text)


def waiting(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield that training waits for data, or did until its end."""
    there = [rank for rank in ranks if rank.up] or ranks
    starved = [rank for rank in there if rank.waiting is not None]
    if starved:
        verb = "waits" if starved[0].up else "waited"
        most = max(rank.waiting or 0.0 for rank in starved)
        share = f": {text_format.percent(most)} of the time of its steps" if most else ""
        gist = f"Training {verb} for its data{_where(starved, there)}"
        yield stated(WARNING, "data", f"{gist}{share}.", f"{gist}.")


def slowest(ranks: Sequence[RankStatus], *, detailed: bool = False) -> Iterator[Finding]:
    """Yield the rank that the others wait for; ``detailed``: with the times of a step."""
    there = [rank for rank in ranks if rank.up] or ranks
    slow = [(rank, rank.slowness) for rank in there if rank.slowness and rank.slowness.is_slow]
    if slow:
        rank, found = max(slow, key=lambda pair: pair[1].factor)
        verb, phase = "is" if rank.up else "was", PHASES[found.phase]
        text = f"Rank {rank.rank} {verb} {found.factor:.1f} times slower than the others in {phase}."
        if detailed:
            own, others = text_format.duration(found.own_s), text_format.duration(found.others_s)
            text += f" It took {own} a step for {phase}, and the others {others}, who waited."
        yield stated(WARNING, "slowest_rank", text, f"Rank {rank.rank} {verb} slower than the others in {phase}.")


def probes_off(ranks: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield the probes that failed and are off."""
    off = sorted({probe for rank in ranks for probe in rank.probes_off})
    if off:
        yield stated(WARNING, "probes_off", f"Not watched, because the probe failed: {', '.join(off)}.")


def _where(affected: Sequence[RankStatus], ranks: Sequence[RankStatus]) -> str:
    return "" if len(affected) == (sum(rank.up for rank in ranks) or len(ranks)) else f" on {_ranks(affected).lower()}"


def _ranks(ranks: Sequence[RankStatus]) -> str:
    return text_format.capital(text_format.ranks([rank.rank for rank in ranks], _MOST_NAMED))
