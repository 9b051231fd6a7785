"""Starts one fake worker in the backend named on the command line and waits to be killed."""

import asyncio
import os
import sys
from pathlib import Path

from paramserver.common.config.sources import load_config
from paramserver.common.registry import BACKENDS
from paramserver.launch.backends.base import Site
from paramserver.launch.hosts.remote import hosts_of
from paramserver.launch.plan.hosts import Child, ProcessSpec


async def main() -> None:
    config = load_config(None, {}, [], dict(os.environ)).config
    site = Site(config=config, hosts=hosts_of(config), folder=os.getcwd())
    backend = BACKENDS.load(sys.argv[1])(
        lambda child, line: print(line, flush=True), lambda child, code: print("ended", code, flush=True), site
    )
    worker = str(Path(__file__).with_name("fake_worker.py"))
    argv = (sys.executable, worker, "--rank", "0", "--server", "none")
    spec = ProcessSpec(Child("worker", 0), argv, {"FAKE_WORKER": "family"})
    await backend.prepare([spec])
    backend.start(spec)
    await asyncio.Event().wait()


asyncio.run(main())
