"""The optimizer that a session gives, in the hands of trainers and of loops of all kinds: right, or stopped with one
sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, end_well

HERE = Path(__file__).parent / "optimizer"
TCP = ("--set", "server.shared_memory=false")
slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "shards"),
    [
        (("--mode", "sync"), 1),
        (("--mode", "localsgd", "--local-steps", "1", *TCP), 1),
        (("--mode", "sync", *TCP), 1),
        (("--mode", "localsgd", "--local-steps", "3"), 1),
        (("--mode", "async", "--delayed-update"), 1),
        (("--mode", "sync", "--shards", "2"), 2),
    ],
)
def test_a_model_that_moves_and_an_optimizer_that_is_loaded_go_on(cluster: Cluster, flags, shards):
    server = cluster.server("--workers", "1", "--steps", "8", "--save", "w.safetensors", *flags)
    cluster.shards(shards)
    script = cluster.script(0, HERE / "moves.py")
    end_well(script, server)
    assert load_file(cluster.folder / "w.safetensors")["0.weight"].unique().tolist() == [-8.0]


def test_each_mistake_gets_its_sentence_and_harms_nothing(cluster: Cluster):
    server = cluster.server("--mode", "async", "--workers", "1", "--steps", "8")
    script = cluster.script(0, HERE / "mistakes.py")
    end_well(script, server)
    assert len(script.events("optimizer_state_not_loaded")) == 1, "of another run's, once"
    # torch's warning: nobody has stepped the optimizer it was made for
    assert "lr_scheduler.step()" not in script.output
    assert server.event("summary")["workers"][0]["training_steps"] == 8


@pytest.mark.parametrize("early", [-1, pytest.param(8, marks=slow)])
def test_a_loop_that_goes_on_after_the_end_is_told_so(cluster: Cluster, early: int):
    server = cluster.server("--mode", "localsgd", "--workers", "1", "--steps", "20", "--save", "w.safetensors")
    script = cluster.script(0, HERE / "overrun.py", str(early))
    assert script.wait() == 2, script.output
    assert "step() after the end of the run, which has 20 training steps (run.steps)" in script.output
    assert "Traceback" not in script.output
    server.wait()  # with the worker's reason, where that failed after its end
    assert load_file(cluster.folder / "w.safetensors")["weight"].item() == -(early if early > 0 else 20)


def module(name: str):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_the_state_that_is_saved_is_the_servers_and_plain_torch_takes_it(cluster: Cluster, shards: int):
    server = cluster.server("--mode", "sync", "--workers", "1", "--steps", "4", "--shards", str(shards))
    cluster.shards(shards)
    script = cluster.script(0, HERE / "saved.py", OUT=str(cluster.folder / "optimizer.pt"))
    end_well(script, server)
    assert not script.events("optimizer_state_not_loaded")
    saved = module("saved")
    model, plain = saved.make()
    saved.train(model, plain, 4)
    _, loaded = saved.make()
    loaded.load_state_dict(torch.load(cluster.folder / "optimizer.pt"))
    found, wanted = loaded.state_dict(), plain.state_dict()
    assert found["param_groups"][0]["lr"] == 0.01 and found["state"].keys() == wanted["state"].keys() == {0, 1, 2, 3}
    for index, state in wanted["state"].items():
        for key, value in state.items():
            assert torch.allclose(found["state"][index][key], value, rtol=1e-9, atol=1e-12), (index, key)


@pytest.mark.slow
def test_lbfgs_in_localsgd_is_what_plain_torch_does(cluster: Cluster):
    lbfgs = module("lbfgs")
    steps = lbfgs.LOCAL_STEPS * lbfgs.ROUNDS
    server = cluster.server(
        "--mode", "localsgd", "--local-steps", str(lbfgs.LOCAL_STEPS), "--workers", str(lbfgs.WORKERS),
        "--steps", str(steps), "--save", "w.safetensors",
    )  # fmt: skip
    scripts = [cluster.script(rank, HERE / "lbfgs.py") for rank in range(lbfgs.WORKERS)]
    end_well(*scripts, server)
    bare = lbfgs.model()
    start = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    bare.load_state_dict(load_file(cluster.folder / "w.safetensors"))
    for name, wanted in lbfgs.plain().items():
        assert torch.allclose(bare.state_dict()[name], wanted, rtol=1e-9, atol=1e-12), name
        assert not torch.allclose(start[name], wanted, rtol=0.1), name


KEPT = {
    "sync": ("--mode", "sync"),
    "clipped": ("--mode", "sync", "--set", "store.max_norm=0.01", "--clip-norm", "0.005"),
    "by the median": ("--mode", "sync", "--set", "policy.aggregation=median"),
    "async": ("--mode", "async"),
    "late": ("--mode", "async", "--delayed-update"),
    "localsgd": ("--mode", "localsgd", "--local-steps", "2"),
    "diloco": ("--mode", "diloco", "--local-steps", "3"),
    "allreduce": ("--mode", "allreduce"),
}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared,grpc", "direct,grpc", "grpc"])
@pytest.mark.parametrize("mode", KEPT)
def test_a_gradient_that_a_script_keeps_after_step_has_the_same_numbers_later(
    cluster: Cluster, mode: str, transport: str
) -> None:
    server = cluster.server("--workers", "2", "--steps", "18", *KEPT[mode])
    env = {"PS_WORKER__TRANSPORTS": transport} | ({"PS_WORKER__OVERLAP": "1"} if mode == "late" else {})
    words = ("clip",) if mode in ("sync", "localsgd", "allreduce") else ()
    scripts = [cluster.script(rank, HERE / "keeps.py", *words, **env) for rank in range(2)]
    end_well(*scripts, server)
