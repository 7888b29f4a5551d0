"""Values of the chart that concern several of its objects: image, names, labels, ports, and the use of its helpers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.helm import CHART, NEWEST, VALUE_SETS, helm, objects, of_kind, rendered, values_of

POLICY = ("--set", "injection.engine=policy,injection.apiVersion=v1")


@pytest.fixture(autouse=True)
def _helm_is_there(program: Callable[[str], str]) -> None:
    program("helm")


@pytest.mark.parametrize(
    "settings", ["", "injection.engine=kyverno,test.enabled=false", "injection.engine=none"], ids=["default", "policy", "test"]
)
def test_without_an_image_nothing_is_installed(settings: str) -> None:
    """An injected pod would wait for it for ever. The message says where the image comes from and which value it is."""
    done = helm("template", "torchobs", CHART, "--kube-version", NEWEST, "--set", settings)
    assert done.returncode != 0
    assert "image.repository is not set" in done.stderr
    assert "--set image.repository=REGISTRY/torchobs-exporter" in done.stderr


def test_who_needs_no_image_gives_none() -> None:
    """Rules and dashboards alone."""
    settings = "injection.engine=none,test.enabled=false"
    assert helm("template", "torchobs", CHART, "--kube-version", NEWEST, "--set", settings).returncode == 0


@pytest.mark.parametrize("name", [*VALUE_SETS, "policy"])
def test_every_object_has_the_labels_and_the_name_of_the_release(name: str) -> None:
    """The injection's, too: `additionalLabels` and `fullnameOverride` hold for all, whatever else is set."""
    values = POLICY if name == "policy" else ("-f", values_of(name))
    runtime = "trainingRuntime.name=own-name"
    for one in objects(rendered(*values, "--set", f"fullnameOverride=own-name,serviceAccount.name=own-name,{runtime}",
                                "--set", "additionalLabels.cost-center=ml", version=NEWEST)):  # fmt: skip
        labels = one["metadata"]["labels"]
        assert (labels["cost-center"], labels["app.kubernetes.io/instance"]) == ("ml", "torchobs"), one["kind"]
        assert one["metadata"]["name"].startswith("own-name"), one["kind"]


def test_the_binding_names_the_policy() -> None:
    """Under any name."""
    made = objects(rendered(*POLICY, "--set", "fullnameOverride=own", "-s", "templates/injection/policy.yaml", version=NEWEST))
    assert [one["metadata"]["name"] for one in made] == ["own-injection"] * 2
    assert made[1]["spec"]["policyName"] == "own-injection"


@pytest.mark.parametrize("name", VALUE_SETS)
def test_helpers_only_makes_no_object(name: str) -> None:
    """For a chart that has this one as a dependency for its helpers alone."""
    assert objects(rendered("-f", values_of(name), "--set", "helpersOnly=true", version=NEWEST)) == []


@pytest.mark.parametrize(
    ("served", "expected"),
    [((), "v1"), (("v1alpha1",), "v1alpha1"), (("v1alpha1", "v1beta1"), "v1beta1"), (("v1beta1", "v1"), "v1")],
)
def test_kyvernos_policy_has_the_newest_version_that_is_served(served: tuple[str, ...], expected: str) -> None:
    """Kyverno 1.15 has the alpha of it, 1.16 the beta; without a cluster it is that of 1.17."""
    known = [text for version in served for text in ("--api-versions", f"policies.kyverno.io/{version}/MutatingPolicy")]
    given = ("--set", "injection.engine=kyverno", "-s", "templates/injection/kyverno.yaml")
    (made,) = objects(rendered(*given, *known))
    assert made["apiVersion"] == f"policies.kyverno.io/{expected}"
    (made,) = objects(rendered(*given, *known, "--set", "injection.apiVersion=v2"))
    assert made["apiVersion"] == "policies.kyverno.io/v2"


def scraped(*settings: str, more: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """The PodMonitor's spec and the job of the scrape configuration."""
    made = objects(rendered("--set", ",".join(["scrapeConfig.enabled=true", *settings]), *more))
    (monitor,) = of_kind(made, "PodMonitor")
    (text,) = [one["data"]["torchobs.yaml"] for one in made if one["metadata"]["name"].endswith("scrape-config")]
    (job,) = yaml.safe_load(text)["scrape_configs"]
    return monitor["spec"], job


def test_only_pods_with_the_sidecars_label_are_asked_for() -> None:
    """Not every pod of the cluster that happens to have a port of that name; with `null` it is."""
    monitor, job = scraped()
    assert monitor["selector"] == {"matchLabels": {"torchobs": "sidecar"}}
    assert job["kubernetes_sd_configs"] == [{"role": "pod", "selectors": [{"role": "pod", "label": "torchobs=sidecar"}]}]
    monitor, job = scraped("podMonitor.selector.matchLabels.torchobs=null")
    assert not monitor["selector"].get("matchLabels")
    assert job["kubernetes_sd_configs"] == [{"role": "pod"}]


def test_the_scrape_configuration_selects_what_the_podmonitor_does() -> None:
    """Expressions, too, in the API server's notation; an operator that it does not know is refused by its name."""
    expressions = [
        {"key": "tier", "operator": "In", "values": ["a", "b"]},
        {"key": "team", "operator": "NotIn", "values": ["x"]},
        {"key": "job", "operator": "Exists"},
        {"key": "quiet", "operator": "DoesNotExist"},
    ]
    given = ("--set-json", f"podMonitor.selector.matchExpressions={json.dumps(expressions)}")
    _, job = scraped(more=given)
    (selector,) = job["kubernetes_sd_configs"][0]["selectors"]
    assert selector["label"] == "torchobs=sidecar,tier in (a,b),team notin (x),job,!quiet"
    _, job = scraped("podMonitor.selector.matchLabels.torchobs=null", more=given)
    assert job["kubernetes_sd_configs"][0]["selectors"][0]["label"] == "tier in (a,b),team notin (x),job,!quiet"
    wrong = 'podMonitor.selector.matchExpressions=[{"key":"a","operator":"in","values":["b"]}]'
    refused = helm("template", "t", CHART, "--kube-version", NEWEST, "--set", "image.repository=any,scrapeConfig.enabled=true",
                   "--set-json", wrong)  # fmt: skip
    assert 'operator is "in", and must be one of DoesNotExist, Exists, In, NotIn' in refused.stderr


def test_a_pod_on_the_nodes_network_is_asked_for_its_own_page() -> None:
    """Its UID is in the scrape, and the exporter of another pod, which has the port already, refuses."""
    monitor, job = scraped()
    named, shared = monitor["podMetricsEndpoints"]
    assert "relabelings" not in named
    assert {"sourceLabels": ["__meta_kubernetes_pod_uid"], "targetLabel": "__param_pod"} in shared["relabelings"]
    (asked,) = [one for one in job["relabel_configs"] if one.get("target_label") == "__param_pod"]
    assert asked["source_labels"][-1] == "__meta_kubernetes_pod_uid"


def test_the_name_of_the_port_is_one_value() -> None:
    """What the sidecar claims is what PodMonitor and scrape configuration look for."""
    monitor, job = scraped("podMonitor.port=obs")
    assert monitor["podMetricsEndpoints"][0]["port"] == "obs"
    assert job["relabel_configs"][0]["regex"].startswith("obs;")
    (test,) = of_kind(objects(rendered("--set", "podMonitor.port=obs,injection.engine=none")), "Pod")
    assert test["spec"]["initContainers"][0]["ports"] == [{"name": "obs", "containerPort": 10960}]


def ports(*settings: str) -> list[dict[str, Any]]:
    """The TCP ports of the NetworkPolicy: to whom scrapes, and to all."""
    given = ",".join(["networkPolicy.enabled=true", *settings])
    (made,) = objects(rendered("--set", given, "-s", "templates/networkpolicy.yaml"))
    return [port for rule in made["spec"]["ingress"] for port in rule["ports"] if port["protocol"] == "TCP"]


def test_the_network_policy_covers_a_range_of_ports() -> None:
    """Pods have ports of their own by annotation; what is not the exporters' stays open."""

    def between(first: int, last: int) -> dict[str, Any]:
        return {"protocol": "TCP", "port": first, "endPort": last}

    assert ports() == [{"protocol": "TCP", "port": 10960}, between(1, 10959), between(10961, 65535)]
    assert ports("networkPolicy.endPort=10975") == [between(10960, 10975), between(1, 10959), between(10976, 65535)]
    assert ports("networkPolicy.port=10000,networkPolicy.endPort=65535") == [between(10000, 65535), between(1, 9999)]
    assert ports("networkPolicy.mode=allow,networkPolicy.endPort=10975") == [between(10960, 10975)]
    assert ports("injection.port=12000")[0]["port"] == 12000


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("networkPolicy.port=11000", "are 11000-11000, and sidecars listen at injection.port, 10960"),
        ("networkPolicy.port=10000,networkPolicy.endPort=10010", "are 10000-10010, and sidecars listen at injection.port"),
        ("networkPolicy.endPort=10959", "networkPolicy.endPort is 10959, and must not be below the first port, 10960"),
    ],
)
def test_a_network_policy_about_other_ports_than_the_sidecars_is_refused(settings: str, reason: str) -> None:
    """It would close nothing and open nothing, and nobody would see it."""
    given = ("--set", f"image.repository=any,networkPolicy.enabled=true,{settings}")
    assert reason in helm("template", "torchobs", CHART, "--kube-version", NEWEST, *given).stderr


@pytest.mark.parametrize(
    ("settings", "labelled"),
    [
        ("injection.apiVersion=v1", True),
        ("injection.engine=kyverno", True),
        ("injection.engine=auto", False),  # `helm template` asks no cluster
        ("injection.engine=none", False),
        ("injection.apiVersion=v1,injection.excludedNamespaces={monitoring}", False),
    ],
)
def test_helm_test_tries_the_label_wherever_it_does_something(settings: str, *, labelled: bool) -> None:
    """Else the same pod has the sidecar by the helper. It has no right and no token, and asks nobody for a volume."""
    pods = of_kind(objects(rendered("--set", settings, "-s", "templates/tests/exporter.yaml")), "Pod")
    assert [one["metadata"]["name"] for one in pods] == [*(["torchobs-test-wait"] if labelled else []), "torchobs-test"]
    for pod in pods:
        assert ("torchobs.io/inject" in pod["metadata"]["labels"]) is labelled
        assert ("initContainers" in pod["spec"]) is not labelled
        assert ("the label added a sidecar" in script(pod)) is labelled
        assert pod["spec"]["automountServiceAccountToken"] is False
        compile(script(pod), "test", "exec")


@pytest.mark.parametrize("by_label", [False, True])
def test_a_training_runtime_has_the_sidecar_or_the_label_for_it(*, by_label: bool) -> None:
    """Never both: the injection leaves a pod alone that has the sidecar."""
    given = f"trainingRuntime.enabled=true,trainingRuntime.image=training,trainingRuntime.byLabel={str(by_label).lower()}"
    (made,) = objects(rendered("--set", given, "-s", "templates/trainingruntime.yaml"))
    pod = made["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert pod["metadata"]["labels"] == ({"torchobs.io/inject": "true"} if by_label else {"torchobs": "sidecar"})
    assert ("initContainers" in pod["spec"]) is not by_label
    assert [one["image"] for one in pod["spec"]["containers"]] == ["training"]


def script(pod: dict[str, Any]) -> str:
    """What a pod of `helm test` runs."""
    return str(pod["spec"]["containers"][0]["command"][-1])


def test_a_policy_that_is_not_in_force_yet_is_waited_for() -> None:
    """Right after the installation the first pod has no sidecar. It says so and waits; then comes the next one, which tells."""
    first, second = of_kind(objects(rendered("--set", "injection.apiVersion=v1", "-s", "templates/tests/exporter.yaml")), "Pod")
    weights = [int(one["metadata"]["annotations"]["helm.sh/hook-weight"]) for one in (first, second)]
    assert weights == sorted(set(weights))
    begun = script(first).replace("time.sleep(20)", "print('waited')")  # this machine has no such volume either
    done = subprocess.run([sys.executable, "-c", begun], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["waited"]
    assert "did nothing yet" in done.stdout
    there = begun.replace("/var/run/torchobs/flight", "/")
    done = subprocess.run([sys.executable, "-c", there], capture_output=True, text=True, check=True)
    assert done.stdout == "the label added a sidecar\n"
