"""Health check: `python -m paramserver.ps.health [HOST:PORT]` exits with 0 if the server is serving.

Container engines run such a probe every few seconds. It calls gRPC's own health service, which needs no token, and does
not load torch. An open port is not enough, because a server that is about to end is NOT_SERVING.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..common.config.addresses import split_address
from ..common.config.cli import make_app, run_app
from ..common.errors import AuthError, UnreachableError
from ..common.proxies import proxy_options

_TIMEOUT_S = 5.0

app = make_app("Ask a server whether it is serving: exit code 0 if it is.")


@app.command()
def check(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")] = "127.0.0.1:50051",
    ca: Annotated[
        str | None, typer.Option(envvar="PS_SECURITY__CA", help="trusted certificates (PEM); with them, use TLS")
    ] = None,
    cert: Annotated[str | None, typer.Option(help="the client's certificate, for a server with mutual TLS")] = None,
    key: Annotated[str | None, typer.Option(help="the certificate's key, PEM")] = None,
    timeout: Annotated[float, typer.Option(help="seconds to wait for a reply")] = _TIMEOUT_S,
) -> None:
    """Ask a server whether it is serving: exit code 0 if it is."""
    split_address(address)
    options = proxy_options(address)
    if ca is None:
        channel = grpc.insecure_channel(address, options)
    else:
        tls = grpc.ssl_channel_credentials(_read(ca), _read(key), _read(cert))
        channel = grpc.secure_channel(address, tls, options)
    try:
        with channel:
            stub = health_pb2_grpc.HealthStub(channel)
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout).status
    except grpc.RpcError as error:
        raise UnreachableError(f"{address}: {error.code().name}: {error.details()}") from None
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    if status != health_pb2.HealthCheckResponse.SERVING:
        raise UnreachableError(f"{address}: {name}")
    print(f"{address}: {name}")


def _read(path: str | None) -> bytes | None:
    try:
        return Path(path).read_bytes() if path is not None else None
    except OSError as error:
        raise AuthError(f"cannot read {path}: {error.strerror}") from None


def main() -> None:
    """Entry point of `python -m paramserver.ps.health`."""
    # The error already names a failed handshake, so gRPC need not print it too.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    run_app(app, "health")


if __name__ == "__main__":
    main()
