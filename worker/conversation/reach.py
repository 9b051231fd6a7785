"""A plain connection to another port of the server, by the way that gRPC has taken to it."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from urllib.parse import SplitResult

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # as gRPC looks for them
_AROUND = ("no_grpc_proxy", "no_proxy")


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """One that is there by `deadline` (time.monotonic), whatever number of addresses the host has; with the time that
    is left as its timeout. OSError."""
    proxy = _proxy_of(host)
    way = (proxy.hostname or "", proxy.port or 80) if proxy is not None else (host, port)
    addresses = socket.getaddrinfo(*way, type=socket.SOCK_STREAM)
    while True:
        family, kind, protocol, _, address = addresses.pop(0)
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(left_s(deadline) / (len(addresses) + 1))
            connection.connect(address)
            connection.settimeout(left_s(deadline))
            if proxy is not None:
                _go_through(connection, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
            return connection
        except OSError:
            connection.close()
            if not addresses:
                raise


def left_s(deadline: float) -> float:
    """TimeoutError when none is left."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _proxy_of(host: str) -> SplitResult | None:
    """The HTTP proxy that gRPC goes through to this host."""
    url = next((found for name in _PROXIES if (found := os.environ.get(name))), "")
    if not url:
        return None
    from urllib.parse import urlsplit  # rarely

    around = next((found for name in _AROUND if (found := os.environ.get(name))), "")
    if any(host.endswith(part) for name in around.split(",") if (part := name.strip())):
        return None
    return urlsplit(url if "//" in url else f"//{url}")


def _go_through(connection: socket.socket, target: str) -> None:
    connection.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    said = b""
    while not said.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)  # what follows is the server's
        if not piece or len(said) > 4096:
            raise OSError(0, "the proxy does not connect")
        said += piece
    if said.split(b" ", 2)[1:2] != [b"200"]:
        raise OSError(0, f"the proxy says {said.splitlines()[0][:80].decode('latin-1')}")
