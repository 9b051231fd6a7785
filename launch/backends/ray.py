"""Processes in actors of a Ray cluster, in a placement group with a bundle for each.

One child of the launcher is the Ray job (`launch/hosts/ray_job.py`). It reserves the bundles, and starts an agent in
the bundle of each process, so that each process can be ended and restarted alone. When the launcher ends, the job's
input ends, and Ray ends everything of the job. Python and the folder have the same paths on every node.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from typing import Any

from ...common.errors import UsageError
from ..hosts.agent import end_with
from ..hosts.connection import Connection, agent_command, watched
from ..hosts.ray_job import PASS
from ..plan.hosts import Child, ProcessSpec
from ..supervise.restarts import HOST_LOST
from ..view import object_in
from .base import Backend, OnExit, OnLine, Running, Site, command_text, end_helper, start_helper


class RayBackend(Backend):
    """See `base.Backend`."""

    spans_hosts = True
    has_agent_each = True

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None:
        super().__init__(on_line, on_exit, site)
        self._job: Process | None = None
        self._folder = tempfile.mkdtemp(prefix="ps-ray-")  # of the job's socket
        self._bundles: dict[Child, int] = {}

    async def prepare(self, specs: Sequence[ProcessSpec]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UsageError("--backend ray, and Ray is not installed", fix="pip install 'paramserver[ray]'")
        launch = self._site.config.launch
        self._bundles = {spec.child: index for index, spec in enumerate(specs)}
        options: dict[str, Any] = {
            "address": launch.ray_address,
            "bundles": [self._resources(spec.child) for spec in specs],
            "names": [str(spec.child) for spec in specs],
            "strategy": launch.ray_strategy,
            "wait_s": launch.ray_wait_s,
            "socket": f"{self._folder}/job",
            "command": agent_command(),
            "folder": os.path.abspath(self._site.folder),
        }
        program = (sys.executable, "-m", "paramserver.launch.hosts.ray_job")
        self._job = job = await start_helper(*program, json.dumps(options), preexec_fn=end_with(os.getpid()))
        assert job.stdout is not None and job.stderr is not None
        errors = self._until_closed(watched(job.stderr.read()))
        reply = object_in(await job.stdout.readline())
        if "addresses" not in reply:
            crash = f"the Ray job crashed: {(await errors).decode('utf-8', 'replace')[-300:].strip()}"
            raise UsageError(reply.get("error") or crash, fix=reply.get("fix", ""))
        self._addresses = dict(zip(self._bundles, reply["addresses"], strict=True))

    def _resources(self, child: Child) -> dict[str, float]:
        launch = self._site.config.launch
        return launch.ray_server if child.role == "server" else launch.ray_worker

    async def _agent(self, running: Running) -> tuple[Connection, Mapping[str, str], str]:
        child = running.spec.child
        connection = self._connection(
            name=self._addresses[child],
            command=(sys.executable, "-I", "-S", "-c", PASS, f"{self._folder}/job", str(self._bundles[child])),
            on_command_line=lambda line: self._lines(running, [line]),
        )
        connection.begin()
        num_threads = max(1, int(self._resources(child).get("CPU", 1)))
        return connection, self._threads_env(num_threads), os.path.abspath(self._site.folder)

    def _lost(self, running: Running, connection: Connection) -> tuple[int, str]:
        return HOST_LOST, f"its actor on {connection.name} was lost"

    async def close(self) -> None:
        await super().close()
        if self._job is not None:
            await end_helper(self._job)
        shutil.rmtree(self._folder, ignore_errors=True)

    @classmethod
    def dry_run(cls, specs: Sequence[ProcessSpec], site: Site) -> list[str]:
        launch = site.config.launch
        resources = {"server": json.dumps(launch.ray_server), "worker": json.dumps(launch.ray_worker)}
        location = f"in Ray at {launch.ray_address}"
        return [f"[{spec.child} {location}, {resources[spec.child.role]}] {command_text(spec)}" for spec in specs]


ENTRY = RayBackend
