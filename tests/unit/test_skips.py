"""The rule that CI skips nothing it could have run."""

import pytest

from tests import support

SKIPS = """
    import pytest

    def test_it() -> None:
        pytest.skip({reason!r})
"""


def test_an_avoidable_skip_fails_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip for something CI could have installed is a failure that repeats the reason."""
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile(SKIPS.format(reason="needs promtool on PATH"))
    result = pytester.runpytest("-p", "tests.skips")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*A skip that CI can avoid: Skipped: needs promtool on PATH*"])


@pytest.mark.parametrize("reason", support.UNAVOIDABLE)
def test_an_unavoidable_skip_stays_a_skip(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """No GPU in the machine is nobody's fault."""
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile(SKIPS.format(reason=reason))
    pytester.runpytest("-p", "tests.skips").assert_outcomes(skipped=1)


def test_a_module_may_not_skip_itself_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pytest.importorskip` at the top of a file would hide every test in it."""
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile("import pytest\n\npytest.importorskip('no_such_module')\n\ndef test_it() -> None: ...\n")
    pytester.runpytest("-p", "tests.skips").assert_outcomes(errors=1)


def test_outside_ci_a_skip_is_the_persons_choice(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop without Prometheus runs everything else."""
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(SKIPS.format(reason="needs promtool on PATH"))
    pytester.runpytest("-p", "tests.skips").assert_outcomes(skipped=1)
