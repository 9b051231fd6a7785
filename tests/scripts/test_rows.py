"""Tables of rows (`session.rows`) by real processes: in sync, two workers end where one plain process with torch's
sparse embeddings and the union batch does; a row's gradient counts exactly as often as its contribution."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import grpc
import pytest
import torch

from paramserver.proto import parameter_server_pb2 as pb
from paramserver.proto import parameter_server_pb2_grpc as pb_grpc
from paramserver.tests.cluster import Cluster, at_gates, end_well
from paramserver.tests.scripts.test_ordinary import BATCH, assert_near
from paramserver.tests.scripts.test_ordinary import plain as ordinary

SCRIPT = Path(__file__).parent / "rows" / "lookup.py"
STEPS = 12


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """One process, torch's own embeddings, the union batch."""
    return ordinary(SCRIPT, tmp_path_factory.mktemp("plain"), PLAIN="1", PS_RUN__STEPS=str(STEPS))


SNAPSHOTS = ("--checkpoint-dir", "snapshots", "--checkpoint-every", "4")


@pytest.mark.slow
def test_a_worker_and_then_the_server_are_killed_and_nothing_else_changes(
    cluster: Cluster, tmp_path: Path, plain: dict[str, torch.Tensor]
):
    """Nobody goes on without the other (min_workers); optimizer state of the rows is in the snapshot."""
    flags = ("--mode", "sync", "--workers", "2", "--steps", str(STEPS), "--set", "policy.min_workers=2", *SNAPSHOTS)
    server = cluster.server(*flags)
    env = {"BATCH": str(BATCH), "OUT": str(tmp_path / "out.pt"), "GATE": "9"}
    first, second = (cluster.script(rank, SCRIPT, DIE="1:3", **env) for rank in range(2))
    assert second.wait() == -signal.SIGKILL
    again = cluster.script(1, SCRIPT, **env)
    at_gates(first, again)
    server.snapshot(4)
    server.kill()
    (tmp_path / "go").touch()
    server = cluster.server("--listen", cluster.address, *flags)
    end_well(first, again, server)
    assert server.event("resumed")["version"] >= 4
    assert_near(torch.load(tmp_path / "out.pt"), plain, rtol=1e-7)


CLICKS = Path(__file__).parents[2] / "examples" / "clicks.py"
COUNTED = Path(__file__).parent / "rows" / "counted.py"


def counted(cluster: Cluster, steps: int, share: float = 1.0) -> None:
    """Every contribution was applied once, in the dense weights and in the rows."""
    seen, rows, common = torch.load(cluster.folder / "counted.pt")
    assert torch.equal(seen[: 2 * steps], torch.full((2 * steps,), -share))
    assert torch.equal(rows, torch.full((2 * steps, 3), -share))
    assert torch.equal(common[4], torch.full((2,), -share * 2 * steps)) and not common[:4].any()


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow) for mode in ("async", "sync", "ssp", "async --delayed-update")]
)
def test_a_killed_server_goes_on_with_its_tables_and_rows_with_nan_are_not_taken(cluster: Cluster, mode: str):
    flags = ("--mode", *mode.split(), "--workers", "2", "--steps", "20", *SNAPSHOTS, "--history", "h.jsonl")
    server = cluster.server(*flags)
    gate = (str(cluster.folder / "go"), "12")
    nan = "" if "delayed-update" in mode else "1:2"  # a loop that is ahead does not compute a rejected step again
    scripts = [cluster.script(rank, COUNTED, "20", *gate, NAN=nan) for rank in range(2)]
    at_gates(*scripts)
    server.snapshot()
    server.kill()
    (cluster.folder / "go").touch()
    second = cluster.server("--listen", cluster.address, *flags)
    end_well(*scripts, second)
    counted(cluster, 20, 0.5 if mode == "sync" else 1.0)
    resumed = second.event("resumed")
    assert resumed["version"] > 0 and resumed["incarnation"] == 2
    starts = [line for line in cluster.history() if line["op"] == "start"]
    assert [line["server_incarnation"] for line in starts] == [1, 2] and starts[0]["run"] == starts[1]["run"]
    assert ("rejected" in scripts[1].output) == bool(nan)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["a shard", "a worker"])
def test_tables_are_divided_among_shards(cluster: Cluster, killed: str):
    server = cluster.server("--mode", "async", "--workers", "2", "--steps", "20", "--shards", "2", *SNAPSHOTS)
    shard = cluster.shard(1, 2, *SNAPSHOTS)
    gate = (str(cluster.folder / "go"), "12")
    scripts = [cluster.script(rank, COUNTED, "20", *gate) for rank in range(2)]
    at_gates(*scripts)
    shard.snapshot()
    if killed == "a shard":
        shard.kill()
        server.event("shard_lost")
    else:
        scripts[1].kill()
        scripts[1] = cluster.script(1, COUNTED, "20")
        server.until(lambda: len(server.events("admitted")) == 3, "replacement")
    (cluster.folder / "go").touch()
    if killed == "a shard":
        shard = cluster.shard(1, 2, *SNAPSHOTS)
    end_well(*scripts, server, shard)
    counted(cluster, 20)
    if killed == "a shard":
        assert server.events("resumed")[-1]["version"] == shard.events("resumed")[-1]["version"] > 0


@pytest.mark.slow
def test_what_cannot_be_is_one_sentence(cluster: Cluster):
    """Another table than the first worker's, and settings that would see a part of the gradient only."""
    cluster.server("--mode", "async", "--workers", "2", "--steps", "20", "--set", "store.polyak=0.9")
    item = cluster.script(0, COUNTED, "20")
    cluster.server("--mode", "localsgd", "--workers", "2", "--steps", "20")
    other = cluster.script(0, COUNTED, "20")
    for refused, why in ((item, "the average does not cover rows"), (other, "use --mode sync, async or ssp")):
        assert refused.wait() and why in refused.output and "Traceback" not in refused.output
    cluster.server("--mode", "sync", "--workers", "2", "--steps", "20")
    cluster.script(0, COUNTED, "20").event("tensors")
    other = cluster.script(1, COUNTED, "20", DIM="4")
    assert other.wait() and "Traceback" not in other.output
    assert "different dim of table 'seen': expected 3, got 4" in other.output


@pytest.mark.slow
def test_the_example_learns_and_sends_what_it_uses(cluster: Cluster):
    """Four ids a sample: whoever sent the table would send 64 kB of it a step, each way."""
    server = cluster.server("--mode", "sync", "--workers", "2", "--steps", "60", "--summary", "s.json")
    scripts = [cluster.script(rank, CLICKS, ROWS="1000") for rank in range(2)]
    end_well(*scripts, server)
    summary = cluster.summary()
    assert summary["final"]["auc"] > 0.75
    output = "".join(script.output for script in scripts)
    sent = float(re.search(r"a step sent ([0-9.]+) MB", output)[1])
    assert 0 < sent < 0.08 and re.search("log loss 0.6[0-9]+ in the first batch, 0.[345]", output), output


@pytest.mark.slow
def test_rows_asked_of_a_new_coordinator_wait_for_its_shards(cluster: Cluster):
    """The coordinator is killed, and its shard stands still: the next coordinator has no run to give rows of yet."""
    flags = ("--mode", "sync", "--workers", "2", "--steps", "20", "--shards", "2", *SNAPSHOTS)
    server, shard = cluster.server(*flags), cluster.shard(1, 2, *SNAPSHOTS)
    scripts = [cluster.script(rank, COUNTED, "20", str(cluster.folder / "go"), "12") for rank in range(2)]
    at_gates(*scripts)
    shard.snapshot()
    server.kill()
    shard.signal(signal.SIGSTOP)
    second = cluster.server("--listen", cluster.address, *flags)
    (cluster.folder / "go").touch()  # each asks for rows next
    assert refusal_of_rows(cluster, server.event("listening")["run"]) == "NOT_READY"
    shard.signal(signal.SIGCONT)
    end_well(*scripts, second, shard)
    assert second.event("resumed")["version"] == shard.events("resumed")[-1]["version"] > 0
    counted(cluster, 20, 0.5)


def refusal_of_rows(cluster: Cluster, run: str) -> str:
    with grpc.insecure_channel(cluster.address) as channel, pytest.raises(grpc.RpcError) as refused:
        pb_grpc.ParameterServerStub(channel).PullRows(pb.RowsRequest(run=run, ids=b"\0" * 8), timeout=30)
    return dict(refused.value.trailing_metadata())["ps-reason"]


def test_a_coordinator_without_its_shards_does_not_say_that_the_run_is_another(cluster: Cluster):
    cluster.server("--mode", "sync", "--workers", "1", "--steps", "1", "--shards", "2")
    assert refusal_of_rows(cluster, "a run before") == "NOT_READY"
