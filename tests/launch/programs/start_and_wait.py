"""Starts one fake worker in the backend named on the command line and waits to be killed."""

import asyncio
import sys
from pathlib import Path

from paramserver.common.registry import BACKENDS
from paramserver.launch.plan import Child, ProcessSpec


async def main() -> None:
    backend = BACKENDS.load(sys.argv[1])(
        lambda child, line: print(line, flush=True), lambda child, code: print("ended", code, flush=True)
    )
    worker = str(Path(__file__).with_name("fake_worker.py"))
    argv = (sys.executable, worker, "--rank", "0", "--server", "none")
    backend.start(ProcessSpec(Child("worker", 0), argv, {"FAKE_WORKER": "family"}))
    await asyncio.Event().wait()


asyncio.run(main())
