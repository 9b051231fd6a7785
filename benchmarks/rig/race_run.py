"""One run of a race: servers and workers start on their hosts, train for the same seconds, and are ended.

A server of ours is on the workers' hosts, one shard on each (as `ps-launch --colocate` starts them), so that ours have
the same links as baselines without a server. Or it is on a host of its own.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import mean

from ...common.errors import ParamServerError
from ..output.machine import machine
from .forks import Program, running
from .links import Host
from .racer import WEIGHTS, Race, race_task
from .server_process import clean_environment

_READY_S, _END_S, _TURN_S = 180.0, 60.0, 0.02
_FIRST_PORT = 20_001

Point = tuple[float, float, float]  # seconds, MB on a worker's link, held-out loss


@dataclass(frozen=True)
class Ours:
    """A mode of ours, and its codecs up and down."""

    mode: str
    codec: str = "raw"
    reply_codec: str = "raw"
    has_peers: bool = False
    above: str = ""  # regions: the mode of the run above; `mode` and no codec are those within a region
    every: int = 1  # steps between two exchanges with the run above

    @property
    def server_settings(self) -> dict[str, str]:
        """All else is as it is by default."""
        found = {"run.mode": self.above or self.mode, "server.insecure": "true", "server.join_timeout_s": "120"}
        return found | ({"policy.local_steps": str(self.every)} if self.above and self.every > 1 else {})

    @property
    def relay_settings(self) -> dict[str, str]:
        codecs = {"upstream.codec": self.codec, "upstream.reply_codec": self.reply_codec}
        codecs["worker.transports"] = "direct,grpc"
        return codecs | {"run.mode": self.mode, "server.insecure": "true", "server.join_timeout_s": "120"}

    @property
    def worker_settings(self) -> dict[str, str]:
        """The processes are on one machine and stand for hosts, so no memory is shared. `overlap` as DDP does."""
        codecs = {} if self.above else {"codec": self.codec, "reply_codec": self.reply_codec}
        return codecs | {"transports": "direct,grpc", "threads": "1", "overlap": "true"}


@dataclass(frozen=True)
class Run:
    """One side with one learning rate and seed."""

    lr: float
    steps: float  # of a worker
    curve: list[Point]
    load: float = 0.0  # load average of the machine at the end
    seed: int = 0
    start_s: float = 0.0  # until all were ready

    @property
    def loss(self) -> float:
        return self.curve[-1][2]


def race_once(race: Race, side: Ours | None, hosts: Sequence[Host], shards: int, number: int) -> Run:
    """One side's run; `race.peer` names the baseline where `side` is None. `number` is another one for each run.

    The last host is the server's own; with None for it, shard I is on the host of worker I."""
    with tempfile.TemporaryDirectory(prefix="ps-race-") as name:
        folder, environment, began = Path(name), clean_environment(), time.monotonic()
        race.write(folder)
        programs = [] if side is None else _servers(side, race, hosts, shards, number, folder)
        if side is not None:
            port = _port(number, 0)
            home = hosts[0] if len(hosts) == (race.regions or len(race.addresses)) else hosts[-1]
            environment |= {f"PS_WORKER__{key.upper()}": value for key, value in side.worker_settings.items()}
            environment |= {"PS_WORKER__SERVER": f"{home.address}:{port}", "PS_LOG__LEVEL": "warning"}
            environment["PS_SERVER__INSECURE"] = "true"  # torch's own connections between peers
        for rank in range(len(race.addresses)):
            argv, host = [str(folder), str(rank)], hosts[race.host_of(rank)]
            of_rank = dict(environment)
            if side is not None and side.above:
                of_rank["PS_WORKER__SERVER"] = f"{host.address}:{_port(number, 1 + race.host_of(rank))}"
            program = Program("paramserver.benchmarks.rig.racer", argv, of_rank, folder / f"log{rank}")
            programs.append((host, program))
        with running(programs) as processes:
            workers = processes[-len(race.addresses) :]
            servers = processes[: -len(race.addresses)]
            _wait(folder, "ready", workers, servers, _READY_S)
            start_s = time.monotonic() - began
            (folder / "start.new").write_text(str(time.monotonic() + 0.2))
            (folder / "start.new").rename(folder / "start")
            _wait(folder, "done", workers, servers, race.seconds + _END_S)
        load = os.getloadavg()[0]
        seen = [json.loads((folder / f"done{rank}").read_text()) for rank in range(len(workers))]
        steps = mean(samples[-1][1] for samples in seen)
        return Run(race.lr, steps, _curve(seen, folder), load, race.seed, start_s)


def _port(number: int, shard: int) -> int:
    """Another one for each run: the last one's connections may linger."""
    return _FIRST_PORT + (number * 16 + shard) % 40_000


def _servers(
    side: Ours, race: Race, hosts: Sequence[Host], shards: int, number: int, folder: Path
) -> list[tuple[Host, Program]]:
    found = []
    has_home = len(hosts) > (race.regions or len(race.addresses))
    shards = 1 if has_home or side.has_peers else shards  # gradients between peers do not pass a server
    homes = hosts[-1:] if has_home else hosts[:shards]
    num_workers = race.regions if side.above else len(race.addresses)
    settings = {**side.server_settings, "run.workers": str(num_workers), "server.shards": str(shards)}
    for shard, home in enumerate(homes):
        argv = ["--no-store", "--listen", f"{home.address}:{_port(number, shard)}", "--shard", str(shard)]
        if shard:
            argv += ["--coordinator", f"{homes[0].address}:{_port(number, 0)}"]
        argv += [f"--set={key}={value}" for key, value in settings.items()]
        log = folder / f"server{shard}"
        environment = {**clean_environment(), "PS_LOG__LEVEL": "warning"}
        found.append((home, Program("paramserver.ps.main", argv, environment, log)))
    for region, home in enumerate(hosts[: race.regions] if side.above else ()):
        argv = ["--no-store", "--listen", f"{home.address}:{_port(number, 1 + region)}"]
        argv += ["--upstream", f"{homes[0].address}:{_port(number, 0)}", "--upstream-rank", str(region)]
        settings = {**side.relay_settings, "run.workers": str(len(race.addresses) // race.regions)}
        argv += [f"--set={key}={value}" for key, value in settings.items()]
        environment = {**clean_environment(), "PS_LOG__LEVEL": "warning"}
        found.append((home, Program("paramserver.ps.main", argv, environment, folder / f"server{1 + region}")))
    return found


def _wait(
    folder: Path, state: str, workers: Sequence[BaseProcess], servers: Sequence[BaseProcess], most_s: float
) -> None:
    """Until every worker has posted `state`. ParamServerError, with the last line of its log, when one cannot."""
    deadline = time.monotonic() + most_s
    missing = set(range(len(workers)))
    while missing:
        ended = {rank for rank in missing if not workers[rank].is_alive()}
        missing -= {rank for rank in missing if (folder / f"{state}{rank}").exists()}
        for shard, server in enumerate(servers):
            if missing and not server.is_alive():
                raise ParamServerError(f"the server ended early: {_last_lines(folder / f'server{shard}')}")
        if missing and (failed := sorted(missing & ended)):
            raise ParamServerError(f"worker {failed[0]} ended early: {_last_lines(folder / f'log{failed[0]}')}")
        if missing and time.monotonic() > deadline:
            raise ParamServerError(f"worker {min(missing)} was not {state} after {most_s:g} s")
        time.sleep(_TURN_S)


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " ".join(map(str.strip, lines[-2:]))[-300:]


def _curve(seen: list[list[list[float]]], folder: Path) -> list[Point]:
    """The samples of a run whose workers have ended: evaluates the weights that rank 0 kept."""
    import torch
    from safetensors.torch import load_file
    from torch.nn.utils import vector_to_parameters

    torch.set_num_threads(int(machine()["cores"]))
    task = race_task()
    model, points = task.model(), []
    weights = load_file(folder / WEIGHTS)
    loss, before = 0.0, None
    for index in range(len(weights)):
        now = weights[str(index)]
        if before is None or not torch.equal(before, now):
            vector_to_parameters(now, model.parameters())
            loss, before = float(task.evaluate(model)["loss"]), now
        link_mb = mean(samples[index][2] for samples in seen) / 1e6
        points.append((seen[0][index][0], link_mb, loss))
    return points
