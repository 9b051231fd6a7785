"""Serving the weights of a run (`ps-serve`)."""

# No `from __future__ import annotations`: see __init__.py.
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ..addresses import listening
from ..conditions import every
from ..option import SERVE, Flag, Panel, Section, checked_by


def _read_interval(text: str) -> None:
    if every(text).unit == "epochs":
        raise ValueError(f"'{text}' is in epochs: versions are counted, 100, or seconds, 10s")


class ServeConfig(Section):
    listen: Annotated[str, AfterValidator(listening), Flag(Panel.RUN, (SERVE,), metavar="HOST:PORT")] = Field(
        "127.0.0.1:8000", description="HOST:PORT of the HTTP server; port 0 takes a free port"
    )
    every: Annotated[
        str,
        BeforeValidator(lambda value: str(value)),
        checked_by(_read_interval),
        Flag(Panel.RUN, (SERVE,), metavar="N|10s"),
    ] = Field("10s", description="how often a newer version is fetched: after N versions, or so many seconds")
    slots: Annotated[int, Flag(Panel.RUN, (SERVE,), metavar="N")] = Field(
        8, ge=1, le=1024, description="requests that are decoded at once"
    )
    queue: int = Field(64, ge=0, description="requests that wait at most; more are refused with 429")
    max_tokens: int = Field(1024, ge=1, description="most tokens of a reply")
    swap: Annotated[Literal["pinned", "in-flight", "recompute"], Flag(Panel.RUN, (SERVE,), metavar="HOW")] = Field(
        "pinned", description="replies under way at a new version: pinned, in-flight or recompute; see docs/serving.md"
    )
    drain_s: float = Field(30.0, ge=0, description="seconds that replies may keep an old version back (pinned)")
    reply_s: float = Field(600.0, gt=0, description="seconds without a token or a result, after which a reply is 504")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="bytes of a request; a longer one is refused with 413")
    stage_silence_s: float = Field(
        10.0, ge=2, description="seconds without a sign of life of a process (--group), after which it is started again"
    )
    threads: int = Field(1, ge=1, description="torch threads of each process")
    group: Annotated[int, Flag(Panel.RUN, (SERVE,), metavar="G")] = Field(
        1, ge=1, le=64, description="processes on this host that the model's layers are divided over"
    )
