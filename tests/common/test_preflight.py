"""What would fail a run is seen in the files, without torch and without running a line of the user's."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paramserver.common.config import preflight
from paramserver.common.config.preflight import (
    check_device,
    check_listening,
    check_optimizer,
    check_resume,
    check_script,
    check_task,
    check_weights,
)
from paramserver.common.config.sections.processes import CheckpointConfig
from paramserver.common.errors import BindError, CheckpointError, ParamServerError, UsageError
from paramserver.common.registry import TASKS
from paramserver.common.tensors.optimizers import known_optimizers

METHODS = "    def model(self): ...\n    def train_data(self): ...\n    def loss(self, m, b): ...\n"
WHOLE = f"{METHODS}    def evaluate(self, m): ...\n"

REFUSED = {
    "no Python": ("class T(\n", "Task.py:1: SyntaxError"),
    "another name": (f"class Other:\n{WHOLE}", "defines no 'T'"),
    "a method is missing": (f"class T:\n{METHODS}", "class T has no evaluate"),
    "missing in its base too": (f"class Base:\n{METHODS}class T(Base):\n    pass\n", "class T has no evaluate"),
    "an argument it does not take": (f"class T:\n    def __init__(self, wide=1): ...\n{WHOLE}", "task.args.hidden"),
    "no arguments at all": (f"class T:\n{WHOLE}", "task.args.hidden"),
    "a function without that argument": ("def T(wide): ...\n", "task.args.hidden"),
    "another name for a class": (f"class A:\n{METHODS}T = A\n", "class A has no evaluate"),
    "null bytes": ("\0", "SyntaxError"),
}
# Where reading cannot know, the worker decides.
TAKEN = {
    "whole": f"class T:\n    def __init__(self, *, hidden): ...\n{WHOLE}",
    "any arguments": f"class T:\n    def __init__(self, **all): ...\n{WHOLE}",
    "a base from elsewhere": "from other import Base\nclass T(Base):\n    pass\n",
    "a decorator": "@made\nclass T:\n    pass\n",
    "a metaclass": "class T(metaclass=Made):\n    pass\n",
    "imported": "from other import T\n",
    "imported in a try": "try:\n    import T\nexcept ImportError:\n    T = None\n",
    "a star": "from other import *\n",
    "made by a call": "T = make()\n",
    "put into globals": "globals()['T'] = int\n",
    "a module's __getattr__": "def __getattr__(name): ...\n",
    "an object's __getattr__": "class T:\n    def __init__(self, hidden): ...\n    def __getattr__(self, name): ...\n",
    "methods that are set": (f"class T:\n    def __init__(self, hidden):\n        self.evaluate = hidden\n{METHODS}"),
    "methods that are assigned": f"class T:\n    def __init__(self, hidden): ...\n    evaluate = other\n{METHODS}",
    "in an if": f"if True:\n  class T:\n    def __init__(self, hidden): ...\n{WHOLE}",
    "of a base here": f"class B:\n    def __init__(self, hidden): ...\n{WHOLE}class T(B):\n    pass\n",
    "in a with": "with open('x') as T:\n    pass\n",
    "in a for": "for T in ():\n    pass\n",
    "several at once": "S, T = 1, 2\n",
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_a_task_that_cannot_be_is_refused_by_reading(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "Task.py").write_text(text)
    with pytest.raises(UsageError, match=words):
        check_task(f"{tmp_path}/Task.py:T", {"hidden": 3})


@pytest.mark.parametrize("text", TAKEN.values(), ids=TAKEN)
def test_what_reading_cannot_know_is_taken(text: str, tmp_path: Path) -> None:
    (tmp_path / "Task.py").write_text(text)
    check_task(f"{tmp_path}/Task.py:T", {"hidden": 3})


@pytest.mark.parametrize("name", TASKS.names())
def test_every_task_of_ours_is_taken(name: str) -> None:
    check_task(name, {})
    with pytest.raises(UsageError, match=f"unknown task.args.made_up of task {name}"):
        check_task(name, {"made_up": 1})


def test_a_file_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(f"raise SystemExit\nclass T:\n{WHOLE}")
    check_task(f"{tmp_path}/task.py:T", {})
    with pytest.raises(UsageError, match=r"no file .*none\.py"):
        check_task(f"{tmp_path}/none.py:T", {})


def test_a_script_that_python_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_text("x = (\n")
    check_script(str(tmp_path / "good.py"))
    with pytest.raises(UsageError, match=r"bad\.py:1: SyntaxError"):
        check_script(str(tmp_path / "bad.py"))


def test_the_names_of_optimizers_are_torchs() -> None:
    """Read from its file, they are what importing it finds."""
    assert preflight.optimizer_names() == sorted(known_optimizers())
    check_optimizer("AdamW")
    with pytest.raises(UsageError, match="unknown optimizer 'adm'"):
        check_optimizer("adm")


def test_a_place_to_resume_from_exists(tmp_path: Path) -> None:
    here, missing = str(tmp_path), str(tmp_path / "none")
    for resume, directory in (("never", missing), (None, missing), (here, None), ("latest", here)):
        check_resume(CheckpointConfig(dir=directory, resume=resume))
    for resume, directory in ((missing, here), ("latest", missing)):
        with pytest.raises(CheckpointError, match=f"no snapshot in {missing} to resume from"):
            check_resume(CheckpointConfig(dir=directory, resume=resume))


def test_weights_are_looked_at_by_their_header(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({}, path)
    check_weights(str(path))
    save_file({"a": torch.zeros(3, 4), "b": torch.ones(2)}, path, metadata={"who": "me"})
    check_weights(str(path))
    whole = path.read_bytes()
    for cut in (0, 5, 20, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(UsageError, match="is no safetensors file"):
            check_weights(str(path))
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(UsageError, match="is no safetensors file"):
        check_weights(str(path))
    for missing, words in ((tmp_path / "none", "there is no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(UsageError, match=words):
            check_weights(str(missing))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
def test_a_device_that_is_not_here(name: str) -> None:
    with pytest.raises(UsageError, match=f"--device {name}: this machine has 0 CUDA devices"):
        check_device(name)


def test_a_device_that_may_be_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(preflight, "_torch_source", lambda _: version)
    monkeypatch.setattr(preflight, "_DRIVERS", (f"{tmp_path}/nvidia*",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_device("cuda:1")
    for visible in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES hides all"):
            check_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "nvidia0").unlink()
    with pytest.raises(UsageError, match="no driver of a GPU"):
        check_device("cuda")
    check_device("auto")


def test_an_address_that_nobody_can_have() -> None:
    check_listening("127.0.0.1:0", "server.listen")
    for address, words in (("nohost.invalid:0", "is not known here"), ("192.0.2.1:0", "cannot listen on 192.0.2.1:0")):
        with pytest.raises(BindError, match=words):
            check_listening(address, "server.listen")


def test_a_port_is_free_again_when_its_connections_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of which connections are in TIME_WAIT is free; one where somebody listens is not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ParamServerError, match="is in use on this machine"):
            check_listening(address, "flag --port")
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()  # the server's side ends first
    check_listening(address, "flag --port")
