"""Settings: options, variables, and those of torchobs run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import OTELResourceDetector

from tests.support import for_each
from torchobs.cli import run
from torchobs.config import settings
from torchobs.config.options import Address, Option
from torchobs.config.settings import OPTIONS, Settings, resolve
from torchobs.exporter import config

if TYPE_CHECKING:
    from collections.abc import Mapping

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

GOOD: list[tuple[str, str, str, object]] = [
    ("TORCHOBS_ENABLED", "no", "enabled", False),
    ("OTEL_SDK_DISABLED", "True", "enabled", False),
    ("TORCHOBS_LEVEL", "Extreme", "level", "extreme"),
    ("TORCHOBS_DIR", "/dev/shm/flights", "flight_dir", Path("/dev/shm/flights")),
    ("TORCHOBS_CONTROL_DIR", "control", "control_dir", Path("control")),
    ("TORCHOBS_FILE_SIZE", "1048576", "file_size", 1048576),
    ("TORCHOBS_FILE_SIZE", "2MiB", "file_size", 2 * 1024**2),
    ("TORCHOBS_EXPORTER", "1", "exporter", True),
    ("TORCHOBS_EXPORTER_ADDRESS", "localhost:0", "exporter_address", Address("localhost", 0)),
    ("TORCHOBS_EXPORTER_ADDRESS", "[::1]:10960", "exporter_address", Address("::1", 10960)),
    ("TORCHOBS_SUMMARY", "off", "summary", False),
    ("TORCHOBS_JOB_NAME", " gpt ", "job_name", "gpt"),
    ("OTEL_SERVICE_NAME", "gpt", "job_name", "gpt"),
    ("TORCHOBS_RUN_ID", "run-7", "run_id", "run-7"),
    ("TORCHOBS_RANK", "0", "rank", 0),
    ("TORCHOBS_LOCAL_RANK", "3", "local_rank", 3),
    ("TORCHOBS_WORLD_SIZE", "4096", "world_size", 4096),
    ("TORCHOBS_RESTART", "2", "restart", 2),
    ("TORCHOBS_K8S_JOB_NAME", "gpt", "kubernetes_job_name", "gpt"),
    ("TORCHOBS_K8S_JOB_UID", "c994", "kubernetes_job_uid", "c994"),
    ("OTEL_RESOURCE_ATTRIBUTES", "team=a%2Cb, tier = 1,", "resource_attributes", (("team", "a,b"), ("tier", "1"))),
    ("TRACEPARENT", TRACEPARENT, "traceparent", TRACEPARENT),
    ("TRACESTATE", "vendor=1", "tracestate", "vendor=1"),
    ("TORCHOBS_TOTAL_STEPS", "1000", "total_steps", 1000),
    ("TORCHOBS_TRACE_STEPS", "100", "trace_steps", 100),
    ("TORCHOBS_GRAD_INTERVAL", "AUTO", "grad_interval", "auto"),
    ("TORCHOBS_GRAD_INTERVAL", "10", "grad_interval", 10),
    ("TORCHOBS_LAYERS", "64", "layers", 64),
    ("TORCHOBS_OVERHEAD_BUDGET", "2e-1", "overhead_budget", 0.2),
    ("TORCHOBS_RAISE_ON", "nonfinite", "raise_on", frozenset({"nonfinite"})),
    ("TORCHOBS_DISABLE_PROBES", "loss, gradients,", "disable_probes", frozenset({"loss", "gradients"})),
    ("TORCHOBS_LOG_LEVEL", "debug", "log_level", "DEBUG"),
    ("TORCHOBS_OTEL_PROVIDERS", "off", "set_global_providers", False),
    ("TORCHOBS_INFER_THROUGHPUT", "no", "infer_throughput", False),
    ("TORCHOBS_NATIVE", "0", "native", False),
    ("TORCHOBS_WATCHDOG", "off", "watchdog", False),
    ("TORCHOBS_RUN_DETAILS", "off", "run_details", False),
    ("TORCHOBS_TAG", "baseline", "tag", "baseline"),
    ("TORCHOBS_KEEP_RUNS", "0", "keep_runs", 0),
    ("TORCHOBS_KEEP_DIR", "/volume/runs", "keep_dir", Path("/volume/runs")),
]
BAD = {
    **dict.fromkeys(("TORCHOBS_ENABLED", "TORCHOBS_LEVEL", "TORCHOBS_LOG_LEVEL", "TORCHOBS_OVERHEAD_BUDGET"), ("loud", "nan")),
    **dict.fromkeys(("TORCHOBS_RANK", "TORCHOBS_GRAD_INTERVAL", "TORCHOBS_LAYERS"), ("-1", "٣", "9" * 5000)),
    "OTEL_SDK_DISABLED": ("1",),
    "TORCHOBS_DIR": ("a\0b",),
    "TORCHOBS_KEEP_DIR": ("runs",),
    "TORCHOBS_FILE_SIZE": ("3MiB", "9" * 5000),
    "TORCHOBS_EXPORTER_ADDRESS": ("10960", "localhost:65536"),
    "TRACEPARENT": ("00-" + "0" * 32 + "-b7ad6b7169203331-01",),
}


def test_no_setting_and_no_variable_is_left_out_here() -> None:
    """Of what the next test tries."""
    every = {(setting.name, variable) for setting in OPTIONS for variable in setting.every_variable}
    assert {(name, variable) for variable, _, name, _ in GOOD} == every


@for_each({f"{variable}={text}": (variable, text, name, value) for variable, text, name, value in GOOD})
def test_an_allowed_value_is_taken(variable: str, text: str, name: str, value: object) -> None:
    """A variable sets its own field, and nothing else; an argument may be text or value. OTEL_SDK_DISABLED is the opposite."""
    resolved, problems = resolve({}, {variable: text})
    assert resolved == dataclasses.replace(Settings(), **{name: value})  # type: ignore[arg-type]
    assert problems == ()
    given_text = text if variable != "OTEL_SDK_DISABLED" else str(value)
    for argument in (given_text, value):
        resolved, problems = resolve({name: argument}, {})
        assert (getattr(resolved, name), problems) == (value, ())


@pytest.mark.parametrize(("variable", "text"), [(variable, text) for variable, texts in BAD.items() for text in texts])
def test_a_bad_value_is_reported_and_the_default_used(variable: str, text: str) -> None:
    """Inside a training nothing is raised; the problem names the variable, its value and what is allowed."""
    resolved, problems = resolve({}, {variable: text})
    assert resolved == Settings()
    [problem] = problems
    assert (problem.name, problem.value) == (variable, text)
    if variable != "OTEL_SDK_DISABLED":
        (allowed,) = (setting.kind.allowed for setting in OPTIONS if variable in setting.every_variable)
        assert allowed in str(problem)


def test_argument_beats_environment_beats_default() -> None:
    """The order of precedence, where a bad value counts as not given and None, too."""
    environ = {"TORCHOBS_LEVEL": "advanced"}
    assert resolve({"level": "off"}, environ)[0].level == "off"
    assert resolve({"level": None}, environ)[0].level == "advanced"
    assert resolve({"level": "loud"}, environ)[0].level == "advanced"
    assert resolve({"level": "loud"}, {"TORCHOBS_LEVEL": "quiet"})[0].level == "basic"
    assert len(resolve({"level": "loud"}, {"TORCHOBS_LEVEL": "quiet"})[1]) == 2


def test_our_own_variable_beats_opentelemetrys() -> None:
    """The more specific variable wins; an empty one is unset and a bad one is passed over."""
    cases: list[tuple[Mapping[str, str], bool]] = [
        ({"TORCHOBS_ENABLED": "true", "OTEL_SDK_DISABLED": "true"}, True),
        ({"TORCHOBS_ENABLED": "maybe", "OTEL_SDK_DISABLED": "true"}, False),
        ({"TORCHOBS_ENABLED": " ", "OTEL_SDK_DISABLED": ""}, True),
    ]
    for environ, enabled in cases:
        assert resolve({}, environ)[0].enabled is enabled


def test_resource_attributes_are_given_as_a_mapping() -> None:
    """A mapping's values are text as they are, commas and percent signs included."""
    resolved, problems = resolve({"resource_attributes": {"team": "a,b=c%20"}}, {})
    assert (resolved.resource_attributes, problems) == ((("team", "a,b=c%20"),), ())


@pytest.mark.parametrize("argument", [object(), 10**5000, float("nan"), True, [1], ""], ids=lambda _: "")
def test_no_argument_makes_it_raise(argument: object) -> None:
    """Whatever somebody passes as a rank: reported, and the default used."""
    resolved, [problem] = resolve({"rank": argument}, {})
    assert resolved.rank is None
    assert str(problem).startswith("argument rank")


def test_an_argument_that_is_no_setting_is_an_error_of_the_program() -> None:
    """As for any function of Python's; and it says which one was meant."""
    with pytest.raises(TypeError, match=r"'levle' is an unknown setting, did you mean level\?"):
        resolve({"levle": "off"}, {})


def test_unknown_variables_are_reported_with_a_suggestion_and_without_their_value() -> None:
    """A misspelled variable would otherwise do nothing in silence; what it holds may be a secret."""
    _, problems = resolve({}, {"TORCHOBS_LEVLE": "s3cret", "TORCHOBS_XYZZY": "s3cret", "OTHER": "1"})
    assert [str(problem) for problem in problems] == [
        "TORCHOBS_LEVLE is an unknown setting, did you mean TORCHOBS_LEVEL?",
        "TORCHOBS_XYZZY is an unknown setting",
    ]


def test_known_items_of_a_list_count_although_another_is_wrong() -> None:
    """One misspelled probe does not switch the others on again, one broken attribute does not hide the others."""
    resolved, problems = resolve({}, {"TORCHOBS_DISABLE_PROBES": "loss,gradient", "OTEL_RESOURCE_ATTRIBUTES": "a=1,b,=c"})
    assert resolved.disable_probes == {"loss"}
    assert resolved.resource_attributes == (("a", "1"),)
    attributes, probes = (str(problem) for problem in problems)
    assert "'gradient' is unknown, did you mean gradients?" in probes
    assert "'b' is left out" in attributes


@given(st.lists(st.text("ab=, %2Cé", max_size=8), max_size=4))
def test_resource_attributes_are_those_of_the_opentelemetry_sdk(items: list[str]) -> None:
    """The rank's resource and an SDK in the same process agree on OTEL_RESOURCE_ATTRIBUTES, well-formed or not."""
    text = ",".join(items)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", text)
        of_the_sdk = {key: value for key, value in OTELResourceDetector().detect().attributes.items() if key}
    resolved, _ = resolve({}, {"OTEL_RESOURCE_ATTRIBUTES": text})
    assert dict(resolved.resource_attributes) == of_the_sdk


@given(st.dictionaries(st.sampled_from([name for s in OPTIONS for name in s.every_variable]), st.text(max_size=30)))
def test_no_environment_makes_it_raise(environ: dict[str, str]) -> None:
    """Every problem can be written to a log in UTF-8, whatever bytes the environment holds."""
    _, problems = resolve({}, environ)
    assert "\n".join(map(str, problems)).encode() is not None


@pytest.mark.parametrize(
    ("options", "defaults"),
    [(settings.OPTIONS, Settings()), (config.OPTIONS, config.ExporterConfig())],
    ids=["init", "exporter"],
)
def test_every_field_has_an_option_whose_words_about_the_default_are_true(
    options: tuple[Option, ...], defaults: object
) -> None:
    """Where the words are themselves a value that is allowed; the others say who finds out."""
    fields = {field.name for field in dataclasses.fields(defaults)}  # type: ignore[arg-type]  # both are dataclasses
    assert fields - {option.name for option in options} <= {"runtime_dir", "push", "problems"}
    parsed = 0
    for option in options:
        default = getattr(defaults, option.name)
        if default is not None and default not in {(), frozenset()}:
            assert option.kind.parse(option.default) == default, option.name
            parsed += 1
    assert parsed >= 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lr", "3", "train.py"], ["unknown option '--lr'", "the script's own come after its name", "--no-exporter, ", "-m"]),
        (["python3.11", "train.py"], ["leave out 'python3.11'"]),
        ([], ["a script or `-m module` is missing"]),
        (["--no-exporter", "--"], ["a script or `-m module` is missing"]),
        (["--level", "loud", "train.py"], ["--level", "loud", "off, basic, advanced or extreme"]),
        (["--address", "h:99999", "train.py"], ["--address", "h:99999", "host:port"]),
        (["x/train.py"], [f"torchobs run: can't open file '{Path.cwd()}/x/train.py': [Errno 2] No such file or directory\n"]),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_is_allowed(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error alone, to the person who has typed it; a file that is not there is named by its whole path."""
    with pytest.raises(SystemExit) as refused:
        run.main(arguments)
    assert refused.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [words for words in said if words not in printed.err] == []


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [([], None, True), ([], "", True), ([], "0", None), (["--no-exporter"], None, False), (["--no-exporter"], "1", False)],
)
def test_the_exporter_is_on_unless_somebody_has_spoken(
    arguments: list[str], variable: str | None, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option beats the variable; what the variable says is for `init()` to read."""
    if variable is not None:
        monkeypatch.setenv("TORCHOBS_EXPORTER", variable)
    (tmp_path / "x.py").touch()
    options, what = run._parse([*arguments, str(tmp_path / "x.py"), "--lr", "1"])
    assert run._overrides(options)["exporter"] is expected
    assert what == run.Program(run.ProgramKind.SCRIPT, str(tmp_path / "x.py"), ("--lr", "1"))
