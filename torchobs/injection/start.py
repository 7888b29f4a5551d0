"""What the import of torch calls in an image that has been given torchobs (:mod:`torchobs.injection.sitecustomize`)."""

from __future__ import annotations

import sys

import torchobs
from torchobs.support.command_line import starts_others

__all__ = ["start"]


def start() -> None:
    """Call :func:`torchobs.init` in a process that trains; the settings are those of the environment."""
    if not starts_others(sys.orig_argv):
        torchobs.init()
