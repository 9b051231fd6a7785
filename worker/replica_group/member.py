"""The exchanger of a worker whose model is sharded over its processes (`sharded.py`).

Each process runs the run's strategy over its own part of the model, and all exchange with the server together. Group
rank 0 has the conversation, for the whole model. Meanwhile the others send and receive their bytes
(`redistribution.py`), and then get its result.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...common.config.schema import Config
from ...common.errors import ParamServerError, UsageError
from ...common.kinds import ContributionKind
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.messages import read_reply, reply_message
from ...common.wire.records import GroupInfo, Position, RateInfo, Reply, Row
from ..conversation.exchange import Exchange
from ..conversation.heartbeat import GroupView
from ..conversation.messages import Begun, Final, Goodbye, Outgoing, ReplyMessage, Settings, loses_replies
from ..conversation.security import worker_credentials
from ..session import Progress
from ..tensors.transfer import ModelTensors

if TYPE_CHECKING:
    from .sharded import Sharded

Result = TypeVar("Result", ReplyMessage, Final)


class ProgressLink:
    """Sends group rank 0's progress to the other processes, with the state that its newest START named."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.begun: Begun | None = None
        self._num_starts = -1  # at the newest message

    def message(self, begun: Begun | None, **fields: Any) -> dict[str, Any]:
        """Build group rank 0's message, as JSON values."""
        found = {"progress": vars(self.progress), **fields}
        if self._num_starts != self.progress.num_starts:
            self._num_starts, self.begun = self.progress.num_starts, begun
            payload = b64encode(begun.payload).decode() if begun else ""
            found["begun"] = begun and {"position": asdict(begun.position), "payload": payload}
        return found

    def take(self, message: Mapping[str, Any]) -> None:
        """Load a message of group rank 0 in another process."""
        found = message["progress"]
        replay = tuple(found["after_replay"] or ()) or None
        read = {"row": Row(*found["row"]), "rates": RateInfo(*found["rates"]), "after_replay": replay}
        self.progress.become(Progress(**{**found, **read}))
        if "begun" in message:
            begun = message["begun"]
            self.begun = begun and Begun(Position(**begun["position"]), b64decode(begun["payload"]))


class GroupMember(ProgressLink):
    """An `Exchanger`. `exchange` is group rank 0's, and `sharded.whole` is the model as the server sees it."""

    def __init__(self, exchange: Exchange | None, sharded: Sharded, settings: Settings, config: Config) -> None:
        self._exchange, self._whole, self._redistribution = exchange, sharded.whole, sharded.redistribution
        self.settings, self.replies_lose, self.stop_reason = settings, loses_replies(config.worker, settings), ""
        super().__init__(exchange.progress if exchange is not None else Progress())
        self.measured: list[dict[str, Any]] = exchange.measured if exchange is not None else []
        self._local: ModelTensors  # this process's part
        self._redistribution.find = self._find

    def _find(self, kind: str, index: int) -> torch.Tensor | None:
        if not kind or index >= self._local.num_exchanged:
            return self._local.tensors[index]
        return self._local.sources(ContributionKind(kind), range(index, index + 1))[0]

    # ---- together -----------------------------------------------------------------------------

    def _together(self, work: Callable[[Exchange], Result | None], kind: type[Result]) -> Result | None:
        """Run `work` in group rank 0. Returns its result, or raises its error, in all processes."""
        if self._exchange is None:
            message = self._redistribution.follow()
            self.take(message)
            return None if message["result"] is None else kind.FromString(b64decode(message["result"]))
        exchange = self._exchange
        exchange.stop_reason = self.stop_reason
        self._redistribution.begin()
        try:
            result = work(exchange)
        except ParamServerError as error:
            self._redistribution.fail(error)
            raise
        payload = None if result is None else b64encode(result.SerializeToString()).decode()
        self._redistribution.end(self.message(exchange.begun, result=payload))
        return result

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        self._local = model
        self._together(lambda exchange: exchange.start(self._whole, optimizer), Final)

    def contribute(self, outgoing: Outgoing) -> Reply:
        message = self._together(lambda exchange: reply_message(exchange.contribute(outgoing)).reply, ReplyMessage)
        assert message is not None
        return read_reply(message)

    def finish(self, can_evaluate: bool) -> Final | None:
        return self._together(lambda exchange: exchange.finish(can_evaluate), Final)

    def pull_exact(self, model: ModelTensors) -> int:
        found = self._together(lambda exchange: Final(version=exchange.pull_exact(self._whole)), Final)
        assert found is not None
        return found.version

    # ---- group rank 0's alone -----------------------------------------------------------------

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        if self._exchange is None:
            raise no_optimizer_here(self._redistribution.rank)
        return self._exchange.pull_optimizer()

    def moved(self) -> None:
        """Does nothing, because `_local` is looked up each time."""

    def leave(self, goodbye: Goodbye) -> None:
        if self._exchange is not None:
            self._exchange.stop_reason = self.stop_reason
            self._exchange.leave(goodbye)

    def drop(self) -> None:
        if self._exchange is not None:
            self._exchange.drop()


class StageMember(GroupMember):
    """A GroupMember that knows the server's facts about peers."""

    def __init__(self, exchange: Exchange | None, sharded: Sharded, settings: Settings, config: Config) -> None:
        super().__init__(exchange, sharded, settings, config)
        self.config, self.server = config.worker, config.worker.server
        self.credentials = exchange.credentials if exchange is not None else worker_credentials(config)
        self.group_view = exchange.group_view if exchange is not None else GroupView()

    def message(self, begun: Begun | None, **fields: Any) -> dict[str, Any]:
        info = self.group_view.info
        return super().message(begun, **fields, peers={**asdict(info), "secret": info.secret.hex()})

    def take(self, message: Mapping[str, Any]) -> None:
        super().take(message)
        info = message["peers"]
        secret, members = bytes.fromhex(info["secret"]), tuple(info["members"])
        self.group_view.info = GroupInfo(**{**info, "secret": secret, "members": members})

    def contribute(self, outgoing: Outgoing) -> Reply:
        return super().contribute(outgoing._replace(optimizer=None))

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}


def no_optimizer_here(rank: int) -> UsageError:
    message = f"group rank {rank}: optimizer.state_dict() is fetched from the server"
    return UsageError(message, fix="call it in group rank 0 only: if session.group_rank == 0")
