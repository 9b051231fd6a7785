"""A connection from one shard to another: TLS where there is a CA, the token with every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from ...common.config.schema import SecurityConfig
from ...common.security import Credentials


def open_channel(
    address: str, security: SecurityConfig, options: Sequence[tuple[str, Any]]
) -> tuple[grpc.aio.Channel, list[tuple[str, str]]]:
    """The channel, and the metadata of its calls. AuthError for files that cannot be used."""
    credentials = Credentials.read(security)
    pem = credentials.pem
    if pem.ca is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        tls = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        channel = grpc.aio.secure_channel(address, tls, options=options)
    return channel, credentials.metadata
