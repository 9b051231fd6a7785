"""A connection from one shard to another: TLS where there is a CA, the token with every call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from ...common.config.schema import SecurityConfig
from ...common.security import authorization, read_pem, read_token


def open_channel(
    address: str, security: SecurityConfig, options: Sequence[tuple[str, Any]]
) -> tuple[grpc.aio.Channel, list[tuple[str, str]]]:
    """The channel, and the metadata of its calls. AuthError for files that cannot be used."""
    token, pem = read_token(security, os.environ), read_pem(security)
    if pem.ca is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return channel, [authorization(token)] if token is not None else []
