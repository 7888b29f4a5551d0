"""Real text for the training scripts, and what they print at their end."""

import hashlib
import json
import sys
import sysconfig
from pathlib import Path

import torch

VOCABULARY = 128


def characters(number: int) -> torch.Tensor:
    """The first characters of the standard library's argparse, int64; whatever is not ASCII is a `?`."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text("utf-8").encode("ascii", "replace")
    return torch.frombuffer(bytearray(text[:number]), dtype=torch.uint8).long()


def windows(number: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many disjoint windows of that length, and for each character the next one."""
    text = characters(number * length + 1)
    return text[:-1].view(number, length), text[1:].view(number, length)


def digest(*models: torch.nn.Module) -> str:
    """A checksum of every bit of the models' state."""
    checksum = hashlib.sha256()
    for model in models:
        for name, value in model.state_dict().items():
            checksum.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return checksum.hexdigest()


def report(name: str, steps: int, loss: float, *models: torch.nn.Module, **more: object) -> None:
    """Print one line of JSON: what was trained, in how many steps, and what came out of it, to the last bit."""
    line = json.dumps({"name": name, "steps": steps, "loss": loss.hex(), "digest": digest(*models), **more})
    sys.stdout.write(f"{line}\n")  # in one piece, buffered or not: ranks may share the pipe
    sys.stdout.flush()
