"""Replies that are differences, between real processes: over every transport, of several shards, through broken
connections and a server that is killed. Workers write down what weights they have of each version: they are the same
bits."""

from __future__ import annotations

import json

import pytest

from paramserver.tests.cluster import at_gates

pytestmark = pytest.mark.slow

STEPS = 40
SCRIPT = """
import sys, time, pathlib, zlib, torch, paramserver
gate, out = pathlib.Path(sys.argv[1]), open(sys.argv[2], "w", buffering=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(90, 300), torch.nn.Tanh(), torch.nn.Linear(300, 4))
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
    while not session.is_done:
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        place = optimizer.progress
        print(place.server_incarnation, place.version, zlib.crc32(bits), file=out)
        if place.num_counted == 15:
            print("at the gate", flush=True)
            while not gate.exists():
                time.sleep(0.01)
        chance = torch.Generator().manual_seed(97 * place.num_counted + session.rank)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=chance)
        session.record(num_samples=1)
        optimizer.step()
    session.finish()
"""
Q4 = {"PS_WORKER__CODEC": "q4", "PS_WORKER__REPLY_CODEC": "q4"}
SNAPSHOTS = ("--checkpoint-dir", "snapshots", "--checkpoint-every", "5")


def seen(cluster):
    """By server incarnation and version, the weights that workers have had of it."""
    found: dict[tuple[str, str], list[str]] = {}
    for rank in range(2):
        for line in (cluster.folder / f"seen{rank}").read_text().splitlines():
            incarnation, version, bits = line.split()
            found.setdefault((incarnation, version), []).append(bits)
    return found


def workers_of(cluster, **env):
    (cluster.folder / "script.py").write_text(SCRIPT)
    places = [str(cluster.folder / "gate"), *(str(cluster.folder / f"seen{rank}") for rank in range(2))]
    script = cluster.folder / "script.py"
    return [cluster.script(rank, script, places[0], places[1 + rank], **(Q4 | env)) for rank in range(2)]


def flags(mode: str, shards: int) -> tuple[str, ...]:
    return ("--mode", mode, "--workers", "2", "--steps", str(STEPS), "--shards", str(shards), "--summary", "s.json")


def at_the_gate(cluster, version):
    """A server and its workers, who wait, with a snapshot of this version or a later one."""
    server = cluster.server(*flags("sync", 1), *SNAPSHOTS)
    workers = workers_of(cluster)
    at_gates(workers)
    server.until(lambda: any(event["version"] >= version for event in server.events("snapshot")), "snapshot")
    return server, workers


def test_all_have_the_same_bits_after_a_killed_server(cluster):
    server, workers = at_the_gate(cluster, 1)
    server.kill()
    second = cluster.server(*flags("sync", 1), *SNAPSHOTS, "--listen", cluster.address)
    (cluster.folder / "gate").touch()
    assert [process.wait() for process in (*workers, second)] == [0, 0, 0], workers[0].output + second.output
    found = seen(cluster)
    assert all(len(set(bits)) == 1 for bits in found.values()), found
    assert {incarnation for incarnation, _ in found} == {"1", "2"}
    rows = json.loads((cluster.folder / "s.json").read_text())["workers"]
    whole = 4 * (90 * 300 + 300 * 5)
    assert all(row["bytes_received"] < (STEPS / 6 + 4) * whole for row in rows), rows


def test_a_snapshot_goes_on_with_workers_of_other_codecs(cluster):
    """Nothing of a codec is in it: what workers had kept is lost with their processes, and counted."""
    server, workers = at_the_gate(cluster, 10)
    for process in (*workers, server):
        process.kill()
    second = cluster.server(*flags("sync", 1), *SNAPSHOTS, "--resume", "latest")
    (cluster.folder / "gate").touch()
    workers = workers_of(cluster, PS_WORKER__CODEC="int8", PS_WORKER__REPLY_CODEC="bf16")
    assert [process.wait() for process in (*workers, second)] == [0, 0, 0], workers[0].output + second.output
    assert second.event("resumed")["version"] >= 10
    found = seen(cluster)
    assert all(len(bits) == 2 and len(set(bits)) == 1 for bits in found.values()), found
    assert max(int(version) for _, version in found) == STEPS - 1
    summary = json.loads((cluster.folder / "s.json").read_text())
    assert summary["version"] == STEPS
    for row in summary["workers"]:
        assert (row["codec"], row["residuals_lost"], row["restarts"]) == ("int8", 1, 1), row
        assert row["residual_lost_norm"] > row["residual_norm"] > 0, "of q4, and of int8 at the end"
