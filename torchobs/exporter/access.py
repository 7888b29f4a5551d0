"""Classify requests by origin: clients on this machine, and authenticated ones, may see more than metrics and health."""

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
"""Key in the ASGI scope of a request that was authenticated"""


def is_unix(scope: Scope) -> bool:
    """Return True if a request came over a Unix socket."""
    server = scope.get("server")
    return server is None or server[1] is None


def is_local(scope: Scope) -> bool:
    """Return True if a request came over a loopback address or a Unix socket.

    The connection's local address counts, not the listener's: a listener on all interfaces is reached by 127.0.0.1 from this
    machine, also through a port-forward, but from no other machine.
    """
    if is_unix(scope):
        return True  # file permissions control access to it
    server = scope["server"]
    try:
        address = ip_address(server[0].partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
