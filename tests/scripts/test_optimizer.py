"""The optimizer that a session gives, in the hands of trainers and of loops of all kinds: right, or stopped with one
sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster

HERE = Path(__file__).parent / "optimizer"
TCP = ("--set", "server.shared_memory=false")
slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "shards"),
    [
        pytest.param(("--mode", "sync"), 1, id="shared memory"),
        pytest.param(("--mode", "localsgd", "--local-steps", "1", *TCP), 1, id="localsgd over TCP", marks=slow),
        pytest.param(("--mode", "sync", *TCP), 1, id="TCP", marks=slow),
        pytest.param(("--mode", "localsgd", "--local-steps", "3"), 1, id="localsgd", marks=slow),
        pytest.param(("--mode", "async", "--delayed-update"), 1, id="delayed_update", marks=slow),
        pytest.param(("--mode", "sync", "--shards", "2"), 2, id="shards", marks=slow),
    ],
)
def test_a_model_that_moves_and_an_optimizer_that_is_loaded_go_on(cluster: Cluster, flags, shards):
    server = cluster.server("--workers", "1", "--steps", "8", "--save", "w.safetensors", *flags)
    if shards > 1:
        cluster.shard(1, shards)
    script = cluster.script(0, HERE / "moves.py")
    assert script.wait() == 0, script.output
    assert server.wait() == 0, server.output
    assert load_file(cluster.folder / "w.safetensors")["0.weight"].unique().tolist() == [-8.0]


TOLD = {
    "record": "session.record() before session.optimizer()",
    "shard": "state() was called before session.optimizer()",
    "no parameters": "the model has no parameters to train: it has none",
    "frozen": "none of its 2 tensors is a parameter with requires_grad",
    "shared": "parameter 'a.0.weight' is in two parameter groups",
    "parts": "takes NAME=(model, optimizer) for each part",
    "list": "the model is a list, not a torch.nn.Module",
    "class": "<class 'torch.optim.adam.Adam'> is not an optimizer",
    "finish": "session.finish() before session.optimizer()",
    "connect": "a second connect() to one server, while this process has an open session",
    "batch size": "session.shard(batch_size=0): a whole number of at least 1 is expected",
    "option": "session.shard(): DataLoader has no option workers",
    "epochs": "session.epochs('3'): a whole number of at least 0 is expected",
    "config": "session.config(5): a dict of names and values is expected",
    "norm": "clip_grad_norm('a'): the norm must be above 0",
    "loss": "session.record(loss=...) is a str, and a metric is one number",
    "after finish": "session.shard(), epochs() or state() after session.finish()",
    "clear": "the state of the optimizer was changed",
    "namesake": "optimizer __main__.Adam is not torch.optim.Adam, which the server would step",
    "max_norm": "embedding '1' has a max_norm",
    "lazy": "'0.weight' of a lazy module has no shape yet",
    "second": "change requires_grad and its groups' lr",
    "second of parts": "session.optimizers(generator=",
    "inner": "step the returned optimizer",
    "group": "parameter groups are fixed",
    "load": "weights ('0.weight' and 3 more) were changed between two steps, not by this optimizer: in mode async",
    "clamp": "weights ('0.bias') were changed",
    "after the end": "step() after the end of the run, which has 8 training steps (run.steps)",
}


def test_each_mistake_gets_its_sentence_and_harms_nothing(cluster: Cluster):
    server = cluster.server("--mode", "async", "--workers", "1", "--steps", "8")
    script = cluster.script(0, HERE / "mistakes.py")
    assert script.wait() == 0, script.output
    assert server.wait() == 0, server.output
    event = script.event("told")
    assert event["rates"] == [0.025, 0.025]
    for name, words in TOLD.items():
        assert words in event.get(name, "nothing"), name
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
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=slow)])
def test_the_state_that_is_saved_is_the_servers_and_plain_torch_takes_it(cluster: Cluster, shards: int):
    server = cluster.server("--mode", "sync", "--workers", "1", "--steps", "4", "--shards", str(shards))
    if shards > 1:
        cluster.shard(1, shards)
    script = cluster.script(0, HERE / "saved.py", OUT=str(cluster.folder / "optimizer.pt"))
    assert script.wait() == 0, script.output
    assert server.wait() == 0, server.output
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
    path = HERE / "lbfgs.py"
    spec = importlib.util.spec_from_file_location("lbfgs", path)
    lbfgs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lbfgs)
    steps = lbfgs.LOCAL_STEPS * lbfgs.ROUNDS
    server = cluster.server(
        "--mode", "localsgd", "--local-steps", str(lbfgs.LOCAL_STEPS), "--workers", str(lbfgs.WORKERS),
        "--steps", str(steps), "--save", "w.safetensors",
    )  # fmt: skip
    scripts = [cluster.script(rank, path) for rank in range(lbfgs.WORKERS)]
    assert [script.wait() for script in (*scripts, server)] == [0, 0, 0], scripts[0].output
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
    assert [script.wait() for script in scripts] == [0, 0], "".join(script.output for script in scripts)
    assert server.wait() == 0, server.output
