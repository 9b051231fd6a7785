"""The wire contract from outside: health, reflection, and a worker made only of generated code."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from queue import SimpleQueue

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from paramserver.proto import parameter_server_pb2 as pb
from paramserver.proto import parameter_server_pb2_grpc as pb_grpc

from ..records import contribution_proto

SERVICE = "paramserver.v4.ParameterServer"


class ForeignWorker:
    """Speaks the protocol with generated classes alone, as a program in another language would.

    Trains one float32 parameter `w` of `size` elements with SGD at lr 1.
    """

    def __init__(self, channel: grpc.Channel, size: int) -> None:
        self.size = size
        self._requests: SimpleQueue[pb.WorkerMessage | None] = SimpleQueue()
        self.replies = pb_grpc.ParameterServerStub(channel).Exchange(self._outgoing())

    def _outgoing(self) -> Iterator[pb.WorkerMessage]:
        while (message := self._requests.get()) is not None:
            yield message

    def send(self, **fields) -> None:
        self._requests.put(pb.WorkerMessage(**fields))

    def receive(self, kind: str) -> pb.ServerMessage:
        for message in self.replies:
            if message.WhichOneof("kind") != "waiting":
                assert message.WhichOneof("kind") == kind
                return message
        raise AssertionError("the stream ended")

    def payload(self, message: pb.ServerMessage, num_bytes: int) -> list[float]:
        data = bytearray(message.data)
        while len(data) < num_bytes:
            piece = next(self.replies)
            assert piece.WhichOneof("kind") is None
            assert piece.offset == len(data)
            data += piece.data
        return list(struct.unpack(f"<{self.size}f", data))

    def join(self, rank: int = 0) -> pb.Welcome:
        self.send(join=pb.Join(rank=rank))
        return self.receive("welcome").welcome

    def offer(self, **changes) -> None:
        spec = {"name": "w", "kind": "PARAMETER", "dtype": "float32", "shape": [self.size]} | changes
        line = f"{spec['kind']} {spec['name']} {spec['dtype']} {','.join(map(str, spec['shape']))}\n"
        rates = Struct()
        rates.update({"lr": 1.0})
        optimizer = pb.Optimizer(name="SGD", groups=[pb.ParameterGroup(tensors=[spec["name"]], hyperparameters=rates)])
        fingerprint = hashlib.sha256(line.encode()).hexdigest()
        self.send(model=pb.Model(tensors=[pb.TensorSpec(**spec)], fingerprint=fingerprint, optimizer=optimizer))

    def contribute(self, step: int, version: int, values: list[float], piece_bytes: int = 1000) -> None:
        data = struct.pack(f"<{self.size}f", *values)
        header = contribution_proto(step, version=version, num_samples=1, num_bytes=len(data), wants_weights=True)
        self.send(contribution=header)
        for at in range(0, len(data), piece_bytes):
            self.send(offset=at, data=data[at : at + piece_bytes])

    def refusal(self) -> tuple[grpc.StatusCode, str, str]:
        """(status, ps-reason, text) of a stream that the server ends."""
        try:
            for _ in self.replies:
                pass
        except grpc.RpcError as error:
            return error.code(), dict(error.trailing_metadata())["ps-reason"], error.details()
        raise AssertionError("the stream ended without a refusal")

    def close(self) -> None:
        self._requests.put(None)


@pytest.fixture
def channel(cluster):
    cluster.server("--mode", "async", "--steps", "4", "--workers", "1", "--set", "server.join_timeout_s=2")
    with grpc.insecure_channel(cluster.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def shared_channel(shared_cluster):
    """One server for tests that leave nothing behind."""
    shared_cluster.server("--mode", "async", "--steps", "1000", "--workers", "1")
    with grpc.insecure_channel(shared_cluster.address) as channel:
        yield channel


def test_health_and_reflection_are_served(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    database = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE in database.get_services()
    described = DescriptorPool(database).FindServiceByName(SERVICE)
    names = ["Exchange", "Pull", "PullRows", "Heartbeat", "Attend", "Status"]
    assert [method.name for method in described.methods] == names


def test_a_whole_run_with_generated_code_alone(channel):
    worker = ForeignWorker(channel, size=700)
    welcome = worker.join()
    assert (welcome.rank, welcome.incarnation, welcome.seq, welcome.settings.mode) == (0, 1, 0, "async")
    worker.offer()
    worker.receive("send_weights")
    start = [float(i) for i in range(700)]
    worker.send(initial_weights=pb.InitialWeights(payload_bytes=2800), offset=0, data=struct.pack("<700f", *start))
    reply = worker.receive("reply")
    result, next_work = reply.reply.result, reply.reply.next_work
    assert (result.outcome, result.version, next_work.local_steps) == (pb.Reply.START, 0, 1)
    assert worker.payload(reply, reply.reply.weights.num_bytes) == start
    for step in range(1, 5):
        worker.contribute(step, step - 1, [1.0] * 700)
        reply = worker.receive("reply")
        result = reply.reply.result
        assert (result.outcome, result.seq, result.version) == (pb.Reply.APPLIED, step, step)
        assert worker.payload(reply, 2800) == [value - step for value in start]
    assert reply.reply.next_work.local_steps == 0
    stub = pb_grpc.ParameterServerStub(channel)
    status = stub.Status(pb.StatusRequest(), timeout=10)
    assert (status.version, status.step) == (4, 4)
    fields = json.loads(status.status)
    assert (fields["mode"], fields["steps"], fields["workers"][0]["rank"]) == ("async", 4, 0)
    pulled = list(stub.Pull(pb.PullRequest(), timeout=10))
    assert (pulled[0].snapshot.version, pulled[0].snapshot.tensors[0].name) == (4, "w")
    assert b"".join(message.data for message in pulled) == struct.pack("<700f", *(value - 4 for value in start))
    worker.send(finish=pb.Finish(can_evaluate=True))
    final = worker.receive("final")
    assert final.final.evaluate
    worker.payload(final, final.final.weights.num_bytes)
    worker.send(leave=pb.Leave(final_metrics={"loss": 0.5}))
    worker.close()
    assert list(worker.replies) == []


def _has_weights(channel) -> bool:
    try:
        next(pb_grpc.ParameterServerStub(channel).Pull(pb.PullRequest(), timeout=10))
    except grpc.RpcError:
        return False
    return True


def _ready(channel, size: int = 8) -> ForeignWorker:
    """A worker with weights to compute on; the first one of a run brings zeros."""
    worker = ForeignWorker(channel, size)
    worker.join()
    worker.offer()
    if not _has_weights(channel):
        worker.receive("send_weights")
        worker.send(initial_weights=pb.InitialWeights(payload_bytes=4 * size), data=bytes(4 * size))
    worker.payload(worker.receive("reply"), 4 * size)
    return worker


def test_a_repeated_contribution_gets_a_reply_and_not_applied(channel):
    worker = _ready(channel)
    for _ in range(2):
        worker.contribute(1, 0, [1.0] * 8)
        reply = worker.receive("reply")
        assert worker.payload(reply, 32) == [-1.0] * 8
    assert (reply.reply.result.outcome, reply.reply.result.version, reply.reply.result.seq) == (pb.Reply.REPEATED, 1, 1)


_ANNOUNCED = {"contribution": {"seq": 1, "num_samples": 1, "num_bytes": 32}}


def test_an_unfinished_upload_leaves_nothing_behind(channel):
    worker = _ready(channel)
    worker.send(contribution=contribution_proto(1, num_samples=1, num_bytes=32, wants_weights=True))
    worker.send(offset=0, data=bytes(16))
    worker.replies.cancel()
    second = ForeignWorker(channel, 8)
    assert second.join().seq == 0
    second.offer()
    reply = second.receive("reply")
    assert reply.reply.result.version == 0
    assert second.payload(reply, 32) == [0.0] * 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([{"contribution": {"seq": 1, "num_samples": 1, "num_bytes": 2**50}}], "32"),
        ([{"contribution": {"seq": 1, "num_samples": 2**41, "num_bytes": 32}}], "num_samples is 2"),
        ([{"contribution": {"seq": 1, "num_samples": 1, "num_bytes": 32, "codec": "zip"}}], "unknown codec 'zip'"),
        ([_ANNOUNCED, {"offset": 4, "data": bytes(8)}, {"data": bytes(5)}], "at 0..5"),
        ([_ANNOUNCED, {"offset": 28, "data": bytes(8)}], "at 28..36"),
        ([_ANNOUNCED, {"offset": 0, "out_of_band": 8}], "travels in messages"),
        ([_ANNOUNCED, {"data": bytes(33)}], "at 0..33"),
        ([{"data": bytes(8)}], "a piece of a payload"),
        ([{"join": {"rank": 0}}], "got join"),
    ],
)
def test_what_breaks_the_contract_is_refused_with_a_reason(shared_channel, fields, words):
    worker = _ready(shared_channel)
    for message in fields:
        worker.send(**{key: _message(key, value) for key, value in message.items()})
    code, reason, text = worker.refusal()
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST")
    assert words in text


def _message(kind: str, value):
    return {"contribution": contribution_proto, "join": pb.Join}[kind](**value) if isinstance(value, dict) else value


def test_what_a_worker_measured_and_sent_as_it_left_is_no_mistake(cluster):
    """Its last heartbeat and its goodbye have separate connections."""
    server = cluster.server("--mode", "async", "--steps", "4", "--workers", "1")
    measured = pb.EvaluationMetrics(metrics={"cpu": 0.5})
    with grpc.insecure_channel(cluster.address) as channel:
        call = pb_grpc.ParameterServerStub(channel).Heartbeat
        (reply,) = call(iter([pb.HeartbeatRequest(run="run", rank=0, process="p", metrics=measured)]))
        assert reply.is_gone
        list(call(iter([pb.HeartbeatRequest(process="e"), pb.HeartbeatRequest(evaluates=True, metrics=measured)])))
    assert [event["process"] for event in server.events("metrics_ignored")] == ["e"], "only of the evaluator"
