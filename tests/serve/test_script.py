"""`paramserver.serve_model()`: a script serves its own model, from a file or a live run."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file
from torch import nn

from paramserver.tests.cluster import Cluster
from paramserver.tests.serve.test_api import Client

pytest.importorskip("starlette", reason="pip install 'paramserver[serve]'")

SCRIPT = """
import torch, paramserver

def make():
    return torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))

paramserver.serve_model(make, {weights}, listen="127.0.0.1:0", context=64,
                        encode=lambda text: list(text.encode()), decode=lambda tokens: bytes(tokens).decode("latin1"))
"""


@pytest.mark.slow
def test_a_script_serves_its_model(cluster: Cluster) -> None:
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
    save_file(model.state_dict(), cluster.folder / "w.safetensors")
    script = cluster.folder / "serve.py"
    script.write_text(SCRIPT.format(weights="'w.safetensors'"))
    client = Client(cluster.start("script", str(script), PS_LOG__FORMAT="json"))
    status, reply, _ = client.ask("/v1/completions", {"prompt": "a", "max_tokens": 3, "temperature": 0})
    assert (status, reply["usage"]["completion_tokens"], reply["model"]) == (200, 3, "model"), reply
    script.write_text(SCRIPT.format(weights="None"))
    lost = cluster.start("lost", str(script))
    assert lost.wait() == 1 and "give HOST:PORT or FILE.safetensors to serve_model()" in lost.output
    grouped = cluster.start("grouped", str(script), PS_SERVE__GROUP="2", PS_SERVER="127.0.0.1:1")
    grouped.event("waiting_for_server")
