"""What is recorded of an exception: the first line of its message, without secrets, and places in a worker's traceback."""

from __future__ import annotations

import pytest
import torch
from torch._utils import ExceptionWrapper

from torchobs.probes.exits import MAX_MESSAGE, describe, message


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


def test_a_message_is_its_first_line() -> None:
    """The first that is not blank; empty where there is none, or where the class fails to make it."""
    for error, line in (
        (KeyError("loss"), "'loss'"),
        (KeyError(("loss", 3)), "('loss', 3)"),
        (FileNotFoundError(2, "No such file or directory", "data.bin"), "[Errno 2] No such file or directory: 'data.bin'"),
        (RuntimeError("\n\n  Expected a tensor.\nIt was none."), "Expected a tensor."),
        (Named("mnist"), "no data set mnist"),
        (Unprintable("x"), ""),
        (KeyboardInterrupt(), ""),
        (ValueError(""), ""),
    ):
        assert message(error) == line


def test_secrets_are_removed_and_it_is_short_and_printable() -> None:
    """By the rules for command lines, before the cut; of what stays nothing moves a cursor or ends a line."""
    for text in ("cannot read s3://me:{}@bucket/data", '{{"api_key": "{}"}} is not accepted', "hf_\x1b[31m{}\x1b[0m"):
        assert "abcdefghijklmnopqrstuv" not in message(ValueError(text.format("abcdefghijklmnopqrstuv")))
    assert "hf_" not in message(ValueError("x" * (MAX_MESSAGE - 12) + " hf_abcdefghijklmnopqrstuv"))
    shown = message(ValueError("\x1b[1;31mred\x1b[0m\x07\u202e\ud800\tof " + "long " * 1_000_000))
    assert shown.startswith("red of long long")
    assert shown.isprintable()
    assert len(shown) == MAX_MESSAGE


def test_no_tensor_is_formatted() -> None:
    """Its values are on a device, which may never answer."""

    class Asked(torch.Tensor):
        def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument
            raise AssertionError

    tensor = torch.zeros(2).as_subclass(Asked)
    assert message(ValueError("loss is not finite", tensor)) == "loss is not finite"
    assert message(ValueError(tensor)) == message(ValueError([tensor])) == ""


HEAD = "Traceback (most recent call last):\n"


def deep(text: str) -> None:
    """Raise what the text is the message of."""
    try:
        raise KeyError(text)  # noqa: TRY301  # the chain is what is wanted
    except KeyError as error:
        raise ValueError(text) from error


def wrapped(error: BaseException, where: str = "in DataLoader worker process 3") -> dict[str, str]:
    """The description of it when torch raises it again."""
    wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where)  # type: ignore[no-untyped-call]
    try:
        wrapper.reraise()  # type: ignore[no-untyped-call]
    except Exception as again:  # noqa: BLE001  # whatever torch makes of it
        return describe(again)
    raise AssertionError


@pytest.mark.parametrize(
    "message",
    [
        'x\n  File "secret", line 1, in secret',
        f'x\n{HEAD}  File "/secret", line 1, in secret\nKeyError',
        "x\n\nsecret\n" * 1000,
        "\x1b]0;secret\x07",
    ],
)
def test_a_message_is_no_place(message: str) -> None:
    """Whatever it looks like, it comes after the line that names the class; others than torch make wrappers, too."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message is the parameter
        deep(message)
    description = wrapped(caught.value)
    assert description["location"].endswith("in deep")
    assert "secret" not in repr({name: value for name, value in description.items() if not name.endswith("message")})
    assert "\x1b" not in repr(description)
    assert wrapped(caught.value, "in \x1b]0;owned\x07\nsecret")["origin"] == "background"
