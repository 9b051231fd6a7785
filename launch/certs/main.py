"""Make certificates and a token for a server and its workers, for use in a lab.

Examples

  ps-certs init lab --host 10.0.0.5 --workers 4   a CA, the server's certificate, one for each rank, a token
  ps-certs init lab --host 10.0.0.5 --shards 3    also one for each shard of the server, for security.mutual
  ps-certs init lab --renew                       new certificates of the same CA, which running servers use
  ps-certs show lab                               names and expiry
"""

# Commands import their code when they run, so that --help answers at once.
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...common.config.cli import make_app, run_app

PROGRAM = "ps-certs"

app = make_app(__doc__)

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the files.", show_default=False)]
_HOST = "Name or address of the server; repeatable."


@app.command("init")
def init(
    directory: DirArgument,
    host: Annotated[list[str] | None, typer.Option(metavar="NAME_OR_IP", help=_HOST, show_default=False)] = None,
    workers: Annotated[
        int, typer.Option("-n", "--workers", min=0, max=4096, help="Number of worker certificates; 0: one for all.")
    ] = 0,
    shards: Annotated[int, typer.Option(min=0, max=256, help="Certificates for the shards of a server.")] = 0,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Validity of the certificates.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="New certificates of the existing CA; the token stays.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace everything; old certificates become invalid.")
    ] = False,
) -> None:
    """Make a CA, certificates for server, shards and workers, and a token; print how to use them."""
    from . import kit

    kit.make(directory, host or [], workers, shards, days, renew=renew, force=force)


@app.command("show")
def show(directory: DirArgument) -> None:
    """Show names and expiry of the certificates in DIR."""
    from . import kit

    kit.show(directory)


def main() -> None:
    """Entry point of `ps-certs`."""
    run_app(app, PROGRAM)
