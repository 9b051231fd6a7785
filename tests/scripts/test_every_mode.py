"""Scripts and options in every mode: a run ends after its steps, or says in a sentence why it cannot begin.

A combination that no other test names may still be what a user types first. `tests/combinations` has the pairs of the
table of combinations; here are options that are not in it.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paramserver.tests.cluster import Cluster

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
MODES = ("sync", "allreduce", "ssp", "dssp", "buffered", "async", "localsgd", "diloco", "async_diloco")
SCRIPTS = {
    "ordinary/branches": 14, "ordinary/language_model": 12, "ordinary/mixed": 8, "ordinary/sparse": 10,
    "ordinary/unfreezing": 12, "parts/gan": 13, "parts/actor_critic": 12,
}  # fmt: skip
OPTIONS = {
    "powersgd": ["--set", "worker.codec=powersgd"],
    "rmsprop": ["--optimizer", "rmsprop", "--set", "optimizer.momentum=0.5"],
    "schedule": ["--optimizer", "adamw", "--lr-schedule", "cosine", "--warmup", "3", "--clip-norm", "1.0"],
    "accumulate": ["--accumulate", "3", "--precision", "bf16"],
    "median": ["--set", "policy.aggregation=median"],
    "backup workers": ["--backup-workers", "1"],
    "evaluations": ["--eval-every", "5", "--best", "loss"],
    "samples": ["--set", "policy.weighting=samples"],
    "torch variables": ["--torch-variables"],
}


def check(cluster: Cluster, num_steps: int, *flags: str, **env: str) -> None:
    done = cluster.command("launch", "-n", "2", "--max-restarts", "0", "--summary", "s.json", *flags, **env)
    text = done.stdout + done.stderr
    assert done.returncode in (0, 2) and "Traceback" not in text, text
    if done.returncode == 2:
        assert "fix" in text or "; use --mode" in text, text
        return
    summary = cluster.summary()
    assert [worker["training_steps"] for worker in summary["workers"]] == [num_steps] * 2, text
    assert summary["loss"] is None or math.isfinite(summary["loss"]), text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_in_every_mode(cluster: Cluster, mode: str, options: str) -> None:
    check(cluster, 15, "--task", "xor", "--steps", "15", "--mode", mode, *OPTIONS[options])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_in_every_mode(cluster: Cluster, mode: str, script: str) -> None:
    """The GAN steps its generator each third time, and last after the last training step began."""
    flags = ("--script", str(HERE / f"{script}.py"), "--mode", mode, "--steps", str(SCRIPTS[script]))
    check(cluster, SCRIPTS[script], *flags, BATCH="10", OUT="weights.pt", EVERY="3")
