"""What a job has not chosen: the folder and its files, the locale, what a script has changed in torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.tests.cluster import Cluster

# The model and the data are on the CPU; every other tensor that torch creates has no memory.
ON_ANOTHER_DEVICE = """
import torch
torch.set_default_device("meta")
import paramserver
session = paramserver.connect()
model = torch.nn.Sequential(torch.nn.Linear(4, 8, device="cpu"), torch.nn.Linear(8, 1, device="cpu"))
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
x = torch.linspace(-1, 1, 256, device="cpu").view(64, 4)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return x[i]
for batch in session.shard(Data(), batch_size=8):
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    session.record(loss=float(loss))
session.finish()
assert all(item.device.type == "cpu" for item in model.state_dict().values())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [("sync",), ("allreduce",), ("diloco", "--local-steps", "2"), ("async", "--set", "worker.codec=topk")]
)
def test_a_default_device_of_the_script_changes_nothing_of_ours(cluster: Cluster, flags: tuple[str, ...]) -> None:
    (cluster.folder / "train.py").write_text(ON_ANOTHER_DEVICE)
    done = cluster.command("launch", "-n", "2", "--max-restarts", "0", "--mode", *flags, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr


SCRIPT = """
import grpc, torch, paramserver
session = paramserver.connect()
model = torch.nn.Linear(4, 1)
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
for (x,) in session.shard(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=8, num_workers=2):
    optimizer.zero_grad(); model(x).pow(2).mean().backward(); optimizer.step()
session.finish()
"""


@pytest.mark.slow
def test_grpc_of_the_script_lets_loader_processes_fork(cluster: Cluster) -> None:
    (cluster.folder / "train.py").write_text(SCRIPT)
    done = cluster.command("launch", "-n", "1", "--max-restarts", "0", "--mode", "sync", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fork" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paramserver", "queue"])
def test_a_file_that_hides_a_module_is_named(cluster: Cluster, name: str) -> None:
    (cluster.folder / "train.py").write_text(SCRIPT.replace("import grpc, torch, paramserver", "import paramserver"))
    (cluster.folder / f"{name}.py").touch()
    done = cluster.command("launch", "-n", "1", "--max-restarts", "0", "--mode", "sync", "train.py")
    assert done.returncode == 1
    assert f"{cluster.folder / name}.py hides the module of that name: rename the file" in done.stderr


def test_a_path_that_is_not_utf8_is_refused_before_the_run(cluster: Cluster) -> None:
    for flag in ("--checkpoint-dir", "--report", "--save"):
        done = cluster.command("launch", "-n", "1", "--task", "xor", "--steps", "5", flag, "/tmp/caf\udce9")
        assert done.returncode == 2
        assert f"flag {flag}: /tmp/caf\\udce9 is not UTF-8" in done.stderr, done.stderr
        assert "relative path" in done.stderr


# ---- standard streams and the locale ----------------------------------------------------------------

PROGRAMS = {
    "ps-launch": "--print-config", "ps-server": "--print-config", "ps-worker": "--print-config --rank 0",
    "ps-serve": "--print-config --server 127.0.0.1:1", "ps-runs": "--help", "ps-sim": "--help", "ps-bench": "--help",
    "ps-certs": "--help",
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_streams_that_cannot_be_written_end_no_program_with_a_traceback(cluster: Cluster, program: str) -> None:
    words = f"{Path(sys.executable).with_name(program)} {PROGRAMS[program]}"
    shell = "; ".join(f"{words} {how}; echo $?" for how in (">&-", "2>&- >out", ">/dev/full", ">out"))
    env = {
        "PATH": os.environ["PATH"],
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "latin-1",
    }
    done = subprocess.run(
        ["sh", "-c", shell], capture_output=True, cwd=cluster.folder, timeout=240, check=False, env=env
    )
    assert done.stdout.split() == [b"0", b"0", b"14", b"0"], (done.stdout, done.stderr)
    assert b"Traceback" not in done.stderr
    assert b"the output cannot be written: No space left on device" in done.stderr


@pytest.mark.slow
def test_a_run_needs_no_streams_and_no_utf8(cluster: Cluster) -> None:
    """Nor a proxy, which the environment names."""
    launch = f"{sys.executable} -m paramserver.launch -n 1 --task linear --steps 4 --mode sync"
    shell = f"{launch} --report rep --summary s.json >&- 2>&-"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PS_"))}
    environ |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "http_proxy": "http://127.0.0.1:1"}
    environ |= {"grpc_proxy": "http://proxy.example:3128", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["sh", "-c", shell], cwd=cluster.folder, timeout=240, check=False, env=environ)
    assert done.returncode == 0
    assert '"version": 4' in (cluster.folder / "s.json").read_text(encoding="utf-8")


def test_an_unreachable_server_is_reported_with_the_proxy_on_the_way(cluster: Cluster) -> None:
    words = [sys.executable, "-m", "paramserver.worker", "--server", "192.0.2.1:50051", "--rank", "0"]
    environ = {**os.environ, "https_proxy": "http://127.0.0.1:1", "PS_WORKER__GIVE_UP_S": "2"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 15
    assert "through the proxy that https_proxy names (no_proxy=192.0.2.1 goes without)" in done.stderr


@pytest.mark.slow
def test_a_job_in_a_folder_that_is_not_utf8_resumes(cluster: Cluster) -> None:
    folder = os.fsencode(cluster.folder) + b"/caf\xe9"
    os.mkdir(folder)
    words = [sys.executable, "-m", "paramserver.launch", "-n", "1", "--task", "linear", "--mode", "sync"]
    for steps, version in ((3, b""), (5, b"version=3")):
        words[7:] = ["--mode", "sync", "--steps", str(steps), "--checkpoint-dir", "snap"]
        done = subprocess.run(words, capture_output=True, timeout=120, check=False, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert version in done.stdout + done.stderr
    assert b"resumed" in done.stdout + done.stderr
