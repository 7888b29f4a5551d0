"""`python tests/install.py ARGUMENT...`: `pip install ARGUMENT...` for this interpreter, by uv where that is to be had.

The same packages in a third of the time (two cores, an index nearby): uv fetches and compiles several at once. It reads none
of pip's settings, so it is told what pip was told. Where that is more than is understood here, and wherever uv cannot be had
or gives up, pip does the work and has the last word.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

PIP = (sys.executable, "-m", "pip")
UV = (sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--compile-bytecode")
"""Compiled at once, as pip does: where Python may write no bytecode, every process of the tests would compile torch again."""

_PAIRS = (
    "index-url=UV_INDEX_URL extra-index-url=UV_EXTRA_INDEX_URL trusted-host=UV_INSECURE_HOST find-links=UV_FIND_LINKS"
    " cert=SSL_CERT_FILE client-cert=SSL_CLIENT_CERT proxy=ALL_PROXY timeout=UV_HTTP_TIMEOUT default-timeout=UV_HTTP_TIMEOUT"
)
TOLD = dict(pair.split("=") for pair in _PAIRS.split())
"""pip's setting: the variable in which uv takes it."""

ONLY_PIPS = frozenset(
    {
        *("break-system-packages", "cache-dir", "disable-pip-version-check", "log", "no-cache-dir", "no-color", "no-input"),
        *("progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action", "verbose"),
    }
)
"""Settings that make no difference to what is installed, nor from where."""


def settings_of_pip(listed: Iterable[str]) -> dict[str, str]:
    """What `pip config list` printed, as far as it is for `pip install`; the environment comes last in it and wins."""
    read = dict(line.split("=", 1) for line in listed if "=" in line)
    sections = ("global.", "install.", ":env:.")
    return {
        name.removeprefix(section): str(ast.literal_eval(value))
        for section in sections
        for name, value in read.items()
        if name.startswith(section)
    }


def told_to_uv(settings: Mapping[str, str]) -> dict[str, str] | None:
    """The variables that tell uv what pip was told; None if one of the settings is not known to make no difference."""
    relevant = {name: value for name, value in settings.items() if name not in ONLY_PIPS}
    if relevant.keys() - TOLD.keys():
        return None
    # pip takes the newest version that any index has, uv by default what the first index has that knows the package
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_CACHE_DIR": ".cache/uv"}
    for name, value in relevant.items():
        variables[TOLD[name]] = ("," if name == "find-links" else " ").join(value.split())
    return variables


def by_uv(arguments: list[str]) -> bool:
    """Whether uv did it."""
    listed = subprocess.run((*PIP, "config", "list"), capture_output=True, text=True, check=False).stdout
    variables = told_to_uv(settings_of_pip(listed.splitlines()))
    if variables is None:
        return False
    if find_spec("uv") is None and subprocess.run((*PIP, "install", "-q", "uv>=0.5"), check=False).returncode:
        return False
    return not subprocess.run((*UV, *arguments), env={**variables, **os.environ}, check=False).returncode


def main(arguments: list[str]) -> int:
    """Install; the exit code is pip's where pip had to do it."""
    if by_uv(arguments):
        return 0
    sys.stderr.write(f"{Path(__file__).name}: not by uv, so by pip\n")
    return subprocess.run((*PIP, "install", *arguments), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
