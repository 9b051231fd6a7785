"""A server above, regions with two workers each, and the weight with which each contribution was applied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.faults.proxy import Proxy

STEPS = 24
COUNTING = Path(__file__).with_name("counting.py")


class World:
    """A server above, and relays with two workers each."""

    def __init__(
        self, cluster: Cluster, above: str, *flags: str, num_regions: int = 2, min_workers: int | None = None
    ) -> None:
        self.cluster, self.above_flags = cluster, ("--mode", above, *flags)
        self.num_regions, self.min_workers = num_regions, min_workers or num_regions
        self.above = self._start_above()
        self.address = cluster.address
        self.relays: list[Process] = []
        self.addresses: list[str] = []

    def _start_above(self, *flags: str) -> Process:
        return self.cluster.server(
            *self.above_flags, "--workers", str(self.num_regions), "--steps", str(STEPS), "--save", "w.safetensors",
            "--set", "policy.weighting=equal", "--set", f"policy.min_workers={self.min_workers}",
            "--history", "above.jsonl", "--set", "server.absent_s=15", *flags,
        )  # fmt: skip

    def restart_above(self) -> None:
        self.above = self._start_above("--listen", self.address)

    def relay(self, rank: int, *flags: str, mode: str = "sync") -> Process:
        """Start the relay of a region, at the address of an earlier one."""
        again = ("--listen", self.addresses[rank]) if rank < len(self.addresses) else ()
        relay = self.cluster.server(
            "--mode", mode, "--workers", "2", "--upstream", self.address, "--upstream-rank", str(rank),
            "--set", "policy.weighting=equal", "--set", "server.absent_s=15", *again, *flags,
        )  # fmt: skip
        self.addresses[rank : rank + 1] = [self.cluster.address]
        self.relays[rank : rank + 1] = [relay]
        return relay

    def relay_behind(self, proxy: Proxy, rank: int, *flags: str, mode: str = "sync") -> Process:
        """Start a relay whose connection to the server above goes through this proxy."""
        target, self.address = self.address, proxy.address
        relay = self.relay(rank, *flags, mode=mode)
        self.address = target
        return relay

    def workers(
        self, scale: float, delay_s: float = 0.0, stop_at: int = 0, large: Mapping[int, str] = MappingProxyType({})
    ) -> list[Process]:
        """Start all workers. `large`: COUNTING_LARGE of some, by their number in all regions."""
        found = []
        for rank in range(len(self.addresses)):
            for worker in range(2):
                environ = {"COUNTING_LARGE": text} if (text := large.get(2 * rank + worker)) else {}
                found.append(self.worker(rank, worker, scale, delay_s, 0 if rank + worker else stop_at, **environ))
        return found

    def worker(
        self, rank: int, worker: int, scale: float, delay_s: float = 0.0, stop_at: int = 0, **environ: str
    ) -> Process:
        """Start this worker of a region."""
        self.cluster.address = self.addresses[rank]
        argv = (str(2 * rank + worker), str(STEPS), str(scale), str(delay_s), str(stop_at))
        return self.cluster.script(worker, COUNTING, *argv, **environ)

    def check_each_counted_once(self, workers: list[Process]) -> None:
        """Wait for the end of all processes, and check that every contribution has weight 1."""
        assert [worker.wait() for worker in workers] == [0] * len(workers)
        assert [process.wait() for process in (*self.relays, self.above)] == [0] * (len(self.relays) + 1)
        weights = self.weights()
        torch.testing.assert_close(weights, torch.ones_like(weights), rtol=0, atol=1e-9)

    def weights(self) -> torch.Tensor:
        """[4, STEPS]: the weight with which each contribution was applied."""
        num_workers = 2 * self.num_regions
        return -load_file(self.cluster.folder / "w.safetensors")["seen"].view(-1, STEPS)[:num_workers]


# The mode above, its flags, those of a relay, and by how much the run above divides a region's mean.
ABOVE = {
    "sync": ("sync", (), (), 4.0),
    "localsgd, waiting": ("localsgd", ("--local-steps", "1"), ("--upstream-every", "0"), 4.0),
    "localsgd": ("localsgd", ("--local-steps", "4"), (), 4.0),
    "diloco": ("diloco", ("--local-steps", "4", "--outer-lr", "1", "--outer-momentum", "0"), (), 4.0),
    "async_diloco": ("async_diloco", ("--local-steps", "4", "--outer-lr", "1", "--outer-momentum", "0"), (), 4.0),
}
