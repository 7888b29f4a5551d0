"""A namespace of a Kubernetes cluster for a test, with Pod Security `restricted` enforced; by `kubectl`, as a person would.

What tests ask again and again goes by `kubectl proxy`: a process for each question would take the machine from the pods.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from secrets import token_hex
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tests.support import free_port, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

PORT = 10960
OOM_KILLED = 137
"""The exit code that SIGKILL leaves. The `reason` beside it is `Error` where containerd handles the exit before the event"""
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
        statuses = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        return next((status for status in statuses if status["name"] == name), {})

    def ended(self, name: str) -> Mapping[str, Any]:
        """How a container ended; empty while it has not."""
        state: Mapping[str, Any] = self.container(name).get("state", {})
        ended: Mapping[str, Any] = state.get("terminated", {})
        return ended


class Namespace:
    """A new one inside a `with` block, deleted at the end with everything in it."""

    def __init__(self) -> None:
        self.name = f"torchobs-test-{token_hex(4)}"
        self._api, self._stack = "", ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._api = stack.enter_context(_proxy())
            self._make()
            self._stack = stack.pop_all()
        return self

    def _make(self) -> None:
        labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/enforce-version": "latest"}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name, "labels": labels}})
        # its admission waits for the account that pods run as
        wait_until(lambda: "default" in self.kubectl("get", "serviceaccounts", "-o", "name"), timeout_s=120, interval_s=0.2)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:
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
        conditions = json.loads(self._ask("/apis/batch/v1", f"jobs/{job}"))["status"].get("conditions", ())
        types = {condition["type"] for condition in conditions if condition["status"] == "True"}
        return next(iter(types & {"Complete", "Failed"}), "")

    def pods(self, job: str = "") -> list[Pod]:
        """The pods of a Job, or all of them, oldest first."""
        chosen = {"labelSelector": f"batch.kubernetes.io/job-name={job}"} if job else {}
        listed = json.loads(self._ask("/api/v1", "pods", **chosen))["items"]
        return sorted((Pod(content) for content in listed), key=lambda pod: str(pod.content["metadata"]["creationTimestamp"]))

    def logs(self, pod: Pod, container: str) -> str:
        """What a container has printed so far."""
        return self._ask("/api/v1", f"pods/{pod.name}/log", container=container)

    def _ask(self, group: str, path: str, **options: str) -> str:
        """What the API server says of this namespace; the test fails with its message if it refuses."""
        url = f"{self._api}{group}/namespaces/{self.name}/{path}?{urllib.parse.urlencode(options)}"
        try:
            with _DIRECT.open(url, timeout=60) as answer:
                return str(answer.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(path, error.read().decode(errors="replace")) from None

    @contextmanager
    def forwarded(self, pod: Pod) -> Iterator[str]:
        """`kubectl port-forward` to the exporter; gives the `host:port` on this machine."""
        port = free_port()
        argv = ["kubectl", "--namespace", self.name, "port-forward", pod.name, f"{port}:{PORT}"]
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                wait_until(lambda: _accepts(port), timeout_s=60)
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()


@contextmanager
def _proxy() -> Iterator[str]:
    """`kubectl proxy`, which asks as KUBECONFIG says: where it serves the cluster's API on this machine."""
    argv = ["kubectl", "proxy", "--port=0"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()  # "Starting to serve on 127.0.0.1:41537"
            assert said.startswith("Starting to serve on "), (argv, said)
            yield f"http://{said.split()[-1]}"
        finally:
            process.terminate()


def _accepts(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def get(address: str, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    """Status and body of an answer; 0 and nothing where nobody listens."""
    converted = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with _DIRECT.open(urllib.request.Request(f"http://{address}{path}", headers=converted), timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (OSError, http.client.HTTPException):  # nobody, or a pod that ended within its answer
        return 0, ""


def printed_steps(log: str) -> int:
    """The last step that `pod.py` has printed, among what else a container says."""
    return int(next(line for line in reversed(log.splitlines()) if line.isdecimal()))


def environment(**variables: str) -> Sequence[Mapping[str, str]]:
    """As a container's `env`."""
    return [{"name": name, "value": text} for name, text in variables.items()]
