"""Convert the web configuration to an ``ssl.SSLContext``. What Python cannot do is an error: never less security than asked."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.exporter.http.auth.web_config import WebConfigError

if TYPE_CHECKING:
    from torchobs.exporter.http.auth.web_config import Tls

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_MODES = {"VerifyClientCertIfGiven": ssl.CERT_OPTIONAL, "RequireAndVerifyClientCert": ssl.CERT_REQUIRED}
_SUITES = {
    "TLS_AES_128_GCM_SHA256": "",
    "TLS_AES_256_GCM_SHA384": "",
    "TLS_CHACHA20_POLY1305_SHA256": "",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
"""OpenSSL's names by Go's (``tls.CipherSuites()`` of Go 1.22); "" for TLS 1.3, whose suites cannot be chosen."""


def files(tls: Tls, directory: Path) -> tuple[Path, ...]:
    """Return the certificate and key files that the configuration names."""
    return tuple(directory / name for name in (tls.cert_file, tls.key_file, tls.client_ca_file) if name)


def context(tls: Tls, directory: Path) -> ssl.SSLContext:
    """Return a server's context. Raises :class:`WebConfigError`."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        _load(made, tls, directory)
        _verify_clients(made, tls, directory)
        _limit(made, tls)
    except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
        if isinstance(problem, WebConfigError):
            raise
        raise WebConfigError(f"tls_server_config: {_reason(problem)}") from None
    made.set_alpn_protocols(["http/1.1"])
    return made


def notes(tls: Tls) -> tuple[str, ...]:
    """Return notes where the server offers less than the configuration allows, which never weakens security."""
    found = []
    if tls.min_version in {"TLS10", "TLS11"}:
        found.append(f"min_version {tls.min_version}: TLS 1.2 is the least that is offered")
    if tls.client_auth_type == "RequestClientCert":
        found.append("client_auth_type RequestClientCert: no certificate is asked for, as none would be verified")
    return tuple(found)


def _load(made: ssl.SSLContext, tls: Tls, directory: Path) -> None:
    """Load the server's certificate and key. Raises :class:`WebConfigError` naming both: OpenSSL does not say which is bad."""
    try:
        # the password "" instead of none: OpenSSL would prompt for one on the terminal
        made.load_cert_chain(directory / tls.cert_file, directory / tls.key_file, password="")
    except (OSError, ValueError) as problem:
        msg = f"tls_server_config: {tls.cert_file} and {tls.key_file} are no certificate and its key: {_reason(problem)}"
        raise WebConfigError(msg) from None


def _verify_clients(made: ssl.SSLContext, tls: Tls, directory: Path) -> None:
    made.verify_mode = _MODES.get(tls.client_auth_type, ssl.CERT_NONE)
    if made.verify_mode != ssl.CERT_NONE:
        if tls.client_ca_file:
            made.load_verify_locations(directory / tls.client_ca_file)
        else:
            made.load_default_certs(ssl.Purpose.CLIENT_AUTH)


def _limit(made: ssl.SSLContext, tls: Tls) -> None:
    least, most = _VERSIONS.get(tls.min_version, ssl.TLSVersion.TLSv1_2), _VERSIONS.get(tls.max_version)
    if most is None or most < least:
        raise WebConfigError(f"tls_server_config: there is nothing from {least.name} to max_version {tls.max_version}")
    if unknown := [name for name in tls.cipher_suites if name not in _SUITES]:
        raise WebConfigError(f"tls_server_config: unknown cipher {unknown[0]!r}")
    older = [_SUITES[name] for name in tls.cipher_suites if _SUITES[name]]
    if older:
        made.set_ciphers(":".join(older))
    elif tls.cipher_suites:
        least = ssl.TLSVersion.TLSv1_3
    made.minimum_version, made.maximum_version = least, most
    if len(tls.curve_preferences) > 1:
        raise WebConfigError("tls_server_config: curve_preferences: Python's ssl takes one curve")
    for curve in tls.curve_preferences:
        made.set_ecdh_curve(_CURVES[curve])
    if not tls.prefer_server_cipher_suites:
        made.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE


def _reason(problem: OSError | ValueError) -> str:
    if isinstance(problem, OSError) and problem.filename is not None:
        return f"{problem.strerror}: {problem.filename}"
    reason = getattr(problem, "reason", None)  # OpenSSL's, such as KEY_VALUES_MISMATCH
    return reason.lower().replace("_", " ") if isinstance(reason, str) else getattr(problem, "strerror", None) or str(problem)
