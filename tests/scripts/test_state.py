"""A script that is killed and resumed ends in the bits of one that was not, and so does what it remembers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, Process, at_gates, end_well

pytestmark = pytest.mark.slow

EPOCHS = Path(__file__).parent / "state" / "epochs.py"


class Job:
    """Workers of a script, who go on only together."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        script: Path,
        *flags: str,
        steps: int,
        workers: int = 2,
        mode: str = "sync",
        **env: str,
    ) -> None:
        self.cluster, self.name, self.script, self.env = cluster, name, script, env
        self.out = [cluster.folder / f"{name}{rank}.pt" for rank in range(workers)]
        self.flags = (
            "--mode", mode, "--workers", str(workers), "--set", f"policy.min_workers={workers}",
            "--steps", str(steps), "--checkpoint-dir", name, "--checkpoint-every", "5", *flags,
        )  # fmt: skip
        self.server = cluster.server(*self.flags)
        self.ranks = [self.start(rank, **env) for rank in range(workers)]

    def start(self, rank: int, **env: str) -> Process:
        return self.cluster.script(rank, self.script, OUT=str(self.out[rank]), **env)

    def end(self) -> None:
        """Workers first: a server whose worker has died waits for it."""
        end_well(*self.ranks, self.server)

    def kill(self) -> None:
        for process in (*self.ranks, self.server):
            process.kill()

    def replace(self, rank: int) -> None:
        """Kill it alone, and go on with another process, which waits at no gate."""
        self.ranks[rank].kill()
        self.server.event("left")
        env = {name: value for name, value in self.env.items() if not name.startswith("GATE")}
        self.ranks[rank] = self.start(rank, **env)


def flat(value: object, name: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {key: item for part, inner in value.items() for key, item in flat(inner, f"{name}.{part}").items()}
    return {name: value}


def same(path: Path, other: Path) -> None:
    found, wanted = flat(torch.load(path)), flat(torch.load(other))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def begun(process: Process) -> tuple[int, int]:
    """Step and epoch that a process goes on from."""
    process.until(lambda: "resumed" in process.output, "begin")
    at = re.search(r"resumed True at (\d+) in (\d+)", process.output)
    assert at, process.output
    return int(at[1]), int(at[2])


@pytest.mark.parametrize("env", [{}, {"SCALER": "1"}], ids=["", "scaler"])
def test_a_script_goes_on_with_what_it_remembers(cluster: Cluster, env: dict[str, str]) -> None:
    """Killed with its server in the middle of an epoch of 20 batches: the state at the snapshot's last step comes back,
    and that step is computed once more. With a scaler that step is the 24th: of two batches, in the first of which it
    found infinities that it would not find with the newer weights."""
    whole = Job(cluster, "whole", EPOCHS, workers=1, steps=45, **env)
    whole.end()
    gate = {"GATE": str(cluster.folder / "never"), "GATE_AT": "33" if env else "27"}
    killed = Job(cluster, "killed", EPOCHS, "--checkpoint-every", "1", workers=1, steps=45, **gate, **env)
    at_gates(*killed.ranks)
    killed.server.snapshot(24 if env else 20)
    killed.kill()
    resumed = Job(cluster, "killed", EPOCHS, workers=1, steps=45, **env)
    resumed.end()
    step, epoch = begun(resumed.ranks[0])
    assert step >= 19 and (env or epoch == step // 20)
    same(resumed.out[0], whole.out[0])


@pytest.mark.parametrize(("accumulate", "first", "second"), [("3", 28, 8), ("1", 20, 21)])
def test_two_workers_killed_and_one_replaced_end_in_the_same_bits(
    cluster: Cluster, accumulate: str, first: int, second: int
) -> None:
    """10 batches an epoch for each of two workers; a gate before so many batches. Snapshots are of every 5th step."""
    per_epoch, steps = -(-10 // int(accumulate)), 45 if accumulate == "1" else 15
    whole = Job(cluster, "whole", EPOCHS, steps=steps, ACCUMULATE=accumulate)
    whole.end()
    gate = cluster.folder / "go"
    env = {"ACCUMULATE": accumulate, "GATE": str(gate)}
    killed = Job(cluster, "killed", EPOCHS, steps=steps, GATE_AT=str(first), **env)
    at_gates(*killed.ranks)
    killed.server.snapshot(first // int(accumulate) - 9)
    killed.kill()
    resumed = Job(cluster, "killed", EPOCHS, steps=steps, GATE_AT=str(second), **env)
    at_gates(*resumed.ranks)
    step, epoch = begun(resumed.ranks[0])
    assert epoch == step // per_epoch, "where the last step of the snapshot began"
    resumed.replace(1)
    gate.touch()
    resumed.end()
    assert begun(resumed.ranks[1])[0] > step
    for rank in range(2):
        same(resumed.out[rank], whole.out[rank])
    assert len({torch.load(out)["best"] for out in whole.out}) == 1, "the mean loss is over both ranks"


def test_the_example_with_its_scheduler_ends_in_the_same_bits(cluster: Cluster) -> None:
    """As it stands, but seeded, and with a shorter schedule; killed wherever it happens to be."""
    script = cluster.folder / "own_script.py"
    example = Path(__file__).parents[2] / "examples" / "own_script.py"
    text = example.read_text().replace("step_size=200", "step_size=20")
    script.write_text(text.replace("model = ", "torch.manual_seed(0)\nmodel = "))
    flags = ("--set", "server.shared_memory=false")
    whole = Job(cluster, "whole", script, *flags, "--save", "whole.safetensors", steps=90)
    whole.end()
    killed = Job(cluster, "killed", script, *flags, steps=90, PS_SLOWDOWN__BASE_S="0.03")  # it does not end meanwhile
    killed.server.snapshot(15)
    killed.replace(1)
    killed.server.snapshot(45)
    killed.kill()
    resumed = Job(cluster, "killed", script, *flags, "--save", "killed.safetensors", steps=90)
    resumed.end()
    found, wanted = (load_file(cluster.folder / f"{name}.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("gate_at", "newest"), [(22, 11), (12, 10)])
def test_a_live_script_goes_back_with_its_server(cluster: Cluster, gate_at: int, newest: int) -> None:
    """Of two shards the first is killed alone, and a new one goes on from its snapshot: loops over epochs go back. To
    step 10 it is the end of an epoch: what the loop does to a buffer at the end of the next one is undone."""
    flags = ("--shards", "2")
    whole = Job(cluster, "whole", EPOCHS, *flags, steps=45)
    cluster.shard(1, 2, "--checkpoint-dir", "whole")
    whole.end()
    gate = cluster.folder / "go"
    killed = Job(cluster, "killed", EPOCHS, *flags, steps=45, GATE=str(gate), GATE_AT=str(gate_at), GOES_BACK="1")
    follower = cluster.shard(1, 2, "--checkpoint-dir", "killed")
    at_gates(*killed.ranks)
    for process in (killed.server, follower):
        process.snapshot(newest)
    killed.server.kill()
    killed.server = cluster.server(*killed.flags, "--listen", cluster.address)
    gate.touch()
    killed.end()
    assert follower.wait() == 0, follower.output
    assert killed.ranks[0].events("replaying") and killed.ranks[0].output.count("epoch 1 ") > 1
    for rank in range(2):
        same(killed.out[rank], whole.out[rank])


@pytest.mark.parametrize("mode", ["async", "localsgd"])
def test_in_other_modes_schedules_go_on_where_they_were(cluster: Cluster, mode: str) -> None:
    """One worker is replaced, then everyone and the server are killed: each has taken each of its steps once."""
    steps, gate = 44, cluster.folder / "go"
    flags = ("--set", "policy.local_steps=3") if mode == "localsgd" else ("--set", "policy.delayed_update=true")
    killed = Job(cluster, "killed", EPOCHS, *flags, mode=mode, steps=steps, GATE=str(gate), GATE_AT="13", FED="1")
    at_gates(*killed.ranks)
    killed.replace(1)
    gate.touch()
    killed.server.snapshot(2 if mode == "localsgd" else 20)
    killed.kill()
    resumed = Job(cluster, "killed", EPOCHS, *flags, mode=mode, steps=steps, FED="1")
    resumed.end()
    for found in map(torch.load, resumed.out):
        assert found["ema"]["n_averaged"] == steps
        assert found["lr"] == rate_after(steps)


def rate_after(steps: int) -> list[float]:
    """Of the script's first schedule, in plain torch: epochs of 10 steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.05)
    by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for step in range(1, steps + 1):
        optimizer.step()
        by_step.step()
        if step % 10 == 0:
            by_epoch.step()
            plateau.step(1.0)
    return by_step.get_last_lr()
