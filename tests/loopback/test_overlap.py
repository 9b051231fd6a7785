"""Gradients that leave during backward, with the real executables: the same weights to the last bit."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_overlap_changes_nothing_but_time(cluster, shared_memory):
    bodies = {}
    for overlap in ("true", "false"):
        path = cluster.folder / f"{overlap}.safetensors"
        server = cluster.server("--mode", "sync", "--workers", "2", "--steps", "8", "--save", str(path))
        env = {"PS_WORKER__OVERLAP": overlap, "PS_WORKER__SHARED_MEMORY": shared_memory}
        workers = [cluster.script(rank, "wide.py", **env) for rank in range(2)]
        assert [process.wait() for process in (*workers, server)] == [0, 0, 0]
        bodies[overlap] = load_file(path)
    for name, tensor in bodies["false"].items():
        assert tensor.equal(bodies["true"][name]), name
