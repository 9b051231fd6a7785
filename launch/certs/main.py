"""ps-certs: certificates and a token that are good for a lab. What the commands do is in `kit.py`, imported when one
is given: --help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...common.config.cli import make_app, run_app

PROGRAM = "ps-certs"

_HELP = """Certificates and a token for a server and its workers.

Examples

  ps-certs init lab --host 10.0.0.5 --workers 4   a CA, the server's certificate, one for each rank, a token
  ps-certs init lab --host 10.0.0.5 --shards 3    one for each shard of the server too, for security.mutual
  ps-certs init lab --renew                       new certificates of the same CA; running servers take them
  ps-certs show lab                               names, and until when they are valid
"""

app = make_app(_HELP)

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="where the files are kept", show_default=False)]
HostOption = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="NAME_OR_IP", help="how workers reach the server; repeatable", show_default=False),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "-n", "--workers", min=1, max=4096, help="a certificate for each rank; none: one that all workers share"
    ),
]
ShardsOption = Annotated[
    int | None,
    typer.Option("--shards", min=1, max=256, help="a certificate for each shard of a server that has several"),
]
DaysOption = Annotated[int, typer.Option("--days", min=1, max=3650, help="how long certificates are valid")]
RenewOption = Annotated[bool, typer.Option("--renew", help="new certificates, with the CA and token that are there")]
ForceOption = Annotated[bool, typer.Option("--force", help="replace everything; what the old CA signed is void")]


@app.command("init")
def init(
    directory: DirArgument,
    host: HostOption = None,
    workers: WorkersOption = None,
    shards: ShardsOption = None,
    days: DaysOption = 365,
    renew: RenewOption = False,
    force: ForceOption = False,
) -> None:
    """Make a CA, certificates for server, shards and workers, and a token; then say how to use them."""
    from . import kit

    kit.make(directory, host or [], workers or 0, shards or 0, days, renew=renew, force=force)


@app.command("show")
def show(directory: DirArgument) -> None:
    """Names and expiry of the certificates in DIR."""
    from . import kit

    kit.show(directory)


def main() -> None:
    run_app(app, PROGRAM)
