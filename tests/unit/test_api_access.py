"""Who may do what over which door."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchobs.exporter.api.authorization import AccessChannel, Token, access_channel, refusal

TOKEN = "0123456789abcdef-token"
JSON = {"content-type": "application/json; charset=utf-8"}
BEARER = {"authorization": f"Bearer {TOKEN}"}
LOCAL = {"host": "localhost:10960"}


@pytest.fixture
def token(tmp_path: Path) -> Token:
    """A token file with a newline at its end, as an editor leaves it."""
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return Token(str(path))


def status(method: str, headers: dict[str, str], door: AccessChannel, token: Token) -> int:
    """What the refusal answers with; 0 for none."""
    refused = refusal(method, headers, door, token)
    return refused.status if refused else 0


@pytest.mark.parametrize(
    ("door", "method", "headers", "expected"),
    [
        ("socket", "GET", {}, 0),
        ("socket", "POST", JSON, 0),
        ("socket", "POST", {}, 415),
        ("loopback", "GET", LOCAL, 0),
        ("loopback", "HEAD", {"host": "127.0.0.1"}, 0),
        ("loopback", "GET", {"host": "[::1]:10960"}, 0),
        ("loopback", "GET", {"host": "[::1]"}, 0),
        ("loopback", "GET", {"host": "evil.example"}, 421),
        ("loopback", "GET", {"host": "evil.example:10960"}, 421),
        ("loopback", "GET", {"host": "10.0.0.1:10960"}, 421),
        ("loopback", "GET", {}, 421),
        ("loopback", "GET", LOCAL | {"origin": "http://localhost:10960"}, 0),
        ("loopback", "GET", LOCAL | {"origin": "http://evil.example"}, 403),
        ("loopback", "GET", LOCAL | {"origin": "null"}, 403),
        ("loopback", "POST", LOCAL | JSON, 401),
        ("loopback", "DELETE", LOCAL | JSON, 401),
        ("loopback", "POST", LOCAL | JSON | BEARER, 0),
        ("loopback", "POST", LOCAL | JSON | BEARER | {"origin": "http://evil.example"}, 403),
        ("loopback", "POST", LOCAL | BEARER | {"content-type": "text/plain"}, 415),
        ("loopback", "POST", LOCAL | JSON | {"authorization": "Bearer wrong"}, 401),
        ("loopback", "GET", LOCAL | {"authorization": "Bearer wrong"}, 401),
        ("loopback", "POST", LOCAL | JSON | {"authorization": f"Basic {TOKEN}"}, 401),
        ("open", "GET", {"host": "node-1"}, 401),
        ("open", "GET", {"host": "node-1"} | BEARER, 0),
        ("open", "POST", {"host": "node-1"} | JSON | BEARER, 0),
        ("open", "POST", {"host": "node-1"} | JSON, 401),
        ("open", "POST", JSON | {"authorization": "Basic dTpw", "torchobs-token": TOKEN}, 0),
        ("open", "POST", JSON | {"authorization": "Basic dTpw", "torchobs-token": "wrong"}, 401),
        ("open", "POST", JSON | {"authorization": "Bearer wrong", "torchobs-token": TOKEN}, 401),
    ],
)
def test_the_gate(door: AccessChannel, method: str, headers: dict[str, str], expected: int, token: Token) -> None:
    """With a token file."""
    assert status(method, headers, door, token) == expected


def test_without_a_token_file_commands_are_off_but_for_the_socket() -> None:
    """And the refusal says how to switch them on."""
    refused = refusal("POST", LOCAL | JSON, "loopback", Token(None))
    assert refused
    assert (refused.status, refused.kind) == (403, "control-off")
    assert "--api.token-file" in refused.detail
    assert refusal("POST", LOCAL | JSON | BEARER, "loopback", Token(None))
    assert refusal("GET", LOCAL, "loopback", Token(None)) is None


@pytest.mark.parametrize("content", [None, "", "short", "\n\n", b"\xff" * 32])
def test_a_token_file_that_is_none_admits_nobody(tmp_path: Path, content: str | bytes | None) -> None:
    """It fails closed: missing, empty, too short, no text."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for given in ("", "short", "\udcff" * 32):
        assert not Token(str(path)).admits(given)
    assert status("POST", LOCAL | JSON | {"authorization": "Bearer short"}, "loopback", Token(str(path))) == 401


def test_a_token_is_rotated_by_its_file(tmp_path: Path) -> None:
    """As a mounted secret is; and a directory or a FIFO in its place admits nobody, and holds nobody up."""
    path = tmp_path / "token"
    token = Token(str(path))
    path.write_text(TOKEN)
    assert token.admits(TOKEN)
    path.write_text(TOKEN[::-1])
    assert not token.admits(TOKEN)
    assert token.admits(TOKEN[::-1])
    path.unlink()
    path.mkdir()
    assert not token.admits(TOKEN)


def test_a_password_or_a_certificate_is_enough_for_reading() -> None:
    """Where the web configuration asks for one; commands need the token all the same."""
    assert refusal("GET", {"host": "node-1"}, "open", Token(None), authenticated=True) is None
    refused = refusal("POST", {"host": "node-1"} | JSON, "open", Token(None), authenticated=True)
    assert refused
    assert refused.kind == "control-off"
    crossed = refusal("GET", {"host": "node-1", "origin": "https://evil.example"}, "open", Token(None), authenticated=True)
    assert crossed
    assert crossed.kind == "foreign-origin"


@pytest.mark.parametrize(
    ("host", "door"),
    [("127.0.0.1", "loopback"), ("127.8.9.1", "loopback"), ("::1", "loopback"), ("::ffff:127.0.0.1", "loopback"),
     ("10.1.2.3", "open"), ("fe80::1%eth0", "open"), ("", "open")],
)  # fmt: skip
def test_every_request_has_its_door(host: str, door: AccessChannel) -> None:
    """By the address of this machine that it came to, whatever is listened on."""
    assert access_channel({"server": (host, 10960)}) == door
