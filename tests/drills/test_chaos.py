"""ps-launch chaos: its parts with real sockets and processes, and real jobs under real faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from paramserver.common.errors import OutputError, UsageError
from paramserver.drills.chaos import faults
from paramserver.drills.chaos.faults import Handle, Injector, child_of_port, children_of
from paramserver.drills.chaos.job import Ending
from paramserver.drills.chaos.ledger import Epoch, audit, read_floats
from paramserver.drills.chaos.plan import Fault
from paramserver.drills.chaos.proxy import DOWN, UP, Network
from paramserver.drills.chaos.trial import judge, make_setup
from paramserver.drills.lineage import Lineage
from paramserver.launch.plan.hosts import Child
from paramserver.tests.drills.histories import options_of

DEADLINE_S = 120.0
WORKER, OTHER = Child("worker", 0), Child("worker", 1)

# ---- the account in the weights ------------------------------------------------------------------

ASYNC = Epoch(steps=3, batch_size=2, local_steps=1)
SYNC = Epoch(steps=3, batch_size=2, local_steps=1, has_rounds=True)


def committed(*contributions: tuple[int, int, int]) -> Lineage:
    """(rank, step, version)"""
    lineage = Lineage({})
    for rank, step, version in contributions:
        assert lineage.add(rank, step, version, 1) is None
    return lineage


EACH = committed(*((rank, step, 2 * step + rank - 1) for step in (1, 2, 3) for rank in (0, 1)))
ROUNDS = committed((0, 1, 1), (1, 1, 1), (0, 2, 2), (1, 2, 2), (0, 3, 3))  # the last one without rank 1


def weights(folder: Path, applied: list[float], clock: list[float]) -> Path:
    path = folder / "w.safetensors"
    save_file({"clock": torch.tensor(clock), "applied": torch.tensor(applied)}, path)
    return path


def test_tensors_are_read_as_they_were_saved(tmp_path: Path) -> None:
    path = weights(tmp_path, [0.25, 1.0, -3.5], [7.0])
    assert list(read_floats(path, "applied")) == [0.25, 1.0, -3.5]
    assert list(read_floats(path, "clock")) == [7.0]
    with pytest.raises(OutputError, match="cannot be read"):
        read_floats(tmp_path / "none", "clock")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(OutputError, match="cannot be read"):
        read_floats(path, "clock")


def test_weights_that_are_what_was_committed(tmp_path: Path) -> None:
    found = audit(weights(tmp_path, [1.0] * 12, [6.0, 6.0]), ASYNC, EACH)
    assert found == ([], "ledger: 12 of 12 samples were applied exactly once")
    problems, summary = audit(weights(tmp_path, [0.5] * 8 + [1.0] * 2 + [0.0] * 2, [3.0, 3.0]), SYNC, ROUNDS)
    assert problems == [] and summary.endswith("2 belong to rounds that closed without their worker")


def test_rounds_of_local_steps(tmp_path: Path) -> None:
    """Three steps in contributions of two: the second round has one."""
    epoch = Epoch(steps=3, batch_size=2, local_steps=2, has_rounds=True)
    rounds = committed((0, 1, 1), (1, 1, 1), (0, 2, 2), (1, 2, 2))
    assert audit(weights(tmp_path, [0.5] * 12, [3.0]), epoch, rounds)[0] == []


def test_contributions_of_unequal_steps(tmp_path: Path) -> None:
    """Where paces differ: two of two steps and two of one, of two samples each."""
    epoch = Epoch(steps=3, batch_size=2, local_steps=2, may_scale=True)
    lineage = committed((0, 1, 1), (1, 1, 2), (0, 2, 3), (1, 2, 4))
    path = weights(tmp_path, [0.3] * 12, [3.0])
    assert audit(path, epoch, lineage, 12)[0] == []
    assert audit(path, epoch, lineage, 16)[0][0] == "16 samples were committed, but an epoch has 12"


@pytest.mark.parametrize(
    ("epoch", "lineage", "applied", "clock", "message"),
    [
        (ASYNC, EACH, [1.0] * 10 + [0.0] * 2, 6.0, "2 samples are missing"),
        (ASYNC, EACH, [1.0] * 10 + [2.0] * 2, 6.0, "2 samples were applied more than once"),
        (ASYNC, EACH, [1.0] * 12, 7.0, "the clock shows 7 steps, committed were 6"),
        (SYNC, ROUNDS, [0.5] * 10 + [1.0] * 2, 3.0, "2 of 12 weights differ from the committed contributions"),
        (
            SYNC,
            ROUNDS,
            [0.5] * 6 + [1.0] * 4 + [0.0] * 2,
            3.0,
            "2 of 12 weights differ from the committed contributions",
        ),
    ],
)
def test_weights_that_are_not(
    tmp_path: Path, epoch: Epoch, lineage: Lineage, applied: list[float], clock: float, message: str
) -> None:
    assert message in audit(weights(tmp_path, applied, [clock, clock]), epoch, lineage)[0]


def test_weights_of_two_versions(tmp_path: Path) -> None:
    problems, _ = audit(weights(tmp_path, [1.0] * 12, [6.0, 7.0]), ASYNC, EACH)
    assert problems == ["a worker read weights of two versions: the clock shows 6 and 7"]


# ---- the network ---------------------------------------------------------------------------------


def tunnelled(work: Callable[[Network, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    """Run `work` with a connection through the proxy, as worker 0's, to a server that echoes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        network = Network(lambda port: WORKER, seed=1)
        await network.start()
        host, _, port = network.address.rpartition(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 OK\r\n\r\n"
            async with asyncio.timeout(DEADLINE_S):
                await work(network, reader, writer)
            writer.transport.abort()
        finally:
            await network.close()
            server.close()

    asyncio.run(run())


async def is_silent(reader: asyncio.StreamReader) -> bool:
    try:
        await asyncio.wait_for(reader.read(1), 0.1)
    except TimeoutError:
        return True
    return False


def test_everything_gets_through_in_order() -> None:
    async def work(network: Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = os.urandom(1_000_000)
        network.delays["loss"] = 1
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        writer.write_eof()
        assert await reader.read() == b""

    tunnelled(work)


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_blocked_direction_waits_until_every_block_is_lifted(direction: str) -> None:
    async def work(network: Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        network.block(OTHER, direction)  # somebody else's
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        network.block(WORKER, direction)
        network.block(None, direction)
        writer.write(b"b")
        assert await is_silent(reader)
        network.unblock(None, direction)
        assert await is_silent(reader)
        network.unblock(WORKER, direction)
        assert await reader.readexactly(1) == b"b"

    tunnelled(work)


def test_a_reset_is_a_reset() -> None:
    async def work(network: Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert network.reset(OTHER) == 0
        assert network.reset(WORKER) == 1
        with pytest.raises(ConnectionResetError):
            await reader.read(1)

    tunnelled(work)


def test_a_cut_lets_so_many_bytes_through() -> None:
    async def work(network: Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        network.cut(WORKER, 1000)
        writer.write(b"x" * 999)
        assert await reader.readexactly(999) == b"x" * 999
        writer.write(b"y" * 100)
        with pytest.raises(ConnectionResetError):  # with or without the one byte more that was let through
            await reader.readexactly(2)
        assert network.num_bytes >= 999

    tunnelled(work)


# ---- processes -----------------------------------------------------------------------------------


def test_a_process_is_stopped_goes_on_and_its_number_is_no_matter(wait_until) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    handle = Handle(sleeper.pid)
    process = psutil.Process(sleeper.pid)
    handle.send(signal.SIGSTOP)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert [state for pid, state, _ in children_of(os.getpid()) if pid == sleeper.pid] == ["T"]
    handle.send(signal.SIGCONT)
    wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
    handle.send(signal.SIGKILL)
    assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
    handle.send(signal.SIGKILL)  # nobody has it any more
    handle.close()


def test_a_fault_that_meets_a_process_which_has_ended_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the processes and the fault a process may end, and its parent may wait for it."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(faults, "job_processes", lambda launcher: {WORKER: (gone.pid, "S")})
    lines: list[str] = []
    injector = Injector(0, Network(lambda port: None, 1), 1, lines.append, lambda shard: None, 2)
    for kind in ("kill_worker", "freeze_worker", "full_disk"):
        injector.inject(Fault(0, kind, rank=0, for_s=1.0))
    injector.inject(Fault(0, "kill_worker", rank=1))
    assert injector.killed == [] and [text.rpartition(": ")[2] for text in lines] == ["it is not running"] * 4


def test_a_port_nobody_has_is_nobodys() -> None:
    assert child_of_port(os.getpid(), 1) is None


# ---- whole jobs ----------------------------------------------------------------------------------


def chaos(marked, *argv: str, deadline_s: float) -> subprocess.CompletedProcess[str]:
    process = marked.start("-m", "paramserver.launch", "chaos", "--keep", "kept", *argv)
    out, err = process.communicate(timeout=deadline_s)
    assert marked.left() == []
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_survives_a_kill_of_each_and_more(marked) -> None:
    run = chaos(marked, "--seconds", "14", "--seed", "1870", "-n", "2", deadline_s=380)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "samples were applied exactly once" in run.stdout
    assert "every contribution was applied once, nothing durable was lost" in run.stdout
    assert run.stdout.rstrip().endswith("passed")
    assert "restarting: " in run.stdout
    assert (marked.folder / "kept" / "job.log").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_large_fragments_that_are_cut_are_continued(marked, codec: str) -> None:
    """More than 16 MiB each, of which only the missing bytes are sent again."""
    fragments = ("policy.fragments=2", "policy.local_steps=2", f"worker.codec={codec}")
    sets = [word for setting in fragments for word in ("--set", setting)]
    size = {"raw": "40", "int8": "80"}[codec]
    argv = ("--seconds", "20", "--mode", "diloco", "-n", "2", "--faults", "cut", "--model-mb", size)
    run = chaos(marked, *argv, *sets, deadline_s=560)
    assert run.returncode == 0, run.stdout + run.stderr
    assert '"continued"' in (marked.folder / "kept" / "job.log").read_text()


KILLS = ("--faults", "kill_worker,kill_server,kill_shard,freeze_worker,freeze_server,freeze_shard")
SHARDS = ("-n", "2", "--shards", "3")


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("ssp", ()), ("sync", ()), ("async", ("--transport", "shared")), ("localsgd", ("--transport", "grpc")),
        ("sync", (*SHARDS, *KILLS)), ("sync", SHARDS), ("ssp", SHARDS), ("async", (*SHARDS, *KILLS)),
    ],
)  # fmt: skip
def test_a_minute_of_everything(marked, mode: str, flags: tuple[str, ...]) -> None:
    """The ledger's clock counts commits and lies on all shards: one that kept what others went back from would show."""
    run = chaos(marked, "--seconds", "60", "--mode", mode, *flags, deadline_s=800)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.rstrip().endswith("passed")


def test_what_is_not_true_is_not_passed(tmp_path: Path, capsys) -> None:
    """A job that ended well, of which nothing else is as it should be."""
    chosen = {"run.workers": 1, "run.steps": 3, "run.mode": "async"}
    with pytest.raises(UsageError, match="the drill knows no relays"):
        make_setup(None, chosen, ["launch.regions=2"], folder=tmp_path, seconds=5, seed=1, kinds=["cut"])
    trial = make_setup(None, chosen, [], folder=tmp_path, seconds=5, seed=1, kinds=["cut"])
    ending = Ending(exit_code=0, unexpected=["worker 0 failed: exit code 13"])
    nothing_carried = "no byte went through the controlled network, so its faults hit nothing"
    failures = ["ended without being killed: worker 0 failed: exit code 13", nothing_carried, "there is no history"]
    assert judge(ending, trial) == failures
    identity = {"role": "server", "rank": 0, "incarnation": 1}
    start = {"run": "r", "server_incarnation": 1, "mode": "async", "version": 0, "rows": {}, "source": None}
    start |= {"options": options_of("async"), "common": {}}
    history = [
        {"op": "start", "role": "server", **start},
        {"op": "join", **identity, "seq": 0},
        {"op": "enter", **identity, "seq": 0},
        {"op": "commit", "role": "server", "version": 1, "contributions": [[0, 1, 1]], "members": [0]},
    ]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    weights(tmp_path, [1.0] * 4 + [0.0] * 8, [1.0, 1.0]).rename(tmp_path / "weights.safetensors")
    assert judge(Ending(exit_code=0, num_bytes=1), trial) == ["its history: 1 problem", "8 samples are missing"]
    assert (
        "version 1 holds rank 0 incarnation 1 contribution 1, which was not accepted before" in capsys.readouterr().out
    )
    assert judge(Ending(exit_code=3), trial)[0] == "the job ended with exit code 3"
    assert judge(Ending(hang="nothing has moved for 90 s"), trial)[0] == "nothing has moved for 90 s"


def test_ctrl_c_leaves_nothing(marked, read_until, wait_until) -> None:
    process = marked.start("-m", "paramserver.launch", "chaos", "--seconds", "60", "-n", "2")
    read_until(process.stdout, "again: ps-launch chaos --seconds 60 --seed 1 -n 2 --mode ssp")
    wait_until(lambda: any("paramserver.ps" in line for line in marked.left()))
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S + 20)
    assert process.returncode == 130
    assert marked.left() == []
    assert time.monotonic() - began < DEADLINE_S + 20
