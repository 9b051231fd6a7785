"""The worker's side of secure connections: what it was given, and the channels made of it.

A token is never sent in the clear to another machine, unless `server.insecure` says that the network is trusted.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from ...common.config.schema import Config, SecurityConfig
from ...common.errors import AuthError, UsageError
from ...common.security import (
    Pem,
    authorization,
    is_loopback,
    read_pem,
    read_token,
    split_address,
    warn_of_readable_secrets,
)


@dataclass(frozen=True)
class Security:
    """How a worker connects. The default is in the clear and without a token."""

    config: SecurityConfig = field(default_factory=SecurityConfig)
    pem: Pem = field(default_factory=Pem)
    token: str | None = field(default=None, repr=False)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What every call shows the server."""
        return [authorization(self.token)] if self.token is not None else []

    def renewed(self) -> Security:
        """With the files as they are now; itself while they cannot be used (half of them replaced)."""
        try:
            return Security(self.config, read_pem(self.config), self.token)
        except AuthError:
            return self


PLAINTEXT = Security()


def worker_security(config: Config) -> Security:
    """From the settings and PS_TOKEN. AuthError for files that cannot be used, or a token that would leak."""
    security, address = config.security, config.worker.server
    if security.cert is not None and security.ca is None:
        raise AuthError(
            "security.cert is set, but not whom to trust: without security.ca the worker does not speak TLS",
            fix="add --ca FILE: ca.crt of ps-certs init",
        )
    warn_of_readable_secrets(security)
    token = read_token(security, os.environ)
    if token is not None and security.ca is None and not config.server.insecure and not _is_here(address):
        raise AuthError(
            f"the token would go to {address} in the clear, where others may read it",
            fix="speak TLS: --ca FILE (ca.crt of ps-certs init); or on a network you trust --set server.insecure=true",
        )
    return Security(security, read_pem(security), token)


def _is_here(address: str) -> bool:
    try:
        return is_loopback(split_address(address)[0])
    except UsageError:
        return False


# ---- channels -----------------------------------------------------------------------------------


def open_channel(address: str, security: Security, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    """A channel to `address`, in TLS where there is a CA. Its calls show the token by `security.metadata`."""
    pem = security.pem
    if pem.ca is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert), options=options)


def wait_until_ready(channel: grpc.Channel, timeout_s: float, on_failure: Callable[[], None]) -> bool:
    """Connect; False when it takes longer. `on_failure` is called, here, when a first attempt has failed: it may
    raise the reason; otherwise gRPC goes on trying."""
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    deadline = time.monotonic() + timeout_s
    has_failed = False
    deliver = states.put  # the same object for both: that is how gRPC finds it again
    channel.subscribe(deliver, try_to_connect=True)
    try:
        while True:
            try:
                state = states.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if state is grpc.ChannelConnectivity.READY:
                return True
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not has_failed:
                has_failed = True
                on_failure()
    finally:
        channel.unsubscribe(deliver)
