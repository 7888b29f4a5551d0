"""With CI=true a skip is a failure, unless its reason is in `support.UNAVOIDABLE`.

A skipped test is a promise nobody checked: on a person's machine their choice, in CI a hole that no one sees.
"""

import os
from collections.abc import Generator

import pytest

from tests.support import UNAVOIDABLE


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("CI") != "true":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(UNAVOIDABLE):
        report.outcome = "failed"
        report.longrepr = f"A skip that CI can avoid: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn an avoidable skip of a test into its failure."""
    report = yield
    _forbid(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself."""
    report = yield
    _forbid(report)
    return report
