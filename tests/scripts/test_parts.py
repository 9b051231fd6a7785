"""Several models and optimizers in one session: a GAN, an actor and its critic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster
from paramserver.tests.scripts.test_ordinary import BATCH, plain

HERE = Path(__file__).parent / "parts"
slow = pytest.mark.slow


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-9), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "more", "flags"),
    [
        pytest.param("gan", {}, (), marks=slow),
        pytest.param("gan", {"EVERY": "3"}, ("--set", "server.shared_memory=false"), marks=slow),
        pytest.param("gan", {"SGD": "1"}, ("--set", "store.clip_norm=1000"), id="adam and sgd", marks=slow),
        pytest.param("actor_critic", {}, (), id="actor_critic"),
    ],
)
def test_two_workers_in_sync_are_one_process_with_the_union_batch(
    cluster: Cluster, tmp_path: Path, script: str, more: dict[str, str], flags: tuple[str, ...]
):
    wanted = plain(script, tmp_path, HERE, PS_RUN__STEPS="12", **more)
    server = cluster.server("--mode", "sync", "--workers", "2", "--steps", "12", "--save", "w.safetensors", *flags)
    out = tmp_path / "together.pt"
    scripts = [cluster.script(rank, HERE / f"{script}.py", BATCH=str(BATCH), OUT=str(out), **more) for rank in range(2)]
    assert [script.wait() for script in (*scripts, server)] == [0, 0, 0], scripts[0].output + scripts[1].output
    assert_same(torch.load(out), wanted)
    summary = server.event("summary")
    assert summary["ended_by"] == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "gate", ["critic 11", pytest.param("critic 7", marks=slow), pytest.param("generator 7", marks=slow)]
)
def test_a_run_that_is_killed_between_two_parts_of_a_step_ends_as_one_that_was_not(
    cluster: Cluster, tmp_path: Path, gate: str
):
    """BatchNorm counts its batches, and noise comes from torch's generator. Snapshots are of whole steps."""
    more = {"SGD": "1"} if gate == "generator 7" else {}
    wanted = plain("gan", tmp_path, HERE, PS_RUN__STEPS="12", NOISE="1", BATCH=str(BATCH), **more)
    flags = ("--mode", "sync", "--workers", "1", "--steps", "12", "--checkpoint-dir", "kept", "--checkpoint-every", "1")
    out = tmp_path / "together.pt"
    env = {"BATCH": str(BATCH), "OUT": str(out), "NOISE": "1", "GATE": str(tmp_path / "go"), "GATE_AT": gate}
    env |= more
    server = cluster.server(*flags)
    script = cluster.script(0, HERE / "gan.py", **env)
    script.until(lambda: "at the gate" in script.output, "gate")
    server.until(lambda: bool(server.events("snapshot")), "snapshot")
    for item in (server, script):
        item.kill()
    server = cluster.server(*flags)
    script = cluster.script(0, HERE / "gan.py", **env | {"GATE_AT": ""})
    assert [script.wait(), server.wait()] == [0, 0], script.output + server.output
    assert_same(torch.load(out), wanted)
    assert server.event("resumed")["version"] % 2 == 0


@pytest.mark.parametrize(
    ("flags", "shards"),
    [
        pytest.param(("--mode", "localsgd", "--local-steps", "5"), 1, id="localsgd", marks=slow),
        pytest.param(("--mode", "async"), 1, id="async", marks=slow),
        pytest.param(("--mode", "sync"), 2, id="shards", marks=slow),
    ],
)
def test_one_worker_is_one_process_in_every_mode(cluster: Cluster, tmp_path: Path, flags: tuple[str, ...], shards: int):
    """The generator is stepped every third batch, and last after the last training step began."""
    env = {"EVERY": "3", "BATCH": str(BATCH)}
    wanted = plain("gan", tmp_path, HERE, PS_RUN__STEPS="13", **env)
    server = cluster.server(
        *flags, "--workers", "1", "--steps", "13", "--shards", str(shards), "--save", "w.safetensors"
    )
    if shards > 1:
        cluster.shard(1, shards)
    out = tmp_path / "together.pt"
    script = cluster.script(0, HERE / "gan.py", **env, OUT=str(out))
    assert [script.wait(), server.wait()] == [0, 0], script.output + server.output
    assert_same(torch.load(out), wanted)
    assert_same(load_file(cluster.folder / "w.safetensors"), wanted)
    assert "finished_early" not in script.output


@slow
@pytest.mark.parametrize("mode", ["localsgd", "async"])
def test_a_run_of_several_optimizers_ends_after_its_steps(cluster: Cluster, mode: str) -> None:
    """The last step of the generator is after the last training step began."""
    script = str(HERE / "gan.py")
    done = cluster.command(
        "launch", "-n", "2", "--script", script, "--mode", mode, "--steps", "13", "--summary", "m.json",
        EVERY="3", BATCH=str(BATCH), OUT="w.pt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    workers = json.loads((cluster.folder / "m.json").read_text())["workers"]
    assert [worker["training_steps"] for worker in workers] == [13, 13]


@slow
@pytest.mark.parametrize("mode", ["ssp", "dssp", "buffered", "diloco", "async_diloco", "allreduce"])
def test_modes_that_cannot_step_several_optimizers_name_another(cluster: Cluster, mode: str) -> None:
    env = {"BATCH": str(BATCH), "OUT": "w.pt"}
    done = cluster.command("launch", "-n", "2", "--script", str(HERE / "gan.py"), "--mode", mode, "--steps", "9", **env)
    text = done.stdout + done.stderr
    assert done.returncode == 2 and "session.optimizers()" in text and "started again" not in text, text
    assert "use --mode sync, async or localsgd" in text
