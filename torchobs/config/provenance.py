"""How a run was started: its command line without secrets, and its git commit.

The commit is read without ``git``: a process with RDMA memory registered must not fork, and most images lack the program.

A value is replaced by ``***`` where its name says that it is a secret, where it has the form of a well-known provider's token,
and where a URL carries credentials. A name may stand before the value in any usual way: ``--api-key X``, ``--api-key=X``,
``API_KEY=X``, ``"api_key": "X"``, ``X-Api-Key: X``, ``?api_key=X``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


class Checkout(NamedTuple):
    """A checkout; whether its files were changed since is not determined."""

    commit: str
    branch: str | None


def checkout(start: Path) -> Checkout | None:
    """Return the checkout that a directory belongs to; ``None`` if there is none, or no commit yet. May raise ``OSError``."""
    start = start.resolve()
    root = next((path for path in (start, *start.parents) if (path / ".git").exists()), None)
    if root is None:
        return None
    git = _git_directory(root)
    head = _text(git / "HEAD")
    name = head.removeprefix("ref: ") if head.startswith("ref: ") else None
    common = (git / _text(git / "commondir")).resolve() if (git / "commondir").is_file() else git
    commit = _reference(git, common, name) if name else head
    if _HASH.fullmatch(commit) is None:
        return None
    return Checkout(commit, name.removeprefix("refs/heads/") if name else None)


def _git_directory(root: Path) -> Path:
    """Return git's directory; that of a worktree or a submodule is elsewhere."""
    entry = root / ".git"
    return (root / _text(entry).removeprefix("gitdir: ")).resolve() if entry.is_file() else entry


def _reference(git: Path, common: Path, name: str) -> str:
    for directory in (git, common):
        if (directory / name).is_file():
            return _text(directory / name)
    packed = common / "packed-refs"
    lines = _text(packed).splitlines() if packed.is_file() else []
    return next((line.split(" ", 1)[0] for line in lines if line.endswith(f" {name}")), "")


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip()


HIDDEN = "***"
_SECRET = frozenset({
    "key", "keys", "token", "tokens", "password", "passwords", "passwd", "passphrase", "pass", "pwd", "pw", "secret", "secrets",
    "credential", "credentials", "cred", "creds", "auth", "authorization", "bearer", "cookie", "cookies", "signature", "sig",
    "sas", "dsn", "pin", "otp", "jwt", "passcode",
})  # fmt: skip
_ENDINGS = (
    "apikey", "accesskey", "authkey", "licensekey", "privatekey", "secretkey", "signingkey", "sshkey", "encryptionkey",
    "token", "password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "cookie",
)  # fmt: skip
"""As the end of a longer word: ``wandbapikey``, ``authtoken``; of keys only these, for ``monkey`` is none."""
_COUNTED = frozenset({"tokens", "token", "keys"})
"""Names of quantities too (``--max-tokens 512``): a number of at most seven digits is no secret."""
_NAME = r"(?<![A-Za-z0-9_.\-])([A-Za-z0-9_.\-]+)"
"""Begins only where a word begins: from every character on it would take time by the square of a long word's length"""
_MOST_NESTED = 8
"""Levels of pairs within the value of a pair that are searched; deeper ones are hidden as a whole"""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_NUMBER = re.compile(r"[0-9][0-9_,.]{0,8}[kKmMbB]?")
_PAIR = re.compile(
    rf"{_NAME}([\"']?\s*(?:=|:(?!//))\s*)"
    r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|(?:(?i:bearer|basic|token|apikey)\s+)?(?![{\[(])[^\s\"',;&}\])]+)"
)
_LIST = re.compile(rf"{_NAME}([\"']?\s*[=:]\s*)(\[[^\]]*\]?)")
_FLAG = re.compile(r"(?<![^\s=\"'])((?:--?|\+\+?)[A-Za-z][A-Za-z0-9_.\-]*)(\s+)([^\s\-]\S*)")
"""A flag with its value, within one argument: a command for another program"""
_HEADER = re.compile(r"([A-Za-z][A-Za-z0-9\-]*):\s+(.*)", re.DOTALL)
_CODE = re.compile(r"-[A-Za-z]*c")
_WHOLE = re.compile(r"-{0,2}([A-Za-z0-9_.\-]+)=(.*)", re.DOTALL)
_URL_CREDENTIALS = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]{0,30}://)(?:[^/\s?#]*|[^/@\s?#:]*:[^@]*)@")
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_\w{16,}|api_org_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|sk-[\w\-]{16,}"
    r"|(?:xoxe\.)?xox[a-z]-[\w\-]{10,}|xapp-[\w\-]{10,}|wandb_v[0-9]_\w{20,}|ya29\.[\w\-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w\-]{30,}|eyJ[\w\-]{8,}\.[\w\-]{8,}(?:\.[\w\-]*)?"
    r"|npm_[A-Za-z0-9]{20,}|dapi[0-9a-f]{20,}|[rs]k_live_[A-Za-z0-9]{10,}|SG\.[\w\-]{16,}\.[\w\-]{16,}|[0-9a-f]{40})\b"
    r"|(?<![A-Za-z0-9/+])(?=[a-z0-9/+]{0,39}[A-Z])(?=[A-Z0-9/+]{0,39}[a-z])(?=[A-Za-z/+]{0,39}[0-9])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])"
    r"|https://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.\-]*webhook\.office\.com)/\S+"
    r"|-----BEGIN[\s\S]*"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI and its like, Slack, AWS, Google, npm, Databricks, Stripe, SendGrid, JSON web
tokens; forty hexadecimal digits as of Weights & Biases, and forty letters and digits as of AWS's secret keys; private keys;
addresses of webhooks, which are secrets as a whole."""


def is_secret_name(name: str) -> bool:
    """Return whether a value of that name is likely a secret: ``--hf-token``, ``AWS_SECRET_ACCESS_KEY``, ``dbPassword``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return any(word in _SECRET or word.endswith(_ENDINGS) for word in words)


def redacted(arguments: Sequence[str]) -> list[str]:
    """Return a command line without its secrets; code given by ``-c`` is left out whole."""
    words: list[str] = []
    flag, before = "", ""  # the last flag, and the argument before, which it may be
    for argument in arguments:
        is_flag = argument.startswith(("--", "++"))
        if _CODE.fullmatch(before) and len(words) < 8 and not any(word.endswith(".py") for word in words):  # noqa: PLR2004  # Python's own
            words.append("<code>")
        elif not is_flag and _names_secret(flag) and (flag == before or flag.endswith("s")):  # of several, each
            words.append(argument if _is_quantity(flag, argument) else HIDDEN)
        elif (before in {"-u", "--user"} and ":" in argument) or (before == "-b" and "=" in argument):
            # as curl is given a name and a password, or cookies
            words.append(HIDDEN)
        else:
            words.append(redacted_text(argument))
        flag, before = (argument if argument.startswith(("-", "+")) else flag), argument
    return words


def redacted_value(name: str, value: str) -> str:
    """Return a setting's value without secrets."""
    return HIDDEN if is_secret_name(name) and not _is_quantity(name, value) else redacted_text(value)


def redacted_text(text: str) -> str:
    """Return one argument or setting without the secrets within it."""
    whole = _WHOLE.fullmatch(text)
    if whole and is_secret_name(whole[1]) and not _is_quantity(whole[1], whole[2]):
        return text[: whole.start(2)] + HIDDEN  # the value may hold spaces
    header = _HEADER.fullmatch(whole[2] if whole else text)
    if header and is_secret_name(header[1]):
        # all of it: a cookie has several values, a scheme stands before a token
        return f"{text[: whole.start(2)] if whole else ''}{header[1]}: {HIDDEN}"
    for pattern in (_LIST, _FLAG, _PAIR):
        text = pattern.sub(_pair, _URL_CREDENTIALS.sub(rf"\1{HIDDEN}@", text))
    return _TOKENS.sub(HIDDEN, text)


def _pair(match: re.Match[str], nested: int = _MOST_NESTED) -> str:
    name, between, value = match.groups()
    if is_secret_name(name):
        return match[0] if _is_quantity(name, value) else name + between + HIDDEN
    # the value may be a pair itself
    return name + between + (_PAIR.sub(partial(_pair, nested=nested - 1), value) if nested else HIDDEN)


def _names_secret(argument: str) -> bool:
    return argument.startswith(("-", "+")) and "=" not in argument and is_secret_name(argument)


def _is_quantity(name: str, value: str) -> bool:
    words = {word.lower() for word in _WORDS.findall(name)}
    return bool(words & _COUNTED) and not words & (_SECRET - _COUNTED) and _NUMBER.fullmatch(value) is not None
