"""The worker's side of secure connections: what it was given, and the channels made of it.

A token is never sent in the clear to another machine, unless `server.insecure` says that the network is trusted.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc

from ...common.config.addresses import split_address
from ...common.config.schema import Config
from ...common.errors import AuthError
from ...common.security import Credentials, is_loopback, warn_of_readable_secrets


def worker_credentials(config: Config) -> Credentials:
    """From the settings and PS_TOKEN. AuthError for files that cannot be used, or a token that would leak."""
    security, address = config.security, config.worker.server
    if security.cert is not None and security.ca is None:
        raise AuthError(
            "security.cert is set, but not whom to trust: without security.ca the worker does not speak TLS",
            fix="add --ca FILE: ca.crt of ps-certs init",
        )
    warn_of_readable_secrets(security)
    credentials = Credentials.read(security)
    is_here = is_loopback(split_address(address)[0])
    if credentials.token is not None and security.ca is None and not config.server.insecure and not is_here:
        raise AuthError(
            f"the token would go to {address} in the clear, where others may read it",
            fix="speak TLS: --ca FILE (ca.crt of ps-certs init); or on a network you trust --set server.insecure=true",
        )
    return replace(credentials, trusts_network=config.server.insecure)


def check_plaintext(host: str, who: str, trusts_network: bool, fix: str) -> None:
    """AuthError where others can reach `host`, on which `who` would listen for torch's own connections."""
    if trusts_network or is_loopback(host):
        return
    raise AuthError(
        f"{who} would exchange tensors on {host}, which other machines can reach, in the clear: torch's Gloo and NCCL "
        "have neither TLS nor a check of who connects",
        fix=f"on a network you trust (their own, or a tunnel such as WireGuard) add --insecure; {fix}",
    )


def open_channel(address: str, credentials: Credentials, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    """A channel to `address`, in TLS where there is a CA. Its calls show the token by `credentials.metadata`."""
    if credentials.ca is None:
        return grpc.insecure_channel(address, options=options)
    tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.cert)
    return grpc.secure_channel(address, tls, options=options)


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
