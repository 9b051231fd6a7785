"""The HTTP proxy of the environment, which gRPC uses. A process on this machine needs none."""

from __future__ import annotations

import os
from urllib.parse import SplitResult, urlsplit

from .config.addresses import is_loopback, split_address

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # the variables that gRPC reads
_NO_PROXY = ("no_grpc_proxy", "no_proxy")
DRILL_VARIABLE = "PS_DRILL_PROXY"  # ps-launch chaos: its proxy, which injects faults, is for this machine too


def _needs_none(host: str) -> bool:
    return is_loopback(host) and not os.environ.get(DRILL_VARIABLE)


def proxy_of(host: str) -> tuple[str, SplitResult | None]:
    """Returns the variable that names the proxy for this host, and the proxy; "" and None for no proxy."""
    name = next((name for name in _PROXIES if os.environ.get(name)), "")
    no_proxy = next((found for other in _NO_PROXY if (found := os.environ.get(other))), "")
    is_direct = any(host.endswith(part) for word in no_proxy.split(",") if (part := word.strip()))
    if not name or is_direct or _needs_none(host):
        return "", None
    url = os.environ[name]
    return name, urlsplit(url if "//" in url else f"//{url}")


def proxy_options(address: str) -> tuple[tuple[str, int], ...]:
    """Returns the options of a gRPC channel: none uses a proxy to reach this machine."""
    return (("grpc.enable_http_proxy", 0),) if _needs_none(split_address(address)[0]) else ()


def proxy_hint(address: str) -> str:
    """Returns a phrase for errors that names the variable of the proxy, if there is one for this address."""
    host = split_address(address)[0]
    name, _ = proxy_of(host)
    return f", through the proxy that {name} names (no_proxy={host} goes without)" if name else ""
