"""Which codec contributions may come in is agreed on when a worker joins, and looked at where it said nothing."""

from __future__ import annotations

import pytest

from paramserver.common.codecs.base import payload_bytes
from paramserver.common.config.schema import Config
from paramserver.common.kinds import ContributionKind
from paramserver.common.registry import CODECS
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.engine.modes import make_policy

from ..streams import LARGE, SMALL, Aborted, Server, Worker, served, turns, weight_of


async def refused(worker: Worker) -> tuple[str, ...]:
    assert await worker.end() == "BAD_REQUEST"
    error = worker.task.exception()
    assert isinstance(error, Aborted)
    return error.texts


@pytest.mark.parametrize(
    ("mode", "optimizer", "codecs", "text", "fix"),
    [
        ("sync", "Adam", ["q2"], "rank 0: worker.codec is q2, and the optimizer is Adam: it divides", "--mode diloco"),
        ("sync", "Adam", ["int8", "topk"], "rank 0: worker.codec is topk", "--mode diloco"),
        ("async", "SGD", ["onebit_adam"], "rank 0: worker.codec is onebit_adam, and mode async: it is for", "sync"),
        ("localsgd", "SGD", ["q4"], "the codec would lose every small step", "worker.codec=q4 for ps-server"),
        ("sync", "SGD", ["zip"], "unknown codec 'zip'", ""),
        ("sync", "SGD", ["raw"] * 33, "Model.codecs has 33 names; at most 32", ""),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 9 else "",
)
def test_what_the_run_cannot_have_is_refused_at_the_join(
    mode: str, optimizer: str, codecs: list[str], text: str, fix: str
) -> None:
    @served(workers=1, mode=mode)
    async def play(server: Server) -> None:
        worker = Worker(server, 0)
        await worker.join(codecs=codecs, optimizer=optimizer)
        message, remedy = await refused(worker)
        assert text in message and fix in remedy, (message, remedy)
        again = Worker(server, 0)
        await again.join(codecs=["q4", "bf16"] if mode != "localsgd" else ["raw"], optimizer=optimizer)
        await server.settle()
        assert again.outcomes == ["START"]

    play()


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["one message", "in pieces"])
def test_a_contribution_in_a_codec_that_the_optimizer_cannot_have_is_rejected_and_no_other(layout) -> None:
    """Of a worker that names none, as one of an older version; and of one that takes another than it named."""

    @served(layout, max_staged=1, workers=1, mode="async")
    async def play(server: Server) -> None:
        worker = Worker(server, 0)
        for codecs in ((), ("q4",)):
            worker = Worker(server, 0)
            await worker.join(codecs=codecs, momentum=0.9)
            await server.settle()
            first = worker.outcomes[0], server.engine.run.policy.seq(0) + 1
            assert first[0] == "START"
            before = weight_of(server)
            sizes = {name: payload_bytes(CODECS.load(name)(), layout) for name in ("q2", "int8", "raw")}
            for number, name in ((first[1], "q2"), (first[1], "int8"), (first[1] + 1, "raw")):
                header = {"codec": name, "num_bytes": sizes[name]}
                worker.send_encoded(number, bytes(sizes[name]), **header)
                await server.settle()
            assert worker.outcomes == ["START", "REJECTED", "APPLIED", "APPLIED"]
            reasons = [message.header.result.reason for message in worker.stream.received if message.kind == "reply"]
            assert "was not agreed on (worker.codec is q2, and the optimizer is SGD: it amplifies" in reasons[1]
            assert weight_of(server) == before  # zeros
            server.check_no_memory_is_kept()
        await turns()

    play()


@pytest.mark.parametrize(("momentum", "codec"), [(None, "sparse"), (0.5, "sparse"), (0.0, "sparse"), (None, "q4")])
def test_outer_momentum_with_a_codec_that_sends_few_values_is_warned_of_once(momentum, codec, capfd) -> None:
    """Of a server that was not told the workers' codec, or was told a momentum of its own."""

    @served(workers=2, mode="diloco", policy={} if momentum is None else {"outer_momentum": momentum})
    async def play(server: Server) -> None:
        for rank in range(2):
            worker = Worker(server, rank)
            await worker.join(codecs=[codec], contribution=pb.RunSettings.DELTA)
            await server.settle()

    play()
    output = capfd.readouterr()
    assert (output.out + output.err).count("--set policy.outer_momentum=0") == (momentum != 0.0 and codec == "sparse")


@pytest.mark.parametrize(
    ("up", "down", "sent"),
    [
        ("raw", "raw", "weights"), ("bf16", "fp16", "delta"),
        ("q4", "raw", "delta"), ("raw", "int8", "delta"), ("sparse", "q4", "delta"),
    ],
)  # fmt: skip
def test_what_localsgd_sends_is_decided_by_the_codecs_that_the_server_was_told(up: str, down: str, sent: str) -> None:
    settings = {"run": {"mode": "localsgd"}, "worker": {"codec": up, "reply_codec": down}}
    policy = make_policy(Config.model_validate(settings))
    assert policy.kind == sent and (policy.outer is None) == (sent == ContributionKind.WEIGHTS)
