"""Whatever a flight file says becomes the text of a label, and forges nothing."""

import re

import pytest

from torchobs.exporter.api import params
from torchobs.ranks import labels


def test_identity_is_three_texts() -> None:
    """As the resource has them."""
    assert labels.identity({"job_name": "gpt", "run_id": "r", "rank": 3}) == ("gpt", "r", "3")


@pytest.mark.parametrize("resource", [{}, {"job_name": "", "run_id": "", "rank": ""}, {"rank": -1}, {"rank": "0-aaaaaaaa"}])
def test_a_missing_identity_is_unknown(resource: dict[str, object]) -> None:
    """An empty label is no label, and the joins need all three; a rank is a number, or could pass for a duplicate's."""
    assert labels.identity(resource) == ("unknown", "unknown", "unknown")


def test_lone_surrogates_do_not_fail_the_page() -> None:
    """JSON admits them, UTF-8 does not."""
    assert labels.text("a\ud800b") == "a?b"
    assert labels.text('ünï\n"\\') == 'ünï\n"\\'


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "x"), (1, "1"), (1.5, "1.5"), (True, "true"), ([1, "a"], '[1,"a"]'), ("", ""), (None, "null")],
)
def test_values_are_written_as_opentelemetry_does(value: object, text: str) -> None:
    """Numbers and lists are JSON, as in Prometheus' own translation."""
    assert labels.text(value) == text


def test_attributes_are_translated_as_prometheus_does() -> None:
    """Dots become underscores, a leading digit gets a key."""
    assert labels.of_attributes([("a.b", "x"), ("1st", "y"), ("_z", 1)]) == {"a_b": "x", "key_1st": "y", "key_z": "1"}


@pytest.mark.parametrize("name", ["job_name", "run_id", "rank", "le", "job.name", "job", "instance"])
def test_an_attribute_that_is_called_as_ours_is_exported(name: str) -> None:
    """A user's `rank` must not make another rank's series, nor a user's `job` take the scrape's, on the page or in a push."""
    assert labels.of_attributes([(name, "x")]) == {f"exported_{name.replace('.', '_')}": "x"}
    assert labels.pushed_name(name) == f"exported_{name.replace('.', '_')}"


@pytest.mark.parametrize("name", ["a.b", "1st", "_z", "größe", "key____", "exported.x", "http.route"])
def test_a_name_that_prometheus_accepts_is_pushed_as_it_is(name: str) -> None:
    """Other receivers keep it."""
    assert labels.pushed_name(name) == name


@pytest.mark.parametrize("name", ["", "__", "_", "ключ", "__name__", "__address__", "é_x"])
def test_a_name_that_prometheus_refuses_or_drops_is_pushed_as_its_label(name: str) -> None:
    """One such name would cost the whole request."""
    assert {labels.pushed_name(name): "x"} == labels.of_attributes([(name, "x")])


@pytest.mark.parametrize("name", ["__name__", "__address__", "__", "_", ""])
def test_no_attribute_can_be_a_label_of_prometheus_own(name: str) -> None:
    """`__name__` would rename the series, the others vanish."""
    (label,) = labels.of_attributes([(name, "x")])
    assert label.startswith("key")


def test_names_that_become_one_share_it() -> None:
    """Joined by a semicolon, as Prometheus does."""
    assert labels.of_attributes([("a.b", "1"), ("a_b", "2")]) == {"a_b": "1;2"}


def test_an_empty_value_is_no_label() -> None:
    """Prometheus takes it for none, and two series would be one."""
    assert labels.of_attributes([("a", "")]) == {}


def test_the_info_holds_what_describes_the_rank_and_nothing_else() -> None:
    """Facts, Kubernetes' names, the user's attributes, as a rank writes them; not what is a series already."""
    resource = {
        "rank": 0,
        "job_name": "gpt",
        "world_size": 8,
        "restart": 1,
        "local_rank": 0,
        "host": "n1",
        "pid": 7,
        "trace_id": "a" * 32,
        "k8s.pod.name": "p",
        "team": "vision",
        "hos.t": "",
        "ho.st": "x",
        "ho-st": "y",
        "run.id": "liar",
        "job": "mine",
        "instance": "this",
    }
    assert labels.of_info(resource) == {
        "local_rank": "0",
        "host": "n1",
        "k8s_pod_name": "p",
        "team": "vision",
        "ho_st": "x;y",
        "exported_run_id": "liar",
        "exported_job": "mine",
        "exported_instance": "this",
    }


@pytest.mark.parametrize("value", [-1, 1 << 53, 10**400, "7", 1.0, None])
def test_a_number_that_is_none_is_absent(value: object) -> None:
    """A float cannot hold every integer that JSON can."""
    assert labels.number({"restart": value}, "restart") is None
    assert labels.number({"restart": 7}, "restart") == 7


@pytest.mark.parametrize(
    "rank",
    [
        labels.identity({"rank": 0, **group})[2] + suffix
        for group in ({}, {"replica_group": 12})
        for suffix in ("", "-3f9a12bc")
    ],
)
def test_the_api_takes_every_rank_that_is_served(rank: str) -> None:
    """Its number, its replica group, and the digits of a second process."""
    assert re.fullmatch(params.RANK, rank)
