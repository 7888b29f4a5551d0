"""The rule that CI skips nothing it could have run."""

import pytest

from tests import skips, support

ONE_SKIP = """
    import pytest

    @pytest.mark.parametrize("reason", {reasons!r})
    def test_it(reason: str) -> None:
        pytest.skip(reason)
"""
AVOIDABLE = ["needs promtool on PATH"]


def run(pytester: pytest.Pytester, source: str) -> pytest.RunResult:
    """The outcome of `source` under the rule and nothing else: loading every plug-in again costs a second."""
    pytester.makeini("[pytest]")  # or a folder above may lend its own
    pytester.makepyfile(source)
    others = ("hypothesispytest", "xdist", "timeout", "anyio", "jaxtyping", "cloudcoil", "schemathesis")
    return pytester.runpytest("-p", "tests.skips", *(f"-pno:{name}" for name in others))


def test_an_avoidable_skip_fails_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip for something CI could have installed is a failure that repeats the reason."""
    monkeypatch.setenv("CI", "true")
    result = run(pytester, ONE_SKIP.format(reasons=AVOIDABLE))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*A skip that CI can avoid: Skipped: needs promtool on PATH*"])


def test_an_unavoidable_skip_stays_a_skip(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU in the machine is nobody's fault."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(skips, "IN_A_CLUSTER", False)
    reasons = list(support.UNAVOIDABLE)
    run(pytester, ONE_SKIP.format(reasons=reasons)).assert_outcomes(skipped=len(reasons))


def test_where_there_is_a_cluster_nothing_is_skipped_for_the_lack_of_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `make kube-test`: a part that it lacks, such as the policy's API, is one that CI could have switched on."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(skips, "IN_A_CLUSTER", True)
    reasons = [f"{support.NEEDS_KUBERNETES} that serves more", support.NEEDS_CUDA]
    run(pytester, ONE_SKIP.format(reasons=reasons)).assert_outcomes(failed=1, skipped=1)


def test_a_module_may_not_skip_itself_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pytest.importorskip` at the top of a file would hide every test in it."""
    monkeypatch.setenv("CI", "true")
    source = "import pytest\n\npytest.importorskip('no_such_module')\n\ndef test_it() -> None: ...\n"
    run(pytester, source).assert_outcomes(errors=1)


def test_outside_ci_a_skip_is_the_persons_choice(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop without Prometheus runs everything else."""
    monkeypatch.delenv("CI", raising=False)
    run(pytester, ONE_SKIP.format(reasons=AVOIDABLE)).assert_outcomes(skipped=1)
