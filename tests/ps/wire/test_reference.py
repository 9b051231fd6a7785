"""Replies that are differences of one reference: what comes over the real service, read by a real worker's `Down` and
by a few lines of numpy after the wire's own words, against the reference that the server holds and its exact weights.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paramserver.common.codecs.base import FreeBuffers, encode_payload
from paramserver.common.errors import ParamServerError
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Layout, as_bytes, new_payload
from paramserver.common.wire.frames import message_frames
from paramserver.common.wire.messages import read_weights
from paramserver.common.wire.records import ReferenceInfo, WeightsInfo
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.observe.metrics import MetricsSink
from paramserver.worker.tensors.staged import make_transfer
from paramserver.worker.tensors.transfer import ModelTensors
from paramserver.worker.transports.transport import Down

from ..streams import Server, Worker, served


class Net(nn.Module):
    """A matrix that is encoded, one that is too small, a bias, a buffer, and a frozen tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(width, 60), nn.BatchNorm1d(60), nn.Linear(60, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)


SMALL, LARGE = (ModelTensors(Net(width)).layout for width in (40, 3000))  # the large one is worked on by a thread


def decoded(codec: str, encoded: bytes, n: int) -> np.ndarray:
    """float32 [n]: the table of docs/codecs.md."""
    blocks = -(-n // 256)
    scales = np.repeat(np.frombuffer(encoded, "<f4", blocks), 256)[:n]
    if codec == "int8":
        return np.frombuffer(encoded, "i1", n, 4 * blocks).astype("f4") * scales
    pairs = np.frombuffer(encoded, "u1", -(-n // 2), 4 * blocks)
    codes = np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)[:n]
    sizes = np.where(codes & 7, np.exp2((codes & 7).astype("f4") - 7), np.float32(0)).astype("f4")
    return np.where(codes & 8, -sizes, sizes) * scales


def follow(codec: str, layout: Layout, payload: bytearray, difference: bytes) -> None:
    """What a worker in another language would do."""
    at = 0
    for spec, offset, _ in layout.entries:
        if spec.kind.name != "PARAMETER":
            continue
        at, n = -(-at // 8) * 8, spec.num_elements
        values = np.frombuffer(payload, "<f4", n, offset)
        if len(spec.shape) < 2 or n < 1024:
            bits = np.frombuffer(difference, "<u2", n, at).astype("<u4") << 16
            values += bits.view("<f4")
            at += 2 * n
            continue
        for first in range(0, n, 131072):
            part = values[first : first + 131072]
            size = 4 * -(-len(part) // 256) + (len(part) if codec == "int8" else -(-len(part) // 2))
            part += decoded(codec, difference[at : at + size], len(part))
            at += size
    payload[layout.parameter_bytes : layout.exchange_bytes] = difference[at:]


class Follower(Worker):
    """A worker that gets its reply in `codec`; `mine` is numpy's copy of the reference."""

    def __init__(self, server: Server, rank: int, codec: str = "q4") -> None:
        super().__init__(server, rank)
        self.server, self.codec = server, codec
        self.net = Net(40 if self.layout.fingerprint == SMALL.fingerprint else 3000)
        tensors = ModelTensors(self.net)
        self.down = Down(CODECS.load(codec)(), tensors, make_transfer(tensors))
        self.mine, self.number, self.seq, self.kinds_of_replies = bytearray(), 0, 0, []

    @classmethod
    async def joined(cls, server: Server, rank: int = 0, codec: str = "q4") -> Follower:
        """One that has its first weights."""
        worker = cls(server, rank, codec)
        await worker.join()
        await server.settle()
        worker.take()
        return worker

    async def join(self, *_: Any, **__: Any) -> None:
        is_delta = self.server.engine.run.policy.kind.holds_differences
        await super().join(reply_codec=self.codec, contribution=pb.RunSettings.DELTA if is_delta else 0)

    def initial_weights(self) -> torch.Tensor:
        weights = super().initial_weights()
        for _, view in self.layout.views(weights):
            if view.is_floating_point():
                view.copy_(torch.randn(view.shape))
        return weights

    async def step(self, chance: torch.Generator, **fields: Any) -> None:
        self.push(random_payload(self.layout, chance), **fields)
        await self.server.settle()
        self.take()

    def push(self, payload: torch.Tensor, **fields: Any) -> None:
        self.seq += 1
        settings = {"reference": self.down.reference, "version": self.version, **fields}
        header = self.header(self.seq, **settings)
        self.stream.send(*message_frames(header, [as_bytes(payload)]))

    @property
    def version(self) -> int:
        return self.newest_reply.result.version

    @property
    def newest_reply(self) -> Any:
        return next(message.header for message in reversed(self.stream.received) if message.kind == "reply")

    def take(self) -> None:
        """The newest reply: by `Down`, and by numpy."""
        at = max(index for index, item in enumerate(self.stream.received) if item.kind == "reply")
        reply, pieces = self.stream.received[at].header, self.stream.received[at:]
        result, weights = reply.result, read_weights(reply.weights)
        self.seq, codec, number = result.seq, weights.codec, reply.weights.reference.number
        if result.outcome == pb.Reply.START:
            self.down.reference = 0

        def receive(write: Callable[[int, memoryview], None]) -> None:
            for piece in pieces:
                write(piece.offset, memoryview(bytes(piece.data)))

        self.down.take(WeightsInfo(weights.num_bytes, codec, reference=weights.reference), receive)
        payload = bytearray(weights.num_bytes)
        for piece in pieces:
            payload[piece.offset : piece.offset + len(piece.data)] = piece.data
        self.kinds_of_replies.append(f"{codec or 'raw'}{number - self.number if codec else ''}")
        if not number:
            return
        if not codec:
            self.mine = payload[: self.layout.exchange_bytes]
        elif number > self.number:
            count = number - self.number
            size = len(payload) // count
            for piece in range(count):
                follow(self.codec, self.layout, self.mine, bytes(payload[piece * size : (piece + 1) * size]))
        self.number = number
        if reply.weights.reference.checked == number:
            crc = zlib.crc32(memoryview(self.mine)[: self.layout.parameter_bytes])
            assert crc == reply.weights.reference.crc

    def check(self, server: Server) -> None:
        """All that have the newest number have the server's bits, in the copy and, but for local steps, the model."""
        reference = server.engine.model.references._of_codec[self.codec]
        assert self.down.reference == self.number
        copy = payload_of(self.down)
        assert bytes(as_bytes(copy)) == bytes(self.mine)
        if self.number == reference.number:
            assert torch.equal(copy, reference._payload)


def payload_of(down: Down) -> torch.Tensor:
    """The worker's copy of the reference."""
    assert down._copy is not None
    return down._copy


def random_payload(layout: Layout, chance: torch.Generator) -> torch.Tensor:
    payload = new_payload(layout.total_bytes)
    for _, view in layout.views(payload):
        if view.is_floating_point():
            view.copy_(torch.randn(view.shape, generator=chance))
    return payload[: layout.exchange_bytes]


def parameters(layout: Layout, payload: torch.Tensor) -> torch.Tensor:
    return payload[: layout.parameter_bytes].view(torch.float32).clone()


@pytest.mark.parametrize(
    ("mode", "layout", "codec"),
    [
        ("sync", SMALL, "q4"), ("sync", LARGE, "int8"), ("async", SMALL, "int8"), ("async", LARGE, "q4"),
        ("ssp", SMALL, "q4"), ("dssp", SMALL, "int8"), ("buffered", SMALL, "q4"),
        ("diloco", SMALL, "int8"), ("async_diloco", SMALL, "q4"),
    ],
)  # fmt: skip
def test_workers_have_the_same_bits_and_the_servers_weights_stay_exact(mode: str, layout: Layout, codec: str) -> None:
    @served(layout, max_staged=4, mode=mode, workers=2, steps=100)
    async def test(server: Server) -> None:
        workers = [Follower(server, rank, codec) for rank in range(2)]
        for worker in workers:
            await worker.join()
        await server.settle()
        store, chance = server.engine.model.store, torch.Generator().manual_seed(7)
        for worker in workers:
            worker.take()
            worker.check(server)
            assert worker.kinds_of_replies == ["raw"]
        exact = parameters(layout, store.weights)
        for _ in range(6):
            payloads = [random_payload(layout, chance) for _ in workers]
            for worker, payload in zip(workers, payloads, strict=True):
                worker.push(payload)
                await server.settle()
            for worker in workers:
                worker.take()
                worker.check(server)
            if mode == "sync":
                exact -= 0.5 * (parameters(layout, payloads[0]) + parameters(layout, payloads[1])) / 2
                torch.testing.assert_close(parameters(layout, store.weights), exact)
                assert workers[0].mine == workers[1].mine
                left = exact - torch.frombuffer(workers[0].mine, dtype=torch.float32, count=len(exact))
                assert 0 < left.norm() / exact.norm() < (0.03 if codec == "int8" else 0.4)
            elif mode == "async":
                for payload in payloads:
                    exact -= 0.5 * parameters(layout, payload)
        if mode == "async":
            assert store.version == 12
        assert set(workers[0].kinds_of_replies[1:]) <= {codec + "0", codec + "1"}
        number = server.engine.model.references._of_codec[codec].number
        assert number == 7, "once in a round, or in as many contributions as there are workers"
        for worker in workers:  # the model is a copy, buffers included; what never changes came with the start
            for tensor, (spec, view) in zip(
                ModelTensors(worker.net).tensors, layout.views(torch.frombuffer(
                    bytearray(worker.mine) + bytes(layout.total_bytes - layout.exchange_bytes), dtype=torch.uint8,
                )), strict=True,
            ):  # fmt: skip
                assert spec.kind.name == "FROZEN" or torch.equal(tensor, view)

    test()


def test_whoever_is_behind_gets_the_chain_or_the_whole() -> None:
    found = {kind for seed in range(2) for kind in _kinds_with_losses(seed)}
    assert {"raw", "q41", "q42", "q43"} <= found, found


def _kinds_with_losses(seed: int) -> list[str]:
    found: list[str] = []

    @served(SMALL, mode="async", workers=1, steps=1000)
    async def test(server: Server) -> None:
        chance, order = torch.Generator().manual_seed(seed), random.Random(seed)
        worker = await Follower.joined(server)
        saved: list[tuple[int, bytes, torch.Tensor]] = []
        for _ in range(30):
            saved.append((worker.number, bytes(worker.mine), payload_of(worker.down).clone()))
            worker.push(random_payload(SMALL, chance), wants_weights=order.random() < 0.5)
            await server.settle()
            fault, says = order.choice(["none", "lost", "long lost", "torn"]), None
            if fault == "none" and worker.newest_reply.weights.reference.number:
                worker.take()
                worker.check(server)
                continue
            worker.seq = worker.newest_reply.result.seq  # its reply was lost, or brought nothing
            if fault == "torn":
                says = order.choice([0, 2**64 - 1])  # or what nobody has
                worker.number = worker.down.reference = 0
            elif fault == "long lost":  # as of a process that stood still
                worker.number, mine, payload = saved[max(0, len(saved) - order.randint(1, 8))]
                worker.mine, worker.down.reference = bytearray(mine), worker.number
                payload_of(worker.down).copy_(payload)
            worker.send(ask_again=pb.AskAgain(seq=worker.seq, reference=says or worker.number))
            await server.settle()
            worker.take()
            worker.check(server)
            assert worker.number == server.engine.model.references._of_codec["q4"].number
        found.extend(worker.kinds_of_replies[1:])

    test()
    return found


@served(SMALL, mode="async", workers=None, steps=1000)
async def test_one_who_joins_later_has_the_same_bits_and_an_evaluation_the_exact_weights(server: Server) -> None:
    chance = torch.Generator().manual_seed(0)
    first = await Follower.joined(server)
    for _ in range(3):
        await first.step(chance)
    late = await Follower.joined(server, 1)
    late.check(server)
    first.check(server)
    assert late.mine == first.mine and late.number == first.number == 4
    before = bytes(first.mine)
    await first.step(chance, wants_exact=True)
    assert first.newest_reply.weights.reference.number == 0 and first.kinds_of_replies[-1] == "raw"
    exact = dict(server.engine.model.store.tensors())
    assert all(torch.equal(tensor, exact[name]) for name, tensor in first.net.named_parameters())
    assert bytes(first.mine) == before
    await first.step(chance)  # two contributions of two workers: a new difference, from where its copy is
    first.check(server)
    assert first.kinds_of_replies[-1] == "q41"


def test_what_is_not_a_difference_ends_the_worker_with_a_sentence() -> None:
    tensors, codec = ModelTensors(Net(100)), CODECS.load("topk")()
    layout = tensors.layout
    nothing = bytes(as_bytes(encode_payload(codec, layout, new_payload(layout.exchange_bytes), FreeBuffers())))
    size, crc = len(nothing), zlib.crc32(bytes(layout.parameter_bytes))

    def take(data: bytes, settings: dict[str, Any], base: int = 3) -> int:
        down = Down(codec, tensors, make_transfer(tensors))
        down.reference, down._copy = base, new_payload(layout.exchange_bytes)
        name = settings.pop("codec", "topk")
        info = ReferenceInfo(**{"number": 4, **settings}) if settings.get("number", 4) else None
        down.take(WeightsInfo(len(data), name, reference=info), lambda write: write(0, memoryview(data)))
        return down.reference

    assert take(nothing, {"checked": 4, "crc": crc}) == 4
    assert take(nothing + nothing, {}, 2) == 4
    assert take(b"", {"number": 3}) == 3
    wrong: list[tuple[bytes, dict[str, Any], int, str]] = [
        (nothing[1:], {}, 3, f"sends {size - 1} bytes"),
        (nothing + nothing, {}, 3, f"sends {2 * size} bytes"),
        (nothing * 200, {"number": 203}, 3, f"sends {200 * size} bytes"),  # more than the whole
        (nothing, {}, 0, "this worker has reference 0"),
        (nothing, {"number": 2}, 3, "up to reference 2"),
        (nothing, {"codec": "q4"}, 3, "asked for were 'topk'"),
        (b"\xff" * size, {}, 3, "codec 'topk' cannot decode"),
        (nothing, {"number": 0}, 3, "no reference"),
        (bytes(7), {"codec": ""}, 3, "sends 7 bytes"),
        (nothing, {"checked": 4, "crc": crc ^ 1}, 3, f"{crc:08x}, the server's"),
    ]
    for data, settings, base, text in wrong:
        with pytest.raises(ParamServerError, match=text) as error:
            take(data, settings, base)
        assert "\n" not in error.value.message


def test_a_check_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.ps.tensors.replies._CHECKED_EVERY", 8)

    @served(SMALL, mode="async", workers=1, steps=1000)
    async def test(server: Server) -> None:
        chance = torch.Generator().manual_seed(0)
        worker = await Follower.joined(server, codec="int8")
        checked = []
        for _ in range(9):
            worker.push(random_payload(SMALL, chance))
            await server.settle()
            number = worker.newest_reply.weights.reference.checked
            checked += [number] * bool(number)
            worker.take()
        assert checked == [8]
        sink = MetricsSink("127.0.0.1:0")
        sink.begin(server.engine)
        families, _ = await sink.read()
        sink.close()
        (family,) = [family for family in families if family.name == "paramserver_reference_distance"]
        (sample,) = family.samples
        assert sample.labels == {"codec": "int8"} and 0 < sample.value < 0.05
        as_bytes(payload_of(worker.down))[3] ^= 0x80  # a bit of its memory turns over
        for _ in range(6):
            worker.push(random_payload(SMALL, chance))
            await server.settle()
            if worker.newest_reply.weights.reference.number < 16:
                worker.take()
        with pytest.raises(ParamServerError, match="weights of reference 16 are not the server's"):
            worker.take()

    test()
