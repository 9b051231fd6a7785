"""Results of an evaluator, whose connection to the server breaks."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import grpc
import pytest

from paramserver.common.config.schema import Config
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation.evaluator import Evaluator

from .served import heartbeats, serve

WAIT_S = 60.0


class BreakingServer:
    """Ends the call at a result instead of replying, as often as `breaks` says; `results` has the others."""

    def __init__(self, breaks: int) -> None:
        self.results: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.num_lost, self._breaks = 0, breaks
        status = grpc.unary_unary_rpc_method_handler(
            self._status, pb.StatusRequest.FromString, pb.StatusReply.SerializeToString
        )
        self._grpc, self.address = serve(Heartbeat=heartbeats(self._heartbeat), Status=status)

    def _heartbeat(
        self, heartbeats: Iterator[pb.HeartbeatRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.HeartbeatReply]:
        is_first = True
        for heartbeat in heartbeats:
            if heartbeat.HasField("metrics"):
                assert not is_first, "the server knows an evaluator only after its first heartbeat"
                if self.num_lost < self._breaks:
                    self.num_lost += 1
                    context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                self.results.put(heartbeat.metrics.version)
            is_first = False
            yield pb.HeartbeatReply(lease_s=10)

    def _status(self, _: pb.StatusRequest, __: grpc.ServicerContext) -> pb.StatusReply:
        settings = pb.RunSettings(mode="async", contribution=pb.RunSettings.GRADIENT, batch_size=1)
        return pb.StatusReply(run="r", version=1, step=1, settings=settings)

    def stop(self) -> None:
        self._grpc.stop(None)


@pytest.mark.parametrize("breaks", [0, 1, 5])
def test_each_result_reaches_the_server_though_its_connection_breaks(breaks: int) -> None:
    server = BreakingServer(breaks)
    evaluator = Evaluator(Config.model_validate({"worker": {"server": server.address, "evaluate": True}}))
    try:
        for version in (1, 2, 3):
            evaluator.report(version, version, metrics={"loss": 1.0})
        assert [server.results.get(timeout=WAIT_S) for _ in range(3)] == [1, 2, 3]
        assert server.num_lost == breaks
        evaluator.report(4, 4, failure="an error")  # returns once the server has it
        assert server.results.get_nowait() == 4
    finally:
        evaluator.close()
        server.stop()
