"""Finds codecs by name, and checks whether a worker may use one for its contributions."""

from __future__ import annotations

import functools

from ...common.codecs.base import Codec, check_codecs
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
    groups = zip(optimizer.classes, (group.hyperparameters for group in optimizer.groups), strict=True)
    reply_codec = peer.reply_codec or codec_named("")
    try:
        check_codecs(run.mode, policy.kind, codec, reply_codec, list(groups), fragments=policy.fragments)
    except UsageError as error:
        return error
    return None
