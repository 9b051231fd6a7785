"""docs/example.md: gpt in two workers of two stages each, served over stages while it learns."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paramserver.tests.cluster import Cluster
from paramserver.tests.ports import free_port
from paramserver.tests.serve.test_api import SIZES, ask

pytest.importorskip("starlette", reason="pip install 'paramserver[serve]'")

SMALL = [word for key, size in (SIZES | {"context": 64}).items() for word in ("--set", f"task.args.{key}={size}")]
CONFIG = str(Path(__file__).parents[2] / "configs" / "gpt.yaml")


@pytest.mark.slow
def test_a_model_learns_in_stages_and_replies_meanwhile(cluster: Cluster) -> None:
    port = free_port()
    job = cluster.start(
        "job", "-m", "paramserver.launch", CONFIG, "-n", "2", "--group", "2", "--pipeline", *SMALL, "--steps", "100000",
        "--serve", str(port), "--set", "serve.group=2", "--set", "serve.every=1", "--set", "slowdown.base_s=0.05",
    )  # fmt: skip
    job.event("serving")
    assert {event["stages"] for event in job.events("pipeline")} <= {"1 + 2", "2 + 1"}  # as measured
    versions = set()
    while len(versions) < 3:
        status, reply, _ = ask(f"http://127.0.0.1:{port}", "/v1/completions", {"prompt": "def ", "max_tokens": 8})
        assert status == 200, reply
        versions.add(reply["system_fingerprint"])
    job.signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM, job.output
