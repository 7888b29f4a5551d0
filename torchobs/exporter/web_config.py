"""TLS, client certificates, passwords and headers, configured as in every Prometheus exporter: ``--web.config.file``.

The format is that of Prometheus' exporter-toolkit; its ``promtool check web-config`` is the tests' reference:
https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. As there, an unknown key is an error: a
misspelt ``basic_auth_users`` must not disable authentication. What Python cannot do is an error, too: never less security than
asked, but for TLS before 1.2, which is never offered.

If the file is invalid from the start, everything but health is answered with 503: what was to be protected is unknown.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import os
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import yaml
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

from torchobs.exporter.access import LET_IN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEALTH = ("/-/healthy", "/-/ready")
"""Paths without authentication: kubelet's probes have no password, and the responses reveal nothing."""

_BCRYPT = re.compile(r"\$2[abxy]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}", re.ASCII)
_HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""Headers that the toolkit allows, with their permitted values (empty: any)."""
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_MODES = {"VerifyClientCertIfGiven": ssl.CERT_OPTIONAL, "RequireAndVerifyClientCert": ssl.CERT_REQUIRED}
_TLS13 = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
"""Cipher suites of TLS 1.3, which cannot be chosen"""

_REMEMBERED = 100
_WAITING = 16
"""Most comparisons of passwords in the queue: at 50 ms each (cost 10) the last one waits for a second."""
_LONGEST = 4096
_BCRYPT_BYTES = 72
"""Longest password of bcrypt; Go's and Apache's implementations truncate longer ones, Python's raises."""
_NOBODY = "$2b$10$NDTPvuJp.Y6.k7P5xOPl9uHMGmHin0gthQKVMWozjAxUPresC9eq2"
"""A hash for unknown users, so that the time of a refusal does not reveal whether a user exists."""

_log = logging.getLogger(__name__)


class WebConfigError(ValueError):
    """The file is invalid; the message is for the log and contains no secret."""


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``tls_server_config``. Paths are relative to the file's directory."""

    cert_file: str = ""
    key_file: str = ""
    client_auth_type: Literal[
        "", "NoClientCert", "RequestClientCert", "RequireClientCert", "RequireAnyClientCert",
        "VerifyClientCertIfGiven", "RequireAndVerifyClientCert",
    ] = ""  # fmt: skip
    client_ca_file: str = ""
    min_version: Literal["TLS10", "TLS11", "TLS12", "TLS13"] = "TLS12"
    max_version: Literal["TLS10", "TLS11", "TLS12", "TLS13"] = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    curve_preferences: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True  # without effect, as in Go since 1.17


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``http_server_config``."""

    http2: bool = True
    headers: dict[str, str] | None = None


class WebConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. ``basic_auth_users`` are bcrypt hashes by user."""

    tls_server_config: Tls | None = None
    http_server_config: Http | None = None
    basic_auth_users: dict[str | int, str] | None = None

    @property
    def tls(self) -> Tls | None:
        """The TLS configuration, if the toolkit would enable TLS for it."""
        tls = self.tls_server_config
        return tls if tls and (tls.cert_file or tls.key_file or tls.client_auth_type or tls.client_ca_file) else None

    @property
    def users(self) -> Mapping[str, str]:
        """Hashes (bcrypt) by user; empty: no authentication by password."""
        return {str(user): hashed for user, hashed in (self.basic_auth_users or {}).items()}

    @property
    def authenticates(self) -> bool:
        """Whether every request that passes is authenticated, by a password or a client certificate."""
        return bool(self.users) or (self.tls is not None and self.tls.client_auth_type == "RequireAndVerifyClientCert")

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to add to every response."""
        return (self.http_server_config and self.http_server_config.headers) or {}


def parse(text: str) -> WebConfig:
    """Return the parsed file. Raises :class:`WebConfigError`; an empty file configures nothing, as in the toolkit."""
    try:
        _refuse_duplicate_keys(yaml.compose(text, yaml.SafeLoader))
        content = yaml.safe_load(text)
        config = msgspec.convert({} if content is None else content, WebConfig, strict=True, str_keys=True)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)  # not the parser's message: it quotes the line, which may contain a hash
        at = f"line {mark.line + 1}: " if mark else ""
        raise WebConfigError(f"{at}{getattr(problem, 'problem', None) or 'no YAML'}") from None
    except msgspec.ValidationError as problem:
        raise WebConfigError(str(problem)) from None
    except (ValueError, RecursionError):  # a date in month 13, a number of 5,000 digits, a thousand levels
        raise WebConfigError("it has a date or a number that there is not, or too many levels") from None
    if wrong := next(iter(_problems(config)), None):
        raise WebConfigError(wrong)
    return config


def _refuse_duplicate_keys(node: yaml.Node | None) -> None:
    """Raise :class:`WebConfigError` for duplicate keys, as the toolkit does; PyYAML lets the last one win."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        if duplicates := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise WebConfigError(f"line {node.start_mark.line + 1}: {', '.join(duplicates)} is there twice")
    if isinstance(node, yaml.CollectionNode):
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                _refuse_duplicate_keys(part)


def _problems(config: WebConfig) -> Iterable[str]:
    """Yield the problems of a file with the right keys and types."""
    for user, hashed in config.users.items():
        if not _BCRYPT.fullmatch(hashed):
            yield f"basic_auth_users: what stands for {user!r} is no bcrypt hash"
        if ":" in user:
            yield f"basic_auth_users: {user!r} has a colon, which ends a user's name"
    for name, value in config.headers.items():
        if name not in _HEADERS:
            yield f"http_server_config: the header {name!r} cannot be configured"
        elif _HEADERS[name] and value not in _HEADERS[name]:
            yield f"http_server_config: {name} may be {' or '.join(_HEADERS[name])}"
        if not _HEADER_VALUE.fullmatch(value):
            yield f"http_server_config: {name} has characters that no header may have"
    if config.tls is not None:
        yield from _problems_of_tls(config.tls)


def _problems_of_tls(tls: Tls) -> Iterable[str]:
    if not tls.cert_file or not tls.key_file:
        yield f"tls_server_config: {'key_file' if tls.cert_file else 'cert_file'} is missing"
    if tls.client_ca_file and tls.client_auth_type in {"", "NoClientCert"}:
        yield "tls_server_config: client_ca_file without a client_auth_type that verifies"
    if tls.client_auth_type in {"RequireClientCert", "RequireAnyClientCert"}:
        yield (
            f"tls_server_config: {tls.client_auth_type} verifies no certificate, which Python's ssl cannot do: "
            "RequireAndVerifyClientCert does, against client_ca_file"
        )
    if tls.curve_preferences:
        yield "tls_server_config: curve_preferences cannot be chosen in Python"
    least, most = _VERSIONS.get(tls.min_version, ssl.TLSVersion.TLSv1_2), _VERSIONS.get(tls.max_version)
    if most is None or most < least:
        yield f"tls_server_config: there is nothing from {least.name} to max_version {tls.max_version}"


def server_context(tls: Tls, directory: Path) -> ssl.SSLContext:
    """Return the context of a server. Raises :class:`WebConfigError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names = f"{tls.cert_file} and {tls.key_file} are no certificate and its key: "  # OpenSSL does not say which is bad
    try:
        # the password "" instead of none: OpenSSL would prompt for one on the terminal
        context.load_cert_chain(directory / tls.cert_file, directory / tls.key_file, password="")
        names = ""
        context.verify_mode = _MODES.get(tls.client_auth_type, ssl.CERT_NONE)
        if context.verify_mode != ssl.CERT_NONE and tls.client_ca_file:
            context.load_verify_locations(directory / tls.client_ca_file)
        elif context.verify_mode != ssl.CERT_NONE:
            context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = _VERSIONS.get(tls.min_version, ssl.TLSVersion.TLSv1_2)
        context.maximum_version = _VERSIONS[tls.max_version]
        older = [_openssl_name(name) for name in tls.cipher_suites if name not in _TLS13]
        for name in older:
            context.set_ciphers(name)  # raises for one that does not exist, which a list may have
        if older:
            context.set_ciphers(":".join(older))
        elif tls.cipher_suites:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
    except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
        raise WebConfigError(f"tls_server_config: {names}{_reason(problem)}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def _openssl_name(suite: str) -> str:
    """Return OpenSSL's name of a cipher suite that has Go's: ``ECDHE-RSA-AES128-SHA``, ``ECDHE-RSA-CHACHA20-POLY1305``."""
    name = suite.removeprefix("TLS_").replace("_WITH_", "-").replace("AES_", "AES").replace("_CBC", "").replace("_", "-")
    return name.replace("POLY1305-SHA256", "POLY1305")


def _reason(problem: OSError | ValueError) -> str:
    if isinstance(problem, OSError) and problem.filename is not None:
        return f"{problem.strerror}: {problem.filename}"
    reason = getattr(problem, "reason", None)  # OpenSSL's, such as KEY_VALUES_MISMATCH
    return reason.lower().replace("_", " ") if isinstance(reason, str) else getattr(problem, "strerror", None) or str(problem)


class BusyError(Exception):
    """The queue of password comparisons is full."""


class Passwords:
    """Checks passwords with bcrypt, one at a time, off the event loop. To be used in one event loop.

    Accepted ones are cached by a hash of user, bcrypt hash and password, keyed with a random key of this process, so that no
    password stays in memory.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._accepted: dict[bytes, None] = {}
        self._comparing = asyncio.Lock()
        self._waiting = 0
        self.compared = 0
        """number of bcrypt comparisons"""

    async def allowed(self, header: str | None, users: Mapping[str, str]) -> bool:
        """Return whether an ``Authorization`` header has a valid user and password. Raises :class:`BusyError`."""
        credentials = _credentials(header)
        if credentials is None:
            return False
        user, password = credentials
        hashed = users.get(user, _NOBODY)
        parts = user.encode(), hashed.encode(), password
        key = hmac.digest(self._key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), hashlib.sha256)
        if key not in self._accepted and await self._compare(password, hashed) and user in users:
            self._accepted[key] = None
            if len(self._accepted) > _REMEMBERED:
                del self._accepted[next(iter(self._accepted))]
        return key in self._accepted

    async def _compare(self, password: bytes, hashed: str) -> bool:
        import bcrypt

        if self._waiting >= _WAITING:
            raise BusyError
        self._waiting += 1
        self.compared += 1
        try:
            async with self._comparing:
                return await asyncio.to_thread(bcrypt.checkpw, password[:_BCRYPT_BYTES], hashed.encode())
        finally:
            self._waiting -= 1


def _credentials(header: str | None) -> tuple[str, bytes] | None:
    """Return the user and password of an ``Authorization`` header (RFC 7617), or ``None``."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic" or len(encoded) > _LONGEST:
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon and b"\0" not in password else None
    except (binascii.Error, ValueError):
        return None


class WebConfigMiddleware:
    """Enforces a web configuration file, if there is one. To be used in one event loop."""

    def __init__(self, path: str | None) -> None:
        self.problem = ""
        """the file's error; empty if there is none"""
        self._path = Path(path) if path is not None else None
        self._config: WebConfig | None = None if path is not None else WebConfig()
        """the configuration in force"""
        self.context: ssl.SSLContext | None = None
        """for TLS of new connections (``None``: no TLS): another object after every change"""
        self._versions: dict[Path, tuple[int, ...]] = {}
        self._passwords = Passwords()

    async def reload(self) -> None:
        """Reload the file if it, or a certificate file that it names, has changed."""
        if self._path is not None and (loaded := await asyncio.to_thread(self._load, self._path)) is not None:
            self._config, self.context = loaded  # both in one turn of the event loop, so that no request meets one of each

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Return the application with authentication and the configured headers."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            config, answer = self._config, None
            if config is not None and config.headers:
                send = _with_headers(config.headers, send)
            if scope["path"] not in HEALTH:
                answer = await self._refusal(config, scope)
            scope[LET_IN] = answer is None and config is not None and config.authenticates
            await (answer or app)(scope, receive, send)

        return guarded

    async def _refusal(self, config: WebConfig | None, scope: Scope) -> PlainTextResponse | None:
        if config is None:
            return PlainTextResponse(
                "the web configuration is broken: nothing is served until it is mended; see the log\n", 503
            )
        if not config.users:
            return None
        try:
            if await self._passwords.allowed(Headers(scope=scope).get("authorization"), config.users):
                return None
        except BusyError:
            return PlainTextResponse("Too many passwords to look at.\n", 503, {"Retry-After": "1"})
        return PlainTextResponse("Unauthorized\n", 401, {"WWW-Authenticate": 'Basic realm="torchobs", charset="UTF-8"'})

    def _load(self, path: Path) -> tuple[WebConfig, ssl.SSLContext | None] | None:
        if self._versions and self._versions == {watched: _version(watched) for watched in self._versions}:
            return None
        self._versions = {path: _version(path)}  # before it is read, so that a change meanwhile is noticed
        try:
            config = parse(path.read_text("utf-8"))
            tls, directory = config.tls, path.parent
            if tls is not None:
                files = [directory / name for name in (tls.cert_file, tls.key_file, tls.client_ca_file) if name]
                self._versions |= {file: _version(file) for file in files}
            context = server_context(tls, directory) if tls is not None else None
        except (OSError, ValueError) as problem:
            of_system = getattr(problem, "strerror", None) or "it is no UTF-8"
            words = str(problem) if isinstance(problem, WebConfigError) else of_system
            kept = "the one before stays in force" if self._config is not None else "nothing is served"
            self.problem = f"--web.config.file {path}: {words}; {kept}"
            _log.error("%s", self.problem)
            return None
        self.problem = ""
        _log.info("web configuration in force: %s", path, extra={"good_news": True})
        return config, context


def _version(path: Path) -> tuple[int, ...]:
    """Return numbers that change with a file; empty if there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116  # follows symbolic links: Kubernetes replaces one
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _with_headers(configured: Mapping[str, str], send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in configured.items():
                headers.setdefault(name, value)  # a policy that our own pages set is stricter
        await send(message)

    return sending
