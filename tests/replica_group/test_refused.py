"""What a worker of several processes cannot do is said in one sentence, by each of them."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
from torch import nn

from paramserver.common.config.launchers import engine_settings
from paramserver.common.errors import MismatchError, UsageError
from paramserver.launch.plan.hosts import place_processes
from paramserver.tests.cluster import Forked
from paramserver.tests.forks import Run
from paramserver.worker.replica_group.group import _compare, find_member
from paramserver.worker.replica_group.start import reserved_port
from paramserver.worker.replica_group.strategy import Grouped
from paramserver.worker.strategies.base import BlockingStrategy

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


def test_the_place_in_a_group_is_torchruns_and_the_rank_another_engines() -> None:
    member = find_member(TORCHRUN)
    assert (member.rank, member.size, member.store, member.is_host) == (1, 4, ("h", 29500), False)
    assert find_member(TORCHRUN | {"RANK": "0"}).is_host
    assert not find_member(TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}).is_host
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "a[1-3]"}
    found = engine_settings(TORCHRUN | slurm, is_group=True)
    assert {key: setting.value for key, setting in found.settings.items()} == {
        "worker.rank": "2", "run.workers": "3", "worker.local_rank": "1", "worker.server": "h:50051",
    }  # fmt: skip
    alone = engine_settings(TORCHRUN, is_group=True).settings
    assert {key: setting.value for key, setting in alone.items()} == {
        "worker.local_rank": "1", "worker.server": "127.0.0.1:50051",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not in the environment"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT not in the environment"),
        (TORCHRUN | {"RANK": "x"}, "RANK=x"),
        (TORCHRUN | {"RANK": "4"}, "RANK is 4 and WORLD_SIZE 4"),
    ],
)
def test_nobody_says_who_it_is(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_member(environ)


def test_the_port_of_a_group_is_nobody_elses_until_its_store_listens_there() -> None:
    with reserved_port() as port_holder:
        port = port_holder.getsockname()[1]
        for _ in range(2):  # as a process that is started again
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
            dist.TCPStore("127.0.0.1", port, is_master=False).set("here", "1")
            assert store.get("here") == b"1"
            del store
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_who_was_told_something_else_is_named() -> None:
    with pytest.raises(MismatchError, match=r"worker.codec is bf16 in group rank 2 and raw in group rank 0"):
        _compare([{"worker.codec": "raw"}, {"worker.codec": "raw"}, {"worker.codec": "bf16"}], 1)


def test_devices_of_a_host_are_divided(tmp_path) -> None:
    from paramserver.tests.launch.plans import hosts_of

    hosts = hosts_of(tmp_path, "hosts: [{host: a, devices: [0, 1, 2, 5], slots: 2}]")
    placement = place_processes(hosts, 2, 1, colocate=False, folder="/here", group=2)
    assert [item.env.get("CUDA_VISIBLE_DEVICES") for item in placement.values()] == [None, "0,1", "2,5"]
    with pytest.raises(UsageError, match="a has 4 devices, and workers of 3 processes each"):
        place_processes(hosts, 2, 1, colocate=False, folder="/here", group=3)


def test_a_model_in_parts_outside_of_a_group_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    grouped, alone = Grouped.__new__(Grouped), BlockingStrategy.__new__(BlockingStrategy)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(4, 4))
        with pytest.raises(UsageError, match=r"'weight' is sharded over processes \(fully_shard\), but this worker is"):
            alone.wraps(model)
        with pytest.raises(UsageError, match="'0' is wrapped in DistributedDataParallel, but the whole model is not"):
            grouped.wraps(nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 4))))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--group", "3", "--batch-size", "32"), "a batch of 32 samples (run.batch_size) cannot be divided among 3"),
        (("--group", "0"), "launch.group: input should be greater than or equal to 1"),
    ],
)
def test_the_launcher_refuses(flags: tuple[str, ...], message: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "paramserver.launch", "--dry-run", *flags], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert message in result.stderr


def refused(group: list[Forked], code: int = 2) -> str:
    """The outputs of processes that end with this code; some may just lose others."""
    assert {code} <= {forked.wait() for forked in group} <= {code, 15}, group[0].output
    outputs = "".join(forked.output for forked in group)
    assert "Traceback" not in outputs
    return outputs


SERVE = ("--mode", "sync", "--workers", "1", "--steps", "20", "--batch-size", "8")


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1])
def test_who_is_missing_is_named(run: Run, absent: int) -> None:
    run.serve(*SERVE)
    (other,) = run.group(0, 2, absent=absent, PS_WORKER__GIVE_UP_S="2")
    assert other.wait() == 15
    message = "group rank 1 of 2 did not come in 2 s (worker.give_up_s), so group rank 0 gives up"
    assert (message if absent else "group rank 1: no reply from group rank 0 at 127.0.0.1:") in other.output


@pytest.mark.parametrize(
    ("size", "words", "env", "code", "message"),
    [
        (2, (), {"inner1": "PS_WORKER__CODEC=bf16"}, 12, "codec is bf16 in group rank 1 and raw in group rank 0"),
        (2, (), {"inner1": "PS_RUN__SEED=7"}, 12, "run.seed is 7 in group rank 1 and 0 in group rank 0"),
        (2, ("taller",), {}, 12, "the models (tensors, shapes) of group rank 0 and 1 differ"),
        (2, ("parts",), {}, 2, "have diverged: group rank 1 is at the end of its loop, step 5"),
        (3, (), {}, 2, "a batch of 8 samples cannot be divided among the 3 processes of this worker"),
        (2, (), {"PS_SERVER": "127.0.0.1:1", "PS_WORKER__GIVE_UP_S": "2"}, 15, "no server at 127.0.0.1:1 for 2 s"),
    ],
    ids=["codec", "seed", "model", "parted", "batch", "no server"],
)
def test_the_worker_ends_and_says_why(
    run: Run, size: int, words: tuple[str, ...], env: dict[str, str], code: int, message: str
) -> None:
    run.serve(*SERVE)
    group = run.group(0, size, *words, **env)
    output = refused(group, code)
    assert message in output, output
