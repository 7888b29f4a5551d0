"""TLS, client certificates and passwords of the exporter: as Prometheus' own tools have them, and never open by mistake."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.exporters import Answer, Service, start_program
from tests.support import wait_until, why_missing
from tests.web_configs import ACCEPTED, HASH, PASSWORD, REFUSED, STRICTER, TLS, USERS, certify
from torchobs.exporter import access, daemon, web_config
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.web_config import BusyError, Passwords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

METRICS = "torchobs_build_info"


@pytest.fixture(autouse=True)
def _shorter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file is looked at more often, and an exporter ends sooner when its test has."""
    monkeypatch.setattr(daemon, "TICK_S", 0.05)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `server.pem`, `client.pem` and their keys."""
    if reason := why_missing("openssl"):
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client"):
        certify(str(shutil.which("openssl")), directory, name)
    return directory


@pytest.fixture
def home(certificates: Path, tmp_path: Path) -> Path:
    """A directory of the test's own with those."""
    for path in certificates.iterdir():
        shutil.copy(path, tmp_path)
    return tmp_path


class Served:
    """An exporter with a web configuration file, which `write` replaces at once."""

    def __init__(self, home: Path, text: str | None) -> None:
        self.home, self.path = home, home / "web.yml"
        if text is not None:
            self.write(text)
        self.service = Service(ExporterConfig(flight_dir=str(home), web_config_file=str(self.path)))

    def write(self, text: str) -> None:
        new = self.home / "new.yml"
        new.write_text(text)
        new.replace(self.path)

    def get(self, path: str = "/metrics", password: str | None = None, user: str = "prometheus") -> Answer:
        """Ask without TLS."""
        encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
        return self.service.get(path, **({} if password is None else {"Authorization": f"Basic {encoded}"}))

    def trust(self, most: ssl.TLSVersion | None = None) -> ssl.SSLContext:
        """A client's context that trusts the present `server.pem`."""
        context = ssl.create_default_context(cafile=str(self.home / "server.pem"))
        context.maximum_version = most or context.maximum_version
        return context

    def page(self, trust: ssl.SSLContext) -> bytes:
        """The metrics over TLS; empty if there is not even a connection."""
        with contextlib.closing(http.client.HTTPSConnection(self.service.address, timeout=10, context=trust)) as connection:
            try:
                connection.request("GET", "/metrics")
                return connection.getresponse().read()
            except OSError:
                return b""


@pytest.fixture
def serve(home: Path) -> Iterator[Callable[[str | None], Served]]:
    """Serve with the text of a web configuration file."""
    running: list[Served] = []

    def start(text: str | None) -> Served:
        served = Served(home, text)
        running.append(served)
        served.service.__enter__()
        return served

    yield start
    for served in running:
        served.service.stop()


def _accepts(home: Path, text: str) -> bool:
    try:
        parsed = web_config.parse(text)
        if parsed.tls is not None:
            web_config.server_context(parsed.tls, home)
    except web_config.WebConfigError:
        return False
    return True


def test_what_promtool_accepts_is_accepted_and_nothing_else(program: Callable[[str], str], home: Path) -> None:
    """The same file serves node_exporter and us; not unknown keys, missing files, passwords that are no hashes.

    A wish for protection that Python cannot meet is an error, too, and not done by half.
    """
    command = [program("promtool3"), "check", "web-config"]
    for number, text in enumerate((*ACCEPTED, *REFUSED)):
        path = home / f"{number}.yml"
        path.write_text(text)
        done = subprocess.run([*command, path.name], check=False, cwd=home, capture_output=True)
        assert (done.returncode == 0, _accepts(home, text)) == (number < len(ACCEPTED),) * 2, text
    assert [text for text in STRICTER if _accepts(home, text)] == []


def test_an_error_shows_no_hash() -> None:
    """The message goes to the log, and to a page."""
    for text in (f"basic_auth_users: {{a: '{HASH}x'}}", f"basic_auth_users: {{a: '{HASH}", f"{HASH}: [", f"a: {HASH}\n b: ]"):
        with pytest.raises(web_config.WebConfigError) as caught:
            web_config.parse(text)
        assert HASH[7:] not in str(caught.value)


def test_a_password_opens_the_metrics_and_everything_else(serve: Callable[[str], Served]) -> None:
    """Without it, with a wrong one, or for nobody we know: 401 and how to ask. Health is open."""
    served = serve(USERS)
    for answer in (served.get(), served.get(password="wrong"), served.get(password=PASSWORD, user="else"), served.get("/")):
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith('Basic realm="torchobs"')
        assert METRICS.encode() not in answer.body
    strange = ("", "Basic", "Basic !", "Bearer x", "Basic bm9jb2xvbg==", f"Basic {'A' * 9000}", "Basic /zo6", "Basic OgA=")
    assert [header for header in strange if served.service.get(Authorization=header).status != 401] == []
    paths = ("/-/healthy", "/nothing", "/-/healthy/../metrics")
    assert [served.get(path).status for path in paths] == [200, 401, 401]
    assert served.get(password=PASSWORD).status == 200
    assert served.get("/", password=PASSWORD).status == 200


def test_the_page_is_for_this_machine_and_for_who_is_known(
    serve: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From elsewhere a password opens it; without any configured it stays shut."""
    monkeypatch.setattr(access, "is_local", lambda scope: not scope)
    assert [serve(text).get("/", password=PASSWORD).status for text in (USERS, "")] == [200, 403]


def test_a_password_is_compared_once() -> None:
    """A scrape must not cost 50 ms each time; a new hash is a new comparison."""

    async def ask() -> tuple[list[bool], int]:
        passwords = Passwords()
        right, wrong = _basic(PASSWORD), _basic("no")
        answers = [await passwords.allowed(header, {"a": HASH}) for header in (right, wrong, right, wrong, right)]
        answers.append(await passwords.allowed(right, {"a": HASH.replace("$2b$", "$2y$")}))
        return answers, passwords.compared

    assert asyncio.run(ask()) == ([True, False, True, False, True, True], 4)


def _basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'a:{password}'.encode()).decode()}"


def test_guesses_neither_queue_up_nor_push_the_scraper_out() -> None:
    """Two hundred at once: some are compared, the rest may come later, and who was admitted still is."""

    async def ask() -> tuple[int, int, int]:
        passwords = Passwords()

        async def one(word: str) -> bool:
            return await passwords.allowed(_basic(word), {"a": HASH})

        assert await one(PASSWORD)
        tried = await asyncio.gather(*[one(f"{i}") for i in range(200)], return_exceptions=True)
        for i in range(150):
            await one(f"{i} later")
        before = passwords.compared
        assert await one(PASSWORD)
        busy, right = sum(isinstance(answer, BusyError) for answer in tried), sum(answer is True for answer in tried)
        return busy, right, passwords.compared - before

    assert asyncio.run(ask()) == (184, 0, 0)


def test_the_least_version_is_kept(serve: Callable[[str], Served]) -> None:
    """And so are suites: those of TLS 1.3 alone leave no other version."""
    for text in (f"{TLS}, min_version: TLS13}}", f"{TLS}, cipher_suites: [TLS_AES_128_GCM_SHA256]}}"):
        served = serve(text)
        assert METRICS.encode() in served.page(served.trust())
        assert served.page(served.trust(most=ssl.TLSVersion.TLSv1_2)) == b""


def test_configured_headers_are_on_every_response(serve: Callable[[str], Served]) -> None:
    """On a refusal as well; a page of ours keeps the stricter policy that it has."""
    served = serve(f"{USERS}\nhttp_server_config: {{headers: {{X-Frame-Options: deny, Content-Security-Policy: 'img-src *'}}}}")
    assert served.get().headers["x-frame-options"] == "deny"
    page = served.get("/", password=PASSWORD)
    assert page.headers["x-frame-options"] == "deny"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")


MISTAKES = {
    "another's key": ("tls_server_config: {cert_file: server.pem, key_file: client.key}", "are no certificate and its key"),
    "half a file": (f"{TLS}, min_version: TLS13}}"[:-20], "expected"),
    "no key": ("tls_server_config: {cert_file: server.pem, key_file: lost.key}", "lost.key"),
    "no text": ("\0", "no YAML"),
    "removed": (None, "No such file"),
}
"""By its name, what the file is changed to, and a word of what is said about it."""


@pytest.mark.parametrize("before", [USERS, f"{TLS}}}"], ids=["passwords", "TLS"])
def test_a_change_that_cannot_be_is_none(serve: Callable[[str], Served], caplog: pytest.LogCaptureFixture, before: str) -> None:
    """What was in force is in force all the while; the log and the page say what is wrong; what is mended is taken."""
    served = serve(before)

    def page() -> bytes:
        if before == USERS:
            assert served.get().status == 401
            return served.get(password=PASSWORD).body
        return served.page(served.trust())

    for name, (text, words) in MISTAKES.items():
        caplog.clear()
        served.path.unlink() if text is None else served.write(text)
        wait_until(lambda: b"torchobs_exporter_config_ok 0" in page())
        wait_until(lambda: "stays in force" in caplog.text)
        assert words in caplog.text, name
        served.write(before)
        wait_until(lambda: b"torchobs_exporter_config_ok 1" in page())


def test_a_renewed_certificate_is_presented(
    serve: Callable[[str], Served], program: Callable[[str], str], tmp_path: Path
) -> None:
    """One file comes after the other: while they do not belong together, the old pair stays in force, and the page says so."""
    served = serve(f"{TLS}}}")
    first, old = ssl.get_server_certificate(_split(served)), served.trust()
    renewed = tmp_path / "renewed"
    renewed.mkdir()
    certify(program("openssl"), renewed, "server")
    (renewed / "server.key").replace(served.home / "server.key")
    wait_until(lambda: b"torchobs_exporter_config_ok 0" in served.page(old))
    assert ssl.get_server_certificate(_split(served)) == first
    (renewed / "server.pem").replace(served.home / "server.pem")
    wait_until(lambda: b"torchobs_exporter_config_ok 1" in served.page(served.trust()))
    assert ssl.get_server_certificate(_split(served)) != first


def _split(served: Served) -> tuple[str, int]:
    host, _, port = served.service.address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("broken", [None, "a: [", f"{TLS}, client_ca_file: no.pem}}"])
def test_a_file_that_is_broken_or_missing_from_the_start_opens_nothing(
    serve: Callable[[str | None], Served], broken: str | None
) -> None:
    """503 for everything but health, and no word of it to strangers; once mended, it is in force."""
    served = serve(broken)
    for answer in map(served.get, ("/metrics", "/", "/nothing")):
        assert (answer.status, answer.body.startswith(b"the web configuration is broken")) == (503, True)
    assert served.get("/-/healthy").status == 200
    served.write(USERS)
    wait_until(lambda: served.get(password=PASSWORD).status == 200)
    assert served.get().status == 401


def test_a_mistake_on_the_command_line_opens_nothing(
    start: Callable[..., subprocess.Popen[str]], free_port: Callable[[], int], tmp_path: Path, flight_dir: Path
) -> None:
    """Not in the option's name, not in another option's."""
    port = free_port()
    variables = {"TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS": f"127.0.0.1:{port}", "TORCHOBS_DIR": str(flight_dir)}
    log, mistyped = tmp_path / "exporter.log", "--web.config-file=web.yml"
    program = start_program(start, log, port, mistyped, **variables, KUBERNETES_SERVICE_HOST="10.96.0.1")
    assert program.get().status == 503
    assert program.get("/-/healthy").status == 200
