"""Processes in actors of a Ray cluster, in a placement group with a bundle for each.

One child of the launcher is the Ray job (`launch/hosts/ray_job.py`): it holds the bundles, and puts an agent into the
one of each process that is started, so that each can be ended and started again alone. When the launcher ends, however
it does, the job's input ends, and Ray ends what the job had. Python and the folder are at the same paths on every node.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Any

from ...common.errors import UsageError
from ...common.wire.json_text import read_json
from ..hosts.agent import end_with
from ..hosts.connection import Connection, agent_command, watched
from ..hosts.ray_job import PASS
from ..plan.process import Child, ProcessSpec
from ..supervise.exits import HOST_LOST
from .base import Backend, OnExit, OnLine, Running, Site, command_text, end_helper, handed_on


class RayBackend(Backend):
    """See `base.Backend`."""

    spans_hosts = True
    has_agent_each = True

    def __init__(self, on_line: OnLine, on_exit: OnExit, site: Site) -> None:
        super().__init__(on_line, on_exit, site)
        self._job: Process | None = None
        self._folder = tempfile.mkdtemp(prefix="ps-ray-")  # of the job's socket
        self._bundles: dict[Child, int] = {}
        self._nodes: list[tuple[str, str]] = []  # of each bundle: id and address

    async def prepare(self, specs: Sequence[ProcessSpec]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UsageError("--backend ray, and Ray is not installed", fix="pip install 'paramserver[ray]'")
        launch = self._site.config.launch
        self._bundles = {spec.child: index for index, spec in enumerate(specs)}
        options: dict[str, Any] = {
            "address": launch.ray_address,
            "bundles": [self._asked(spec.child) for spec in specs],
            "names": [str(spec.child) for spec in specs],
            "strategy": launch.ray_strategy,
            "wait_s": launch.ray_wait_s,
            "socket": self._socket,
            "command": agent_command(),
            "folder": os.path.abspath(self._site.folder),
        }
        self._job = job = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "paramserver.launch.hosts.ray_job", json.dumps(options),
            stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, preexec_fn=end_with(os.getpid()),
        )  # fmt: skip
        assert job.stdout is not None and job.stderr is not None
        telling = self._until_closed(watched(_read(job.stderr)))
        try:
            told = read_json(await job.stdout.readline() or "{}")
        except ValueError:
            told = {}
        if "nodes" not in told:
            why = told.get("error") or f"the Ray job ended without a word: {(await telling)[-300:].strip()}"
            raise UsageError(why, fix=told.get("fix", ""))
        self._nodes = [(node, address) for node, address in told["nodes"]]

    def _asked(self, child: Child) -> dict[str, float]:
        launch = self._site.config.launch
        return launch.ray_server if child.role == "server" else launch.ray_worker

    @property
    def _socket(self) -> str:
        return f"{self._folder}/job"

    async def _agent(self, running: Running) -> tuple[Connection, Mapping[str, str], str]:
        bundle = self._bundles[running.spec.child]
        connection = self._connection(
            name=self._nodes[bundle][1],
            command=(sys.executable, "-I", "-S", "-c", PASS, self._socket, str(bundle)),
            on_said=lambda line: self._said(running, [line]),
        )
        connection.begin()
        num_threads = max(1, int(self._asked(running.spec.child).get("CPU", 1)))
        env = handed_on(os.environ) | self._threads_env(num_threads)
        return connection, {**env, **running.spec.env}, os.path.abspath(self._site.folder)

    def _host_of(self, child: Child) -> str:
        return self._nodes[self._bundles[child]][1]

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
        asked = {"server": launch.ray_server, "worker": launch.ray_worker}
        return [
            f"[{spec.child} in Ray at {launch.ray_address}, {json.dumps(asked[spec.child.role])}] {command_text(spec)}"
            for spec in specs
        ]


async def _read(stream: asyncio.StreamReader) -> str:
    return (await stream.read()).decode("utf-8", "replace")


ENTRY = RayBackend
