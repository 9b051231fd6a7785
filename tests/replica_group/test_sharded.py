"""A model that fully_shard has divided among the processes of a worker: as if it were whole."""

from __future__ import annotations

import signal

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import end_well
from paramserver.tests.faults.proxy import Plan, Proxy
from paramserver.tests.forks import Run
from paramserver.tests.replica_group.member import WIDTH, make, make_wide
from paramserver.tests.replica_group.test_groups import EXTRA, alone, difference, serve
from paramserver.tests.replica_group.test_refused import refused


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("momentum", marks=pytest.mark.campaign)])
def test_in_sync_two_groups_of_two_are_one_process_with_the_union_batch(run: Run, optimizer: str) -> None:
    """The last batch of each epoch has two samples for four processes. What is saved loads into the bare model."""
    serve(run, "sync", 2, 40, 8)
    groups = [run.group(rank, 2, optimizer, "fsdp") for rank in range(2)]
    run.end()
    saved = load_file(run.folder / "w.safetensors")
    make().load_state_dict(saved)
    assert difference(saved, alone(40, 16, optimizer)) <= 1e-9
    for rank in range(2):
        assert difference(torch.load(run.folder / f"w{rank}-0.pt"), saved) == 0
    whole, has_whole_row = 8 * (5 * 8 + 8 + 8 + 1), 8 * (8 + 1)  # bytes; the last layer's only row is group rank 0's
    parts = [int(group.output.split("parts ")[1].split()[0]) for group in groups[0]]
    assert parts == [(whole - has_whole_row) // 2 + has_whole_row, (whole - has_whole_row) // 2]


@pytest.mark.slow
def test_local_steps_along_the_mean_of_a_group_are_those_of_one_process(run: Run) -> None:
    serve(run, "localsgd", 1, 24, 16, "--local-steps", "4")
    run.group(0, 2, "fsdp", "adam")
    run.end()
    assert difference(load_file(run.folder / "w.safetensors"), alone(24, 16, "adam")) <= 1e-9


@pytest.mark.slow
def test_the_worker_divides_the_model_of_a_task_and_evaluates_it(run: Run) -> None:
    """Whole in each process or divided: the same weights."""
    found, folder = [], run.folder
    for zero in ("0", "3"):
        run.folder = folder / zero
        run.folder.mkdir()
        serve(run, "sync", 1, 10, 8, "--task", "digits", "--eval-every", "5")
        run.group(0, 2, of="paramserver.worker.main", PS_WORKER__ZERO=zero)
        run.end()
        found.append((load_file(run.folder / "w.safetensors"), run.summary()["final"]))
        run.processes.clear()
    assert difference(found[0][0], found[1][0]) <= 1e-6
    assert found[0][1]["accuracy"] == pytest.approx(found[1][1]["accuracy"], abs=0.01)


@pytest.mark.parametrize(
    ("mode", "words", "env", "message"),
    [
        ("sync", (), {"PS_WORKER__ZERO": "3"}, "worker.zero is 3, but this script's model is whole"),
        ("allreduce", ("fsdp",), {}, "(fully_shard), and mode allreduce, whose workers average among"),
        ("localsgd", ("fsdp", "adafactor"), {}, "Adafactor is not elementwise"),
    ],
)
def test_what_cannot_be_is_said(run: Run, mode: str, words: tuple[str, ...], env: dict[str, str], message: str) -> None:
    more = ("--local-steps", "4") if mode == "localsgd" else ()
    serve(run, mode, 1, 20, 8, *more)
    assert message in refused(run.group(0, 2, *words, **env))


@pytest.mark.slow
def test_all_are_killed_and_go_on_from_the_servers_snapshot_in_groups_of_another_size(run: Run) -> None:
    """Adam's moments are the server's: nothing of the processes is needed."""
    flags = ("--set", "server.absent_s=60", "--checkpoint-dir", str(run.folder / "snapshots"))
    flags += ("--checkpoint-every", "5")
    serve(run, "sync", 1, 60, 16, *flags)
    group = run.group(0, 2, "fsdp", "adam", PS_SLOWDOWN__BASE_S="0.05")
    run.processes[0].snapshot(15)
    for item in (run.processes[0], *group):
        item.signal(signal.SIGKILL)
    for item in run.processes:
        item.wait()
    run.processes.clear()
    run.folder = run.folder / "again"
    run.folder.mkdir()
    server = serve(run, "sync", 1, 60, 16, *flags)
    end_well(*run.group(0, 4, "fsdp", "adam", life=1), server)
    assert "snapshot-0000000000" in server.output.partition('"admitted"')[0]  # that it goes on from
    assert difference(load_file(run.folder / "w.safetensors"), alone(60, 16, "adam")) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "direct", "grpc"])
def test_a_large_model_goes_window_by_window_over_every_transport(run: Run, transport: str) -> None:
    """Gradients up, weights down: no process ever has the whole of either."""
    serve(run, "sync", 1, 6, 16)
    transports = ",".join(dict.fromkeys((transport, "grpc")))
    group = run.group(0, 2, "fsdp", "wide", PS_WORKER__TRANSPORTS=transports)
    run.end()
    name = {"shared": "shared memory"}.get(transport, transport)
    assert f'"transport": "{name}"' in group[0].output or f"transport={name}" in group[0].output, group[0].output
    saved = load_file(run.folder / "w.safetensors")
    assert difference(saved, alone(6, 16, "sgd", make=make_wide)) <= 1e-9
    assert difference(torch.load(run.folder / "w0-0.pt"), saved) == 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["direct", "grpc"])
@pytest.mark.parametrize("mode", ["sync", "localsgd", "localsgd delayed_update", "async delayed_update"])
def test_connections_that_break_in_the_middle_of_a_payload_cost_nothing(run: Run, mode: str, transport: str) -> None:
    """Up or down: what was on its way is asked of all processes again."""
    more = EXTRA.get(mode, ("--delayed-update",) if "delayed_update" in mode else ())
    server = serve(run, mode.split()[0], 1, 8, 16, *more)
    size = 8 * 7 * WIDTH
    plans = [
        *([Plan(reset_after_up=size * 3 // 2)] * 2),  # of the heartbeat's nothing becomes so much
        *([Plan(reset_after_down=size // 2)] * 3),
        *([Plan(reset_after_up=size // 3)] * 3),
    ]
    port = server.event("listening")["direct_port"] if transport == "direct" else 0
    with Proxy(run.address, lambda number: plans[number] if number < len(plans) else Plan(), port) as proxy:
        transports = ",".join(dict.fromkeys((transport, "grpc")))
        group = run.group(0, 2, "fsdp", "wide", PS_SERVER=proxy.address, PS_WORKER__TRANSPORTS=transports)
        end_well(*group, server)
    assert proxy.num_resets >= 2
    saved = load_file(run.folder / "w.safetensors")
    assert difference(torch.load(run.folder / "w0-1.pt"), saved) == 0
    if mode in ("sync", "localsgd"):
        assert difference(saved, alone(8, 16, "sgd", make=make_wide)) <= 1e-9
