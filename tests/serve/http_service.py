"""ps-serve in the test's process, behind its real HTTP server."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from paramserver.common.config.conditions import every
from paramserver.common.config.schema import Config, ServeConfig
from paramserver.serve.source import Follower, WeightsFile
from paramserver.tests.serve.conftest import Served

pytest.importorskip("starlette", reason="pip install 'paramserver[serve]'")
from paramserver.serve.app import Service, rules
from paramserver.tests.serve.test_api import ask
from paramserver.web.http import HttpServer


class HttpService:
    """Serves a task at `url`."""

    def __init__(self, task: Any, **options: Any) -> None:
        settings = ServeConfig(**options)
        self.served, self._folder = Served(task, settings), tempfile.TemporaryDirectory()
        file = Path(self._folder.name, "unused.safetensors")
        save_file({}, file)
        source = WeightsFile(file, "run")
        follower = Follower(self.served.engine, source, every("10s"), lambda error: None)
        self._http = HttpServer("127.0.0.1:0", Config(), rules(settings), name="ps-serve", flag="--listen")
        self._http.start(Service("small", self.served.engine, follower).app())
        self.url = self._http.url("/")

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the JSON of a reply. A request without a body is a GET."""
        return ask(self.url.rstrip("/"), path, body)[:2]

    def close(self) -> None:
        self.served.engine.close()
        self._http.close()
