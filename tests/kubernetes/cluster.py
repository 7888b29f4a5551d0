"""A namespace of a Kubernetes cluster for a test, with Pod Security `restricted` enforced; by `kubectl`, as a person would."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support import free_port, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

PORT = 10960
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the API server has it."""

    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.content["metadata"]["name"])

    @property
    def ip(self) -> str:
        """Its address, empty while it has none."""
        return str(self.content["status"].get("podIP", ""))

    @property
    def phase(self) -> str:
        """Pending, Running, Succeeded or Failed."""
        return str(self.content["status"]["phase"])

    def container(self, name: str) -> Mapping[str, Any]:
        """The status of a container, be it an init container; empty while there is none."""
        status = self.content["status"]
        found = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        return next((one for one in found if one["name"] == name), {})

    def ended(self, name: str) -> Mapping[str, Any]:
        """How a container ended; empty while it has not."""
        state: Mapping[str, Any] = self.container(name).get("state", {})
        ended: Mapping[str, Any] = state.get("terminated", {})
        return ended


class Namespace:
    """One of its own inside a `with` block, deleted at the end with everything in it."""

    def __init__(self) -> None:
        self.name = f"torchobs-test-{token_hex(4)}"

    def __enter__(self) -> Self:
        labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/enforce-version": "latest"}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name, "labels": labels}})
        # its admission waits for the account that pods run as
        wait_until(lambda: "default" in self.kubectl("get", "serviceaccounts", "-o", "name"), timeout_s=30, interval_s=0.2)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kubectl("delete", "pods,jobs", "--all", "--grace-period=1", "--wait=false")
        self.kubectl("delete", "namespace", self.name, "--wait=false")

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """What `kubectl` prints for these arguments; the test fails with its message if it fails."""
        done = subprocess.run(
            ["kubectl", "--namespace", self.name, *arguments], input=given, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Make these objects; a field that Kubernetes does not know is an error."""
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "--validate=strict", "-f", "-", given=json.dumps(listed))

    def job_condition(self, job: str) -> str:
        """`Complete`, `Failed`, or nothing yet."""
        found = json.loads(self.kubectl("get", "job", job, "-o", "json"))["status"].get("conditions", ())
        return next((one["type"] for one in found if one["status"] == "True" and one["type"] in {"Complete", "Failed"}), "")

    def pods(self, job: str) -> list[Pod]:
        """The pods of a Job, oldest first."""
        listed = json.loads(self.kubectl("get", "pods", "-l", f"batch.kubernetes.io/job-name={job}", "-o", "json"))["items"]
        return sorted((Pod(one) for one in listed), key=lambda pod: str(pod.content["metadata"]["creationTimestamp"]))

    def logs(self, pod: Pod, container: str) -> str:
        """What a container has printed so far."""
        return self.kubectl("logs", pod.name, "-c", container)

    @contextmanager
    def forwarded(self, pod: Pod) -> Iterator[str]:
        """`kubectl port-forward` to the exporter; gives the `host:port` on this machine."""
        port = free_port()
        argv = ["kubectl", "--namespace", self.name, "port-forward", pod.name, f"{port}:{PORT}"]
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                wait_until(lambda: _accepts(port), timeout_s=20)
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()


def reached_from(pod: Pod) -> str:
    """This machine's address, as a pod sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((pod.ip, PORT))  # nothing is sent
        return str(asking.getsockname()[0])


def _accepts(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def get(address: str, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    """Status and body of an answer; 0 and nothing where nobody listens."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with _DIRECT.open(urllib.request.Request(f"http://{address}{path}", headers=given), timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def value(page: str, name: str, **labels: str) -> float | None:
    """The value of the first sample of a metrics page with that name and these labels."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None


def printed_steps(log: str) -> int:
    """The last step that `pod.py` has printed."""
    return int(log.rsplit(maxsplit=1)[-1])


def environment(**variables: str) -> Sequence[Mapping[str, str]]:
    """As a container's `env`."""
    return [{"name": name, "value": text} for name, text in variables.items()]
