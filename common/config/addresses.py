"""HOST:PORT, where a server listens or is looked for."""

from __future__ import annotations

import re

from ..errors import UsageError

# A name, an IPv4 address, or an IPv6 address in brackets. Whether there is such a host is found out when it is used.
_HOST = re.compile(r"[^\s/@?#\[\]]+|\[[0-9A-Fa-f:.]+(%\w+)?\]")


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT -> (host, port); [v6]:PORT too. UsageError otherwise."""
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"'{address}' is not HOST:PORT", fix="e.g. 127.0.0.1:50051, or [::1]:50051")
    return host.strip("[]"), int(port)


def listening(address: str) -> str:
    """The address of who listens; port 0 is a free one. These raise ValueError, as fields are checked."""
    try:
        split_address(address)
    except UsageError as error:
        raise ValueError(f"{error.message}, {error.fix}, ports 0 to 65535") from None
    return address


def reached(address: str) -> str:
    """The address of somebody else."""
    if split_address(listening(address))[1] == 0:
        raise ValueError(f"'{address}': port 0 is no address that anyone replies at")
    return address


def reached_or_none(address: str) -> str:
    """The same, or `none`."""
    return address if address == "none" else reached(address)
