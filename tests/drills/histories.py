"""Histories of a run as values: their lines, and what ps-launch check says about them."""

from __future__ import annotations

import json
from typing import Any

from paramserver.common.registry import MODES
from paramserver.drills.check import Verdict, check

Line = dict[str, Any]


def verdict_of(lines: list[Line]) -> Verdict:
    return check({"h": [json.dumps(line).encode() + b"\n" for line in lines]})


def messages(lines: list[Line]) -> str:
    return "\n".join(map(str, verdict_of(lines).problems))


def encoded(*lines: Line) -> list[bytes]:
    return [json.dumps(line).encode() + b"\n" for line in lines]


def options_of(mode: str, **values: Any) -> dict[str, Any]:
    """All options of a mode."""
    return MODES.load(mode).Options(**values).model_dump(mode="json")


def rows_of(seqs: dict[str, int]) -> dict[str, list[int]]:
    """Rows of ranks whose contributions are one step, one sample and one batch each."""
    return {rank: [seq, seq, seq, seq, 0] for rank, seq in seqs.items()}


def start(mode: str, *, incarnation: int = 1, version: int = 0, seqs: dict | None = None, **more: Any) -> Line:
    options = options_of(mode, **({"staleness": more["staleness"]} if more.get("staleness") is not None else {}))
    settings = {"run": "r", "server_incarnation": incarnation, "mode": mode, "workers": 2}
    settings |= {"staleness": options.get("staleness"), "options": options, "common": {}}
    source = "s" if version else None
    return {
        "op": "start",
        "role": "server",
        **settings,
        "version": version,
        "rows": rows_of(seqs or {}),
        "source": source,
        **more,
    }


def op(name: str, rank: int | None = None, incarnation: int = 1, **fields: Any) -> Line:
    """`seqs` are rows, and where nothing else is said, each contribution has one step of one batch."""
    identity = {} if rank is None else {"rank": rank, "incarnation": incarnation}
    if "seqs" in fields:
        fields["rows"] = rows_of(fields.pop("seqs"))
    if name == "accept":
        fields = {"num_steps": 1, "num_batches": 1, **fields}
    if name == "reply":
        fields = {"training_steps": fields["seq"], **fields}
    return {"op": name, "role": "server", **identity, **fields}


def applied(rank: int, seq: int, version: int, *members: int) -> list[Line]:
    """A contribution of an async or ssp run, from acceptance to reply."""
    return [
        op("accept", rank, seq=seq, base_version=version - 1, version=version - 1, outcome="accepted"),
        op("commit", version=version, contributions=[[rank, 1, seq]], members=list(members)),
        op("reply", rank, seq=seq, version=version, outcome="APPLIED"),
    ]


def joined(*ranks: int) -> list[Line]:
    lines = [op("join", rank, seq=0, resumed=False) for rank in ranks]
    lines += [op("enter", rank, seq=0) for rank in ranks]
    return lines + [op("reply", rank, seq=0, version=0, outcome="START") for rank in ranks]
