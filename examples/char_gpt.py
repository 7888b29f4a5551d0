"""Train a small GPT, character by character, on the source text of Python's own standard library.

    python examples/char_gpt.py                                     one process, CPU or GPU
    torchrun --standalone --nproc-per-node 2 examples/char_gpt.py   two ranks, DDP
    torchobs run examples/char_gpt.py                               the same, with a page of metrics beside it

All that torchobs needs of a training script is `torchobs.init()`, and with `torchobs run` not even that. Steps, phases,
loss, gradient norm and learning rate are found without help; `torchobs.log(tokens=...)` adds what torch cannot know.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchobs

VOCABULARY = 128  # ASCII: a character is its own token
VALIDATION_BATCHES = 20
CLIP_NORM = 1.0  # no optimizer step is given a larger gradient

Pairs: TypeAlias = Iterator[list[Tensor]]  # batches of [inputs, targets], int64 of shape (batch_size, block_size)


def option(default: object, about: str, **more: object) -> Any:
    """Describe one command-line option beside its default."""
    return field(default=default, metadata={"help": f"{about} [%(default)s]", **more})


@dataclass(frozen=True)
class Options:
    """The command line: every field is a `--option`."""

    steps: int = option(800, "optimizer steps; so many take about a minute on two cores")
    batch_size: int = option(12, "sequences per rank and backward pass")
    block_size: int = option(64, "context in characters; the cost of attention grows with its square")
    layers: int = option(4, "transformer blocks")
    heads: int = option(4, "attention heads; must divide the width")
    width: int = option(128, "size of a character's vector; the number of weights grows with its square")
    learning_rate: float = option(2e-3, "the peak, between the warm-up and the cosine decay")
    accumulate: int = option(1, "backward passes per optimizer step: a larger batch in the same memory")
    precision: str = option("fp32", "bf16: autocast, weights stay fp32", choices=("fp32", "bf16"))
    compile: bool = option(default=False, about="torch.compile the model; the first step pays for it")
    device: str = option("auto", "auto: CUDA if every local rank can have a GPU", choices=("auto", "cpu", "cuda"))
    threads: int = option(0, "CPU threads per rank; 0 leaves it to torch and torchrun")
    workers: int = option(0, "DataLoader processes per rank; 0 loads in the training process")
    characters: int = option(4_000_000, "how much of the standard library to read")
    seed: int = option(0, "same seed, same machine: same losses")
    blow_up_at: int = option(0, "from this step on multiply the learning rate, to see what torchobs shows; 0: never")
    blow_up_factor: float = option(1000.0, "by how much")
    eval_every: int = option(200, "steps between two looks at the validation loss; 0: never")
    log_every: int = option(20, "steps between two printed lines")
    sample: int = option(300, "characters that the model writes at the end")
    timings: str = option("", "file to append a line of JSON to, per step and rank: this script's own figures")

    @classmethod
    def parse(cls, arguments: list[str] | None = None) -> Options:
        """Read the arguments; None reads `sys.argv`."""
        style = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=style, allow_abbrev=False)
        for each in fields(cls):
            kind = {"action": "store_true"} if each.default is False else {"type": type(each.default), **each.metadata}
            flag = f"--{each.name.replace('_', '-')}"
            parser.add_argument(flag, default=each.default, **{"help": each.metadata["help"], **kind})
        return cls(**vars(parser.parse_args(arguments)))


# --- text -------------------------------------------------------------------------------------------------------------


def standard_library() -> Iterator[Path]:
    """Yield its modules in a fixed order, without packages that not every machine has or that are only tables."""
    for entry in sorted(Path(sysconfig.get_path("stdlib")).iterdir()):
        if entry.suffix == ".py":
            yield entry
        elif entry.is_dir() and entry.name not in {"site-packages", "dist-packages", "test", "encodings"}:
            yield from sorted(entry.rglob("*.py"))


def read_text(characters: int) -> Tensor:
    """Return the first characters of the standard library as int64; whatever is not ASCII becomes a `?`."""
    text = bytearray()
    for path in standard_library():
        text += path.read_text("utf-8", errors="replace").encode("ascii", "replace")
        if len(text) >= characters:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:characters].long()


def batches(text: Tensor, options: Options) -> Pairs:
    """Yield this rank's share of a text for ever, in a new order each epoch."""
    length = (len(text) - 1) // options.block_size * options.block_size
    inputs, targets = text[:length], text[1 : length + 1]  # the target is the next character
    blocks = TensorDataset(inputs.view(-1, options.block_size), targets.view(-1, options.block_size))
    sampler: DistributedSampler[Any] = DistributedSampler(blocks, seed=options.seed)
    loader = DataLoader(blocks, options.batch_size, sampler=sampler, num_workers=options.workers, drop_last=True)
    if not len(loader):
        raise ValueError("the text does not fill one batch: more --characters, or a smaller batch")
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


# --- model ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, each after a layer norm and around a residual, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape; each position sees itself and those before it."""
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        return x.add(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer over characters, whose output layer is its embedding."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, options.width)
        self.position = nn.Embedding(options.block_size, options.width)
        self.blocks = nn.Sequential(*(Block(options.width, options.heads) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        for matrix in (parameter for parameter in self.parameters() if parameter.dim() > 1):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 (batch, time) to logits (batch, time, VOCABULARY)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood, in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(gpt: GPT, text: Tensor, options: Options) -> float:
    """Return the loss on the same batches of a text each time, averaged over the ranks."""
    gpt.eval()
    device = gpt.token.weight.device
    pairs = itertools.islice(batches(text, options), VALIDATION_BATCHES)
    mean = torch.stack([cross_entropy(gpt(inputs.to(device)), targets.to(device)) for inputs, targets in pairs]).mean()
    gpt.train()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@torch.no_grad()
def write(gpt: GPT, prompt: str, length: int) -> str:
    """Continue a prompt by drawing one character after the other."""
    gpt.eval()
    tokens = torch.tensor([list(prompt.encode("ascii"))], device=gpt.token.weight.device)
    for _ in range(length):
        logits = gpt(tokens[:, -gpt.position.num_embeddings :])[:, -1]
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1)), dim=1)
    return bytes(tokens[0].tolist()).decode("ascii")


# --- training ---------------------------------------------------------------------------------------------------------


def learning_rate_share(step: int, options: Options) -> float:
    """Share of the peak at a step, counted from 1: linear warm-up over a twentieth of the run, then a cosine to 0.1."""
    warm_up = max(1, options.steps // 20)
    decay = (step - warm_up) / max(1, options.steps - warm_up)
    share = step / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * decay)
    return share * options.blow_up_factor if 0 < options.blow_up_at <= step else share


def gradient_norm(model: nn.Module) -> float:
    """L2 norm over all gradients, summed in float64 (`clip_grad_norm_` has float32)."""
    squares = [weight.grad.double().square().sum() for weight in model.parameters() if weight.grad is not None]
    return torch.stack(squares).sum().sqrt().item()


class Figures:
    """What this script itself measures in one step; torchobs' own figures are checked against it."""

    def __init__(self, step: int) -> None:
        self.values: dict[str, float] = {"rank": dist.get_rank(), "step": step}

    @contextlib.contextmanager
    def seconds(self, phase: str) -> Iterator[None]:
        """Add up the time in the block by the host's clock; on a GPU that is the time to launch the work."""
        started = time.perf_counter()
        yield
        self.values[phase] = self.values.get(phase, 0.0) + time.perf_counter() - started

    def append_to(self, path: str) -> None:
        """Append a line of JSON in one write, so that ranks can share the file and a killed one leaves whole lines."""
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.values) + "\n")


def compute_gradients(model: nn.Module, pairs: Pairs, options: Options, figures: Figures) -> Tensor:
    """Run one step's forward and backward passes and return its loss; the last pass averages over the ranks."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for passes_left in reversed(range(options.accumulate)):
        with figures.seconds("data"):
            inputs, targets = next(pairs)
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = passes_left == 0
        with figures.seconds("forward"), torch.autocast(device.type, torch.bfloat16, options.precision == "bf16"):
            loss = cross_entropy(model(inputs.to(device)), targets.to(device)) / options.accumulate
        with figures.seconds("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def train(gpt: GPT, training: Tensor, validation: Tensor, options: Options) -> None:
    """Run the steps."""
    if options.compile:
        gpt.compile()
    model = DistributedDataParallel(gpt) if dist.get_world_size() > 1 else gpt
    optimizer = torch.optim.AdamW(gpt.parameters(), options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda steps_done: learning_rate_share(steps_done + 1, options))
    samples = options.batch_size * options.accumulate
    tokens_per_line = samples * options.block_size * dist.get_world_size() * options.log_every
    pairs, printed_at = batches(training, options), time.perf_counter()

    for step in range(1, options.steps + 1):
        figures = Figures(step)
        loss = compute_gradients(model, pairs, options, figures)
        if options.timings:
            rate = optimizer.param_groups[0]["lr"]
            figures.values |= {"loss": loss.item(), "grad_norm": gradient_norm(gpt), "learning_rate": rate}
        norm = nn.utils.clip_grad_norm_(gpt.parameters(), CLIP_NORM)
        with figures.seconds("optimizer"):
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        torchobs.log(tokens=samples * options.block_size, samples=samples)
        if options.timings:
            figures.append_to(options.timings)

        if step % options.log_every == 0:
            speed = tokens_per_line / (time.perf_counter() - printed_at)
            say(f"step {step:5d}  loss {loss:7.4f}  gradient norm {norm:8.4f}  {speed:9,.0f} tokens/s")
            printed_at = time.perf_counter()
        if options.eval_every and step % options.eval_every == 0:
            say(f"step {step:5d}  validation loss {evaluate(gpt, validation, options):7.4f}")


def say(text: str) -> None:
    """Print once, not once per rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def join_ranks(options: Options) -> torch.device:
    """Join the process group, a group of one without a launcher such as torchrun, and return this rank's device."""
    local_ranks, local_rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.device_count() >= local_ranks)
    if cuda:
        torch.cuda.set_device(local_rank)
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, "tcp://127.0.0.1:0", rank=0, world_size=1)
    return torch.device("cuda", local_rank) if cuda else torch.device("cpu")


def main(arguments: list[str] | None = None) -> None:
    """Train, then let the model write."""
    options = Options.parse(arguments)
    torchobs.init()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = join_ranks(options)
    torch.manual_seed(options.seed)
    text = read_text(options.characters)
    training, validation = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    gpt = GPT(options).to(device)
    train(gpt, training, validation, options)
    if options.sample:
        say(write(gpt, "def ", options.sample))
    dist.barrier()  # all is let go of: torch 2.13 can deadlock when a group goes while a gloo thread frees a backward's work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
