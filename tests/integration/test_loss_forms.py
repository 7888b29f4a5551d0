"""A loss that takes softmax or sigmoid twice, or softmax over the batch, is told; what looks alike is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.diagnosis.observing import Observed
from tests.loss_trainings import SAMPLES, observe_loss
from torchobs import catalog

N, CLASSES = SAMPLES, 5
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def run(loss_of: Loss, outputs: int = CLASSES, **autocast: bool) -> Observed:
    """Train with a loss of outputs [N, outputs] and labels [N]."""
    return observe_loss(lambda made, x: loss_of(made, (x.sum(1).abs() * 3).long().remainder(CLASSES)), outputs, **autocast)


def of_each_class(labels: torch.Tensor) -> torch.Tensor:
    """A 1 for the label."""
    return functional.one_hot(labels, CLASSES).float()


WRONG: dict[str, tuple[str, Loss]] = {
    "cross_entropy": ("softmax_twice", lambda made, labels: functional.cross_entropy(made.softmax(1), labels)),
    "of the last dimension": ("softmax_twice", lambda made, labels: functional.cross_entropy(made.softmax(-1), labels)),
    "label smoothing": (
        "softmax_twice", lambda made, labels: functional.cross_entropy(made.softmax(1), labels, label_smoothing=0.1)
    ),
    "soft targets": (
        "softmax_twice", lambda made, labels: functional.cross_entropy(made.softmax(1), of_each_class(labels))
    ),
    "one of two terms": (
        "softmax_twice", lambda made, labels: functional.cross_entropy(made.softmax(1), labels) * 0.5 + made.square().mean()
    ),
    "weighed": (
        "softmax_twice",
        lambda made, labels: (functional.cross_entropy(made.softmax(1), labels, reduction="none") * torch.rand(N)).mean(),
    ),
    "of images": (
        "softmax_twice",
        lambda made, labels: functional.cross_entropy(made[..., None, None].softmax(1), labels[..., None, None]),
    ),
    "of a sequence, flattened": (
        "softmax_twice",
        lambda made, labels: functional.cross_entropy(made.view(4, 4, -1).softmax(2).flatten(0, 1), labels),
    ),
    "by hand": (
        "softmax_twice", lambda made, labels: functional.nll_loss(functional.log_softmax(made.softmax(1), 1), labels)
    ),
    "with logits": (
        "sigmoid_twice",
        lambda made, labels: functional.binary_cross_entropy_with_logits(made.sigmoid(), of_each_class(labels)),
    ),
    "with logits, squeezed": (
        "sigmoid_twice",
        lambda made, labels: functional.binary_cross_entropy_with_logits(
            made.sigmoid()[:, :, None].squeeze(2), of_each_class(labels)
        ),
    ),
    "sigmoid of a sigmoid": (
        "sigmoid_twice",
        lambda made, labels: functional.binary_cross_entropy(made.float().sigmoid().sigmoid(), of_each_class(labels)),
    ),
    "over the batch": (
        "softmax_over_batch", lambda made, labels: functional.nll_loss(functional.log_softmax(made, 0), labels)
    ),
    "the logarithm of one over the batch": (
        "softmax_over_batch", lambda made, labels: functional.nll_loss(made.softmax(0).log(), labels)
    ),
    "twice, the first over the batch": (
        "softmax_over_batch", lambda made, labels: functional.cross_entropy(made.softmax(0), labels)
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_what_is_normalised_twice_or_wrongly(how: str) -> None:
    """Once, in the third step, with the shape."""
    kind, loss = WRONG[how]
    observed = run(loss)
    (told,) = observed.events(catalog.EVENT_LOOP_MISTAKE)
    assert (told.attributes["kind"], told.step) == (kind, 3)
    assert kind in observed.kinds()
    assert f"shape {told.attributes['shape']}" in observed.text(kind)


@pytest.mark.parametrize("how", ["cross_entropy", "with logits"])
def test_under_autocast(how: str) -> None:
    """Types change between."""
    kind, loss = WRONG[how]
    assert kind in run(loss, enabled=True).kinds()


def distilled(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Soft targets at a temperature, and the labels."""
    teacher = torch.randn(N, CLASSES)
    soft = functional.kl_div((made / 4).log_softmax(1), (teacher / 4).softmax(1), reduction="batchmean")
    return 16 * soft + functional.cross_entropy(made, labels)


def mutual(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Two heads that teach each other, with gradients on both sides."""
    other = made.flip(1)
    return functional.kl_div(made.log_softmax(1), other.softmax(1)) + functional.cross_entropy(made, labels)


def focal(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A sigmoid as a factor of its own."""
    wanted = of_each_class(labels)
    each = functional.binary_cross_entropy_with_logits(made, wanted, reduction="none")
    return ((made.sigmoid() - wanted).abs() ** 2 * each).mean()


def focal_softmax(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same of classes."""
    logs = made.log_softmax(1)
    return (functional.nll_loss(logs, labels, reduction="none") * (1 - made.softmax(1).gather(1, labels[:, None])[:, 0])).mean()


RIGHT: dict[str, tuple[Loss, int]] = {
    "logits": (functional.cross_entropy, CLASSES),
    "logits and smoothing": (lambda made, labels: functional.cross_entropy(made, labels, label_smoothing=0.1), CLASSES),
    "soft targets": (lambda made, _: functional.cross_entropy(made, torch.rand(N, CLASSES).softmax(1)), CLASSES),
    "nll_loss": (lambda made, labels: functional.nll_loss(made.log_softmax(1), labels), CLASSES),
    "nll_loss of a logarithm": (lambda made, labels: functional.nll_loss(made.softmax(1).log(), labels), CLASSES),
    "log_softmax twice": (lambda made, labels: functional.cross_entropy(made.log_softmax(1), labels), CLASSES),
    "binary": (lambda made, labels: functional.binary_cross_entropy(made.sigmoid(), of_each_class(labels)), CLASSES),
    "binary with logits": (
        lambda made, labels: functional.binary_cross_entropy_with_logits(made, of_each_class(labels)), CLASSES
    ),
    "distillation": (distilled, CLASSES),
    "mutual learning": (mutual, CLASSES),
    "focal": (focal, CLASSES),
    "focal of classes": (focal_softmax, CLASSES),
    "entropy": (lambda made, _: (made.softmax(1) * made.log_softmax(1)).sum(1).mean(), CLASSES),
    "contrastive, both ways": (
        lambda made, _: functional.cross_entropy(made @ made.T, torch.arange(N))
        + functional.nll_loss((made @ made.T).log_softmax(0), torch.arange(N)),
        8,
    ),
    "attention over a batch": (lambda made, _: (made.softmax(0) * made).sum(0).square().mean(), CLASSES),
    "a temperature between": (lambda made, labels: functional.cross_entropy(made.softmax(1) / 0.05, labels), CLASSES),
    "squares of probabilities": (
        lambda made, labels: functional.mse_loss(made.softmax(1), of_each_class(labels)), CLASSES
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", RIGHT)
def test_what_is_meant_so_is_left_alone(how: str) -> None:
    """Soft targets, distillation, focal and contrastive losses."""
    assert run(*RIGHT[how]).said() == []


def test_within_a_compiled_model_nothing_is_seen() -> None:
    """Its graph is one node."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def loss(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(made, labels)

    assert run(loss).said() == []
