"""Chromium, driven over its debugging pipe: what a person sees of a page, and what the browser has to say about it."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import clean_environment, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

_LAUNCH = """
import fcntl, os, sys
there = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(there[0], 3), os.dup2(there[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
          "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe")  # fmt: skip
_TIMEOUT_S = 60.0


class Browser:
    """A browser with a profile of its own, inside a `with` block."""

    def __init__(self, program: str, profile: Path) -> None:
        (read, self._write), (self._read, write) = os.pipe(), os.pipe()
        argv = [sys.executable, "-c", _LAUNCH, str(read), str(write), program, *_FLAGS, f"--user-data-dir={profile}"]
        with (profile.parent / f"{profile.name}.log").open("w") as log:
            self._process = subprocess.Popen(
                argv, pass_fds=(read, write), stdout=log, stderr=log, start_new_session=True, env=clean_environment()
            )
        os.close(read)
        os.close(write)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        self._contexts: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # which ends it
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._listener.join(timeout=10)
        os.close(self._read)

    def tab(self, url: str = "about:blank", *, width: int = 1400, dark: bool = False, script: bool = True) -> Tab:
        """Open a page and wait until it has loaded; it shares no cookies and no storage with any other."""
        self._contexts.append(self.call("Target.createBrowserContext")["browserContextId"])
        wanted = {"url": "about:blank", "browserContextId": self._contexts[-1]}
        target = self.call("Target.createTarget", wanted)["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            tab.call(f"{domain}.enable")
        tab.call("Page.setLifecycleEventsEnabled", {"enabled": True})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        tab.call("Emulation.setScriptExecutionDisabled", {"value": not script})
        tab.resize(width, 1000)
        if url != "about:blank":
            tab.go(url)
        return tab

    def close_tabs(self) -> None:
        while self._contexts:
            self.call("Target.disposeBrowserContext", {"browserContextId": self._contexts.pop()})
        self._tabs.clear()

    def call(self, method: str, params: Mapping[str, object] | None = None, session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = queue.Queue()
        message = {"id": number, "method": method, "params": params or {}, **({"sessionId": session} if session else {})}
        raw = json.dumps(message).encode() + b"\0"
        while raw:
            raw = raw[os.write(self._write, raw) :]
        got = answer.get(timeout=_TIMEOUT_S)
        assert "error" not in got, (method, got)
        result: dict[str, Any] = got["result"]
        return result

    def _listen(self) -> None:
        pending = b""
        while chunk := os.read(self._read, 1 << 20):
            *messages, pending = (pending + chunk).split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                    tab.heard(message["method"], message["params"])


class Tab:
    """A page; `complaints` are the errors and warnings that its console has, `requests` what it asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self._loaded: set[str] = set()
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, params: Mapping[str, object] | None = None) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def heard(self, method: str, params: Mapping[str, Any]) -> None:
        """Take note of what the browser tells without being asked."""
        if method == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def go(self, url: str) -> None:
        loader = self.call("Page.navigate", {"url": url})["loaderId"]
        wait_until(lambda: loader in self._loaded, _TIMEOUT_S)  # itself, not the empty page before it

    def run(self, script: str) -> Any:
        """The value of an expression in the page, once it is settled."""
        wanted = {"expression": script, "returnByValue": True, "awaitPromise": True}
        got = self.call("Runtime.evaluate", wanted)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key; `code` is its virtual key code."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code})

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        )

    def metrics(self) -> dict[str, float]:
        """What the page has cost the browser: `ScriptDuration`, `LayoutDuration`, `TaskDuration` in seconds."""
        return {metric["name"]: metric["value"] for metric in self.call("Performance.getMetrics")["metrics"]}
