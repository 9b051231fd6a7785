"""Which lane a stream has: the first of the preferred ones that both sides can open."""

from __future__ import annotations

from ...common.config.schema import WorkerConfig
from ...common.registry import AUTO
from ...proto import parameter_server_pb2 as pb
from .base import Lane
from .direct import DirectLane
from .shared import SharedLane


class Lanes:
    """Those that a worker would take, the best first; `lane` is the one that the stream has."""

    def __init__(self, config: WorkerConfig) -> None:
        self._direct = DirectLane()
        every = {"shared": SharedLane(), "direct": self._direct, "grpc": Lane()}
        self._all: list[Lane] = [every[name] for name in config.wanted_lanes]
        self.wants_direct = self._direct in self._all
        self.lane = self._all[-1]
        self._off = ""  # why one is not even tried
        codecs = [name for name in (config.codec, config.answer_codec) if name not in ("raw", AUTO)]
        if codecs and not all(lane.carries_codecs for lane in self._all):
            self._all = [lane for lane in self._all if lane.carries_codecs]
            self._off = f"{SharedLane.name}: off (worker.codec is {codecs[0]})"

    def joined(self, welcome: pb.Welcome, why_not_direct: str) -> None:
        """On a new stream: what of the server can be reached from here? `why_not_direct` is empty where there is a
        direct connection."""
        for lane in self._all:
            lane.joined(welcome)
        self._direct.reached(why_not_direct)
        self.lane = self._first()

    def offer(self, model: pb.Model, num_bytes: int) -> Lane | None:
        """The first that has something to offer says so in `model`, and the server will answer it; none where a better
        one is open."""
        for lane in self._all[: self._all.index(self._first())]:
            if lane.offer(model, num_bytes):
                self.lane = lane
                return lane
        return None

    def agreed(self) -> None:
        """Everything has been said about it on this stream."""
        self.lane = self._first()

    def _first(self) -> Lane:
        return next(lane for lane in self._all if lane.is_open)

    @property
    def reason(self) -> str:
        """Why it is not the best, `lane: reason`; empty when it is."""
        better = [lane for lane in self._all[: self._all.index(self.lane)] if lane.reason]
        return "; ".join([*([self._off] if self._off else []), *(f"{lane.name}: {lane.reason}" for lane in better)])
