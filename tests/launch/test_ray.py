"""ps-launch on a Ray cluster of three nodes: a run, and what is said where it cannot be."""

from __future__ import annotations

import sys

import pytest

from paramserver.common.errors import UsageError
from paramserver.launch.backends import ray as backend
from paramserver.launch.hosts.ray_job import _reserved
from paramserver.tests.launch.conftest import Marked

SMALL = ("--task", "linear", "--steps", "20", "--set", "server.insecure=true", "--backend", "ray")


@pytest.mark.slow
@pytest.mark.timeout(300)  # the cluster starts too
def test_a_run_on_three_nodes(marked: Marked, ray_address: str) -> None:
    argv = (
        "-m", "paramserver.launch", "-n", "2", *SMALL, "--set", "launch.ray_strategy=STRICT_SPREAD", "--summary",
        "s.json",
    )  # fmt: skip
    process = marked.start(*argv, PS_LAUNCH__RAY_ADDRESS=ray_address)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    assert (marked.folder / "s.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)  # the cluster starts too
def test_what_no_node_has_is_named(marked: Marked, ray_address: str) -> None:
    argv = ("-m", "paramserver.launch", "-n", "2", *SMALL, "--set", "launch.ray_worker={CPU: 1, GPU: 2}")
    process = marked.start(*argv, PS_LAUNCH__RAY_ADDRESS=ray_address)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 2
    assert f"worker 0 asks for CPU 1, GPU 2, and no node of the Ray cluster at {ray_address} has that" in err
    assert "the most of each is CPU 4, GPU 0" in err


class FakeCluster:
    """What of `ray` is asked before anything is reserved."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": node} for node in self._nodes]


def test_resources_are_looked_for_on_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"address": "h:1", "bundles": [{"CPU": 3, "GPU": 1}], "names": ["worker 0"]}
    assert _reserved(FakeCluster({"CPU": 4}, {"CPU": 2, "GPU": 1}), options) is None
    assert "worker 0 asks for CPU 3, GPU 1, and no node" in capsys.readouterr().out


def test_ray_that_is_not_installed_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    import asyncio

    from paramserver.common.config.schema import Config
    from paramserver.launch.backends.base import Site

    async def prepare() -> None:
        made = backend.RayBackend(lambda *_: None, lambda *_: None, Site(config=Config()))
        try:
            await made.prepare([])
        finally:
            await made.close()

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="Ray is not installed") as caught:
        asyncio.run(prepare())
    assert caught.value.fix == "pip install 'paramserver[ray]'"
