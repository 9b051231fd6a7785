"""Codecs by name, and whether a worker's contributions may come in one of them."""

from __future__ import annotations

import functools

from ...common.codecs.base import Codec, check_codecs
from ...common.errors import ParamServerError, Reason, UsageError, refusal
from ...common.registry import CODECS
from ..core.run import Run
from ..engine.peers import Peer


@functools.cache
def codec_named(name: str) -> Codec:
    """One of this program's codecs; an empty name is raw. Refuses BAD_REQUEST an unknown name."""
    try:
        codec: Codec = CODECS.load(name or "raw")()
        return codec
    except ParamServerError as error:
        raise refusal(Reason.BAD_REQUEST, error.message, fix=error.fix) from None


def unusable(run: Run, peer: Peer, codec: Codec) -> UsageError | None:
    """Why contributions of this worker cannot come in a codec; None where its mode and optimizer allow it."""
    assert peer.offer is not None
    policy, optimizer = run.policy, peer.offer[1]
    groups = zip(optimizer.classes, (group.hyperparameters for group in optimizer.groups), strict=True)
    reply_codec = peer.reply_codec or codec_named("")
    try:
        check_codecs(run.mode, policy.kind, codec, reply_codec, list(groups), fragments=policy.fragments)
    except UsageError as error:
        return error
    return None
