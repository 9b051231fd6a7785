"""A client that is written from the proto alone trains in several modes, and gets each refusal that it can provoke.

It has a trained tensor of each of two shapes, a buffer and a frozen tensor, and no code of common/ or worker/.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct

from paramserver.proto import parameter_server_pb2 as pb
from paramserver.proto import parameter_server_pb2_grpc as pb_grpc

PARAMETER, BUFFER, FROZEN = pb.TensorSpec.PARAMETER, pb.TensorSpec.BUFFER, pb.TensorSpec.FROZEN
SPECS = [("v", PARAMETER, (2, 3)), ("w", PARAMETER, (13,)), ("running", BUFFER, (2,)), ("fixed", FROZEN, (3,))]
NUM_TRAINED, AT_BUFFER, EXCHANGED, AT_FROZEN, TOTAL = 19, 128, 136, 192, 204  # floats, and bytes of the layout
LR = 0.5
ONE = pb.Counts(num_samples=1, num_steps=1, num_batches=1)


def fingerprint(specs: list[tuple[str, int, tuple[int, ...]]]) -> str:
    lines = ""
    for name, kind, shape in specs:
        rule = " lowest_rank" if kind == BUFFER else ""
        lines += f"{pb.TensorSpec.Kind.Name(kind)} {name} float32 {','.join(map(str, shape))}{rule}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


def packed(trained: list[float], running: list[float], codec: str = "raw") -> bytes:
    """A payload of parameters and buffers."""
    raw = struct.pack(f"<{NUM_TRAINED}f", *trained)
    gap = bytes(AT_BUFFER - len(raw))
    if codec == "bf16":  # exact for the small numbers here: the upper half of each float32
        raw = b"".join(raw[at + 2 : at + 4] for at in range(0, len(raw), 4))
    return raw + gap + struct.pack("<2f", *running)


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

    def begin(self, *, brings: bool = True, weights: float = 1.0) -> tuple[pb.Reply, list[float]]:
        """Offer the model, bring the initial weights if `brings`, and return START's trained weights."""
        self.offer()
        if brings:
            self.receive("send_weights")
            data = packed([weights] * NUM_TRAINED, [5.0, 6.0])
            data += bytes(AT_FROZEN - EXCHANGED) + struct.pack("<3f", 7.0, 8.0, 9.0)
            self.send(initial_weights=pb.InitialWeights(payload_bytes=TOTAL), data=data)
        return self.weights(is_start=True)

    def weights(self, is_start: bool = False) -> tuple[pb.Reply, list[float]]:
        message = self.receive("reply")
        reply = message.reply
        assert reply.weights.num_bytes == (TOTAL if is_start else EXCHANGED)
        data = self.payload(message, reply.weights.num_bytes)
        if is_start:
            assert struct.unpack("<3f", data[AT_FROZEN:]) == (7.0, 8.0, 9.0)
        return reply, list(struct.unpack(f"<{NUM_TRAINED}f", data[: 4 * NUM_TRAINED]))

    def contribute(self, seq: int, version: int, trained: float, codec: str = "raw", **fields: object) -> None:
        data = packed([trained] * NUM_TRAINED, [5.0, 6.0], codec)
        contribution = pb.Contribution(
            seq=seq, counts=pb.Counts(num_samples=4, num_steps=1, num_batches=1), base=pb.Base(version=version),
            payload=pb.PayloadInfo(num_bytes=len(data), codec=codec), training=pb.TrainingInfo(wants_weights=True),
        )  # fmt: skip
        self.send(contribution=contribution, data=data)

    def leave(self) -> None:
        self.send(finish=pb.Finish())
        message = self.receive("final")
        assert message.final.weights.num_bytes == EXCHANGED
        self.payload(message, EXCHANGED)
        self.send(leave=pb.Leave())
        self._out.put(None)
        assert list(self.call) == []

    def refusal(self) -> tuple[str, str]:
        """(ps-reason, gRPC status) with which the server ends the stream."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return dict(error.trailing_metadata()).get("ps-reason", ""), error.code().name
        raise AssertionError("the stream ended without a refusal")


@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_async(cluster, codec: str) -> None:
    cluster.server("--mode", "async", "--steps", "3", "--workers", "1")
    client = Client(cluster.address)
    settings = client.join().settings
    assert settings.contribution == pb.RunSettings.GRADIENT
    (group,) = settings.optimizer.groups
    assert settings.optimizer.name == "sgd" and "lr" in group.hyperparameters and not group.tensors
    _, weights = client.begin()
    assert weights == [1.0] * NUM_TRAINED
    for seq in range(1, 4):
        client.contribute(seq, seq - 1, 0.5, codec)
        reply, weights = client.weights()
        assert (reply.result.outcome, reply.result.version, reply.result.seq) == (pb.Reply.APPLIED, seq, seq)
        assert weights == [1.0 - 0.25 * seq] * NUM_TRAINED
    assert reply.next_work.local_steps == 0
    client.leave()


@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_two_clients_in_rounds(cluster, mode: str) -> None:
    cluster.server("--mode", mode, "--steps", "2", "--workers", "2", "--set", "policy.local_steps=1")
    clients = [Client(cluster.address) for _ in range(2)]
    kinds = {client.join(rank).settings.contribution for rank, client in enumerate(clients)}
    assert kinds == {pb.RunSettings.WEIGHTS if mode == "localsgd" else pb.RunSettings.GRADIENT}
    clients[0].offer()
    clients[0].receive("send_weights")
    clients[1].offer()
    data = packed([1.0] * NUM_TRAINED, [5.0, 6.0]) + bytes(AT_FROZEN - EXCHANGED) + struct.pack("<3f", 7.0, 8.0, 9.0)
    clients[0].send(initial_weights=pb.InitialWeights(payload_bytes=TOTAL), data=data)
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


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(shared_cluster) -> Iterator[str]:
    """A server whose run has begun, and stays at two workers."""
    shared_cluster.server("--mode", "async", "--steps", "1000", "--workers", "2", "--set", "limits.state_bytes=10",
                          "--set", "limits.progress_s=2")  # fmt: skip
    first, second = Client(shared_cluster.address), Client(shared_cluster.address)
    first.join(0)
    second.join(1)
    first.offer()
    first.receive("send_weights")
    second.offer()
    data = packed([1.0] * NUM_TRAINED, [5.0, 6.0]) + bytes(AT_FROZEN - EXCHANGED) + struct.pack("<3f", 7.0, 8.0, 9.0)
    first.send(initial_weights=pb.InitialWeights(payload_bytes=TOTAL), data=data)
    first.weights(is_start=True)
    second.weights(is_start=True)
    return_address = shared_cluster.address
    first.call.cancel()  # rank 0 is free for these tests; rank 1 stays
    yield return_address
    second.call.cancel()


def ready(client: Client) -> None:
    client.join(0)
    client.begin(brings=False)


def full(client: Client) -> None:
    client.other = Client(client.address)
    client.other.join(0)
    client.send(join=pb.Join(rank=-1))


def replaced(client: Client) -> None:
    ready(client)
    other = Client(client.address)
    other.join(0, process="another")


def announced(client: Client) -> None:
    ready(client)
    payload = pb.PayloadInfo(num_bytes=EXCHANGED)
    client.send(
        contribution=pb.Contribution(
            seq=1, counts=pb.Counts(num_samples=1, num_steps=1, num_batches=1), payload=payload
        )
    )


def gap(client: Client) -> None:
    ready(client)
    client.contribute(7, 0, 0.5)


def large_state(client: Client) -> None:
    ready(client)
    client.send(state=pb.State(num_bytes=11, piece=bytes(11)))


def large_piece(client: Client) -> None:
    ready(client)
    payload = pb.PayloadInfo(num_bytes=EXCHANGED)
    client.send(
        contribution=pb.Contribution(
            seq=1, counts=pb.Counts(num_samples=1, num_steps=1, num_batches=1), payload=payload
        )
    )
    client.send(data=bytes(5_000_000))


def offered(**fields: object) -> Callable[[Client], None]:
    def offer(client: Client) -> None:
        client.join(0)
        client.offer(**fields)

    return offer


OTHER = [("v", PARAMETER, (2, 4)), *SPECS[1:]]
REFUSALS = {
    "BAD_REQUEST/INVALID_ARGUMENT": [
        offered(sent="0" * 64), offered(reply_codec="zip"), large_piece, lambda client: client.send(data=b"x"),
    ],
    "RANK_OUT_OF_RANGE/OUT_OF_RANGE": [lambda client: client.send(join=pb.Join(rank=2))],
    "RUN_FULL/RESOURCE_EXHAUSTED": [full],
    "RUN_MISMATCH/FAILED_PRECONDITION": [lambda client: client.send(join=pb.Join(rank=0, run="another"))],
    "MODEL_MISMATCH/FAILED_PRECONDITION": [offered(specs=OTHER)],
    "OPTIMIZER_MISMATCH/FAILED_PRECONDITION": [offered(optimizer="Adam")],
    "REPLACED/ABORTED": [replaced],
    "SEQ_GAP/FAILED_PRECONDITION": [gap],
    "LIMIT_EXCEEDED/RESOURCE_EXHAUSTED": [large_state],
    "TOO_SLOW/ABORTED": [announced],
    "/RESOURCE_EXHAUSTED": [lambda client: client.send(data=bytes(9 << 20))],  # gRPC itself
}  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "provoke"), [(expected, provoke) for expected, cases in REFUSALS.items() for provoke in cases]
)
def test_each_refusal_has_its_reason_and_status(address: str, expected: str, provoke: Callable[[Client], None]) -> None:
    client = Client(address)
    provoke(client)
    assert "/".join(client.refusal()) == expected


def test_refusals_of_calls_beside_the_stream_and_of_strangers(cluster) -> None:
    cluster.server("--mode", "async", "--steps", "3", "--workers", "1", "--set", "store.on_nonfinite=reject",
                   "--set", "store.max_nonfinite=2", PS_TOKEN="t" * 32)  # fmt: skip
    token = (("authorization", "Bearer " + "t" * 32),)
    stranger = Client(cluster.address)
    stranger.send(join=pb.Join())
    assert stranger.refusal() == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    client = Client(cluster.address, token)
    with pytest.raises(grpc.RpcError) as early:
        list(client.stub.Pull(pb.PullRequest(), metadata=token))
    assert dict(early.value.trailing_metadata())["ps-reason"] == "NOT_READY"
    with pytest.raises(grpc.RpcError) as no_shard:
        list(client.stub.Attend(iter([pb.ShardReport()]), metadata=token))
    assert dict(no_shard.value.trailing_metadata())["ps-reason"] == "SHARD_MISMATCH"
    other = Client(cluster.address, token)
    other.join()
    other.offer(optimizer="LBFGS")
    assert other.refusal() == ("OPTIMIZER_UNSUPPORTED", "INVALID_ARGUMENT")
    client.join()
    client.begin()
    client.contribute(1, 0, float("nan"))
    assert client.weights()[0].result.outcome == pb.Reply.REJECTED
    client.contribute(1, 0, float("nan"))
    assert client.refusal() == ("DIVERGED", "ABORTED")
