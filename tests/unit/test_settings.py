"""Settings: every value from every source, and what becomes of a bad one."""

import ast
import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import OTELResourceDetector

from torchobs.config import settings
from torchobs.config.option_types import Address
from torchobs.config.options import Option
from torchobs.config.settings import OPTIONS, Settings, resolve

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

GOOD: list[tuple[str, str, str, object]] = [
    ("TORCHOBS_ENABLED", "no", "enabled", False),
    ("TORCHOBS_ENABLED", "ON", "enabled", True),
    ("OTEL_SDK_DISABLED", "True", "enabled", False),
    ("OTEL_SDK_DISABLED", "false", "enabled", True),
    ("TORCHOBS_LEVEL", "Extreme", "level", "extreme"),
    ("TORCHOBS_DIR", "/dev/shm/flights", "flight_dir", Path("/dev/shm/flights")),
    ("TORCHOBS_CONTROL_DIR", "control", "control_dir", Path("control")),
    ("TORCHOBS_FILE_SIZE", "1048576", "file_size", 1048576),
    ("TORCHOBS_FILE_SIZE", "2MiB", "file_size", 2 * 1024**2),
    ("TORCHOBS_FILE_SIZE", "256 KiB", "file_size", 256 * 1024),
    ("TORCHOBS_FILE_SIZE", "300000B", "file_size", 300000),
    ("TORCHOBS_EXPORTER", "1", "exporter", True),
    ("TORCHOBS_EXPORTER_ADDRESS", "localhost:0", "exporter_address", Address("localhost", 0)),
    ("TORCHOBS_EXPORTER_ADDRESS", ":9090", "exporter_address", Address("", 9090)),
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
    ("TORCHOBS_OVERHEAD_BUDGET", "0", "overhead_budget", 0.0),
    ("TORCHOBS_OVERHEAD_BUDGET", "2e-1", "overhead_budget", 0.2),
    ("TORCHOBS_RAISE_ON", "nonfinite", "raise_on", frozenset({"nonfinite"})),
    ("TORCHOBS_DISABLE_PROBES", "loss, gradients,", "disable_probes", frozenset({"loss", "gradients"})),
    ("TORCHOBS_LOG_LEVEL", "debug", "log_level", "DEBUG"),
    ("TORCHOBS_OTEL_PROVIDERS", "off", "set_global_providers", False),
    ("TORCHOBS_INFER_THROUGHPUT", "no", "infer_throughput", False),
    ("TORCHOBS_NATIVE", "0", "native", False),
    ("TORCHOBS_WATCHDOG", "off", "watchdog", False),
    ("TORCHOBS_RUN_DETAILS", "off", "run_details", False),
    ("TORCHOBS_TENSOR_SAMPLES", "no", "tensor_samples", False),
]
BAD: list[tuple[str, str]] = [
    ("TORCHOBS_ENABLED", "maybe"),
    ("OTEL_SDK_DISABLED", "1"),
    ("TORCHOBS_LEVEL", "loud"),
    ("TORCHOBS_DIR", "a\0b"),
    ("TORCHOBS_FILE_SIZE", "3MiB"),
    ("TORCHOBS_FILE_SIZE", "1"),
    ("TORCHOBS_FILE_SIZE", "1MB"),
    ("TORCHOBS_FILE_SIZE", "-1048576"),
    ("TORCHOBS_FILE_SIZE", "9" * 5000),
    ("TORCHOBS_EXPORTER", "2"),
    ("TORCHOBS_EXPORTER_ADDRESS", "10960"),
    ("TORCHOBS_EXPORTER_ADDRESS", "localhost:65536"),
    ("TORCHOBS_EXPORTER_ADDRESS", "http://localhost:10960"),
    ("TORCHOBS_RANK", "-1"),
    ("TORCHOBS_RANK", "1_0"),
    ("TORCHOBS_RANK", "٣"),
    ("TORCHOBS_WORLD_SIZE", "0"),
    ("TORCHOBS_RESTART", "1.0"),
    ("TRACEPARENT", "00-" + "0" * 32 + "-b7ad6b7169203331-01"),
    ("TRACEPARENT", "ff" + TRACEPARENT[2:]),
    ("TRACEPARENT", TRACEPARENT.upper()),
    ("TORCHOBS_GRAD_INTERVAL", "0"),
    ("TORCHOBS_LAYERS", "65"),
    ("TORCHOBS_OVERHEAD_BUDGET", "nan"),
    ("TORCHOBS_OVERHEAD_BUDGET", "0.21"),
    ("TORCHOBS_LOG_LEVEL", "TRACE"),
]


def _setting_of(variable: str) -> Option:
    return next(setting for setting in OPTIONS if variable in setting.every_variable)


@pytest.mark.parametrize(("variable", "text", "name", "value"), GOOD)
def test_an_allowed_value_is_taken_from_the_environment(variable: str, text: str, name: str, value: object) -> None:
    """Each variable sets its own field, and nothing else, to the value that its text stands for."""
    found, problems = resolve({}, {variable: text})
    assert found == dataclasses.replace(Settings(), **{name: value})  # type: ignore[arg-type]
    assert problems == ()


@pytest.mark.parametrize(("variable", "text", "name", "value"), GOOD)
def test_an_argument_is_worth_what_the_same_text_is(variable: str, text: str, name: str, value: object) -> None:
    """Arguments are taken as text and as values; OTEL_SDK_DISABLED alone says the opposite of its argument."""
    given_text = text if variable != "OTEL_SDK_DISABLED" else str(value)
    for argument in (given_text, value):
        found, problems = resolve({name: argument}, {})
        assert (getattr(found, name), problems) == (value, ())


@pytest.mark.parametrize(("variable", "text"), BAD)
def test_a_bad_value_is_reported_and_the_default_used(variable: str, text: str) -> None:
    """Inside a training nothing is raised; the problem names the variable, its value and what is allowed."""
    found, problems = resolve({}, {variable: text})
    assert found == Settings()
    [problem] = problems
    assert (problem.name, problem.value) == (variable, text)
    if variable != "OTEL_SDK_DISABLED":
        assert _setting_of(variable).kind.allowed in str(problem)


def test_every_setting_is_among_the_good_values() -> None:
    """The tables above leave no setting and no variable out."""
    assert {(name, variable) for variable, _, name, _ in GOOD} == {
        (setting.name, variable) for setting in OPTIONS for variable in setting.every_variable
    }


def test_argument_beats_environment_beats_default() -> None:
    """The order of precedence, where a bad value counts as not given and None, too."""
    environ = {"TORCHOBS_LEVEL": "advanced"}
    assert resolve({"level": "off"}, environ)[0].level == "off"
    assert resolve({"level": None}, environ)[0].level == "advanced"
    assert resolve({"level": "loud"}, environ)[0].level == "advanced"
    assert resolve({"level": "loud"}, {"TORCHOBS_LEVEL": "quiet"})[0].level == "basic"
    assert len(resolve({"level": "loud"}, {"TORCHOBS_LEVEL": "quiet"})[1]) == 2


@pytest.mark.parametrize(
    ("environ", "enabled"),
    [
        ({"TORCHOBS_ENABLED": "true", "OTEL_SDK_DISABLED": "true"}, True),
        ({"TORCHOBS_ENABLED": "maybe", "OTEL_SDK_DISABLED": "true"}, False),
        ({"TORCHOBS_ENABLED": "", "OTEL_SDK_DISABLED": "true"}, False),
        ({"TORCHOBS_ENABLED": " ", "OTEL_SDK_DISABLED": ""}, True),
    ],
)
def test_our_own_variable_beats_opentelemetrys(environ: Mapping[str, str], enabled: bool) -> None:  # noqa: FBT001
    """The more specific variable wins; an empty one is unset and a bad one is passed over."""
    assert resolve({}, environ)[0].enabled is enabled


def test_an_empty_collection_is_an_argument() -> None:
    """`disable_probes=()` switches on what the environment switches off."""
    found, problems = resolve({"disable_probes": ()}, {"TORCHOBS_DISABLE_PROBES": "loss"})
    assert (found.disable_probes, problems) == (frozenset(), ())


def test_resource_attributes_are_given_as_a_mapping() -> None:
    """A mapping's values are text as they are, commas and percent signs included."""
    found, problems = resolve({"resource_attributes": {"team": "a,b=c%20"}}, {})
    assert (found.resource_attributes, problems) == ((("team", "a,b=c%20"),), ())


@pytest.mark.parametrize("argument", [object(), 10**5000, float("nan"), True, [1], ""], ids=lambda _: "")
def test_no_argument_makes_it_raise(argument: object) -> None:
    """Whatever somebody passes as a rank: reported, and the default used."""
    found, [problem] = resolve({"rank": argument}, {})
    assert found.rank is None
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


@pytest.mark.parametrize(
    "variable",
    [
        "TORCHOBS_SERVICE_HOST",
        "TORCHOBS_SERVICE_PORT",
        "TORCHOBS_EXPORTER_SERVICE_PORT_METRICS",
        "TORCHOBS_PORT",
        "TORCHOBS_EXPORTER_PORT_10960_TCP",
        "TORCHOBS_PORT_10960_TCP_ADDR",
    ],
)
def test_a_kubernetes_service_called_torchobs_is_no_misspelled_setting(variable: str) -> None:
    """Kubernetes sets these in every container of the namespace."""
    assert resolve({}, {variable: "tcp://10.0.0.1:10960"}) == (Settings(), ())


def test_known_items_of_a_list_count_although_another_is_wrong() -> None:
    """One misspelled probe does not switch the others on again, one broken attribute does not hide the others."""
    found, problems = resolve({}, {"TORCHOBS_DISABLE_PROBES": "loss,gradient", "OTEL_RESOURCE_ATTRIBUTES": "a=1,b,=c"})
    assert found.disable_probes == {"loss"}
    assert found.resource_attributes == (("a", "1"),)
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
    found, _ = resolve({}, {"OTEL_RESOURCE_ATTRIBUTES": text})
    assert dict(found.resource_attributes) == of_the_sdk


@given(st.dictionaries(st.sampled_from([name for s in OPTIONS for name in s.every_variable]), st.text(max_size=30)))
def test_no_environment_makes_it_raise(environ: dict[str, str]) -> None:
    """Every problem can be written to a log in UTF-8, whatever bytes the environment holds."""
    _, problems = resolve({}, environ)
    assert "\n".join(map(str, problems)).encode() is not None


@pytest.mark.parametrize("variable", ["TORCHOBS_LEVEL", "TORCHOBS_DISABLE_PROBES", "OTEL_RESOURCE_ATTRIBUTES"])
def test_a_long_value_is_shortened_in_the_log(variable: str) -> None:
    """A megabyte in a variable makes a line, not a megabyte of log."""
    _, [problem] = resolve({}, {variable: "x" * 1_000_000})
    assert len(str(problem)) < 600  # it lists what is allowed: the names of all probes


def test_settings_are_frozen_and_slotted() -> None:
    """Nobody changes a setting after it was resolved, and nobody adds one."""
    assert not hasattr(Settings(), "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().level = "off"  # type: ignore[misc]


def test_the_default_is_itself_allowed() -> None:
    """Every default, given as an argument, is taken as it is."""
    for field in dataclasses.fields(Settings):
        if (default := getattr(Settings(), field.name)) is not None:
            assert resolve({field.name: default}, {}) == (Settings(), ())


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment of its own, resolve() reads os.environ."""
    monkeypatch.setenv("TORCHOBS_LEVEL", "off")
    assert resolve({})[0].level == "off"


def _reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "getenvb"}
    if isinstance(node, ast.Attribute):
        return node.attr in names and isinstance(node.value, ast.Name) and node.value.id in {"os", "posix"}
    return isinstance(node, ast.ImportFrom) and node.module == "os" and any(item.name in names for item in node.names)


def test_no_other_module_reads_the_environment() -> None:
    """What torchobs takes from the environment is in this one module's list, and nowhere else."""
    package = Path(settings.__file__).parent
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(map(_reads_environment, ast.walk(ast.parse(path.read_text()))))
    }
    assert readers == {"settings.py"}


def test_every_setting_is_documented_and_nothing_else_is(checkout: Path) -> None:
    """The table of docs/settings.md has exactly the rows that the settings themselves give."""
    document = (checkout / "docs" / "settings.md").read_text()
    documented = [line for line in document.splitlines() if line.startswith("| `") and line.count("|") == 6]
    table, _ = documented[: len(OPTIONS)], documented[len(OPTIONS) :]
    assert table == [
        f"| `{s.name}` | {', '.join(f'`{name}`' for name in s.every_variable)} | {s.default} | {s.kind.allowed} | {s.brief} |"
        for s in OPTIONS
    ]


@pytest.mark.parametrize("module", ["config.settings", "identity.identity"])
def test_they_load_without_torch_and_without_opentelemetry(module: str) -> None:
    """Whoever reads the settings (the exporter has no torch) loads the standard library and nothing else."""
    program = f"import json, sys, torchobs.{module}; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    loaded: list[Any] = json.loads(output)
    roots = {name.partition(".")[0] for name in loaded}
    assert roots.isdisjoint({"torch", "opentelemetry", "psutil", "pynvml", "google", "yaml", "http", "socket"})
