"""The worker's credentials.

A token is never sent unencrypted to another machine, unless `server.insecure` says that the network is trusted.
"""

from __future__ import annotations

from dataclasses import replace

from ...common.config.addresses import is_loopback, split_address
from ...common.config.schema import Config
from ...common.errors import AuthError
from ...common.security import Credentials, warn_of_readable_secrets


def worker_credentials(config: Config) -> Credentials:
    """Read the credentials from the settings and PS_TOKEN.

    Raises AuthError for unusable files, and for a token that would be sent unencrypted.
    """
    security, addresses = config.security, config.worker.server
    if security.cert is not None and security.ca is None:
        message = "security.cert is set without security.ca: the worker uses TLS only if it knows whom to trust"
        raise AuthError(message, fix="add --ca FILE: ca.crt of ps-certs init")
    warn_of_readable_secrets(security)
    credentials = Credentials.read(security)
    is_here = all(is_loopback(split_address(address)[0]) for address in addresses.split(","))
    if credentials.token is not None and security.ca is None and not config.server.insecure and not is_here:
        raise AuthError(
            f"the token would be sent to {addresses} unencrypted, where others may read it",
            fix="use TLS: --ca FILE (ca.crt of ps-certs init); or on a network you trust --set server.insecure=true",
        )
    return replace(credentials, trusts_network=config.server.insecure)


def check_plaintext(host: str, who: str, trusts_network: bool, fix: str) -> None:
    """Raises AuthError if other machines can reach `host`, where `who` would listen for torch's own connections."""
    if trusts_network or is_loopback(host):
        return
    raise AuthError(
        f"{who} would exchange tensors on {host}, which other machines can reach, unencrypted: torch's Gloo and NCCL "
        "have neither TLS nor a check of the peer",
        fix=f"on a network you trust (a private one, or a tunnel such as WireGuard) add --insecure; {fix}",
    )
