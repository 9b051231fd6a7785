"""What a user does wrong, through the real programs: exit code, what happened, what to do, and nothing lost."""

from __future__ import annotations

import signal
import socket
import textwrap
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paramserver.tests.cluster import at_gates, end_well


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("ps", "--mode", "ssb"), 2, ["unknown mode 'ssb'", "did you mean 'ssp'?"]),
        (("ps", "--mode", "async", "--staleness", "1"), 2, ["flag --staleness: mode async has no such option", "ssp"]),
        (("ps", "--mode", "sync", "--delayed-update"), 2, ["async, async_diloco, diloco, dssp, localsgd, ssp"]),
        (("ps", "--mode", "ssp", "--staleness", "0", "--delayed-update"), 2, ["staleness 0", "--staleness 1"]),
        (("launch", "--mode", "async,sync", "--delayed-update"), 2, ["mode sync", "--delayed-update"]),
        (("ps", "--mode", "async", "--clip-norm", "1"), 2, ["store.clip_norm is 1, and mode async", "sync"]),
        (("ps", "--save", "missing/w.safetensors"), 14, ["no directory missing", "mkdir -p missing"]),
        (("ps", "--listen", "0.0.0.0:0"), 11, ["neither encrypted nor authenticated", "--insecure"]),
        (("ps", "--traces", "localhost:4318"), 2, ["flag --traces: output.traces: is the address of a collector"]),
        (("ps", "--traces", "file:///etc/passwd"), 2, ["a collector, such as http://127.0.0.1:4318"]),
        (("worker", "--rank", "-1"), 2, ["flag --rank", "-1"]),
        (("worker", "--device", "cuda:99"), 2, ["cuda:99", "CUDA devices"]),
        (("worker", "--server", "127.0.0.1:1", "--set", "worker.give_up_s=0.5"), 15, ["127.0.0.1:1", "ps-server"]),
    ],
)  # fmt: skip
def test_mistake_gets_its_exit_code_and_a_way_out(cluster, argv, code, words):
    result = cluster.command(*argv)
    assert result.returncode == code, result.stderr
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "127.0.0.1:{}"], "in use"),
        (["--listen", "127.0.0.1:0", "--set", "server.direct=true", "--set", "server.direct_port={}"],
         "cannot listen on port {} for direct connections"),
    ],
)  # fmt: skip
def test_port_in_use(cluster, flags, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cluster.command("ps", *(flag.format(port) for flag in flags))
    assert result.returncode == 10
    assert words.format(port) in result.stderr


def test_a_signal_while_a_server_is_loading_ends_it_without_a_word_of_others(cluster):
    server = cluster.start("server", "-m", "paramserver.ps", "--listen", "127.0.0.1:0", "--checkpoint-dir", "kept")
    libraries = Path(f"/proc/{server.popen.pid}/maps")
    server.until(lambda: "libtorch" in libraries.read_text(), "torch")
    server.signal(signal.SIGINT)
    assert server.wait() == 130
    assert not any(word in server.output for word in ("Traceback", "Exception", "Warning"))


def test_an_interrupted_script_that_waits_for_a_server_says_one_line(cluster):
    cluster.address = "127.0.0.1:1"
    script = cluster.script(0, "onehot.py", "5")
    assert script.event("waiting_for_server")["reason"] == "connection refused"
    script.signal(signal.SIGINT)
    assert script.wait() in (-signal.SIGINT, 130)
    assert script.output.splitlines()[2:] == ["paramserver: interrupted"]  # after `connecting` and `waiting_for_server`


@pytest.mark.slow
def test_a_task_that_raises_shows_its_own_traceback_and_only_that(cluster):
    (cluster.folder / "mine.py").write_text(
        textwrap.dedent("""
        import torch
        class Mine:
            def model(self): return torch.nn.Linear(2, 1)
            def train_data(self): return torch.utils.data.TensorDataset(torch.zeros(100, 2))
            def loss(self, model, batch): return self.helper(batch)
            def helper(self, batch): raise RuntimeError("my own mistake")
            def evaluate(self, model): return {"loss": 0.0}
        """)
    )
    cluster.server("--steps", "5")
    worker = cluster.worker(0, "--task", "mine.py:Mine")
    assert worker.wait() == 1
    text = worker.output[worker.output.index("Traceback") :]
    assert "RuntimeError: my own mistake" in text
    assert "mine.py" in text
    assert "trainer.py" not in text


@pytest.mark.slow
def test_sigterm_drains_a_worker_and_the_barrier_shrinks(cluster):
    server = cluster.server("--mode", "sync", "--workers", "2", "--steps", "100", "--task", "xor")
    stays = cluster.worker(0, "--set", "task.args={num_samples: 1000}", "--set", "slowdown.base_s=0.02")
    goes = cluster.worker(1, "--set", "task.args={num_samples: 1000}", "--set", "slowdown.base_s=0.02")
    server.event("training_started")
    goes.signal(signal.SIGTERM)
    assert goes.wait() == 143
    end_well(stays, server)
    left = [event for event in server.events("left") if event["rank"] == 1]
    assert left[0]["reason"] == "said goodbye"
    assert server.event("summary")["version"] == 100


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_server_stopped_by_a_signal_writes_its_weights(cluster, number, code):
    server = cluster.server("--mode", "async", "--workers", "1", "--steps", "100000", "--save", "w.safetensors")
    script = cluster.script(0, "onehot.py", "100", str(cluster.folder / "never"), "7")
    at_gates(script)
    server.signal(number)
    assert server.wait() == code, server.output
    assert load_file(cluster.folder / "w.safetensors")["seen"].sum().item() == -7


@pytest.mark.parametrize(("steps", "code"), [("20", 0), ("19", 12)])
def test_a_worker_that_has_not_begun_joins_the_run_of_a_restarted_server(cluster, steps, code):
    """Unless the server has other settings than those that the worker was told."""
    mode = ("--mode", "sync", "--workers", "2")
    server = cluster.server(*mode, "--steps", "20")
    first = cluster.script(0, "onehot.py", "20")
    first.event("tensors")  # it has the settings, and waits for the second worker
    server.kill()
    server = cluster.server(*mode, "--steps", steps, "--listen", cluster.address)
    second = cluster.script(1, "onehot.py", "20")
    assert first.wait() == code, first.output
    if code:
        assert "with other settings than the one before it" in first.output
    else:
        assert [second.wait(), server.wait()] == [0, 0]


@pytest.mark.slow
def test_worker_of_a_restarted_server_says_so(cluster):
    server = cluster.server("--mode", "async", "--workers", "1", "--steps", "1000")
    script = cluster.script(0, "onehot.py", "1000", str(cluster.folder / "go"), "3")
    at_gates(script)
    server.kill()
    cluster.server("--mode", "async", "--workers", "1", "--steps", "1000", "--listen", cluster.address)
    (cluster.folder / "go").touch()
    assert script.wait() == 12
    assert "the restarted server runs" in script.output
