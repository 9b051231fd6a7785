"""The exchange of a worker whose model lies in all of its processes: each runs the run's strategy over its own part,
and what they do with the server they do together. Group rank 0 has the conversation, for the whole model; the others
give and take bytes of theirs meanwhile (`redistribution.py`), and hear what came of it.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from ...common.errors import ParamServerError, UsageError
from ...common.kinds import ContributionKind
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.messages import read_reply, reply_message
from ...common.wire.records import Position, Reply
from ..conversation.exchange import Exchange
from ..conversation.messages import Begun, Final, Goodbye, Outgoing, ReplyMessage, Settings
from ..session import Progress
from ..tensors.transfer import ModelTensors
from .redistribution import Redistribution

Said = TypeVar("Said", ReplyMessage, Final)


class GroupMember:
    """What a strategy asks of an Exchange. `own` is group rank 0's, `whole` the model as the server is to see it."""

    zero = 0

    def __init__(
        self, exchange: Exchange | None, whole: ModelTensors, redistribution: Redistribution, settings: Settings
    ) -> None:
        self._own, self._whole, self._redistribution = exchange, whole, redistribution
        self.settings = settings
        self.progress = exchange.progress if exchange is not None else Progress()
        self.begun = exchange.begun if exchange is not None else None
        self.measured: list[dict[str, Any]] = exchange.measured if exchange is not None else []
        self._local: ModelTensors  # this process's part
        redistribution.lying = self._lying

    def _lying(self, kind: str, index: int) -> torch.Tensor | None:
        if not kind or index >= self._local.num_exchanged:
            return self._local.tensors[index]
        return self._local.sources(ContributionKind(kind), range(index, index + 1))[0]

    # ---- together -----------------------------------------------------------------------------

    def _together(self, work: Callable[[Exchange], Said | None], kind: type[Said]) -> Said | None:
        """What it gives in group rank 0, in all; or the error that it ends with."""
        if self._own is None:
            told = self._redistribution.follow()
            self.progress.become(progress_of(told["progress"]))
            if told["begun"] is not False:
                self.begun = begun_of(told["begun"])
            return None if told["result"] is None else kind.FromString(b64decode(told["result"]))
        num_starts = self.progress.num_starts
        self._redistribution.begin()
        try:
            result = work(self._own)
        except ParamServerError as error:
            self._redistribution.fail(error)
            raise
        begun: Any = False
        if self.progress.num_starts != num_starts:
            self.begun = self._own.begun
            begun = told_begun(self.begun)
        payload = None if result is None else b64encode(result.SerializeToString()).decode()
        self._redistribution.end({"progress": vars(self.progress), "begun": begun, "result": payload})
        return result

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        self._local = model

        def start(exchange: Exchange) -> Final | None:
            exchange.start(self._whole, optimizer)
            return None

        self._together(start, Final)

    def contribute(self, outgoing: Outgoing) -> Reply:
        message = self._together(lambda own: reply_message(own.contribute(outgoing)).reply, ReplyMessage)
        assert message is not None
        return read_reply(message)

    def finish(self, can_evaluate: bool) -> Final | None:
        return self._together(lambda own: own.finish(can_evaluate), Final)

    # ---- group rank 0's alone -----------------------------------------------------------------

    @property
    def stop_reason(self) -> str:
        return self._own.stop_reason if self._own is not None else ""

    @stop_reason.setter
    def stop_reason(self, reason: str) -> None:
        if self._own is not None:
            self._own.stop_reason = reason

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        if self._own is None:
            raise no_optimizer_here(self._redistribution.rank)
        return self._own.pull_optimizer()

    def moved(self) -> None:
        """What is sent is looked up in `_local` each time."""

    def leave(self, goodbye: Goodbye) -> None:
        if self._own is not None:
            self._own.leave(goodbye)

    def drop(self) -> None:
        if self._own is not None:
            self._own.drop()


def no_optimizer_here(rank: int) -> UsageError:
    message = f"group rank {rank}: optimizer.state_dict() is fetched from the server"
    return UsageError(message, fix="ask group rank 0 alone: if session.group_rank == 0")


# ---- what the others hear, as JSON ----------------------------------------------------------------


def progress_of(told: Mapping[str, Any]) -> Progress:
    replay = told["after_replay"]
    return Progress(**{**told, "after_replay": tuple(replay) if replay else None})


def told_begun(begun: Begun | None) -> dict[str, Any] | None:
    return begun and {"position": asdict(begun.position), "payload": b64encode(begun.payload).decode()}


def begun_of(told: Mapping[str, Any] | None) -> Begun | None:
    return Begun(Position(**told["position"]), b64decode(told["payload"])) if told else None
