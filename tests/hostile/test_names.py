"""A name from another process is one of a closed list, or refused: nothing is imported, opened or run for it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.errors import ParamServerError
from paramserver.common.wire.checks import struct
from paramserver.common.wire.records import Row
from paramserver.ps.shards.server import shared_config, with_shared
from paramserver.ps.snapshots.manifest import write
from paramserver.tests.ps.snapshots.making import files_of, manifest_of

from ..cluster import run_forked
from .lying import lying_server, run_worker, settings, welcome, welcoming


@pytest.mark.parametrize(
    ("task", "argument"), [(f"{subprocess.__file__}:Popen", "args"), (f"{os.__file__}:system", "command")]
)
def test_a_server_runs_no_command_on_a_worker(task, argument, tmp_path):
    trace = tmp_path / "trace"
    task_args = {argument: f"touch {trace}"} | ({"shell": True} if argument == "args" else {})
    with lying_server(welcoming(welcome(settings=settings(task=task, task_args=struct(task_args))))) as address:
        ended = run_worker(address, folder=tmp_path)
    assert not trace.exists(), "the server's command has been run"
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 2, ended.stderr
    assert "--task FILE.py:NAME" in ended.stderr


def python_file(tmp_path, trace) -> str:
    """A file that leaves a trace when it is imported."""
    path = tmp_path / "evil.py"
    path.write_text(f"open({str(trace)!r}, 'w')\n\n\nclass Mode:\n    pass\n")
    return f"{path}:Mode"


def keep_snapshot(folder: Path, **changes) -> None:
    """A whole one of a small model, with its hashes, whose manifest says this."""
    manifest = manifest_of(3, rows={0: Row(3, 3)}, num_joins={0: 1}, policy={}, training={})
    write(folder, manifest.model_copy(update=changes), files_of(3))


@pytest.mark.parametrize(
    ("name", "says", "codes"),
    [pytest.param("mode", "already_done", (0,), marks=pytest.mark.slow), ("run", "damaged: run: ", (2, 14))],
)
def test_a_snapshot_names_no_file(name, says, codes, tmp_path):
    trace = tmp_path / "trace"
    named = {"mode": python_file(tmp_path, trace), "run": "../../elsewhere"}[name]
    keep_snapshot(tmp_path / "kept", **{name: named})
    flags = ("--checkpoint-dir", "kept", "--set", "run.workers=1", "--steps", "3")
    argv = ("-m", "paramserver.ps", "--mode", "sync", "--listen", "127.0.0.1:0", *flags)
    ended = run_forked(tmp_path, *argv, environ=dict(os.environ))
    assert not trace.exists(), "the snapshot's file has been run"
    assert ended.returncode in codes, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert says in ended.stderr


def test_a_coordinator_configures_what_holds_for_all_shards_and_nothing_else(tmp_path):
    """It names no file of a shard's: where that keeps, writes or reads is its own to say."""
    own_config = Config(checkpoint={"dir": str(tmp_path / "own")})
    shared = json.loads(shared_config(Config(run={"mode": "async", "steps": 7})))
    config, _ = with_shared(own_config, json.dumps(shared))
    assert (config.run.mode, config.run.steps, config.checkpoint.dir) == ("async", 7, str(tmp_path / "own"))
    for more in (
        {"checkpoint": {"dir": str(tmp_path / "theirs")}}, {"output": {"history": str(tmp_path / "trace")}},
        {"options": 3}, {"run": []}, {"policy": {"x": 1}},
        {"run": {**shared["run"], "mode": python_file(tmp_path, tmp_path / "trace")}},
    ):  # fmt: skip
        with pytest.raises(ParamServerError):
            with_shared(own_config, json.dumps(shared | more))
    for text in ("", "[]", "{}", "[" * 100_000):
        with pytest.raises(ParamServerError):
            with_shared(own_config, text)
    assert not (tmp_path / "trace").exists()
