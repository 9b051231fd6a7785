"""The wire contract from outside: a client that is written from the proto alone trains in several modes, and gets each
refusal that it can provoke. Health and reflection are served too.

It has a trained tensor of each of two shapes, a buffer and a frozen tensor, and no code of common/ or worker/.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from paramserver.proto import parameter_server_pb2 as pb
from paramserver.proto import parameter_server_pb2_grpc as pb_grpc
from paramserver.tests.cluster import Cluster

SERVICE = "paramserver.v5.ParameterServer"
PARAMETER, BUFFER, FROZEN = pb.TensorSpec.PARAMETER, pb.TensorSpec.BUFFER, pb.TensorSpec.FROZEN
SPECS = [("v", PARAMETER, (2, 3)), ("w", PARAMETER, (13,)), ("running", BUFFER, (2,)), ("fixed", FROZEN, (3,))]
NUM_TRAINED, AT_BUFFER, EXCHANGED, AT_FROZEN, TOTAL = 19, 128, 136, 192, 204  # floats, and bytes of the layout
LR = 0.5


def fingerprint(specs: list[tuple[str, int, tuple[int, ...]]]) -> str:
    lines = ""
    for name, kind, shape in specs:
        rule = " lowest_rank" if kind == BUFFER else ""
        lines += f"{pb.TensorSpec.Kind.Name(kind)} {name} float32 {','.join(map(str, shape))}{rule}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


def packed(trained: float, codec: str = "raw") -> bytes:
    """A payload of parameters, all alike, and buffers."""
    raw = struct.pack("<f", trained) * NUM_TRAINED
    gap = bytes(AT_BUFFER - len(raw))
    if codec == "bf16":  # exact for the small numbers here: the upper half of each float32
        raw = b"".join(raw[at + 2 : at + 4] for at in range(0, len(raw), 4))
    return raw + gap + struct.pack("<2f", 5.0, 6.0)


INITIAL = packed(1.0) + bytes(AT_FROZEN - EXCHANGED) + struct.pack("<3f", 7.0, 8.0, 9.0)


def contribution(
    seq: int = 1, version: int = 0, num_samples: int = 4, num_bytes: int = EXCHANGED, codec: str = "raw"
) -> pb.Contribution:
    return pb.Contribution(
        seq=seq, counts=pb.Counts(num_samples=num_samples, num_steps=1, num_batches=1), base=pb.Base(version=version),
        payload=pb.PayloadInfo(num_bytes=num_bytes, codec=codec), training=pb.TrainingInfo(wants_weights=True),
    )  # fmt: skip


class Client:
    """One worker's stream."""

    def __init__(self, address: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.address = address
        self.other: Client | None = None  # keeps another worker's stream open
        self._channel = grpc.insecure_channel(address)
        self.stub = pb_grpc.ParameterServerStub(self._channel)
        self._out: SimpleQueue[pb.WorkerMessage | None] = SimpleQueue()
        self.call = self.stub.Exchange(iter(self._out.get, None), metadata=metadata)

    def send(self, **fields: object) -> None:
        self._out.put(pb.WorkerMessage(**fields))

    def receive(self, kind: str) -> pb.ServerMessage:
        message = next(it for it in self.call if it.WhichOneof("kind") != "waiting")
        assert message.WhichOneof("kind") == kind, message
        return message

    def payload(self, message: pb.ServerMessage, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        num_received = 0
        while True:
            data[message.offset : message.offset + len(message.data)] = message.data
            num_received += len(message.data)
            if num_received >= num_bytes:
                return bytes(data)
            message = next(self.call)

    def join(self, rank: int = 0, **fields: object) -> pb.Welcome:
        self.send(join=pb.Join(rank=rank, **fields))
        return self.receive("welcome").welcome

    def offer(self, specs: list = SPECS, optimizer: str = "SGD", sent: str | None = None, **fields: object) -> None:
        rates = Struct()
        rates.update({"lr": LR})
        groups = [pb.ParameterGroup(tensors=[name for name, kind, _ in specs if kind == PARAMETER],
                                    hyperparameters=rates)]  # fmt: skip
        tensors = [pb.TensorSpec(name=name, kind=kind, dtype="float32", shape=shape) for name, kind, shape in specs]
        fields = {"fingerprint": sent or fingerprint(specs), **fields}
        self.send(model=pb.Model(tensors=tensors, optimizer=pb.Optimizer(name=optimizer, groups=groups), **fields))

    def begin(self, *, brings: bool = True) -> tuple[pb.Reply, list[float]]:
        """Offer the model, bring the initial weights if `brings`, and return START's trained weights."""
        self.offer()
        if brings:
            self.bring()
        return self.weights(is_start=True)

    def bring(self) -> None:
        self.receive("send_weights")
        self.send(initial_weights=pb.InitialWeights(payload_bytes=TOTAL), data=INITIAL)

    def weights(self, is_start: bool = False) -> tuple[pb.Reply, list[float]]:
        message = self.receive("reply")
        reply = message.reply
        assert reply.weights.num_bytes == (TOTAL if is_start else EXCHANGED)
        data = self.payload(message, reply.weights.num_bytes)
        if is_start:
            assert struct.unpack("<3f", data[AT_FROZEN:]) == (7.0, 8.0, 9.0)
        return reply, list(struct.unpack(f"<{NUM_TRAINED}f", data[: 4 * NUM_TRAINED]))

    def contribute(self, seq: int, version: int, trained: float, codec: str = "raw", piece_bytes: int = 1000) -> None:
        data = packed(trained, codec)
        self.send(contribution=contribution(seq, version, num_bytes=len(data), codec=codec))
        for at in range(0, len(data), piece_bytes):
            self.send(offset=at, data=data[at : at + piece_bytes])

    def leave(self) -> None:
        self.send(finish=pb.Finish(stays=True))
        message = self.receive("final")
        assert message.final.is_asked and message.final.weights.num_bytes == EXCHANGED
        self.payload(message, EXCHANGED)
        self.send(leave=pb.Leave(final_metrics={"loss": 0.5}))
        self._out.put(None)
        assert list(self.call) == []

    def refusal(self) -> str:
        """The ps-reason, gRPC status and text with which the server ends the stream."""
        with pytest.raises(grpc.RpcError) as ended:
            list(self.call)
        return f"{reason_of(ended.value)}/{ended.value.code().name}: {ended.value.details()}"


def reason_of(error: grpc.RpcError) -> str:
    return str(dict(error.trailing_metadata()).get("ps-reason", ""))


def test_health_and_reflection_are_served(cluster: Cluster) -> None:
    cluster.server("--mode", "async", "--steps", "4", "--workers", "1")
    with grpc.insecure_channel(cluster.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        described = DescriptorPool(database).FindServiceByName(SERVICE)
    names = ["Exchange", "Pull", "PullRows", "Heartbeat", "Attend", "Status"]
    assert [method.name for method in described.methods] == names


@pytest.mark.parametrize(("codec", "piece_bytes"), [("raw", 50), ("bf16", 1000)])
def test_async(cluster: Cluster, codec: str, piece_bytes: int) -> None:
    cluster.server("--mode", "async", "--steps", "3", "--workers", "1")
    client = Client(cluster.address)
    welcome = client.join()
    assert (welcome.rank, welcome.incarnation, welcome.seq, welcome.settings.mode) == (0, 1, 0, "async")
    assert welcome.settings.contribution == pb.RunSettings.GRADIENT
    (group,) = welcome.settings.optimizer.groups
    assert welcome.settings.optimizer.name == "sgd" and "lr" in group.hyperparameters and not group.tensors
    reply, weights = client.begin()
    assert (reply.result.outcome, reply.result.version, reply.next_work.local_steps) == (pb.Reply.START, 0, 1)
    assert weights == [1.0] * NUM_TRAINED
    for seq in range(1, 4):
        client.contribute(seq, seq - 1, 0.5, codec, piece_bytes)
        reply, weights = client.weights()
        assert (reply.result.outcome, reply.result.version, reply.result.seq) == (pb.Reply.APPLIED, seq, seq)
        assert weights == [1.0 - 0.25 * seq] * NUM_TRAINED
    assert reply.next_work.local_steps == 0
    status = client.stub.Status(pb.StatusRequest(), timeout=10)
    assert (status.version, status.step) == (3, 3)
    fields = json.loads(status.status)
    assert (fields["mode"], fields["steps"], fields["workers"][0]["rank"]) == ("async", 3, 0)
    pulled = list(client.stub.Pull(pb.PullRequest(), timeout=10))
    assert (pulled[0].snapshot.version, pulled[0].snapshot.tensors[0].name) == (3, "v")
    assert b"".join(message.data for message in pulled)[: 4 * NUM_TRAINED] == struct.pack("<f", 0.25) * NUM_TRAINED
    client.leave()


@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_two_clients_in_rounds(cluster: Cluster, mode: str) -> None:
    cluster.server("--mode", mode, "--steps", "2", "--workers", "2", "--set", "policy.local_steps=1")
    clients = [Client(cluster.address) for _ in range(2)]
    kinds = {client.join(rank).settings.contribution for rank, client in enumerate(clients)}
    assert kinds == {pb.RunSettings.WEIGHTS if mode == "localsgd" else pb.RunSettings.GRADIENT}
    for client in clients:
        client.offer()
    clients[0].bring()
    for client in clients:
        assert client.weights(is_start=True)[1] == [1.0] * NUM_TRAINED
    expected = 1.0
    for seq in (1, 2):
        for client, value in zip(clients, (0.5, 1.5), strict=True):
            client.contribute(seq, seq - 1, value)
        expected = 1.0 if mode == "localsgd" else expected - LR * 1.0
        for client in clients:
            assert client.weights()[1] == [expected] * NUM_TRAINED
    for client in clients:
        client.send(finish=pb.Finish())
    for client in clients:
        client.payload(client.receive("final"), EXCHANGED)
        client.send(leave=pb.Leave())


def test_a_repeated_contribution_gets_a_reply_and_an_unfinished_one_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.server("--mode", "async", "--steps", "4", "--workers", "1")
    client = Client(cluster.address)
    client.join()
    client.begin()
    client.send(contribution=contribution(), offset=0, data=bytes(16))
    client.call.cancel()
    client = Client(cluster.address)
    assert client.join().seq == 0
    reply, weights = client.begin(brings=False)
    assert reply.result.version == 0 and weights == [1.0] * NUM_TRAINED
    for outcome in (pb.Reply.APPLIED, pb.Reply.REPEATED):
        client.contribute(1, 0, 0.5)
        reply, weights = client.weights()
        assert (reply.result.outcome, reply.result.version, reply.result.seq) == (outcome, 1, 1)
        assert weights == [0.75] * NUM_TRAINED


def test_what_a_worker_measured_and_sent_as_it_left_is_no_mistake(cluster: Cluster) -> None:
    """Its last heartbeat and its goodbye have separate connections."""
    server = cluster.server("--mode", "async", "--steps", "4", "--workers", "1")
    measured, call = pb.Metrics(metrics={"cpu": 0.5}), Client(cluster.address).stub.Heartbeat
    (reply,) = call(iter([pb.HeartbeatRequest(run="run", rank=0, process="p", metrics=measured)]))
    assert reply.is_gone
    assert not server.events("metrics_ignored")


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(shared_cluster: Cluster) -> Iterator[str]:
    """A server whose run has begun, and stays at two workers."""
    shared_cluster.server("--mode", "async", "--steps", "1000", "--workers", "2", "--set", "limits.state_bytes=10",
                          "--set", "limits.progress_s=2")  # fmt: skip
    first, second = Client(shared_cluster.address), Client(shared_cluster.address)
    for rank, client in enumerate((first, second)):
        client.join(rank)
        client.offer()
    first.bring()
    for client in (first, second):
        client.weights(is_start=True)
    first.call.cancel()  # rank 0 is free for these tests; rank 1 stays
    yield shared_cluster.address
    second.call.cancel()


Provoke = Callable[[Client], None]


def ready(client: Client) -> None:
    client.join(0)
    client.begin(brings=False)


def full(client: Client) -> None:
    client.other = Client(client.address)
    client.other.join(0)
    client.send(join=pb.Join(rank=-1))


def replaced(client: Client) -> None:
    ready(client)
    Client(client.address).join(0, process="another")


def joins(**fields: object) -> Provoke:
    return lambda client: client.send(join=pb.Join(**fields))


def sends(*messages: dict[str, object]) -> Provoke:
    def send(client: Client) -> None:
        ready(client)
        for message in messages:
            client.send(**message)

    return send


def offered(**fields: object) -> Provoke:
    def offer(client: Client) -> None:
        client.join(0)
        client.offer(**fields)

    return offer


OTHER = [("v", PARAMETER, (2, 4)), *SPECS[1:]]
ANNOUNCED: dict[str, object] = {"contribution": contribution()}
REFUSALS: dict[str, list[tuple[str, Provoke]]] = {
    "BAD_REQUEST/INVALID_ARGUMENT": [
        ("", offered(sent="0" * 64)), ("", offered(reply_codec="zip")), ("", lambda client: client.send(data=b"x")),
        ("", sends(ANNOUNCED, {"data": bytes(5_000_000)})),
        ("136", sends({"contribution": contribution(num_bytes=2**50)})),
        ("num_samples is 2", sends({"contribution": contribution(num_samples=2**41)})),
        ("unknown codec 'zip'", sends({"contribution": contribution(codec="zip")})),
        ("at 0..5", sends(ANNOUNCED, {"offset": 4, "data": bytes(8)}, {"data": bytes(5)})),
        ("at 132..140", sends(ANNOUNCED, {"offset": 132, "data": bytes(8)})),
        ("travels in messages", sends(ANNOUNCED, {"offset": 0, "out_of_band": 8})),
        ("at 0..137", sends(ANNOUNCED, {"data": bytes(137)})),
        ("a piece of a payload", sends({"data": bytes(8)})),
        ("got join", sends({"join": pb.Join(rank=0)})),
    ],
    "RANK_OUT_OF_RANGE/OUT_OF_RANGE": [("", joins(rank=2))],
    "RUN_FULL/RESOURCE_EXHAUSTED": [("", full)],
    "RUN_MISMATCH/FAILED_PRECONDITION": [("", joins(rank=0, run="another"))],
    "MODEL_MISMATCH/FAILED_PRECONDITION": [("", offered(specs=OTHER))],
    "OPTIMIZER_MISMATCH/FAILED_PRECONDITION": [("", offered(optimizer="Adam"))],
    "REPLACED/ABORTED": [("", replaced)],
    "SEQ_GAP/FAILED_PRECONDITION": [("", sends({"contribution": contribution(seq=7), "data": packed(0.5)}))],
    "LIMIT_EXCEEDED/RESOURCE_EXHAUSTED": [("", sends({"state": pb.State(num_bytes=11, piece=bytes(11))}))],
    "TOO_SLOW/ABORTED": [("", sends(ANNOUNCED))],
    "/RESOURCE_EXHAUSTED": [("", lambda client: client.send(data=bytes(9 << 20)))],  # gRPC itself
}  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "words", "provoke"), [(expected, *case) for expected, cases in REFUSALS.items() for case in cases]
)
def test_each_refusal_has_its_reason_and_status(address: str, expected: str, words: str, provoke: Provoke) -> None:
    client = Client(address)
    provoke(client)
    found = client.refusal()
    assert found.startswith(f"{expected}: ") and words in found


def test_refusals_of_calls_beside_the_stream_and_of_strangers(cluster: Cluster) -> None:
    cluster.server("--mode", "async", "--steps", "3", "--workers", "1", "--set", "store.on_nonfinite=reject",
                   "--set", "store.max_nonfinite=2", PS_TOKEN="t" * 32)  # fmt: skip
    token = (("authorization", "Bearer " + "t" * 32),)
    stranger = Client(cluster.address)
    stranger.send(join=pb.Join())
    assert stranger.refusal().startswith("UNAUTHENTICATED/UNAUTHENTICATED: ")
    client = Client(cluster.address, token)
    early = client.stub.Pull(pb.PullRequest(), metadata=token)
    no_shard = client.stub.Attend(iter([pb.ShardReport()]), metadata=token)
    for call, reason in ((early, "NOT_READY"), (no_shard, "SHARD_MISMATCH")):
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
        assert reason_of(refused.value) == reason
    other = Client(cluster.address, token)
    other.join()
    other.offer(optimizer="LBFGS")
    assert other.refusal().startswith("OPTIMIZER_UNSUPPORTED/INVALID_ARGUMENT: ")
    client.join()
    client.begin()
    client.contribute(1, 0, float("nan"))
    assert client.weights()[0].result.outcome == pb.Reply.REJECTED
    client.contribute(1, 0, float("nan"))
    assert client.refusal().startswith("DIVERGED/ABORTED: ")
