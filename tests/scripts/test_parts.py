"""Several models and optimizers in one session: a GAN, an actor and its critic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, at_gates, end_well
from paramserver.tests.scripts.test_ordinary import BATCH, assert_near, plain, together

HERE = Path(__file__).parent / "parts"
slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "more", "flags"),
    [
        ("gan", {}, ()),
        ("gan", {"EVERY": "3"}, ("--set", "server.shared_memory=false")),
        ("gan", {"SGD": "1"}, ("--set", "store.clip_norm=1000")),
        ("actor_critic", {}, ()),
    ],
)
def test_two_workers_in_sync_are_one_process_with_the_union_batch(
    cluster: Cluster, tmp_path: Path, script: str, more: dict[str, str], flags: tuple[str, ...]
):
    path = HERE / f"{script}.py"
    server, found = together(cluster, path, "--steps", "12", *flags, **more)
    assert_near(found, plain(path, tmp_path, PS_RUN__STEPS="12", **more))
    assert server.event("summary")["ended_by"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["critic 11", "critic 7", "generator 7"])
def test_a_run_that_is_killed_between_two_parts_of_a_step_ends_as_one_that_was_not(
    cluster: Cluster, tmp_path: Path, gate: str
):
    """BatchNorm counts its batches, and noise comes from torch's generator. Snapshots are of whole steps."""
    more = {"SGD": "1"} if gate == "generator 7" else {}
    wanted = plain(HERE / "gan.py", tmp_path, PS_RUN__STEPS="12", NOISE="1", BATCH=str(BATCH), **more)
    flags = ("--mode", "sync", "--workers", "1", "--steps", "12", "--checkpoint-dir", "kept", "--checkpoint-every", "1")
    out = tmp_path / "together.pt"
    env = {"BATCH": str(BATCH), "OUT": str(out), "NOISE": "1", "GATE": str(tmp_path / "go"), "GATE_AT": gate}
    env |= more
    server = cluster.server(*flags)
    script = cluster.script(0, HERE / "gan.py", **env)
    at_gates(script)
    server.event("snapshot")
    for item in (server, script):
        item.kill()
    server = cluster.server(*flags)
    script = cluster.script(0, HERE / "gan.py", **env | {"GATE_AT": ""})
    end_well(script, server)
    assert_near(torch.load(out), wanted)
    assert server.event("resumed")["version"] % 2 == 0


@slow
@pytest.mark.parametrize(
    ("flags", "shards"),
    [(("--mode", "localsgd", "--local-steps", "5"), 1), (("--mode", "async"), 1), (("--mode", "sync"), 2)],
)
def test_one_worker_is_one_process_in_every_mode(cluster: Cluster, tmp_path: Path, flags: tuple[str, ...], shards: int):
    """The generator is stepped every third batch, and last after the last training step began."""
    env = {"EVERY": "3", "BATCH": str(BATCH)}
    wanted = plain(HERE / "gan.py", tmp_path, PS_RUN__STEPS="13", **env)
    server = cluster.server(
        *flags, "--workers", "1", "--steps", "13", "--shards", str(shards), "--save", "w.safetensors"
    )
    cluster.shards(shards)
    out = tmp_path / "together.pt"
    script = cluster.script(0, HERE / "gan.py", **env, OUT=str(out))
    end_well(script, server)
    assert_near(torch.load(out), wanted)
    assert_near(load_file(cluster.folder / "w.safetensors"), wanted)
    assert "finished_early" not in script.output


@slow
@pytest.mark.parametrize("mode", ["ssp", "dssp", "buffered", "diloco", "async_diloco", "allreduce"])
def test_modes_that_cannot_step_several_optimizers_name_another(cluster: Cluster, mode: str) -> None:
    env = {"BATCH": str(BATCH), "OUT": "w.pt"}
    done = cluster.command("launch", "-n", "2", "--script", str(HERE / "gan.py"), "--mode", mode, "--steps", "9", **env)
    text = done.stdout + done.stderr
    assert done.returncode == 2 and "session.optimizers()" in text and "started again" not in text, text
    assert "use --mode sync, async or localsgd" in text
