"""A server that is the relay of a region: a server for its workers, and one worker of the run above."""

# No `from __future__ import annotations`: see __init__.py.
from typing import Annotated

from pydantic import Field

from ..option import SERVER, Flag, Panel, Section
from .processes import Codec, ReachedList
from .run import Mode


class UpstreamConfig(Section):
    """The run above (docs/regions.md)."""

    server: Annotated[ReachedList | None, Flag(Panel.HOSTS, (SERVER,), name="upstream", metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT[,HOST:PORT] of the server above; this server is then the relay of a region"
    )
    rank: Annotated[int | None, Flag(Panel.HOSTS, (SERVER,), name="upstream-rank")] = Field(
        None, ge=0, description="rank of the region in the run above; none: the server above gives a free rank"
    )
    region: str | None = Field(None, description="name of the region, for displays; none: this host's")
    every: Annotated[int | None, Flag(Panel.HOSTS, name="upstream-every", metavar="K")] = Field(
        None, ge=0, description="steps between exchanges; 0: the region waits for each; none: as the run above says"
    )
    mode: Mode = Field("diloco", description="mode of the run above with ps-launch and every of at least 1")
    ahead: int | None = Field(
        None, ge=1, description="steps that the region takes at most without a reply from above; none: 4 K"
    )
    codec: Codec = Field("raw", description="codec of contributions to the server above")
    reply_codec: Codec = Field("raw", description="codec of weights from the server above")
    cert: str | None = Field(None, description="certificate (PEM) for the server above; none: security.cert")
    key: str | None = Field(None, description="private key (PEM) of upstream.cert")
