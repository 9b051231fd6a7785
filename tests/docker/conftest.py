"""Real containers of a real engine: one image for the session, one compose project for each test.

`docker compose` where there is one, docker-compose otherwise; both take the same files. Everything a test
starts is taken down with it, volumes too; the image stays, so that the next run builds in seconds.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
IMAGE = "paramserver-test"
DEADLINE_S = 120.0


def docker(*argv: str, check: bool = True, timeout_s: float = DEADLINE_S, **options: Any) -> str:
    """What a docker command prints; AssertionError with all of it when it fails."""
    done = subprocess.run(["docker", *argv], capture_output=True, text=True, timeout=timeout_s, check=False, **options)
    assert not check or done.returncode == 0, f"docker {argv} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + (done.stderr if not check else "")


def compose_command() -> list[str] | None:
    """Compose v2 where the client has it, otherwise 1.29."""
    v2 = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if v2.returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips where no engine replies."""
    if shutil.which("docker") is None:
        pytest.skip("no docker on this machine: install docker.io and docker-compose")
    if subprocess.run(["docker", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker engine replies (docker version fails): start one")
    if compose_command() is None:
        pytest.skip("neither `docker compose` nor docker-compose on this machine: install docker-compose")


@pytest.fixture(scope="session")
def image(engine: None) -> str:
    """The image of this checkout, built with the classic builder or BuildKit, whatever the engine has."""
    arguments = []
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX"):
        arguments += ["--build-arg", name] if name in os.environ else []
    # The host's network: a package index or proxy that listens on this machine is reached, too.
    docker("build", "--network=host", *arguments, "-t", IMAGE, "-f", "docker/Dockerfile", ".", cwd=ROOT, timeout_s=1200)
    return IMAGE


class Project:
    """One `compose up` with its own names, network and volumes. `extra`: more of its services, as in a file."""

    def __init__(self, image: str, folder: Path, *files: str, extra: dict[str, Any] | None = None, **env: str) -> None:
        self.name = f"pstest{secrets.token_hex(4)}"
        self.folder = folder
        command = compose_command()
        assert command is not None
        self._command = [*command, "-p", self.name]
        for file in files:
            self._command += ["-f", str(ROOT / "docker" / file)]
        if extra is not None:
            override = folder / "extra.yaml"
            override.write_text(yaml.safe_dump({"services": extra}))
            self._command += ["-f", str(override)]
        self._env = {**os.environ, "PARAMSERVER_IMAGE": image, **env}

    def __call__(self, *argv: str, check: bool = True) -> str:
        done = subprocess.run(
            [*self._command, *argv], capture_output=True, text=True, env=self._env, timeout=DEADLINE_S, check=False
        )
        output = done.stdout + done.stderr
        assert not check or done.returncode == 0, f"compose {argv} exited {done.returncode}\n{output}"
        return output

    def logs(self) -> str:
        return self("logs", "--no-color", check=False)

    def ids(self, service: str) -> list[str]:
        """Containers of a service, also those that have ended."""
        labels = [f"label=com.docker.compose.{key}" for key in (f"project={self.name}", f"service={service}")]
        return docker("ps", "-aq", "--no-trunc", "--filter", labels[0], "--filter", labels[1]).split()

    def states(self, service: str) -> list[dict[str, Any]]:
        """The engine's State of each container, with RestartCount."""
        found = json.loads(docker("inspect", *self.ids(service)))
        return [{**load["State"], "RestartCount": load["RestartCount"]} for load in found]

    def until(self, condition: Callable[[], bool], description: str, deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, f"no {description} in {deadline_s:g} s\n{self.logs()}"
            time.sleep(0.5)  # a look at the metrics costs a Python process

    def until_all_exited(self, *services: str) -> None:
        def have() -> bool:
            return all(state["Status"] == "exited" for service in services for state in self.states(service))

        self.until(have, f"end of {services}")

    def exit_codes(self, *services: str) -> list[int]:
        return [state["ExitCode"] for service in services for state in self.states(service)]

    def metrics(self) -> dict[str, float]:
        """The server's metrics; {} while it is not there."""
        code = (
            "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics', timeout=5).read().decode())"
        )
        text = docker("exec", self.ids("server")[0], "python", "-c", code, check=False)
        if not text.startswith("# HELP"):
            return {}
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name + "".join(sample.labels.values()): sample.value for sample in samples}

    def kill(self, container: str) -> None:
        """SIGKILL to the program, as the kernel would for want of memory. `docker kill` is a wish: not healed."""
        docker("exec", container, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")

    def read(self, path: str) -> bytes:
        """A file of the server's volume."""
        target = self.folder / Path(path).name
        docker("cp", f"{self.ids('server')[0]}:{path}", str(target))
        return target.read_bytes()


@pytest.fixture
def up(image: str, tmp_path: Path) -> Iterator[Callable[..., Project]]:
    """Starts a project in the background: up("compose.yaml", STEPS="300")."""
    projects: list[Project] = []

    def start(*files: str, flags: tuple[str, ...] = (), extra: dict[str, Any] | None = None, **env: str) -> Project:
        project = Project(image, tmp_path, *files, extra=extra, **env)
        projects.append(project)
        project(*flags, "up", "-d", "--no-build")
        return project

    yield start
    for project in projects:
        profiles = [word for name in ("monitoring", "serve", "regions") for word in ("--profile", name)]
        project(*profiles, "down", "-v", "-t", "2", check=False)
