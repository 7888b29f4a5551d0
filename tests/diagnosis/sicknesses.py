"""Sicknesses, each planted in a random training at a random step and place, and what has to be said of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.diagnosis import sick_models
from tests.diagnosis.gradient_sicknesses import burst, cut, explosion, saturated, vanishing
from tests.diagnosis.loop_sicknesses import detached, given_to_none, keeping, other_model, part_detached
from tests.diagnosis.observing import Look, observe
from tests.diagnosis.planting import Verdict, first_anomaly, notes, of_block, train
from tests.diagnosis.random_trainings import OPTIMIZERS, PRECISIONS, TRAININGS, Setup, build, setup_of
from tests.diagnosis.resource_sicknesses import leak, slowdown, starvation
from torchobs import catalog


class Sickness(NamedTuple):
    """How a sickness is planted and found."""

    run: Callable[[Setup, random.Random], Verdict]
    trainings: tuple[str, ...] = tuple(TRAININGS)
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    precisions: tuple[str, ...] = PRECISIONS
    compiled: bool = True
    """Whether it may be planted in a compiled training"""


def spike(setup: Setup, chance: random.Random) -> Verdict:
    """The loss is five to a hundred times too large in one to five steps: wrong targets."""
    training, at, factor = build(setup), chance.randrange(40, 200), 10 ** chance.uniform(0.9, 2)
    lasts = chance.randrange(1, 6)

    def before(number: int) -> None:
        training.loss_factor = factor if at <= number < at + lasts else 1.0

    observed = train(training, at + 20, before)
    fact = first_anomaly(observed, at, "loss_spike")
    return Verdict(fact is not None, None, fact and fact.step - at, f"factor {factor:.3g} at {at}: {notes(observed)}")


def divergence(setup: Setup, chance: random.Random) -> Verdict:
    """The learning rate is raised by three to five orders of magnitude in one step."""
    training, at = build(setup), chance.randrange(40, 150)
    factor = 10 ** chance.uniform(3, 5)

    def before(number: int) -> None:
        if number == at:
            for optimizer in training.optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] *= factor

    observed = train(training, at + 60, before)
    fact = first_anomaly(observed, at, "loss_spike", "gradient_explosion", "nonfinite_loss", "nonfinite_gradient")
    losses = [step.loss for step in observed.reports[0].steps if step.loss is not None]
    if fact is None:
        usual, worst = max(losses[:at] or losses[:1]), max(losses[at:])
        return Verdict(worst < 3 * usual, None, None, f"it did not diverge: {usual:.3g} {worst:.3g} {notes(observed)}")
    text = observed.text("loss_spike", "gradient_explosion", "nonfinite_loss")
    note = f"x{factor:.3g} at {at}: {notes(observed)}"
    return Verdict(found=True, culprit="learning rate" in text, steps=fact.step - at, note=note)


def hot(setup: Setup, chance: random.Random) -> Verdict:
    """The learning rate is two to five orders of magnitude too high from the first step on."""
    training, factor = build(setup), 10 ** chance.uniform(2, 5)
    for optimizer in training.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] *= factor
    observed = train(training, 100, lambda _: None)
    fact = first_anomaly(observed, 0, "diverged", "loss_spike", "gradient_explosion", "nonfinite_loss", "nonfinite_gradient")
    losses = [step.loss for step in observed.reports[0].steps if step.loss is not None]
    if fact is None:
        first, last = max(losses[0], 1.0), min(losses[-50:])
        return Verdict(last < 3 * first, None, None, f"it did not diverge: {first:.3g} {last:.3g} {notes(observed)}")
    return Verdict(found=True, culprit=None, steps=(fact.step or 1) - 1, note=f"x{factor:.3g}: {notes(observed)}")


class Root(nn.Module):
    """The root of zero, whose derivative is infinite: no scale helps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return x + torch.sqrt((x - x.detach()).square())


def skipping(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on a block's derivative is not finite, at any loss scale."""
    training, at = build(setup), chance.randrange(5, 100)
    index = chance.randrange(len(training.body))

    def before(number: int) -> None:
        if number == at:
            training.body[index].activation = Root()

    observed = train(training, at + 60, before)
    found = bool(observed.kinds() & {"amp_skips", "amp_scale_collapsed"})
    facts = observed.events(catalog.EVENT_NONFINITE_ORIGIN, at)
    right = bool(facts) and of_block(training, facts[0].text("module"), index) and facts[0].text("operator") == "sqrt"
    return Verdict(found, right, (facts[0].step or 0) - at if facts else None, notes(observed))


def bad_batch(setup: Setup, chance: random.Random) -> Verdict:
    """One batch is a thousand times too large: not normalised."""
    training, at, factor = build(setup), chance.randrange(40, 200), 10 ** chance.uniform(2, 3.5)

    def before(number: int) -> torch.Tensor | None:
        return training.make_batch() * factor if number == at else None

    observed = train(training, at + 20, before)
    fact = first_anomaly(observed, at, "loss_spike", "nonfinite_loss", "gradient_explosion")
    losses = {step.step: step.loss for step in observed.reports[0].steps if step.loss is not None}
    usual = max(loss for step, loss in losses.items() if at - 30 <= step < at)
    if fact is None and losses[at] < 3 * usual:
        return Verdict(found=True, note=f"it did no harm: {usual:.3g} {losses[at]:.3g}")  # bounded activations
    return Verdict(fact is not None, None, fact and fact.step - at, f"factor {factor:.3g} at {at}: {notes(observed)}")


def _nothing(set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # as torch has it
    """Leave the gradients."""
    del set_to_none


def kept(setup: Setup, chance: random.Random) -> Verdict:
    """``zero_grad`` is not called, from the first step on; in some trainings gradients are clipped."""
    training = build(setup)
    if setup.precision != "scaler" and chance.random() < 0.5:
        parameters = list(training.models[training.main].parameters())
        training.after_backward = lambda: nn.utils.clip_grad_norm_(parameters, 0.5)
    for optimizer in training.optimizers.values():
        optimizer.zero_grad = _nothing  # type: ignore[method-assign]
    observed = train(training, 60, lambda _: None, grad_interval=chance.randrange(1, 5))
    facts = observed.events(catalog.EVENT_LOOP_MISTAKE)
    return Verdict("gradients_kept" in observed.kinds(), None, facts[0].step if facts else None, notes(observed))


def evaluating(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on the model is in evaluation mode."""
    at = chance.randrange(20, 100)

    def forget(look: Look) -> None:
        training = build(setup)  # a model that was there before is known after a second only
        for number in range(1, at + 300):
            if number == at:
                training.models[training.main].eval()
            training.step()
            look.stepped()

    observed = observe(forget)
    facts = observed.events(catalog.EVENT_LOOP_MISTAKE)
    return Verdict("evaluation_mode" in observed.kinds(), None, (facts[0].step or 0) - at if facts else None, notes(observed))


def recompiles(setup: Setup, chance: random.Random) -> Verdict:
    """A function that is compiled anew for every value of a number."""
    training = build(setup)
    at, scale = chance.randrange(3, 30), [0.0]
    torch._dynamo.reset()

    def weighted(x: torch.Tensor, power: int) -> torch.Tensor:
        return x * len("x" * power) if power else x

    compiled = torch.compile(weighted, backend="eager", dynamic=False)
    main = training.losses[training.main]
    training.losses[training.main] = lambda x: compiled(main(x), int(scale[0]))

    def before(number: int) -> None:
        scale[0] = number - at if at < number < at + 7 else 1.0

    observed = train(training, at + 20, before)
    facts = observed.events(catalog.EVENT_RECOMPILE_STORM)
    right = bool(facts) and "sicknesses.py" in facts[0].text("location")
    return Verdict("recompile_storm" in observed.kinds(), right, (facts[0].step or 0) - at if facts else None, notes(observed))


def not_finite(setup: Setup, chance: random.Random, kind: str = "", last_start: int = 59, **settings: Any) -> Verdict:
    """Plant a NaN or an infinity (``sick_models``) at a random step and place; by default of a random kind."""
    kind = kind or chance.choice(sick_models.kinds(setup.training))
    training = sick_models.build(setup.training, setup.optimizer, setup.seed, autocast=setup.precision == "bfloat16")
    at, planted = chance.randint(2, last_start), list[sick_models.Planted]()

    def before(number: int) -> torch.Tensor:
        x = training.make_batch()
        if number == at:
            culprit, x = sick_models.plant(training, kind, chance, x)
            planted.append(culprit)
        return x

    observed = train(training, at + 2, before, **settings)
    facts = observed.events(catalog.EVENT_NONFINITE_ORIGIN)
    found = bool(facts) or bool(observed.events(catalog.EVENT_ANOMALY))
    right = bool(facts) and planted[0].is_told(facts[0].attributes)
    note = f"{kind} {planted[0]} {facts[:1]} {notes(observed)}"
    return Verdict(found, right, (facts[0].step or 0) - at if facts else None, note)


SICKNESSES: dict[str, Sickness] = {
    "NaN or infinity": Sickness(not_finite, optimizers=("sgd", "adamw"), precisions=("float32", "bfloat16"), compiled=False),
    # of L-BFGS the gradients vary by orders of magnitude from step to step
    "gradient explosion, one step": Sickness(burst, optimizers=("sgd", "adamw", "fused")),
    "gradient explosion": Sickness(explosion, optimizers=("sgd", "adamw", "fused")),
    # of two players one whose gradient fades is hidden by the other's: the norm is that of all optimizers together
    "vanishing gradient": Sickness(vanishing, ("mlp", "cnn", "rnn", "gpt", "diffusion"), optimizers=("sgd", "adamw", "fused")),
    "saturated units": Sickness(saturated, ("mlp", "cnn", "diffusion")),
    "backbone cut off": Sickness(cut),
    # L-BFGS fits its batch until the loss is a rounding error, which varies by orders of magnitude
    "loss spike": Sickness(spike, optimizers=("sgd", "adamw", "fused")),
    "learning rate too high": Sickness(divergence),
    "learning rate too high from the start": Sickness(hot),
    "scaler that keeps skipping": Sickness(
        skipping, ("mlp", "cnn", "gpt", "gan", "diffusion"), optimizers=("sgd", "adamw"), precisions=("scaler",), compiled=False
    ),
    "bad batch": Sickness(bad_batch, ("rnn", "diffusion"), precisions=("float32", "bfloat16")),
    "zero_grad forgotten": Sickness(kept, optimizers=("sgd", "adamw", "fused")),
    # a loss scaler refuses a step without gradients
    "loss cut off from the model": Sickness(detached, optimizers=("sgd", "adamw", "fused"), precisions=("float32", "bfloat16")),
    "optimizer of another model": Sickness(
        other_model, ("mlp", "cnn", "rnn", "gpt", "diffusion"), ("sgd", "adamw", "fused"), ("float32", "bfloat16")
    ),
    "blocks before a detach": Sickness(
        part_detached, ("mlp", "cnn", "rnn", "gpt", "diffusion"), ("sgd", "adamw", "fused"), compiled=False
    ),
    "parameters given to no optimizer": Sickness(given_to_none, optimizers=("sgd", "adamw", "fused")),
    "losses kept with their graphs": Sickness(
        keeping, ("mlp", "cnn", "rnn", "gpt", "diffusion"), optimizers=("sgd", "adamw", "fused")
    ),
    "train() forgotten": Sickness(evaluating, ("cnn",), optimizers=("sgd", "adamw", "fused")),
    "recompile storm": Sickness(recompiles, compiled=False),
    "slowdown": Sickness(slowdown, ("mlp", "rnn", "gpt", "diffusion"), optimizers=("sgd", "adamw"), compiled=False),
    "waiting for data": Sickness(starvation, ("mlp", "rnn", "gpt", "diffusion"), optimizers=("sgd", "adamw"), compiled=False),
    "host memory leak": Sickness(leak, ("mlp",), optimizers=("sgd",), precisions=("float32",), compiled=False),
}


def try_one(name: str, seed: int) -> tuple[Setup, Verdict]:
    """Plant one sickness and look; the seed decides where, and in which training."""
    chance, sickness = random.Random(f"{name} {seed}"), SICKNESSES[name]
    training = sickness.trainings[seed % len(sickness.trainings)]
    setup = setup_of(training, chance, sickness.optimizers, sickness.precisions, compiled=sickness.compiled)
    torch.manual_seed(seed)
    return setup, sickness.run(setup, chance)
