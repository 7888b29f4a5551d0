"""With CI=true a skip is a failure, unless its reason is in `support.UNAVOIDABLE`; with `make kube-test` there is a cluster.

A skipped test is a promise nobody checked: on a person's machine their choice, in CI a hole that no one sees.
"""

import os
from collections.abc import Generator

import pytest

from tests.support import NEEDS_KUBERNETES, UNAVOIDABLE

# Asked for before the fixture that hides what begins with TORCHOBS_ from every test.
IN_A_CLUSTER = bool(os.environ.get("KUBECONFIG") and os.environ.get("TORCHOBS_TEST_EXPORTER_IMAGE"))


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("CI") != "true":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    unavoidable = tuple(one for one in UNAVOIDABLE if not (IN_A_CLUSTER and one == NEEDS_KUBERNETES))
    if not reason.removeprefix("Skipped: ").startswith(unavoidable):
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
