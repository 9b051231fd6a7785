"""Real processes on a real network that fails: namespaces (with root), a TCP proxy (without).

Metrics are printed as `METRIC name value` lines: `pytest -rP tests/faults` shows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paramserver.tests.cluster import DEADLINE_S, Cluster, Process
from paramserver.tests.faults import network
from paramserver.tests.faults.evidence import History, applied
from paramserver.tests.faults.network import Network
from paramserver.tests.faults.proxy import Plan, Proxy
from paramserver.tests.late import come_late

SCRIPTS = Path(__file__).parent / "scripts"
ONE_HOT = Path(__file__).parents[1] / "loopback" / "scripts" / "onehot.py"


class Job(Cluster):
    """One run with a history: a server and workers whose contributions are one-hot vectors, over `transport` alone."""

    def __init__(self, folder: Path, transport: str) -> None:
        super().__init__(folder)
        self.transport = transport
        # Shared memory would go round the network, and the end of a run waits for a worker that may come back.
        self._env |= {
            "PS_WORKER__TRANSPORTS": {"direct": "direct,grpc"}.get(transport, transport),
            "PS_SERVER__ABSENT_S": "30",
        }
        self._env |= {"PS_SERVER__DIRECT": "true"}
        self._env |= {"PS_SERVER__STATUS_INTERVAL_S": "0.2"}
        self.history = History(folder / "history.jsonl")
        self.steps = 0
        self.num_workers = 0

    def serve(self, mode: str, num_workers: int, steps: int, *flags: str, **env: str) -> Process:
        """The server of a run whose final weights say what was applied."""
        self.steps, self.num_workers = steps, num_workers
        return self.server(
            "--mode", mode, "--workers", str(num_workers), "--steps", str(steps), "--save", "w.safetensors",
            "--set", "policy.weighting=equal", "--history", str(self.history.path), *flags, **env,
        )  # fmt: skip

    def work(self, rank: int, pause_s: float = 0.0, padding: int = 0, **env: str) -> Process:
        """A worker that takes `pause_s` a step and exchanges `padding` floats besides."""
        env = {"PS_SLOWDOWN__BASE_S": str(pause_s), "PADDING": str(padding)} | env
        return self.script(rank, ONE_HOT, str(self.steps), **env)

    def proxy(self, plan: Callable[[int], Plan] = lambda _: Plan()) -> Proxy:
        """Before the server that was started last."""
        listening = [process for process in self.processes if process.name.startswith("server")][-1].event("listening")
        return Proxy(self.address, plan, listening["direct_port"] if self.transport == "direct" else 0)

    def until(self, condition: Callable[[], object], description: str, within_s: float = DEADLINE_S) -> None:
        """Wait for something in the history or the logs; every process must be there or have ended well."""
        deadline = time.monotonic() + within_s
        while not condition():
            failed = [process for process in self.processes if process.popen.poll() not in (None, 0, -9)]
            assert not failed, f"{failed[0].name} ended before {description}\n{failed[0].output}"
            assert time.monotonic() < deadline, f"no {description} within {within_s} s\n" + "\n".join(
                f"--- {process.name}\n{process.output[-3000:]}" for process in self.processes
            )
            time.sleep(0.01)
        come_late()

    def end(self, *processes: Process) -> None:
        """All of these end by themselves, and well; workers that were not cut off there have kept to the transport."""
        assert [process.wait() for process in processes] == [0] * len(processes)
        transports = [event["transport"] for process in processes for event in process.events("tensors")[:1]]
        assert set(transports) <= {self.transport}

    def check(self) -> None:
        """Once all have ended: what was applied is what the history says, in equal shares of each version."""
        lineage, expected = self.history.check(), torch.zeros(self.num_workers, self.steps)
        sizes = lineage.sizes()
        for version, rank, number in lineage.commits():
            expected[rank, number - 1] += 1 / sizes[version]
        torch.testing.assert_close(self.applied(), expected)

    def applied(self) -> torch.Tensor:
        """[num_workers, steps]: how often each contribution was applied."""
        return applied(self.folder / "w.safetensors", self.num_workers, self.steps)


class Rig(Job):
    """A job whose server and workers are hosts of a network of their own."""

    def __init__(self, folder: Path, transport: str, net: Network) -> None:
        super().__init__(folder, transport)
        self.net = net

    def serve(self, mode: str, num_workers: int, steps: int, *flags: str, **env: str) -> Process:
        self.prefix = self.net.at(network.SERVER)
        where = () if "--listen" in flags else ("--listen", f"{network.HOST}:0")
        return super().serve(mode, num_workers, steps, "--insecure", *where, *flags, **env)

    def work(self, rank: int, pause_s: float = 0.0, padding: int = 0, **env: str) -> Process:
        self.prefix = self.net.at(rank)
        return super().work(rank, pause_s, padding, **{"PS_SERVER__INSECURE": "true"} | env)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--transport"))


@pytest.fixture
def job(tmp_path: Path, transport: str) -> Iterator[Job]:
    job = Job(tmp_path, transport)
    yield job
    job.stop()


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: Path, transport: str) -> Iterator[Rig]:
    """Two workers, or as many as the test's parameter says; skipped, with the reason, where there can be no
    namespaces."""
    if reason := network.why_not():
        pytest.skip(reason)
    net = Network(num_workers=getattr(request, "param", 2))
    rig = Rig(tmp_path, transport, net)
    try:
        net.set_up()
        yield rig
    finally:
        rig.stop()
        net.tear_down()


@pytest.fixture
def metric(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Print one measured metric."""

    def show(name: str, value: object) -> None:
        shown = f"{value:.3f}" if isinstance(value, float) else value
        print(f"METRIC {request.node.name}: {name} = {shown}", flush=True)

    return show
