"""One kind of option: what beats what, what a message says, and that the words about a default are true."""

import dataclasses

import pytest

from torchobs.cli import exporter
from torchobs.config import option_types, settings
from torchobs.config.options import Option, SettingsProblem, values_of
from torchobs.config.settings import Settings
from torchobs.exporter import config

PORT = Option("port", option_types.integer(0), "A port.", "0", ("A", "B"), flag="--port")


def asked(option: Option, given: tuple[str, ...] = (), **environ: str) -> tuple[list[object], list[str]]:
    """The values, and the problems as a person reads them."""
    problems: list[SettingsProblem] = []
    return values_of(option, given, environ, problems), [str(problem) for problem in problems]


def test_a_flag_beats_the_variables_in_their_order_and_a_bad_value_the_next_decides() -> None:
    """Each problem names the source that had it; a flag is written as it was typed, a variable as a shell sets it."""
    assert asked(PORT, ("1",), A="2", B="3") == ([1], [])
    assert asked(PORT, A="2", B="3") == ([2], [])
    assert asked(PORT, A=" ", B="3") == ([3], [])
    bad = ["--port 'x': expected an integer, at least 0", "A='-2': expected an integer, at least 0"]
    assert asked(PORT, ("x",), A="-2", B="3") == ([3], bad)
    assert asked(PORT, ("x",), A="-2") == ([], bad)


def test_a_variable_of_another_kind_is_asked_last_by_its_own_rules() -> None:
    """OpenTelemetry's milliseconds beside seconds; one variable may be asked before the flag."""
    option = PORT._replace(also=(("C", option_types.SDK_DISABLED),))
    assert asked(option, C="false") == ([True], [])
    assert asked(option, ("1",), C="false") == ([1], [])
    assert values_of(option, ("1",), {"FIRST": "false"}, [], ("FIRST", option_types.SDK_DISABLED)) == [True]


def test_a_variable_holds_several_values_separated_by_blanks() -> None:
    """As `--port 1 --port 2` does; what is wrong among them is left out."""
    option = PORT._replace(several=True)
    assert asked(option, ("1", "2"), A="3 4") == ([1, 2], [])
    assert asked(option, A=" 3  x 4") == ([3, 4], ["A='x': expected an integer, at least 0"])


def test_what_may_be_a_secret_is_not_repeated() -> None:
    """The log is read by others."""
    _, (problem,) = asked(PORT._replace(hidden_if="@"), ("u:s3cret@h",))
    assert problem == "--port is not repeated here; expected an integer, at least 0"


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


@pytest.mark.parametrize("word", ["--help=x", "-hang-timeout", "--version=1"])
def test_no_mistake_on_the_command_line_ends_a_sidecar(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves with the rest of its options, and its configuration names the mistake."""
    served: list[config.ExporterConfig] = []

    def serve(chosen: config.ExporterConfig) -> int:
        served.append(chosen)
        return 0

    monkeypatch.setattr("torchobs.exporter.daemon.serve", serve)
    monkeypatch.setattr("torchobs.exporter.log_format.configure", lambda *_: None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert exporter.main([word, "--web.config.file", "web.yml", "--grace"]) == 0
    (chosen,) = served
    assert chosen.web_config_file == "web.yml"
    assert chosen.grace_s == 300.0
    assert len(chosen.problems) == 2
    assert chosen.problems[1] == "--grace '': expected a duration such as 90s, 5m or 1h30m"
