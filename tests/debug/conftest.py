"""Fixtures of the tests of the debugging functions."""

import logging

import pytest

from torchobs import debug
from torchobs.debug import findings


@pytest.fixture(autouse=True)
def _findings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The logger's level is the last session's, which an earlier test may have asked to be quiet."""
    caplog.set_level(logging.WARNING, findings.LOGGER)


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    """No finding, operation or step of another test's is known."""
    debug.clear()
