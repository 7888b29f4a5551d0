"""How a run was started: its command line without secrets, and its git commit."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from torchobs.config.provenance import HIDDEN, Checkout, checkout, is_secret_name, redacted, redacted_text, redacted_value

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "s3cr3t-Value"


def test_a_named_secret_is_gone() -> None:
    """By its name: as a flag, a pair, a header, a query, JSON, or code."""
    cases: list[list[str]] = [
        ["--api-key", SECRET],
        *([f"{name}={SECRET}"] for name in ("--password", "AWS_SECRET_ACCESS_KEY", "trainer.logger.apiKey", "+logger.token")),
        *([f"{name}={SECRET}"] for name in ("--env=WANDB_API_KEY", "--args=--password", "--launch=env=WANDB_API_KEY")),
        *(["--header", header + SECRET] for header in ("Authorization: Bearer ", "X-Api-Key: ")),
        *(["-H", header + SECRET] for header in ("Authorization: ApiKey ", "Cookie: a=b; session=")),
        ["--url", f"https://user:{SECRET}@host/path"],
        ["--url", f"postgresql://{SECRET}@host/db"],
        ["--url", f"https://host/path?access_token={SECRET}&page=2"],
        [f"--url=https://host/path?api_key={SECRET}"],
        [f"--db=postgres://u:p@host/db?password={SECRET}"],
        [f"--db=postgres://u:a/{SECRET}@host/db"],
        ["--config", f'{{"lr": 0.1, "api_key": "{SECRET}"}}'],
        ["--config", f"{{'password': '{SECRET}'}}"],
        ["--config", f"{{'auth': ['first', '{SECRET}']}}"],
        ["--config", f'{{"password": "a\\"{SECRET}"}}'],
        ["--secret=two words " + SECRET],
        ["-c", f"import wandb; wandb.login(key='{SECRET}')"],
        ["-uc", f"login('{SECRET}')"],
        ["--env", f"HF_TOKEN={SECRET}"],
        [f"wandb={{api_key:{SECRET}}}"],
        [f"wandb: {{api_key: {SECRET}}}"],
        [f"+env={{a:{{api_key:{SECRET}}},b:2}}"],
        ["--api_keys", "first", SECRET],
        ["++wandb.key", SECRET],
        [f"python x.py --api-key {SECRET} --lr 1"],
        [f"--args=--api-key {SECRET}"],
        ["--user", f"admin:{SECRET}"],
        [f"--header=Cookie: a=b; session={SECRET}"],
        ["-b", f"a=b; session={SECRET}"],
    ]
    for arguments in cases:
        assert SECRET not in " ".join(redacted(["python", *arguments, "--lr", "0.1"]))
        assert redacted(["python", *arguments, "--lr", "0.1"])[-2:] == ["--lr", "0.1"]


def test_a_token_of_a_known_form_is_gone_under_any_name() -> None:
    """Also as an argument of its own."""
    cases: list[str] = [
        "hf_abcdefghijklmnopqrstuv", "ghp_" + "a1" * 18, "github_pat_" + "a1" * 20, "glpat-" + "a1" * 10, "sk-" + "a1" * 20,
        "AKIAABCDEFGHIJKLMNOP", "xoxb-1234567890-abc", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc",
        "0123456789" * 4, "npm_" + "a1" * 18, "dapi" + "0a" * 16, "sk_live_" + "a1" * 12,
        "https://hooks.slack.com/services/T0/B0/abc",
        "-----BEGIN RSA PRIVATE KEY-----abc",
        "hf_oauth_abcdefghijklmnopqrst", "api_org_abcdefghijklmnopqrstuvwxyz1234", "xapp-1-A123-456-abcdef0123456789",
        "xoxe.xoxp-1-abcdefghijk", "ghs_16C7e42F292c6912E7710c838347Ae178B4a", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzEXAMPLEKE",
        "wandb_v1_abcdefghijklmnopqrstuvwxyz0123", "ya29.a0AfH6SMBabcdefghijklmnop", "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.",
        "run_ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    ]  # fmt: skip
    for token in cases:
        hidden = f"run_{HIDDEN}" if token.startswith("run_") else f"{HIDDEN}." if token.endswith(".") else HIDDEN
        assert redacted(["train.py", token, f"--name={token}"]) == ["train.py", hidden, f"--name={hidden}"]


def test_what_is_no_secret_stays() -> None:
    """Numbers of tokens, tokenizers, monkeys, times of day, paths, models and URLs; a flag behind one named as a secret."""
    text = (
        "python -m x train.py --max-tokens 4096 --num_tokens=2M --tokenizer gpt2 --monkey x --lr 3e-4 model.keypoints=17"
        " --start=12:30:00 --data /data/keys/train.bin --url https://host/path?page=2 --author me --betas 0.9,0.95 -b 32"
        " /data/imagenet/train/Experiment2012 --model=meta-llama/Llama-3.1-8B-Instruct hf_hub --use-auth-token --lr 0.1"
    )
    assert redacted(text.split()) == text.split()
    assert [redacted_text(word) for word in text.split()] == text.split()


def test_names_and_settings() -> None:
    """Names in any spelling; settings by their names."""
    names = ("token", "HF_TOKEN", "hfToken", "x-api-key", "apikey", "DB_PASSWORD", "accessKey", "client_secret", "credentials")
    assert all(map(is_secret_name, (*names, "passphrase", "auth", "encryptionkey")))
    assert not any(map(is_secret_name, ("tokenizer", "keyboard", "monkey", "lr", "secretary", "authors", "compass")))
    assert (redacted_value("api_key", "abc"), redacted_value("max_tokens", "512")) == (HIDDEN, "512")
    assert redacted_text("mysql://u:p@h/d") == f"mysql://{HIDDEN}@h/d"


@pytest.mark.parametrize("part", ["a", "a ", "aGVsbG8x", "a=b ", " ", "a.b-"])
def test_a_long_argument_takes_time_by_its_length_alone(part: str) -> None:
    """A configuration in base64 of 20 KB held the training's start up for 20 s: time by the square of its length."""

    def least_s(length: int) -> float:
        text, times = (part * length)[:length], []
        for _ in range(3):
            begun = time.thread_time()
            redacted_text(text)
            times.append(time.thread_time() - begun)
        return min(times)

    assert least_s(16_000) < 64 * least_s(1_000)  # in proportion 16 times as long, by the square 256 times


Git = Callable[..., str]


@pytest.fixture
def git(program: Callable[[str], str], tmp_path: Path) -> Git:
    """Run git in a repository with one commit of two files."""
    name, user = program("git"), ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=trunk"]

    def run(*arguments: str, where: Path = tmp_path) -> str:
        return subprocess.run([name, *user, *arguments], cwd=where, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "-q")
    for file in ("train.py", "sub/ümlaut.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("one\n")
    run("add", ".")
    run("commit", "-qm", "first")
    return run


def test_packed_references_detached_heads_and_worktrees(git: Git, tmp_path: Path) -> None:
    """After `git gc`, at a commit without a branch, and in a worktree, whose files are elsewhere."""
    git("pack-refs", "--all")
    head = git("rev-parse", "HEAD")
    assert checkout(tmp_path) == Checkout(head, "trunk")
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    assert checkout(tmp_path / "tree") == Checkout(head, "other")
    git("checkout", "-q", "--detach")
    assert checkout(tmp_path) == Checkout(head, None)


def test_no_checkout(tmp_path: Path) -> None:
    """Outside of one, and before the first commit."""
    assert checkout(tmp_path) is None
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/trunk\n")
    assert checkout(tmp_path) is None
