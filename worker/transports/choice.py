"""Which transport a stream has: the first of the preferred ones that both sides can open."""

from __future__ import annotations

from ...common.config.schema import WorkerConfig
from ...common.registry import AUTO
from ...proto import parameter_server_pb2 as pb
from .base import Transport
from .direct import DirectTransport
from .shared import SharedTransport


class Transports:
    """Those that a worker would take, the best first; `transport` is the one that the stream has."""

    def __init__(self, config: WorkerConfig) -> None:
        self._direct = DirectTransport()
        every = {"shared": SharedTransport(), "direct": self._direct, "grpc": Transport()}
        self._all: list[Transport] = [every[name] for name in config.wanted_transports]
        self.wants_direct = self._direct in self._all
        self.transport = self._all[-1]
        self._off = ""  # why one is not even tried
        codecs = [name for name in (config.codec, config.reply_codec) if name not in ("raw", AUTO)]
        if codecs and not all(transport.carries_codecs for transport in self._all):
            self._all = [transport for transport in self._all if transport.carries_codecs]
            self._off = f"{SharedTransport.name}: off (worker.codec is {codecs[0]})"

    def joined(self, welcome: pb.Welcome, why_not_direct: str) -> None:
        """On a new stream: what of the server can be reached from here? `why_not_direct` is empty where there is a
        direct connection."""
        for transport in self._all:
            transport.joined(welcome)
        self._direct.reached(why_not_direct)
        self.transport = self._first()

    def offer(self, model: pb.Model, num_bytes: int) -> Transport | None:
        """The first that has something to offer says so in `model`, and the server will reply it; none where a better
        one is open."""
        for transport in self._all[: self._all.index(self._first())]:
            if transport.offer(model, num_bytes):
                self.transport = transport
                return transport
        return None

    def agreed(self) -> None:
        """Everything has been said about it on this stream."""
        self.transport = self._first()

    def _first(self) -> Transport:
        return next(transport for transport in self._all if transport.is_open)

    @property
    def reason(self) -> str:
        """Why it is not the best, `transport: reason`; empty when it is."""
        better = [transport for transport in self._all[: self._all.index(self.transport)] if transport.reason]
        return "; ".join(
            [*([self._off] if self._off else []), *(f"{transport.name}: {transport.reason}" for transport in better)]
        )
