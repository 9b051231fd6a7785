"""A server above, regions with two workers each, and the weight with which each contribution was applied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.faults.proxy import Proxy

STEPS = 24
COUNTING = Path(__file__).with_name("counting.py")
OFTEN = ("--set", "server.status_interval_s=0.05")
OUTER = ("--outer-lr", "1", "--outer-momentum", "0")
WAITING = ("--upstream-every", "0")  # of a relay
# The mode above and its flags.
ABOVE = {
    "sync": ("sync",),
    "localsgd": ("localsgd", "--local-steps", "4"),
    "localsgd of 1 step": ("localsgd", "--local-steps", "1"),
    "diloco": ("diloco", "--local-steps", "4", *OUTER),
    "diloco, delayed": ("diloco", "--local-steps", "4", *OUTER, "--delayed-update"),
    "fragments": ("diloco", "--local-steps", "4", *OUTER, "--fragments", "2"),
    "async_diloco": ("async_diloco", "--local-steps", "4", *OUTER),
}
# The mode of a region and its flags, and the weight of one worker's contribution in the region's weights.
BELOW = {
    "sync": (("sync",), 0.5),
    "async": (("async",), 1.0),
    "ssp": (("ssp", "--staleness", "1"), 1.0),
    "dssp": (("dssp",), 1.0),
    "buffered": (("buffered",), 0.5),
    "localsgd": (("localsgd", "--local-steps", "2"), 0.5),
    "diloco": (("diloco", "--local-steps", "3", *OUTER), 0.5),
    "allreduce": (("allreduce",), 0.5),
}


class World:
    """A server above, and relays with two workers each. `above` and `below` are names of modes in the tables."""

    def __init__(
        self, cluster: Cluster, above: str, *flags: str, below: str = "sync", num_regions: int = 2,
        min_workers: int | None = None,
    ) -> None:  # fmt: skip
        self.cluster, self.above_flags, self.below = cluster, (*ABOVE[above], *flags), below
        self.num_regions, self.min_workers = num_regions, min_workers or num_regions
        self.above = self._start_above()
        self.address = cluster.address
        self.relays: list[Process] = []
        self.addresses: list[str] = []

    def _start_above(self, *flags: str) -> Process:
        return self.cluster.server(
            "--mode", *self.above_flags, "--workers", str(self.num_regions), "--steps", str(STEPS), "--save",
            "w.safetensors", "--set", "policy.weighting=equal", "--set", f"policy.min_workers={self.min_workers}",
            "--history", "above.jsonl", "--summary", "above.json", "--set", "server.absent_s=15", *flags,
        )  # fmt: skip

    def restart_above(self) -> None:
        self.above = self._start_above("--listen", self.address)

    def relay(self, rank: int, *flags: str) -> Process:
        """Start the relay of a region, at the address of an earlier one."""
        again = ("--listen", self.addresses[rank]) if rank < len(self.addresses) else ()
        relay = self.cluster.server(
            "--mode", *BELOW[self.below][0], "--workers", "2", "--upstream", self.address, "--upstream-rank", str(rank),
            "--set", "policy.weighting=equal", "--set", "server.absent_s=15", *OFTEN, *again, *flags,
        )  # fmt: skip
        self.addresses[rank : rank + 1] = [self.cluster.address]
        self.relays[rank : rank + 1] = [relay]
        return relay

    def start(self, *flags: str, **of_workers: Any) -> list[Process]:
        """Start the relays of both regions with these flags, in which {rank} is filled in, and then all workers."""
        for rank in range(2):
            self.relay(rank, *(flag.format(rank=rank) for flag in flags))
        return self.workers(**of_workers)

    def relay_behind(self, proxy: Proxy, rank: int, *flags: str) -> Process:
        """Start a relay whose connection to the server above goes through this proxy."""
        target, self.address = self.address, proxy.address
        relay = self.relay(rank, *flags)
        self.address = target
        return relay

    def workers(
        self, delay_s: float = 0.0, stop_at: int = 0, large: Mapping[int, str] = MappingProxyType({})
    ) -> list[Process]:
        """Start all workers. `large`: COUNTING_LARGE of some, by their number in all regions."""
        found = []
        for rank in range(len(self.addresses)):
            for worker in range(2):
                environ = {"COUNTING_LARGE": text} if (text := large.get(2 * rank + worker)) else {}
                found.append(self.worker(rank, worker, delay_s, 0 if rank + worker else stop_at, **environ))
        return found

    def worker(self, rank: int, worker: int, delay_s: float = 0.0, stop_at: int = 0, **environ: str) -> Process:
        """Start this worker of a region."""
        self.cluster.address = self.addresses[rank]
        scale = 2.0 / BELOW[self.below][1]  # so that each contribution has weight 1 in the end
        argv = (str(2 * rank + worker), str(STEPS), str(scale), str(delay_s), str(stop_at))
        return self.cluster.script(worker, COUNTING, *argv, **environ)

    def wait(self, workers: list[Process]) -> torch.Tensor:
        """Wait until all processes have ended well. Return the weights, as `weights`."""
        assert [worker.wait() for worker in workers] == [0] * len(workers)
        assert [process.wait() for process in (*self.relays, self.above)] == [0] * (len(self.relays) + 1), (
            self.above.output
        )
        return self.weights()

    def weights(self) -> torch.Tensor:
        """[4, STEPS]: the weight with which each contribution was applied."""
        num_workers = 2 * self.num_regions
        return -load_file(self.cluster.folder / "w.safetensors")["seen"].view(-1, STEPS)[:num_workers]


def until_version(process: Process, version: int) -> None:
    process.until(lambda: any(event["version"] >= version for event in process.events("status")), f"version {version}")


def assert_weights(weights: torch.Tensor, least: float = 1.0, most: float = 1.0) -> None:
    """Check that these weights of contributions are whole numbers in this range."""
    torch.testing.assert_close(weights, weights.round().clamp(least, most), rtol=0, atol=1e-9)
