"""Who is told more than metrics and health: whoever is on this machine, or was let in to it."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

REFUSAL = (
    "This address serves /metrics and health only. The page is shown on the machine itself, and elsewhere to whoever has a"
    " password or a certificate (--web.config.file). Open it there as"
    " http://localhost:PORT/, or by `kubectl port-forward POD PORT`, or by `ssh -L PORT:localhost:PORT HOST`.\n"
)


LET_IN = "torchobs.let_in"
"""In the scope of a request whose sender has shown who it is"""


def is_unix(scope: Scope) -> bool:
    """Return True if a request came in by a Unix socket."""
    server = scope.get("server")
    return server is None or server[1] is None


def is_local(scope: Scope) -> bool:
    """Return True if a request came in by a loopback address, or by a Unix socket.

    It is the connection's own local address that counts, not the one that is listened on: a listener on every interface is
    reached from this machine, and through a port-forward, by 127.0.0.1, and from no other machine so.
    """
    if is_unix(scope):
        return True  # whose directory says who may
    server = scope["server"]
    try:
        address = ip_address(server[0].partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
