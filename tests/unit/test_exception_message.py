"""What is recorded of an exception's message: one line, without secrets, cut."""

from __future__ import annotations

import pytest
import torch

from torchobs.probes.lifecycle.exception_message import MAX_LENGTH, message


class Named(Exception):  # noqa: N818  # as scripts have them
    """One with a text of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __str__(self) -> str:
        return f"no data set {self.name}"


class Unprintable(ValueError):  # noqa: N818  # as above
    """One that cannot be shown."""

    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("shapes differ"), "shapes differ"),
        (KeyError("loss"), "'loss'"),
        (KeyError(("loss", 3)), "('loss', 3)"),
        (FileNotFoundError(2, "No such file or directory", "data.bin"), "[Errno 2] No such file or directory: 'data.bin'"),
        (RuntimeError("\n\n  Expected a tensor.\nIt was none."), "Expected a tensor."),
        (Named("mnist"), "no data set mnist"),
        (Unprintable("x"), ""),
        (KeyboardInterrupt(), ""),
        (ValueError(""), ""),
    ],
)
def test_a_message_is_its_first_line(error: BaseException, line: str) -> None:
    """The first that is not blank; empty where there is none, or where the class fails to make it."""
    assert message(error) == line


@pytest.mark.parametrize(
    "text",
    [
        "cannot read s3://me:{}@bucket/data",
        "GET https://host/data?access_token={} answered 403",
        "401 for hf_{}",
        "login failed: password={}",
        '{{"api_key": "{}"}} is not accepted',
        "Authorization: Bearer {}",
        "hf_\x1b[31m{}\x1b[0m",
    ],
)
def test_secrets_are_removed(text: str) -> None:
    """By the rules for command lines, wherever in the message they are; colours of a terminal do not hide one."""
    secret = "abcdefghijklmnopqrstuv"
    assert secret not in message(ValueError(text.format(secret)))


def test_a_secret_that_the_cut_would_halve_is_removed_before() -> None:
    """Half a token is one that can be recognised as a token no more, but still is half a secret."""
    shown = message(ValueError("x" * (MAX_LENGTH - 12) + " hf_abcdefghijklmnopqrstuv"))
    assert "hf_" not in shown


def test_it_is_short_and_printable() -> None:
    """A hundred characters, without those that move a cursor, change the direction or end a line."""
    shown = message(ValueError("\x1b[1;31mred\x1b[0m\x07\u202e\ud800\tof " + "long " * 1_000_000))
    assert shown.startswith("red of long long")
    assert shown.isprintable()
    assert len(shown) == MAX_LENGTH


def test_no_tensor_is_formatted() -> None:
    """Its values are on a device, which may never answer."""

    class Asked(torch.Tensor):
        def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument
            raise AssertionError

    tensor = torch.zeros(2).as_subclass(Asked)
    assert message(ValueError("loss is not finite", tensor)) == "loss is not finite"
    assert message(ValueError(tensor)) == ""
    assert message(ValueError([tensor])) == ""
