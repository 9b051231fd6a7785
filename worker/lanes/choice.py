"""Which lane a stream has: the first of the preferred ones that both sides can open."""

from __future__ import annotations

from ...common.config.schema import WorkerConfig
from ...proto import parameter_server_pb2 as pb
from .base import Lane
from .direct import DirectLane
from .shared import SharedLane


class Lanes:
    """Those a worker would take, the best first; `lane` is the one that the stream has."""

    def __init__(self, config: WorkerConfig) -> None:
        codecs = [name for name in (config.codec, config.answer_codec) if name != "raw"]
        self._direct = DirectLane()
        self._all: list[Lane] = [SharedLane(), self._direct, Lane()]
        self._reason = ""  # why one is not even tried
        if not config.shared_memory:
            self._all, self._reason = self._all[1:], "off (worker.shared_memory)"
        elif codecs:
            self._all = [lane for lane in self._all if lane.carries_codecs]
            self._reason = f"off (worker.codec is {codecs[0]})"
        self.lane = self._all[-1]

    def joined(self, welcome: pb.Welcome, why_not_direct: str) -> None:
        """On a new stream: what of the server can be reached from here? `why_not_direct` is empty where there is a
        direct connection."""
        self.lane = self._all[-1]
        for lane in self._all:
            lane.joined(welcome)
        self._direct.reached(why_not_direct)

    def offer(self, model: pb.Model, num_bytes: int) -> Lane | None:
        """The first that has something to offer says so in `model`; the server will answer it."""
        return next((lane for lane in self._all if lane.offer(model, num_bytes)), None)

    def agreed(self) -> None:
        """Everything has been said about it on this stream."""
        self.lane = next(lane for lane in self._all if lane.is_open)

    @property
    def reason(self) -> str:
        """Why it is not the best; empty when it is."""
        better = self._all[: self._all.index(self.lane)]
        return "; ".join(reason for reason in (self._reason, *(lane.reason for lane in better)) if reason)
