"""What a process says it runs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.config.schema import Config
from paramserver.common.errors import UsageError
from paramserver.common.registry import MODES
from paramserver.common.runstore.process import code_of
from paramserver.common.runstore.record import read_work, what_ran
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.wire.records import MAX_WORK
from paramserver.worker.training.work import Work


def script(*arguments: str) -> dict[str, object]:
    work = Work(Config())
    work.set_script(["train.py", *arguments])
    return work.sections["script"]


def test_arguments_are_on_record_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    assert script("--lr", "0.1", "a b")["arguments"] == "--lr 0.1 'a b'"
    hidden = script("--api-key", "k1", "--hf_token=k2", "--verbose", "x", "--password", "--next", "7")["arguments"]
    assert hidden == "--api-key '***' '--hf_token=***' --verbose x --password --next 7"
    hidden = script("hub.token=k", "--hubToken", "k", "TOKEN=k")["arguments"]
    assert hidden == "'hub.token=***' --hubToken '***' 'TOKEN=***'"
    others = "--tokenizer bpe --max-tokens=512 --pad_token x max_tokens=8 --num-tokens 7"
    assert script(*others.split())["arguments"] == others, "what tells two experiments apart stays"
    work = Work(Config())
    work.add_config({"hf_token": "k", "max_tokens": 8, "DB_PASSWORD": "k"})
    assert work.sections["config"] == {"hf_token": "***", "max_tokens": 8, "DB_PASSWORD": "***"}


def test_a_prompt_and_a_notebook_have_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (None, "/lib/ipykernel_launcher.py"):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
        work = Work(Config())
        work.set_script(["x.py"])
        assert what_ran(Config(), "sync", {}, None, work.sections).work == "" and "script" not in work.sections


def test_the_sizes_of_batches_are_those_of_the_loops() -> None:
    work = Work(Config())
    assert "run" not in work.sections, "unknown before the first loop"
    for size in (16, 16, 64):
        work.add_batch_size(size)
    assert work.sections["run"]["batch_size"] == [16, 64]


def test_a_script_adds_its_hyperparameters_before_its_first_step() -> None:
    work = Work(Config())
    work.add_config(vars(argparse.Namespace(lr=0.1, out=Path("a"), sizes=(1, 2), nested={"x": None})))
    work.add_config({"lr": 0.2, "bad": float("nan")})
    with pytest.raises(UsageError, match=f"characters, and at most {MAX_WORK:,}"):
        Work(Config()).add_config({"text": "x" * MAX_WORK})
    found = read_work(work.text(2))
    assert found["config"] == {"lr": 0.2, "out": "a", "sizes": [1, 2], "nested": {"x": None}, "bad": "nan"}
    assert found["launch"] == {"group": 2}
    with pytest.raises(UsageError, match="after the first step"):
        work.add_config({"late": 1})


@given(text=st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_what_another_process_says_is_read_or_says_nothing(text: str) -> None:
    assert all(isinstance(values, dict) for values in read_work(text).values())
    found = read_work('{"security": {"token": 1}, "run": {"batch_size": 3}, "task": 7}')
    assert found == {"run": {"batch_size": 3}}, "only sections of workers"


def test_a_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("1\n")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    clean = code_of(file, asks_git=True)
    assert len(clean["commit"]) == 40 and clean["is_dirty"] is False
    file.write_text("2\n")
    dirty = code_of(file, asks_git=True)
    assert (dirty["commit"], dirty["is_dirty"]) == (clean["commit"], True) and dirty["digest"] != clean["digest"]
    assert code_of(tmp_path / "missing.py", asks_git=True) == {}


@pytest.mark.parametrize("mode", MODES.names())
def test_what_no_worker_has_said_is_unknown_and_what_the_mode_decides_is_known(mode: str) -> None:
    config = Config()
    found = what_ran(config, mode, config.policy.options(mode).model_dump(mode="json"), None, {}).settings
    assert found["run"]["batch_size"] is None
    unknown = {"script", "task", "optimizer", "train", "loader", "worker", "slowdown", "config"}
    assert not unknown & found.keys()
    assert MODES.load(mode).Options.model_fields.keys() <= found["policy"].keys()
    adam = OptimizerSpec("Adam", (GroupSpec((), {"lr": 0.3}),))
    known = what_ran(config, mode, {}, adam, {"run": {"batch_size": 8}, "config": {"a": 1}}).settings
    assert (known["optimizer"]["lr"], known["run"]["batch_size"], known["config"]) == (0.3, 8, {"a": 1})
