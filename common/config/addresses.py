"""Checks of addresses, HOST:PORT, at which a server listens or is reached."""

from __future__ import annotations

import contextlib
import ipaddress
import re

from ..errors import UsageError

# A name, an IPv4 address, or an IPv6 address in brackets. The name is resolved only when it is used.
_HOST = re.compile(r"[^\s/@?#:\[\]]+|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]")


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT or [v6]:PORT into (host, port). Raises UsageError for other text."""
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        is_v6 = address.count(":") > 1 and "[" not in address
        why = ": brackets tell an IPv6 address from its port" if is_v6 else ""
        raise UsageError(f"'{address}' is not HOST:PORT{why}", fix="e.g. 127.0.0.1:50051, or [::1]:50051")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def listening(address: str) -> str:
    """Check an address to listen at, where port 0 means a free port. Raises ValueError, as pydantic expects."""
    try:
        split_address(address)
    except UsageError as error:
        raise ValueError(f"{error.message}, {error.fix}, ports 0 to 65535") from None
    return address


def reached(address: str) -> str:
    """Check the address of another process. Raises ValueError."""
    if split_address(listening(address))[1] == 0:
        raise ValueError(f"'{address}': no process can be reached at port 0")
    return address


def reached_list(addresses: str) -> str:
    """Check the addresses at which a server may be, HOST:PORT[,HOST:PORT]. Raises ValueError."""
    return ",".join(reached(address.strip()) for address in addresses.split(","))


def reached_list_or_none(addresses: str) -> str:
    """Check the addresses at which a server may be, or `none`. Raises ValueError."""
    return addresses if addresses == "none" else reached_list(addresses)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`. Names other than localhost are not trusted."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
