"""Web configuration files for the exporter: accepted ones, refused ones, and the certificates that they name."""

from __future__ import annotations

import subprocess
from pathlib import Path

PASSWORD = "correct horse"
HASH = "$2b$04$5allVw8sOwhteO6ej8sFm.PFR/h97spidHfu78nTs37DtbOhHw4Pe"
"""Of the password, with the least cost."""
TLS = "tls_server_config: {cert_file: server.pem, key_file: server.key"
USERS = f"basic_auth_users: {{prometheus: '{HASH}'}}"

ACCEPTED = (
    "",
    "{}",
    "tls_server_config:",
    "tls_server_config: {min_version: TLS13}",
    "basic_auth_users:",
    USERS,
    f"basic_auth_users: {{1: '{HASH}'}}",
    f"basic_auth_users: {{'': '{HASH.replace('$2b$', '$2y$')}'}}",
    f"{TLS}}}",
    f"{TLS}, min_version: TLS13}}",
    f"{TLS}, max_version: TLS12}}",
    f"{TLS}, client_auth_type: RequestClientCert}}",
    f"{TLS}, client_auth_type: VerifyClientCertIfGiven, client_ca_file: client.pem}}",
    f"{TLS}, client_auth_type: RequireAndVerifyClientCert, client_ca_file: client.pem}}",
    f"{TLS}, client_auth_type: RequireAndVerifyClientCert}}",
    f"{TLS}, cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA]}}",
    f"{TLS}, prefer_server_cipher_suites: false}}",
    "http_server_config: {http2: no, headers: {X-Frame-Options: deny, X-Content-Type-Options: nosniff}}",
    "http_server_config: {headers: {Strict-Transport-Security: max-age=1, Content-Security-Policy: '', X-XSS-Protection: x}}",
)  # fmt: skip
REFUSED = (
    "[]",
    "a: [",
    "basic_auth_user: {}",
    "basic_auth_users: {a: secret}",
    "basic_auth_users: {a: null}",
    f"basic_auth_users: {{a: '{HASH}', a: '{HASH}'}}",
    f"basic_auth_users: {{a: '{HASH.replace('$04$', '$03$')}'}}",
    f"{TLS}, foo: 1}}",
    "tls_server_config: {cert_file: server.pem}",
    "tls_server_config: {key_file: server.key}",
    "tls_server_config: {client_auth_type: NoClientCert}",
    "tls_server_config: {client_ca_file: client.pem}",
    "tls_server_config: {cert_file: missing.pem, key_file: server.key}",
    "tls_server_config: {cert_file: client.pem, key_file: server.key}",
    f"{TLS}, client_ca_file: client.pem}}",
    f"{TLS}, client_ca_file: missing.pem, client_auth_type: RequireAndVerifyClientCert}}",
    f"{TLS}, client_auth_type: Always}}",
    f"{TLS}, min_version: SSL3}}",
    f"{TLS}, cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]}}",
    f"{TLS}, cipher_suites: TLS_AES_128_GCM_SHA256}}",
    f"{TLS}, curve_preferences: [P256]}}",
    "http_server_config: {http2: maybe}",
    "http_server_config: {headers: {Cache-Control: no-store}}",
    "http_server_config: {headers: {x-frame-options: deny}}",
    "http_server_config: {headers: {X-Frame-Options: never}}",
)
STRICTER = (
    f"basic_auth_users: {{'a:b': '{HASH}'}}",
    f"{TLS}, client_auth_type: RequireAnyClientCert}}",
    f"{TLS}, max_version: TLS11}}",
    f"{TLS}, min_version: TLS13, max_version: TLS12}}",
    f"{TLS}, curve_preferences: [X25519]}}",
    f"{TLS}, client_auth_type: RequireAndVerifyClientCert, client_ca_file: server.key}}",
    f"{TLS}, client_allowed_sans: [a]}}",
    'http_server_config: {headers: {X-XSS-Protection: "a\\nb"}}',
)  # fmt: skip
"""The toolkit takes these, and we do not: Python cannot do them, or nothing could be served by them."""


def certify(openssl: str, directory: Path, name: str) -> Path:
    """Make a certificate of 127.0.0.1 that stands for itself, `<name>.pem`, and its key, `<name>.key`; return the former."""
    path = directory / f"{name}.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", directory / f"{name}.key", "-out", path],
        check=True, capture_output=True,
    )  # fmt: skip
    return path
