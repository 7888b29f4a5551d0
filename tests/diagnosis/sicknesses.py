"""Sicknesses beyond NaN, each planted in a random training at a random step and place, and what has to be said of them."""

from __future__ import annotations

import ctypes
import math
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.diagnosis import sick_models
from tests.diagnosis.observing import Look, Observed, observe
from tests.diagnosis.random_trainings import TRAININGS, Setup, Training, build
from torchobs import catalog


class Verdict(NamedTuple):
    """Whether a sickness was found, its culprit named, and after how many steps."""

    found: bool
    culprit: bool | None = None
    """``None``: there is none to be named"""
    steps: int | None = None
    """``None``: said of the whole run"""
    note: str = ""


class Sickness(NamedTuple):
    """How a sickness is planted and found."""

    run: Callable[[Setup, random.Random], Verdict]
    trainings: tuple[str, ...] = tuple(TRAININGS)
    optimizers: tuple[str, ...] = ("sgd", "adamw", "fused", "lbfgs")
    precisions: tuple[str, ...] = ("float32", "bfloat16", "scaler")
    compiled: bool = True
    """Whether it may be planted in a compiled training"""
    hard: bool = False
    processes: bool = False
    """Whether it starts processes of its own, or takes long"""


def _train(training: Training, steps: int, before: Callable[[int], torch.Tensor | None], **settings: Any) -> Observed:
    """Train that many steps; ``before`` is called with the number of each, and may return its batch."""

    def train(look: Look) -> None:
        for number in range(1, steps + 1):
            training.step(before(number))
            look.stepped()

    return observe(train, **settings)


def _layer(training: Training, index: int, part: str = "") -> str:
    return ".".join(filter(None, [training.body_name, str(index), part]))


def _of_block(training: Training, name: str, index: int) -> bool:
    layer = _layer(training, index)
    bare = layer.removeprefix("Critic.")  # the first model that is seen needs no prefix
    return name in {layer, bare} or name.startswith((f"{layer}.", f"{bare}."))


def _anomaly(observed: Observed, since: int, *kinds: str) -> Any:
    told = [fact for fact in observed.events(catalog.EVENT_ANOMALY, since) if fact.text("kind") in kinds]
    return min(told, key=lambda fact: fact.step or 0, default=None)


def _notes(observed: Observed) -> str:
    return "; ".join(observed.said())[:600]


def burst(setup: Setup, chance: random.Random) -> Verdict:
    """In a single step one layer's gradient is a hundred to ten thousand times as large as usually the whole."""
    training, at, factor = build(setup), chance.randrange(30, 70), 10 ** chance.uniform(2, 4)
    index = chance.randrange(len(training.body))
    module: nn.Module = training.body[index].linear  # type: ignore[assignment]

    def grow() -> None:
        own = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        every = [parameter.grad for parameter in training.models[training.main].parameters() if parameter.grad is not None]
        part = math.hypot(*(float(one.norm()) for one in own)) / math.hypot(*(float(one.norm()) for one in every))
        for gradient in own:
            gradient.mul_(factor / max(part, 1e-6))

    def before(number: int) -> None:
        training.after_backward = grow if number == at else None

    observed = _train(training, at + 20, before, grad_interval=1)
    fact = _anomaly(observed, at, "gradient_explosion")
    if fact is None:
        return Verdict(found=False, note=f"factor {factor:.3g} at {at}: {_notes(observed)}")
    return Verdict(
        fact.step == at, _of_block(training, fact.text("layer"), index), fact.step - at, f"{index}: {fact.attributes}"
    )


def explosion(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on the gradient grows a thousandfold at a block on its way back, and so in all layers before it."""
    training, at, factor = build(setup), chance.randrange(150, 300), 10 ** chance.uniform(2.5, 4)
    index = chance.randrange(len(training.body))
    before_it = [*training.models[training.main].stem.parameters(), *training.body[: index + 1].parameters()]  # type: ignore[union-attr]

    def grow() -> None:
        for parameter in before_it:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def before(number: int) -> None:
        training.after_backward = grow if number >= at else None

    observed = _train(training, at + 40, before, grad_interval=chance.randrange(1, 5))
    fact = _anomaly(observed, at, "gradient_explosion", "nonfinite_gradient", "nonfinite_loss", "loss_spike")
    if fact is None:
        return Verdict(found=False, note=f"factor {factor:.3g} at {at}: {_notes(observed)}")
    named = next((one for one in observed.events(catalog.EVENT_ANOMALY, at) if one.text("layer")), None)
    right = _of_block(training, named.text("layer"), index) if named is not None and (named.step or 0) - at <= 1 else None
    return Verdict(found=True, culprit=right, steps=fact.step - at, note=f"{index}: {named and (named.step, named.attributes)}")


def vanishing(setup: Setup, chance: random.Random) -> Verdict:
    """The loss, and so every gradient, is a thousandth to a hundred-millionth of what it was."""
    training, at, factor = build(setup), chance.randrange(150, 400), 10 ** -chance.uniform(3.5, 8)

    def fade() -> None:
        for parameter in training.models[training.main].parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def before(number: int) -> None:
        training.after_backward = fade if number >= at else None

    observed = _train(training, at + 40, before, grad_interval=chance.randrange(1, 5))
    fact = _anomaly(observed, at, "gradient_vanishing")
    if fact is None:
        return Verdict(found=False, note=f"factor {factor:.3g} at {at}: {_notes(observed)}")
    return Verdict("gradient_vanishing" in observed.kinds(), None, fact.step - at)


def saturated(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on the units of a block are saturated: nothing comes back through them."""
    training, at = build(setup), chance.randrange(1, 200)
    index = chance.randrange(len(training.body))
    for number, block in enumerate(training.body):
        block.residual = False  # type: ignore[assignment]
        if number == index:
            block.activation = chance.choice((nn.Tanh, nn.Sigmoid, nn.ReLU, nn.Hardtanh))()
    linear: Any = training.body[index].linear
    norm: Any = getattr(training.body[index], "norm", linear)
    relu = isinstance(training.body[index].activation, nn.ReLU)

    def before(number: int) -> None:
        if number == at:
            with torch.no_grad():
                norm.bias.fill_(-2000.0 if relu or chance.random() < 0.5 else 2000.0)
                norm.weight.mul_(0.1)

    observed = _train(training, at + 400, before)
    return _unmoved(training, observed, at, index)


def cut(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on the backbone is cut off behind a block: detached, or multiplied by 0."""
    training, at = build(setup), chance.randrange(100, 250)
    index = chance.randrange(len(training.body) - 1) if len(training.body) > 1 else 0
    way, ill = chance.choice(("detach", "zero")), [False]
    if setup.precision == "scaler":
        way = "zero"  # a scaler raises where an optimizer has no gradient at all

    def behind(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not ill[0]:
            return output
        return output.detach() if way == "detach" else output * 0.0

    training.body[index].register_forward_hook(behind)

    def before(number: int) -> None:
        ill[0] = number >= at

    observed = _train(training, at + 400, before)
    return _unmoved(training, observed, at, index, next_too=way == "zero")


def _unmoved(training: Training, observed: Observed, at: int, index: int, *, next_too: bool = False) -> Verdict:
    told = observed.events(catalog.EVENT_UNMOVED_LAYERS, at)
    if not told:
        return Verdict(found=False, note=_notes(observed))
    fact = told[0]
    place = fact.text("at")
    near = _of_block(training, place, index) or (
        (next_too or fact.text("cause") == "dead_units") and (_of_block(training, place, index + 1) or "head" in place)
    )
    return Verdict("unmoved_layers" in observed.kinds(), near, (fact.step or 0) - at, f"{index}: {fact.attributes}")


def spike(setup: Setup, chance: random.Random) -> Verdict:
    """The loss is five to a hundred times too large in one to five steps: wrong targets."""
    training, at, factor = build(setup), chance.randrange(40, 200), 10 ** chance.uniform(0.9, 2)
    lasts = chance.randrange(1, 6)

    def before(number: int) -> None:
        training.loss_factor = factor if at <= number < at + lasts else 1.0

    observed = _train(training, at + 20, before)
    fact = _anomaly(observed, at, "loss_spike")
    return Verdict(fact is not None, None, fact and fact.step - at, f"factor {factor:.3g} at {at}: {_notes(observed)}")


def divergence(setup: Setup, chance: random.Random) -> Verdict:
    """The learning rate is raised by three to five orders of magnitude in one step."""
    training, at = build(setup), chance.randrange(40, 150)
    factor = 10 ** chance.uniform(3, 5)

    def before(number: int) -> None:
        if number == at:
            for optimizer in training.optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] *= factor

    observed = _train(training, at + 60, before)
    fact = _anomaly(observed, at, "loss_spike", "gradient_explosion", "nonfinite_loss", "nonfinite_gradient")
    losses = [step.loss for step in observed.reports[0].steps if step.loss is not None]
    if fact is None:
        usual, worst = max(losses[:at] or losses[:1]), max(losses[at:])
        return Verdict(worst < 3 * usual, None, None, f"it did not diverge: {usual:.3g} {worst:.3g} {_notes(observed)}")
    text = observed.text("loss_spike", "gradient_explosion", "nonfinite_loss")
    note = f"x{factor:.3g} at {at}: {_notes(observed)}"
    return Verdict(found=True, culprit="learning rate" in text, steps=fact.step - at, note=note)


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

    observed = _train(training, at + 60, before)
    found = bool(observed.kinds() & {"amp_skips", "amp_scale_collapsed"})
    told = observed.events(catalog.EVENT_NONFINITE_ORIGIN, at)
    right = bool(told) and _of_block(training, told[0].text("module"), index) and told[0].text("operator") == "sqrt"
    return Verdict(found, right, (told[0].step or 0) - at if told else None, _notes(observed))


def bad_batch(setup: Setup, chance: random.Random) -> Verdict:
    """One batch is a thousand times too large: not normalised."""
    training, at, factor = build(setup), chance.randrange(40, 200), 10 ** chance.uniform(2, 3.5)

    def before(number: int) -> torch.Tensor | None:
        return training.make_batch() * factor if number == at else None

    observed = _train(training, at + 20, before)
    fact = _anomaly(observed, at, "loss_spike", "nonfinite_loss", "gradient_explosion")
    losses = {step.step: step.loss for step in observed.reports[0].steps if step.loss is not None}
    usual = max(loss for step, loss in losses.items() if at - 30 <= step < at)
    if fact is None and losses[at] < 3 * usual:
        return Verdict(found=True, note=f"it did no harm: {usual:.3g} {losses[at]:.3g}")  # bounded activations
    return Verdict(fact is not None, None, fact and fact.step - at, f"factor {factor:.3g} at {at}: {_notes(observed)}")


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

    observed = _train(training, at + 20, before)
    told = observed.events(catalog.EVENT_RECOMPILE_STORM)
    right = bool(told) and "sicknesses.py" in told[0].text("location")
    return Verdict("recompile_storm" in observed.kinds(), right, (told[0].step or 0) - at if told else None, _notes(observed))


def slowdown(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on a phase of the step takes two and a half to six times as long as the whole step before."""
    training, at = build(setup), chance.randrange(200, 300)
    usual, factor, phase = 10 ** chance.uniform(-0.6, 0.3), chance.uniform(1.5, 5), chance.choice(("forward", "backward"))
    noise = chance.uniform(0.02, 0.3)

    def train(look: Look) -> None:
        clock, main = look.clock, training.losses[training.main]
        assert clock is not None
        slow = [False]

        def loss(x: torch.Tensor) -> torch.Tensor:
            made = main(x)
            clock.sleep(usual * chance.lognormvariate(0.0, noise))
            if slow[0] and phase == "forward":
                clock.sleep(usual * factor * chance.lognormvariate(0.0, noise))
            if slow[0] and phase == "backward":
                made.register_hook(lambda _: clock.sleep(usual * factor))  # type: ignore[no-untyped-call]
            return made

        training.losses[training.main] = loss
        for number in range(1, at + max(int(0.7 * at / (1 + factor)), math.ceil(12 / usual / (1 + factor)))):
            slow[0] = number >= at
            training.step()
            look.stepped()

    observed = observe(train, fed=True)
    text = observed.text("slowdown")
    last = observed.reports[0].last_step
    began = last + 1 - int(text.split(" steps")[0].rsplit(" ", 1)[1].replace(",", "")) if text else None
    return Verdict("slowdown" in observed.kinds(), phase in text, None, f"{phase} {at} {began} {text} {_notes(observed)}")


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, fetch: Callable[[int], torch.Tensor], size: int) -> None:
        self.fetch, self.size = fetch, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.fetch(index)


def starvation(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on a batch takes a third of the time of the step, up to five times as long."""
    training, at, usual = build(setup), chance.randrange(1, 120), 10 ** chance.uniform(-0.6, 0.3)
    share = chance.uniform(0.4, 5.0)
    steps = at + 2 * int(60 / usual / (1 + share)) + 60

    def train(look: Look) -> None:
        clock, main = look.clock, training.losses[training.main]
        assert clock is not None

        def fetch(index: int) -> torch.Tensor:
            clock.sleep(usual * share if index + 1 >= at else usual * 0.001)
            return training.make_batch()

        def loss(x: torch.Tensor) -> torch.Tensor:
            clock.sleep(usual)
            return main(x)

        training.losses[training.main] = loss
        for batch in torch.utils.data.DataLoader(_Slow(fetch, steps), batch_size=None):
            training.step(batch)
            look.stepped()

    observed = observe(train, fed=True)
    told = observed.events(catalog.EVENT_STARVED)
    return Verdict(bool(told), None, (told[0].step or 0) - at if told else None, f"{usual:.2f} {share:.2f} {_notes(observed)}")


def leak(setup: Setup, chance: random.Random) -> Verdict:
    """Every step keeps memory, and what is left lasts for minutes or hours."""
    from torchobs.probes.memory.memory_limits import MemoryLimits
    from torchobs.probes.memory.process_memory import MemoryProbe
    from torchobs.probes.memory.process_stats import Machine

    training, at = build(setup), chance.randrange(1, 60)
    size, step_s, hours = int(2 ** chance.uniform(18, 20)), 10 ** chance.uniform(-0.5, 0), 10 ** chance.uniform(-1, 0.2)
    left = size / step_s * 3600 * hours
    steps = at + int(300 / step_s)
    kept: list[bytearray] = []
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier run gave back to malloc would be taken again without growing

    def train(look: Look) -> None:
        clock = look.clock
        assert clock is not None
        assert look.session.context is not None
        probe = MemoryProbe(clock=clock.monotonic)
        probe.install(look.session.context)
        machine = Machine(int(2 * left), int(left), 0, 0)
        probe._limits = MemoryLimits(look.session.context.writer, lambda: machine, root="/nowhere")
        observed_s = read_s = clock.monotonic()
        for number in range(1, steps + 1):
            training.step()
            clock.sleep(step_s)
            if number >= at:
                kept.append(bytearray(b"x") * size)
            if clock.monotonic() - read_s >= 1.0:
                read_s = clock.monotonic()
                probe._read(thorough=False)
            if clock.monotonic() - observed_s >= 10.0:
                observed_s = clock.monotonic()
                probe.observe()

    observed = observe(train, fed=True, disable_probes="memory")
    kept.clear()
    told = observed.events(catalog.EVENT_MEMORY_GROWTH)
    if not told:
        return Verdict(found=False, note=f"{size / 1024:.0f} KiB {step_s:.2f} s {hours:.2f} h {_notes(observed)}")
    per_step = told[0].number("per_step") or 0.0
    note = f"{size} {per_step} {hours:.2f} h"
    return Verdict(found=True, culprit=math.isclose(per_step, size, rel_tol=0.3), steps=(told[0].step or 0) - at, note=note)


def not_finite(seed: int) -> Verdict:
    """Plant a NaN or an infinity (``sick_models``) at a random step and place."""
    chance = random.Random(f"nan {seed}")
    name = chance.choice(list(sick_models.TRAININGS))
    data = ["weight", "inf_weight", *(("embedding", "mask") if name == "gpt" else ("batch",))]
    kind = chance.choice([*sick_models.FORWARD, *sick_models.BACKWARD, *data])
    training = sick_models.build(name, chance.choice(("sgd", "adamw")), chance.randrange(1 << 30))
    at, autocast, planted = chance.randrange(2, 60), chance.random() < 0.3, list[sick_models.Planted]()

    def train(look: Look) -> None:
        for number in range(1, at + 3):
            x = training.batch()
            if number == at:
                what, x = sick_models.plant(training, kind, chance, x)
                planted.append(what)
            training.compute(x, autocast=autocast)
            look.stepped()

    observed = observe(train)
    told = observed.events(catalog.EVENT_NONFINITE_ORIGIN)
    found = bool(told) or bool(observed.events(catalog.EVENT_ANOMALY))
    (what,) = planted
    wanted = {"origin": what.kind, "operator": what.operator, "module": what.module, "parameter": what.parameter}
    right = bool(told) and all(told[0].text(key) == value for key, value in wanted.items() if value)
    right = right and (what.sample is None or told[0].attributes.get("sample") == what.sample)
    return Verdict(found, right, (told[0].step or 0) - at if told else None, f"{what} {told[:1]} {_notes(observed)}")


SICKNESSES: dict[str, Sickness] = {
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
    "scaler that keeps skipping": Sickness(
        skipping, ("mlp", "cnn", "gpt", "gan", "diffusion"), optimizers=("sgd", "adamw"), precisions=("scaler",), compiled=False
    ),
    "bad batch": Sickness(bad_batch, ("rnn", "diffusion"), precisions=("float32", "bfloat16")),
    "recompile storm": Sickness(recompiles, compiled=False),
    "slowdown": Sickness(slowdown, ("mlp", "rnn", "gpt", "diffusion"), optimizers=("sgd", "adamw"), compiled=False),
    "waiting for data": Sickness(starvation, ("mlp", "rnn", "gpt", "diffusion"), optimizers=("sgd", "adamw"), compiled=False),
    "host memory leak": Sickness(leak, ("mlp",), optimizers=("sgd",), precisions=("float32",), compiled=False),
}


def setup_of(name: str, seed: int) -> tuple[Setup, random.Random]:
    """Return the training in which that sickness is planted for a seed, and what decides where."""
    chance, sickness = random.Random(f"{name} {seed}"), SICKNESSES[name]
    training = sickness.trainings[seed % len(sickness.trainings)]
    # two players that both search lines never come to rest
    optimizer = chance.choice([one for one in sickness.optimizers if training != "gan" or one != "lbfgs"])
    precision = chance.choice([one for one in sickness.precisions if optimizer != "lbfgs" or one != "scaler"])
    compiled = sickness.compiled and chance.random() < 0.15
    return Setup(training, optimizer, precision, compiled, chance.randrange(1 << 30)), chance


def try_one(name: str, seed: int) -> tuple[Setup, Verdict]:
    """Plant one sickness and look."""
    setup, chance = setup_of(name, seed)
    torch.manual_seed(seed)
    return setup, SICKNESSES[name].run(setup, chance)
