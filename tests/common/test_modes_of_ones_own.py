"""A mode in a user's own file: `--mode FILE.py:NAME`, its options, and the sentences for what can be wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.common.config.schema import Config, own_modes
from paramserver.common.config.sources import Resolved, load_config

from .test_config_sources import mistake

MINE = """
from pydantic import Field

from paramserver.common.config.option import Section
from paramserver.ps.policies.single import SinglePolicy


class MineOptions(Section):
    alpha: float = Field(0.5, gt=0, description="how much of it")
    pull_every: int = Field(4, ge=2, description="as async, but never with every one")


class Mine(SinglePolicy):
    Options = MineOptions
    options: MineOptions


class Half(Mine):
    _take = None


NUMBER = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a mode of one's own, relative to the working directory."""
    (tmp_path / "my_mode.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "my_mode.py:Mine"


def load(*sets: str, path: Path | None = None, **flags: str) -> Resolved:
    given = {key.replace("__", "."): value for key, value in flags.items()}
    return load_config(str(path) if path else None, given, list(sets), {})


def test_its_name_is_the_whole_path_and_its_options_are_keys(mine: str, tmp_path: Path) -> None:
    resolved = load("policy.alpha=2", run__mode=mine)
    config = resolved.config
    assert config.run.mode == f"{tmp_path}/my_mode.py:Mine"
    assert config.policy.options(config.run.mode).model_dump() == {"alpha": 2.0, "pull_every": 4}
    rows = {key: (value, origin) for key, value, origin in resolved.rows()}
    assert rows["policy.alpha"] == ("2.0", "--set policy.alpha")
    assert rows["policy.pull_every"] == ("4", "default")  # its own default, not that of another mode


def test_a_key_of_the_file_means_what_the_mode_that_runs_says(mine: str) -> None:
    error = mistake(lambda: load("policy.pull_every=1", run__mode=mine))
    assert "policy.pull_every: input should be greater than or equal to 2" in error.message
    assert load("policy.pull_every=1").config.policy.options("async").pull_every == 1


@pytest.mark.parametrize("first", ["sync", "my_mode.py:Mine"])
def test_one_file_serves_it_and_others(mine: str, first: str, tmp_path: Path) -> None:
    """A flag that overrules the mode of the file leaves the options known that the file sets."""
    path = tmp_path / "run.yaml"
    path.write_text(f"run: {{mode: {mine}}}\npolicy: {{alpha: 2, staleness: 1}}\n")
    config = load(path=path, run__mode=first).config
    assert config.policy.options(f"{tmp_path}/my_mode.py:Mine").alpha == 2.0
    assert config.policy.options("ssp").staleness == 1
    assert config.run.other_modes == ((f"{tmp_path}/my_mode.py:Mine",) if first == "sync" else ())


def test_without_it_its_options_are_unknown(mine: str) -> None:
    assert "unknown key 'policy.alpha'" in mistake(lambda: load("policy.alpha=2")).message
    error = mistake(lambda: load("policy.alpa=2", run__mode=mine))
    assert error.message == "--set policy.alpa: unknown key 'policy.alpa'"
    assert error.fix == "did you mean 'policy.alpha'?"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.py:Mine", None, "no file "),
        ("my_mode.py:Mini", None, "defines no 'Mini'"),
        ("my_mode.py:NUMBER", None, "is no mode"),
        ("my_mode.py:MineOptions", None, "is no mode"),
        ("bad.py:Mine", "import paramserver\n\nnumber = 1 / 0\n", "bad.py:3: ZeroDivisionError"),
        ("bad.py:Mine", "class Mine\n", "bad.py:1: SyntaxError"),
        ("bad.py:Mine", "def f():\n    raise KeyError('x')\n\nf()\n", "bad.py:2: KeyError"),
        (
            "bad.py:Mine",
            "from paramserver.ps.policies.base import Policy\nclass Mine(Policy):\n    pass\n",
            "lacks _take",
        ),
        ("bad.py:Mine", MINE.replace("Field(0.5, ", "Field("), "option alpha has no default"),
        ("bad.py:Mine", MINE.replace("alpha:", "trim:"), "option trim is a setting of every mode"),
    ],
)
def test_what_is_wrong_with_it_is_said(name: str, content: str | None, says: str, mine: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "bad.py").write_text(content)
    error = mistake(lambda: load(run__mode=name))
    assert error.message.startswith("flag --mode: "), error.message
    assert says in error.message
    sys.modules.pop("bad", None)


def test_another_process_cannot_name_a_file(mine: str, tmp_path: Path) -> None:
    """The coordinator's mode replaces the one on a shard's command line, in whichever folder the file is."""
    config = load(run__mode=mine).config
    settings = {"mode": "/elsewhere/my_mode.py:Mine", "other_modes": [], "steps": 7}
    here = {"mode": f"{tmp_path}/my_mode.py:Mine", "other_modes": (), "steps": 7}
    assert own_modes(config.run.modes, settings) == here
    assert own_modes(config.run.modes, {"mode": "sync", "other_modes": []})["mode"] == "sync"
    for strange in ({"mode": "/elsewhere/my_mode.py:Other"}, {"mode": "sync", "other_modes": ["/x/evil.py:Mine"]}):
        error = mistake(lambda strange=strange: own_modes(config.run.modes, strange))
        assert "own settings do not name" in error.message
    assert "own settings do not name" in mistake(lambda: own_modes(Config().run.modes, settings)).message


# ---- the command line --------------------------------------------------------------------------


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", f"paramserver.{program}", *arguments],
        cwd=folder, env=environ, capture_output=True, text=True,
    )  # fmt: skip


def test_its_options_are_flags(mine: str, tmp_path: Path) -> None:
    shown = run("ps", "--mode", mine, "--help", folder=tmp_path)
    assert "--alpha" in shown.stdout
    assert "how much of it" in shown.stdout
    printed = run("launch", f"--mode={mine}", "--alpha", "2", "--print-config", folder=tmp_path)
    row = next(line.split() for line in printed.stdout.splitlines() if line.startswith("policy.alpha"))
    assert row == ["policy.alpha", "2.0", "flag", "--alpha"]
    wrong = run("ps", "--mode", mine, "--alpha", "-1", folder=tmp_path)
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (2, False)
    assert "flag --alpha: policy.alpha: input should be greater than 0" in wrong.stderr


def test_the_launcher_hands_on_the_whole_path(mine: str, tmp_path: Path) -> None:
    shown = run(
        "launch", "--dry-run", "--mode", f"sync,{mine}", "--alpha", "2", "--save", "w.safetensors", folder=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    sync, custom = [line for line in shown.stdout.splitlines() if line.startswith("[server")]
    assert "run.mode=sync" in sync
    assert f"run.mode={tmp_path}/my_mode.py:Mine" in custom
    for server, name in ((sync, "sync"), (custom, "Mine")):
        assert f"run.other_modes=[{tmp_path}/my_mode.py:Mine]" in server.replace("'", "").replace('"', "")
        assert "policy.alpha=2.0" in server
        assert f"output.save=w-{name}.safetensors" in server
    for worker in (line for line in shown.stdout.splitlines() if line.startswith("[worker")):
        assert "my_mode" not in worker  # the server's business: a worker may be where no such file is
        assert "alpha" not in worker
