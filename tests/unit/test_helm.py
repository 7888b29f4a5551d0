"""The chart: what it renders from which values, what it refuses, and what its documentation says of it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.helm import (
    CHART,
    CLUSTER,
    IMAGE,
    NEWEST,
    OLDEST,
    SERVED,
    VALUE_SETS,
    checked,
    helm,
    objects,
    of_kind,
    rendered,
    values_of,
)
from tests.kubernetes import schemas
from tests.support import ROOT
from torchobs._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GOLDEN = Path(__file__).parent / "golden" / "helm"
ALERT = "TorchobsCheckpointNever"
GROUPS = """
groups: [{name: mine, rules: [{alert: Mine, expr: vector(1), labels: {severity: page}, annotations: {dashboard_url: /d/x}}]}]
"""


@pytest.fixture(autouse=True)
def _helm_is_there(program: Callable[[str], str], checkout: Path) -> None:
    assert (checkout / "helm").is_dir()
    program("helm")


def groups_of(text: str) -> list[dict[str, Any]]:
    """Return the groups of all rendered PrometheusRules."""
    return [group for rule in of_kind(objects(text), "PrometheusRule") for group in rule["spec"]["groups"]]


def alerts_of(text: str) -> dict[str, dict[str, Any]]:
    """Return the rendered alerts by name."""
    return {rule["alert"]: rule for group in groups_of(text) for rule in group["rules"] if "alert" in rule}


def summary(text: str) -> str:
    """Return manifests without what is generated from elsewhere: rules, dashboards and the version."""
    manifests = objects(text)
    for manifest in manifests:
        if manifest["kind"] == "PrometheusRule":
            manifest["spec"]["groups"] = [group["name"] for group in manifest["spec"]["groups"]]
        if manifest["metadata"]["name"].endswith("-dashboard") and "data" in manifest:
            manifest["data"] = {name: json.loads(content)["title"] for name, content in manifest["data"].items()}
    return yaml.safe_dump_all(manifests, width=120).replace(__version__, "VERSION")


@pytest.mark.parametrize("name", VALUE_SETS)
def test_each_set_of_values_is_linted_and_renders_as_it_did(name: str, pytestconfig: pytest.Config) -> None:
    """`helm lint --strict`, and a golden file, written again by `pytest --update-golden`."""
    linted = helm("lint", "--strict", "--kube-version", OLDEST, "-f", values_of(name), CHART)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    text = summary(rendered("-f", values_of(name)))
    path = GOLDEN / f"{name}.yaml"
    if pytestconfig.getoption("--update-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"`pytest --update-golden` writes {path.name} again"


def test_every_variant_is_valid_for_the_oldest_and_the_newest_kubernetes(tmp_path: Path, program: Callable[[str], str]) -> None:
    """Kubeconform, strict: what a schema does not have is seen. All variants at once, for reading the schemas takes seconds."""
    none = ("--set", "injection.engine=none")
    for version in (OLDEST, NEWEST):
        (tmp_path / version).mkdir()
        schemas.write(tmp_path / version, version)
        plain = {name for name in VALUE_SETS if name == "plain" or version == NEWEST}
        manifests = [rendered("-f", values_of(name), *(() if name in plain else none), version=version) for name in VALUE_SETS]
        manifests.append(rendered("--set", "podMonitor.endpoint.intervall=1s", *none, version=version))
        template = f"{tmp_path / version}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
        argv = [program("kubeconform"), "-strict", "-summary", "-schema-location", template]
        done = subprocess.run(argv, input="\n---\n".join(manifests), capture_output=True, text=True, check=False)
        assert "Invalid: 1, Errors: 0, Skipped: 0" in done.stdout, f"{version}: {done.stdout}"
        assert "additional properties 'intervall' not allowed" in done.stdout


@pytest.mark.parametrize(
    ("setting", "path", "reason"),
    [
        ("podMonitor.intervall=15s", "/podMonitor", "additional properties 'intervall' not allowed"),
        ("podMonitor.enabled=maybe", "/podMonitor/enabled", "value must be one of 'auto', true, false"),
        ("image.digest=latest", "/image/digest", "'latest' does not match pattern '^(sha256:[0-9a-f]{64})?$'"),
        ("prometheusRule.disabled[0]=Torchobs", "/prometheusRule/disabled/0", ALERT),
        (f"prometheusRule.severities.{ALERT}=loud", f"/prometheusRule/severities/{ALERT}", "one of 'page', 'ticket'"),
        ("otlp.endpoint=collector:4318", "/otlp/endpoint", "'collector:4318' does not match pattern"),
        ("injection.resources.limits.memory=64", "/injection/resources/limits/memory", "minimum: got 64, want 8.388608"),
        ("injection.resources=null", "/injection", "missing property 'resources'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_the_reason(setting: str, path: str, reason: str) -> None:
    """By the schema, at lint, template, install and upgrade alike; never rendered as something else."""
    done = helm("template", "torchobs", CHART, "--kube-version", OLDEST, "--set", setting)
    assert done.returncode != 0
    assert path in done.stderr
    assert reason in done.stderr


def test_what_only_a_template_can_see_is_refused_too(tmp_path: Path) -> None:
    """Alerts that are no rules file, an old Kubernetes; what compares two values."""
    (tmp_path / "alerts").write_text("rules: []")
    for option, setting, reason in (
        ("--set-file", f"prometheusRule.alerts={tmp_path / 'alerts'}", "is no rules file"),
        ("--set", "injection.resources.limits.memory=48Mi", "requests.memory is 64Mi, above limits.memory, 48Mi"),
        ("--set", "injection.resources.requests.cpu=0.5", "requests.cpu is 0.5, above limits.cpu, 200m"),
        ("--set", "podMonitor.interval=5s", "scrapeTimeout is 10s, and must not be longer than podMonitor.interval, 5s"),
        ("--set", "podMonitor.enabled=false,scrapeConfig.enabled=true,podMonitor.scrapeTimeout=1m", "scrapeTimeout is 1m"),
        ("--set", "podMonitor.interval=31s", "a last scrape may take 46 s"),
        ("--set", "injection.terminationGracePeriodSeconds=29", "Set injection.terminationGracePeriodSeconds to 30"),
        ("--set", "networkPolicy.enabled=true", "networkPolicy.namespaces is empty"),
    ):
        done = helm("template", "t", CHART, "--kube-version", OLDEST, *IMAGE, *CLUSTER, option, setting)
        assert done.returncode != 0
        assert reason in done.stderr
    assert "incompatible with Kubernetes v1.28.0" in helm("template", "t", CHART, "--kube-version", "1.28.0").stderr


@pytest.mark.parametrize(
    "setting",
    [
        "image.repository=localhost:5000/a/b_c,image.tag=1.0-rc.1_a",
        "injection.resources.limits.memory=131072Ki,injection.flightVolumeSize=65536Ki",
        "podMonitor.interval=1m30s,podMonitor.scrapeTimeout=60s,injection.terminationGracePeriodSeconds=155",
        "podMonitor.additionalLabels=null",
        "global.cluster=a,enabled=true",  # as an umbrella chart hands them to its dependencies
    ],
)
def test_what_is_unusual_and_right_is_taken(setting: str) -> None:
    """What the patterns must not refuse."""
    assert rendered("--set", setting)


@pytest.mark.parametrize("variant", ["classic", "native"])
def test_the_rules_are_the_shipped_ones(variant: str, checkout: Path) -> None:
    """Not a letter differs, whatever YAML makes of them."""
    folder, native = checkout / "deploy" / "prometheus", "-native" if variant == "native" else ""
    names = ("rules/torchobs-alerts.yml", "rules/torchobs-recordings.yml", f"rules{native}/torchobs-percentiles.yml")
    shipped = [group for name in names for group in objects((folder / name).read_text())[0]["groups"]]
    text = rendered("--set", f"prometheusRule.percentiles={variant}")
    assert sorted(groups_of(text), key=itemgetter("name")) == sorted(shipped, key=itemgetter("name"))


def test_alerts_are_chosen_and_changed_by_values(program: Callable[[str], str], tmp_path: Path) -> None:
    """Left out, louder, with a team and links; promtool takes the result, in which nothing else has changed."""
    text = rendered("-f", values_of("operator"))
    before, after = alerts_of(rendered()), alerts_of(text)
    assert before.keys() - after.keys() == {ALERT}
    assert before["TorchobsRankFailed"]["labels"]["severity"] == "ticket"
    failed = after["TorchobsRankFailed"]
    assert failed["labels"] == before["TorchobsRankFailed"]["labels"] | {"severity": "critical", "team": "training"}
    assert after["TorchobsRunDown"]["labels"]["severity"] == "critical"
    assert after["TorchobsSlowdown"]["labels"]["severity"] == "ticket"
    assert failed["annotations"]["runbook_url"] == "https://runbooks.example.org/torchobs/TorchobsRankFailed.md"
    assert failed["annotations"]["dashboard_url"].startswith("https://grafana.example.org/d/torchobs-run?")
    assert not any("dashboard_url" in rule["annotations"] for rule in before.values())
    assert all(after[name]["expr"] == before[name]["expr"] for name in after)
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups_of(text)}))
    argv = [program("promtool"), "check", "rules", str(tmp_path / "rules.yml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_alerts_with_other_thresholds_come_from_a_file(tmp_path: Path) -> None:
    """That of `torchobs rules render`, in place of the chart's alerts; recordings stay."""
    (tmp_path / "alerts.yml").write_text(GROUPS)
    text = rendered("--set-file", f"prometheusRule.alerts={tmp_path / 'alerts.yml'}")
    assert list(alerts_of(text)) == ["Mine"]
    assert len(of_kind(objects(text), "PrometheusRule")) == 3


def test_the_dashboards_are_the_shipped_ones(checkout: Path) -> None:
    """Each in a ConfigMap with the label and the folder that Grafana's sidecar looks for."""
    shipped = {path.name: json.loads(path.read_text()) for path in (checkout / "deploy/grafana/dashboards").glob("*.json")}
    maps = of_kind(objects(rendered()), "ConfigMap")
    assert {name: json.loads(text) for config_map in maps for name, text in config_map["data"].items()} == shipped
    assert all(config_map["metadata"]["labels"]["grafana_dashboard"] == "1" for config_map in maps)
    assert all(config_map["metadata"]["annotations"]["grafana_folder"] == "torchobs" for config_map in maps)


def test_prometheus_takes_the_scrape_configuration(tmp_path: Path, program: Callable[[str], str]) -> None:
    """As a file of `scrape_config_files`."""
    maps = of_kind(objects(rendered("-f", values_of("plain"))), "ConfigMap")
    ((text,),) = (config["data"].values() for config in maps if config["metadata"]["name"].endswith("scrape-config"))
    (tmp_path / "jobs.yaml").write_text(text)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_config_files": ["jobs.yaml"]}))
    newest = shutil.which("promtool3") or program("promtool")  # Prometheus 2.42 has no scrape_config_files
    if "promtool3" not in newest:
        pytest.skip("needs a program that Debian does not package: promtool3")
    argv = [newest, "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


POLICY = ("--set", "injection.engine=policy,injection.apiVersion=v1")


def test_without_an_image_nothing_is_installed() -> None:
    """An injected pod would wait for it for ever. The message says where the image comes from and which value it is."""
    done = helm("template", "torchobs", CHART, "--kube-version", NEWEST, *CLUSTER)
    assert done.returncode != 0
    assert "image.repository is not set" in done.stderr
    assert "--set image.repository=REGISTRY/torchobs-exporter" in done.stderr


def test_what_the_cluster_lacks_is_an_error_or_named() -> None:
    """No policy: an error that says what to set. No CRDs of the Prometheus operator: no object of these kinds."""
    options = ("--kube-version", OLDEST, *IMAGE)
    served = {kind: ("--api-versions", ",".join(api for api in SERVED if kind not in api)) for kind in ("Policy", "PodMonitor")}
    refused = helm("template", "torchobs", CHART, *options, *served["Policy"])
    assert "serves no MutatingAdmissionPolicy" in refused.stderr
    assert "set injection.engine to kyverno or none" in refused.stderr
    kinds = [api["kind"] for api in objects(checked(*options, *served["PodMonitor"]))]
    assert ("PodMonitor" in kinds, "PrometheusRule" in kinds) == (False, True)
    asked = checked(*options, *served["PodMonitor"], "--set", "podMonitor.enabled=true")
    assert len(of_kind(objects(asked), "PodMonitor")) == 1


def test_without_a_cluster_no_pod_is_applied() -> None:
    """Promise: `helm template | kubectl apply` makes all but the pods of `helm test`; Argo CD is asked to skip them."""
    text = checked("--kube-version", NEWEST, *IMAGE, "--set", "injection.apiVersion=v1")
    kinds = {manifest["kind"] for manifest in objects(text)}
    assert kinds >= {"PodMonitor", "PrometheusRule", "MutatingAdmissionPolicy", "ConfigMap"}
    assert "Pod" not in kinds
    for pod in of_kind(objects(rendered()), "Pod"):
        assert pod["metadata"]["annotations"]["argocd.argoproj.io/hook"] == "Skip"


@pytest.mark.parametrize("name", [*VALUE_SETS, "policy"])
def test_every_object_has_the_labels_and_the_name_of_the_release(name: str) -> None:
    """The injection's, too, whatever else is set; and a chart that has this one for its helpers alone gets no object."""
    values = POLICY if name == "policy" else ("-f", values_of(name))
    naming = ("--set", "fullnameOverride=own-name", "--set", "additionalLabels.cost-center=ml")
    for manifest in objects(rendered(*values, *naming, version=NEWEST)):
        labels = manifest["metadata"]["labels"]
        assert (labels["cost-center"], labels["app.kubernetes.io/instance"]) == ("ml", "torchobs"), manifest["kind"]
        assert manifest["metadata"]["name"].startswith("own-name"), manifest["kind"]
    assert objects(rendered(*values, "--set", "helpersOnly=true", version=NEWEST)) == []


@pytest.mark.parametrize(("served", "expected"), [((), "v1"), (("v1alpha1",), "v1alpha1"), (("v1beta1", "v1"), "v1")])
def test_kyvernos_policy_has_the_newest_version_that_is_served(served: tuple[str, ...], expected: str) -> None:
    """Kyverno 1.15 has the alpha of it, 1.16 the beta; without a cluster it is that of 1.17."""
    api_versions = [text for version in served for text in ("--api-versions", f"policies.kyverno.io/{version}/MutatingPolicy")]
    options = ("--set", "injection.engine=kyverno", "-s", "templates/injection/kyverno.yaml")
    (policy,) = objects(rendered(*options, *api_versions))
    assert policy["apiVersion"] == f"policies.kyverno.io/{expected}"
    if served:  # and no policy of Kubernetes' own
        chosen = checked("--kube-version", OLDEST, *IMAGE, *api_versions, "-s", "templates/injection/kyverno.yaml")
        assert objects(chosen)[0]["apiVersion"] == f"policies.kyverno.io/{expected}"


def ports(*settings: str) -> list[dict[str, Any]]:
    """The TCP ports of the NetworkPolicy: to whom scrapes, and to all."""
    values = ",".join(["networkPolicy.enabled=true,networkPolicy.namespaces={research}", *settings])
    (network_policy,) = objects(rendered("--set", values, "-s", "templates/networkpolicy.yaml"))
    assert network_policy["spec"]["podSelector"] == {"matchLabels": {"torchobs": "sidecar"}}
    return [port for rule in network_policy["spec"]["ingress"] for port in rule["ports"] if port["protocol"] == "TCP"]


def test_the_network_policy_closes_the_exporters_port_alone() -> None:
    """What is not the exporter's stays open: ranks find each other by it."""

    def between(first: int, last: int) -> dict[str, Any]:
        return {"protocol": "TCP", "port": first, "endPort": last}

    assert ports() == [{"protocol": "TCP", "port": 10960}, between(1, 10959), between(10961, 65535)]
    assert ports("injection.port=12000")[0]["port"] == 12000


PAGES = (
    "README.md",
    "docs/kubernetes.md",
    *(f"{folder}/README.md" for folder in ("helm/torchobs", "deploy/prometheus", "deploy/grafana")),
)
WORDS = {"REGISTRY": "registry.example.org", "TAG": "1.0", "NAME": "stack"}
"""What a reader replaces."""
OF_A_CLUSTER = {"--install", "--create-namespace", "--reset-then-reuse-values"}
"""Options that `helm template` does not have."""
JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: gpt}
spec: {template: {spec: {restartPolicy: Never, containers: [{name: main, image: training}]}}}
"""


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command that a page shows."""
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


OF_THE_CHART = [
    words
    for page in PAGES
    for words in commands(ROOT / page)
    if words[:2] in (["helm", "install"], ["helm", "upgrade"]) and "helm/torchobs" in words
]
"""The commands that install or change the chart."""


@pytest.mark.parametrize("words", OF_THE_CHART, ids=" ".join)
def test_every_command_with_the_chart_renders(words: list[str], tmp_path: Path) -> None:
    """An option that the chart has no value for is refused by its schema."""
    (tmp_path / "alerts.yml").write_text((ROOT / "deploy/prometheus/rules/torchobs-alerts.yml").read_text())
    arguments = [str(CHART) if word == "helm/torchobs" else word for word in words[2:] if word not in OF_A_CLUSTER]
    replaced = [re.sub(r"\b(REGISTRY|TAG|NAME)\b", lambda match: WORDS[match[0]], word) for word in arguments]
    replaced = [word.replace("=alerts.yml", f"={tmp_path / 'alerts.yml'}") for word in replaced]
    image = () if any("image.repository" in word for word in replaced) else ("--set", "image.repository=any")
    done = helm("template", *replaced, *image, *CLUSTER, "--kube-version", NEWEST)
    assert done.returncode == 0, done.stderr
    assert objects(done.stdout)


def test_the_values_for_several_releases_render(tmp_path: Path) -> None:
    """As they stand in the chart's README; they leave out what one release alone may have."""
    text = (CHART / "README.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "values.yaml").write_text(block)
    manifests = objects(rendered("-f", tmp_path / "values.yaml", "--set", "injection.apiVersion=v1", version=NEWEST))
    assert {manifest["metadata"]["name"].startswith("torchobs-vision") for manifest in manifests} == {True}
    assert not {"PrometheusRule", "ConfigMap"} & {manifest["kind"] for manifest in manifests}


def test_the_command_that_labels_a_job_labels_its_pods(tmp_path: Path, program: Callable[[str], str]) -> None:
    """The label has to be on the template: on the Job itself it does nothing."""
    program("kubectl")
    (words,) = [words for words in commands(ROOT / "docs/kubernetes.md") if words[:3] == ["kubectl", "patch", "--local"]]
    (tmp_path / "job.yaml").write_text(JOB)
    patch = words[: words.index("|")]
    done = subprocess.run(patch, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    labelled = yaml.safe_load(done.stdout)
    assert labelled["spec"]["template"]["metadata"]["labels"] == {"torchobs.io/inject": "auto"}
    assert "labels" not in labelled["metadata"]
