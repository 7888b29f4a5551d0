"""Parse and check the web configuration file, in the format of Prometheus' exporter-toolkit.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md; ``promtool check web-config`` is the
tests' reference. As there, an unknown key is an error: a misspelt ``basic_auth_users`` must not disable authentication.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec
import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

TlsVersion = Literal["TLS10", "TLS11", "TLS12", "TLS13"]
ClientAuth = Literal[
    "", "NoClientCert", "RequestClientCert", "RequireClientCert", "RequireAnyClientCert",
    "VerifyClientCertIfGiven", "RequireAndVerifyClientCert",
]  # fmt: skip
Curve = Literal["CurveP256", "CurveP384", "CurveP521", "X25519"]

_MOST_BYTES = 1 << 20
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


class WebConfigError(ValueError):
    """The file is invalid; the message is for the log and contains no secret."""


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``tls_server_config``. Paths are relative to the file's directory."""

    cert_file: str = ""
    key_file: str = ""
    client_auth_type: ClientAuth = ""
    client_ca_file: str = ""
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    curve_preferences: tuple[Curve, ...] = ()
    prefer_server_cipher_suites: bool = True

    @property
    def wanted(self) -> bool:
        """True if the toolkit would enable TLS for it."""
        return bool(self.cert_file or self.key_file or self.client_auth_type or self.client_ca_file)


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
        """The TLS configuration, if TLS is enabled."""
        return self.tls_server_config if self.tls_server_config and self.tls_server_config.wanted else None

    @property
    def users(self) -> Mapping[str, str]:
        """Hashes (bcrypt) by user; empty: no authentication by password."""
        return {str(user): hashed for user, hashed in (self.basic_auth_users or {}).items()}

    @property
    def authenticates(self) -> bool:
        """True if every request that passes is authenticated, by a password or a client certificate."""
        return bool(self.users) or (self.tls is not None and self.tls.client_auth_type == "RequireAndVerifyClientCert")

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to add to every response."""
        return (self.http_server_config and self.http_server_config.headers) or {}


def parse(text: str) -> WebConfig:
    """Return the parsed file. Raises :class:`WebConfigError`; an empty file configures nothing, as in the toolkit."""
    if len(text) > _MOST_BYTES:
        raise WebConfigError("the file is larger than 1 MiB")
    try:
        _refuse_duplicate_keys(yaml.compose(text, yaml.SafeLoader))
        content = yaml.safe_load(text)
        found = msgspec.convert({} if content is None else content, WebConfig, strict=True, str_keys=True)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)  # not the parser's message: it quotes the line, which may contain a hash
        at = f"line {mark.line + 1}: " if mark else ""
        raise WebConfigError(f"{at}{getattr(problem, 'problem', None) or 'no YAML'}") from None
    except msgspec.ValidationError as problem:
        raise WebConfigError(str(problem)) from None
    except ValueError:  # of Python's types for a date in month 13, or for a number of 5,000 digits
        raise WebConfigError("it has a date or a number that there is not") from None
    except RecursionError:
        raise WebConfigError("it is nested too deeply") from None
    _check(found)
    return found


def _refuse_duplicate_keys(node: yaml.Node | None) -> None:
    """Raise :class:`WebConfigError` for duplicate keys, as the toolkit does; PyYAML lets the last one win."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        if duplicates := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise WebConfigError(f"line {node.start_mark.line + 1}: {', '.join(duplicates)} is there twice")
    if isinstance(node, yaml.CollectionNode):
        for child in node.value:
            for one in child if isinstance(child, tuple) else (child,):
                _refuse_duplicate_keys(one)


def _check(found: WebConfig) -> None:
    for user, hashed in found.users.items():
        if not _BCRYPT.fullmatch(hashed):
            raise WebConfigError(f"basic_auth_users: what stands for {user!r} is no bcrypt hash")
        if ":" in user:
            raise WebConfigError(f"basic_auth_users: {user!r} has a colon, which ends a user's name")
    for name, value in found.headers.items():
        if name not in _HEADERS:
            raise WebConfigError(f"http_server_config: the header {name!r} cannot be configured")
        if _HEADERS[name] and value not in _HEADERS[name]:
            raise WebConfigError(f"http_server_config: {name} may be {' or '.join(_HEADERS[name])}")
        if not _HEADER_VALUE.fullmatch(value):
            raise WebConfigError(f"http_server_config: {name} has characters that no header may have")
    if found.tls is not None:
        _check_tls(found.tls)


def _check_tls(tls: Tls) -> None:
    for field, path in (("cert_file", tls.cert_file), ("key_file", tls.key_file)):
        if not path:
            raise WebConfigError(f"tls_server_config: {field} is missing")
    if tls.client_ca_file and tls.client_auth_type in {"", "NoClientCert"}:
        raise WebConfigError("tls_server_config: client_ca_file without a client_auth_type that verifies")
    if tls.client_auth_type in {"RequireClientCert", "RequireAnyClientCert"}:
        raise WebConfigError(
            f"tls_server_config: {tls.client_auth_type} verifies no certificate, which Python's ssl cannot do: "
            "RequireAndVerifyClientCert does, against client_ca_file"
        )
