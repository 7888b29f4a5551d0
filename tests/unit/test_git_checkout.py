"""The commit of a checkout, read from its files, is what git itself says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from torchobs.identity.git import Checkout, checkout

Git = Callable[..., str]


@pytest.fixture
def git(program: Callable[[str], str], tmp_path: Path) -> Git:
    """Run git in a repository with one commit of two files."""
    name, given = program("git"), ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=trunk"]

    def run(*arguments: str, where: Path = tmp_path) -> str:
        return subprocess.run([name, *given, *arguments], cwd=where, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "-q")
    for file in ("train.py", "sub/ümlaut.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("one\n")
    run("add", ".")
    run("commit", "-qm", "first")
    return run


def test_a_clean_checkout(git: Git, tmp_path: Path) -> None:
    """From a folder within it; a file that is only touched has not changed, one that git does not know is no change."""
    (tmp_path / "train.py").touch()
    (tmp_path / "new.py").write_text("x")
    assert checkout(tmp_path / "sub") == Checkout(git("rev-parse", "HEAD"), "trunk", dirty=False)


@pytest.mark.parametrize("change", ["edit", "same size", "remove"])
def test_a_changed_file(git: Git, tmp_path: Path, change: str) -> None:
    """Another size, another content of the same size, or gone."""
    if change == "remove":
        (tmp_path / "train.py").unlink()
    else:
        (tmp_path / "train.py").write_text("two\n" if change == "same size" else "more than that\n")
    found = checkout(tmp_path)
    assert found is not None
    assert (found.commit, found.dirty) == (git("rev-parse", "HEAD"), True)


def test_a_pipe_in_the_place_of_an_empty_file(git: Git, tmp_path: Path) -> None:
    """It is a change, and is not read, from which nobody would return."""
    (tmp_path / "train.py").write_text("")
    git("commit", "-qam", "empty")
    (tmp_path / "train.py").unlink()
    os.mkfifo(tmp_path / "train.py")
    assert checkout(tmp_path) == Checkout(git("rev-parse", "HEAD"), "trunk", dirty=True)


def test_packed_references_detached_heads_and_worktrees(git: Git, tmp_path: Path) -> None:
    """After `git gc`, at a commit without a branch, and in a worktree, whose files are elsewhere."""
    git("pack-refs", "--all")
    head = git("rev-parse", "HEAD")
    assert checkout(tmp_path) == Checkout(head, "trunk", dirty=False)
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    assert checkout(tmp_path / "tree") == Checkout(head, "other", dirty=False)
    git("checkout", "-q", "--detach")
    assert checkout(tmp_path) == Checkout(head, None, dirty=False)


def test_no_checkout(tmp_path: Path) -> None:
    """Outside of one, and before the first commit."""
    assert checkout(tmp_path) is None
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/trunk\n")
    assert checkout(tmp_path) is None


def test_a_slow_file_system_is_given_up(git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is known all the same, and whether files have changed is not."""
    monkeypatch.setattr("torchobs.identity.git.LONGEST_S", -1.0)
    assert checkout(tmp_path) == Checkout(git("rev-parse", "HEAD"), "trunk", dirty=None)
