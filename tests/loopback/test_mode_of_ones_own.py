"""A mode in a file outside the package, with state, options and a rule: examples/cooling.py.

Contribution k of the run is applied at the rate COOLING ** k, and each is an element of its own in the weights
(onehot.py). So they hold every power once, to the bit, in whatever order workers came: a state that was lost, or
counted twice, or differs between shards, stands out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from safetensors.torch import load_file

import paramserver
from paramserver.common.registry import MODES
from paramserver.tests.cluster import at_gates
from paramserver.tests.contract.test_policies_contract import SETTINGS, PolicyMachine

STEPS = 25
COOLING = 0.5
NAME = "cooling.py:Cooling"
FLAGS = ("--mode", NAME, "--cooling", str(COOLING), "--set", "policy.max_age=40", "--steps", str(STEPS))
OUTPUTS = ("--save", "w.safetensors", "--summary", "s.json", "--history", "h.jsonl")
SNAPSHOTS = ("--checkpoint-dir", "snapshots", "--checkpoint-every", "5")
UNCHECKED = "cooling.py:Cooling were not checked: it is not installed here, and --mode does not name it"


@pytest.fixture(autouse=True)
def example(cluster) -> Path:
    """The example, in the working directory."""
    path = cluster.folder / "cooling.py"
    path.write_text((Path(paramserver.__file__).parent / "examples" / "cooling.py").read_text())
    return path


def check_weights(folder: Path) -> None:
    """Every contribution of both workers was applied once, at a rate of its own."""
    applied = -load_file(folder / "w.safetensors")["seen"].view(-1, STEPS)[:2].flatten()
    expected = COOLING ** torch.arange(2 * STEPS, dtype=torch.float64)
    assert torch.equal(applied.double().sort(descending=True).values, expected)


def check_history(cluster, *flags: str) -> tuple[int, str]:
    found = cluster.command("launch", "check", *flags, "h.jsonl", COLUMNS="200")
    assert "Traceback" not in found.stderr, found.stderr
    return found.returncode, found.stdout


def test_it_keeps_the_promises_of_every_mode(example: Path) -> None:
    machine = type("CoolingMachine", (PolicyMachine,), {"mode": f"{example}:Cooling"})
    assert MODES.load(machine.mode).may_scale
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=50))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_the_launcher_runs_it_and_the_checker_knows_its_rule(cluster, shards: int) -> None:
    script = ("--script", str(cluster.scripts / "onehot.py"), "--", str(STEPS))
    found = cluster.command("launch", "-n", "2", "--shards", str(shards), *FLAGS, *OUTPUTS, *script)
    assert found.returncode == 0, found.stdout + found.stderr
    check_weights(cluster.folder)
    summary = cluster.summary()
    assert (summary["mode"], summary["version"]) == (f"{cluster.folder}/{NAME}", 2 * STEPS)
    lines = cluster.history()
    assert lines[0]["options"] == {"cooling": COOLING, "max_age": 40}
    code, output = check_history(cluster, "--mode", NAME)
    assert (code, "were not checked" in output) == (0, False), output
    code, output = check_history(cluster)
    assert (code, UNCHECKED in output) == (0, True), output

    # The first line claims another limit. Both began at version 0, so one of them was late: only the rule minds.
    lines[0]["options"]["max_age"] = 0
    (cluster.folder / "h.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, output = check_history(cluster, "--mode", NAME)
    assert (code, "versions old, over 0" in output) == (1, True), output
    assert check_history(cluster)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_its_state_goes_on_where_the_killed_server_was(cluster, example: Path, shards: int) -> None:
    """Also where its file has moved meanwhile, and where it lies elsewhere for another shard."""

    def start(*flags: str):
        return cluster.server(*flags, *OUTPUTS, *SNAPSHOTS, "--workers", "2", "--shards", str(shards))

    server = start(*FLAGS)
    others = cluster.shards(shards, "--mode", NAME, *SNAPSHOTS)
    workers = [cluster.script(rank, "onehot.py", str(STEPS), "go", "12") for rank in range(2)]
    at_gates(*workers)
    server.snapshot()
    server.kill()
    moved = cluster.folder / "elsewhere" / "cooling.py"
    moved.parent.mkdir()
    moved.write_text(example.read_text())
    server = start("--listen", cluster.address, *FLAGS, "--mode", f"{moved}:Cooling")
    (cluster.folder / "go").touch()
    assert [process.wait() for process in (*workers, server, *others)] == [0] * (3 + len(others))
    assert server.event("resumed")["version"] > 0
    check_weights(cluster.folder)
    code, output = check_history(cluster, "--mode", NAME)
    assert (code, "were not checked" in output) == (0, False), output


@pytest.mark.slow
def test_a_shard_that_was_not_given_it_does_not_load_it(cluster) -> None:
    server = cluster.server(*FLAGS, "--workers", "1", "--shards", "2")
    shard = cluster.shard(1, 2)
    assert shard.wait() == 2
    assert "a file that this process" in shard.output
    assert "Traceback" not in shard.output + server.output
