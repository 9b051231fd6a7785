"""Finds codecs by name, and checks whether a worker may use one for its contributions."""

from __future__ import annotations

import functools

from ...common.codecs.base import Codec
from ...common.combinations import Choices
from ...common.combinations import refusal as refused
from ...common.errors import ParamServerError, Reason, UsageError, refusal
from ...common.registry import CODECS
from ..core.run import Run
from ..engine.peers import Peer


@functools.cache
def codec_named(name: str) -> Codec:
    """Return the codec of this name, where "" is raw. Raises a BAD_REQUEST refusal for an unknown name."""
    try:
        codec: Codec = CODECS.load(name or "raw")()
        return codec
    except ParamServerError as error:
        raise refusal(Reason.BAD_REQUEST, error.message, fix=error.fix) from None


def unusable(run: Run, peer: Peer, codec: Codec) -> UsageError | None:
    """Return the error if the mode or the optimizer excludes a codec for this worker's contributions, else None."""
    assert peer.offer is not None
    policy, optimizer = run.policy, peer.offer[1]
    return refused(
        Choices(
            mode=run.mode,
            kind=policy.kind,
            has_rounds=policy.has_rounds,
            codec=codec.name,
            reply_codec=peer.reply_codec.name if peer.reply_codec is not None else "raw",
            fragments=policy.fragments,
            optimizers=optimizer.each,
        )
    )
