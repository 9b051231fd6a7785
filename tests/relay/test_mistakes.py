"""What a user may do wrong with a relay: each is a sentence with the fix, and exit code 2 or 15."""

from __future__ import annotations

import pytest

from paramserver.tests.cluster import Cluster

ABOVE = "127.0.0.1:9"  # nobody listens at the port of `discard`


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--shards", "2"), "a region (--upstream), and --shards 2: the server above is one process"),
        (("--checkpoint-dir", "snapshots"), "the run above keeps the state of a region"),
        (("--listen", ABOVE), "is this server's own address"),
        (("--set", "store.polyak=0.9"), "--upstream, and store.polyak is 0.9"),
        (("--mode", "allreduce", "--staleness", "1"), "a region (--upstream), and policy.staleness is 1"),
        (("--mode", "diloco", "--set", "policy.fragments=5"), "policy.fragments is 5, and a region (--upstream)"),
    ],
)
def test_settings_that_a_region_cannot_have(cluster: Cluster, flags: tuple[str, ...], words: str) -> None:
    listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
    done = cluster.command("ps", "--upstream", ABOVE, *listen, *flags)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "fix:" in done.stderr and "Traceback" not in done.stderr


def test_a_server_above_that_is_not_there(cluster: Cluster) -> None:
    done = cluster.command("ps", "--upstream", ABOVE, "--listen", "127.0.0.1:0", "--set", "worker.give_up_s=0.2")
    assert done.returncode == 15, done.stderr
    assert f"no server at {ABOVE}" in done.stderr and "(--upstream HOST:PORT)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("above", "below", "words"),
    [
        (("allreduce",), ("sync",), "the run above is in mode allreduce: its workers average among themselves"),
        (("sync",), ("localsgd",), "mode localsgd, and the run above is in mode sync: it takes"),
        (("sync",), ("allreduce",), "mode allreduce, and the run above is in mode sync: it takes"),
        (("sync",), ("async",), "mode async, and the run above is in mode sync: it takes"),
        (("sync",), ("sync", "--upstream-every", "8"), "mode sync: it would have to exchange weights every 8 steps"),
    ],
)
def test_modes_that_do_not_fit(cluster: Cluster, above: tuple[str, ...], below: tuple[str, ...], words: str) -> None:
    cluster.server("--workers", "2", "--steps", "4", "--mode", *above)
    done = cluster.command("ps", "--upstream", cluster.address, "--listen", "127.0.0.1:0", "--mode", *below)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


def test_another_number_of_steps_than_above_and_another_model_end_the_region(cluster: Cluster) -> None:
    cluster.server("--workers", "2", "--steps", "40", "--mode", "localsgd", "--local-steps", "4")
    address = cluster.address
    relays = [
        cluster.server("--mode", "sync", "--workers", "1", "--upstream", address, "--upstream-every", every)
        for every in ("8", "4")
    ]
    workers = [cluster.worker(0, "--task", "linear")]
    cluster.address = relays[0].event("listening")["address"]
    workers.append(cluster.worker(0, "--task", "linear"))
    assert relays[0].wait() == 2
    assert "--upstream-every 8, but policy.local_steps of the run above is 4" in relays[0].output
    assert workers[1].wait() != 0
    assert "--local-steps 8" in workers[1].output


@pytest.mark.slow
def test_the_workers_of_a_region_with_another_model_are_refused(cluster: Cluster) -> None:
    cluster.server("--workers", "2", "--steps", "40", "--mode", "sync")
    address = cluster.address
    relays, workers = [], []
    for task in ("linear", "xor"):
        relays.append(cluster.server("--mode", "sync", "--workers", "1", "--upstream", address))
        workers.append(cluster.worker(0, "--task", task))
        if task == "linear":
            relays[0].until(lambda: relays[0].events("tensors"), "offer of its model to the server above")
    assert relays[1].wait() == 12
    assert "differs from the run's" in relays[1].output
    assert workers[1].wait() == 12
