"""Training loops that are not the plain one: `loops.py NAME...` runs those. Nothing here knows of torchobs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.text import VOCABULARY, report, windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def batches(number: int, length: int, size: int) -> Iterator[list[Tensor]]:
    """Inputs and targets."""
    shuffled = torch.Generator().manual_seed(1)
    yield from DataLoader(TensorDataset(*windows(number, length)), size, shuffle=True, generator=shuffled)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """In nats per character."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def one_hot(tokens: Tensor) -> Tensor:
    """As float."""
    return functional.one_hot(tokens, VOCABULARY).float()


def lbfgs() -> None:
    """A closure that the optimizer calls as often as it likes: four times a step here."""
    model = nn.Linear(VOCABULARY, VOCABULARY)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    loss, steps, evaluations = torch.zeros(()), 0, 0
    for inputs, targets in batches(60, 50, 10):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = cross_entropy(model(one_hot(inputs)), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss = optimizer.step(closure)  # type: ignore[no-untyped-call]
        steps += 1
    report("lbfgs", steps, loss.item(), model, evaluations=evaluations)


def gan() -> None:
    """Two optimizers that take turns; one iteration is one step."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8 * VOCABULARY))
    critic = nn.Sequential(nn.Linear(8 * VOCABULARY, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    makes = torch.optim.Adam(generator.parameters(), 1e-3)
    judges = torch.optim.Adam(critic.parameters(), 1e-3)
    loss, steps = torch.zeros(()), 0
    for inputs, _ in batches(120, 8, 10):
        fake = generator(torch.randn(len(inputs), 8)).view(-1, 8, VOCABULARY).softmax(-1).flatten(1)
        judges.zero_grad()
        judged = functional.softplus(-critic(one_hot(inputs).flatten(1))) + functional.softplus(critic(fake.detach()))
        judged.mean().backward()  # type: ignore[no-untyped-call]
        judges.step()
        makes.zero_grad()
        loss = functional.softplus(-critic(fake)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        makes.step()
        steps += 1
    report("gan", steps, loss.item(), generator, critic)


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of rank 4, as in LoRA (arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]  # a module's call is


class Characters(nn.Module):
    """Two transformer layers over characters."""

    def __init__(self, *, recomputed: bool = False) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 (batch, time) to logits."""
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for number, layer in enumerate(self.layers):
            # one of each kind: the reentrant one runs a backward inside the backward
            x = checkpoint(layer, x, mask, use_reentrant=bool(number)) if self.recomputed else layer(x, mask)
        return self.head(x)  # type: ignore[no-any-return]  # as above


def low_rank() -> None:
    """A frozen base, gradients for a few parameters only, clipped."""
    model = Characters().requires_grad_(requires_grad=False)
    model.head = LowRank(model.head)  # type: ignore[assignment]  # a module in place of another
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    loss, steps = torch.zeros(()), 0
    for inputs, targets in batches(80, 16, 8):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    report("low_rank", steps, loss.item(), model, frozen=len(list(model.parameters())) - len(trained))


def recomputed() -> None:
    """Activation checkpointing, of both kinds: the backward pass runs the forward pass again."""
    model = Characters(recomputed=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss, steps = torch.zeros(()), 0
    for inputs, targets in batches(80, 16, 8):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
    report("recomputed", steps, loss.item(), model)


def gradient_penalty() -> None:
    """Double backward: the loss holds the gradient with respect to the inputs (arXiv:1704.00028), and to the weights."""
    model = nn.Sequential(nn.Linear(VOCABULARY, 32), nn.Tanh(), nn.Linear(32, VOCABULARY))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loss, steps = torch.zeros(()), 0
    for inputs, targets in batches(80, 16, 8):
        optimizer.zero_grad()
        x = one_hot(inputs).requires_grad_()
        loss = cross_entropy(model(x), targets)
        for slope in torch.autograd.grad(loss, (x, *model.parameters()), create_graph=True):
            loss = loss + 0.1 * slope.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
    report("gradient_penalty", steps, loss.item(), model)


TRAININGS = {each.__name__: each for each in (lbfgs, gan, low_rank, recomputed, gradient_penalty)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        TRAININGS[name]()
