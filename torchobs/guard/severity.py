"""How bad something is that the guard found, and of which kind: on its events and metrics."""

from __future__ import annotations

from enum import Enum


class Severity(Enum):
    """How bad it is, in OpenTelemetry's words."""

    INFO = "info"
    """nothing was lost: an operation was repeated and worked"""
    WARNING = "warning"
    """something was lost and training went on: a batch, a step"""
    ERROR = "error"
    """a budget is spent, and the original error was raised"""


class Category(Enum):
    """What an error is about. By the exception's type, never by words of its message."""

    MEMORY = "memory"
    """a device or the machine ran out of memory"""
    NUMERICS = "numerics"
    """a loss, a gradient or an output is not finite, or has exploded"""
    DATA = "data"
    """a sample or a batch cannot be read or used"""
    IO = "io"
    """a file system or network failed, perhaps for a moment"""
    CONTRACT = "contract"
    """a tensor is not what was agreed"""
    RESOURCES = "resources"
    """a limit of processor, memory or disk is near"""
    FILE = "file"
    """a model file is suspicious or damaged"""
    OTHER = "other"
