"""Words of other tools and earlier versions end in a sentence that names ours, and every flag that it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from paramserver.common import synonyms
from paramserver.common.config.cli import run_command, single_app
from paramserver.common.config.flags import settings
from paramserver.common.config.option import LAUNCHER, SERVE, SERVER, WORKER
from paramserver.common.config.schema import Config
from paramserver.common.config.sources import load_config
from paramserver.common.errors import UsageError
from paramserver.common.registry import CODECS, MODES
from paramserver.common.runstore.record import Record
from paramserver.launch import main as launch_main
from paramserver.launch.main import launch
from paramserver.ps.main import serve as server
from paramserver.serve.main import serve
from paramserver.worker.main import work

COMMANDS = {LAUNCHER: launch, SERVER: server, WORKER: work, SERVE: serve}


def test_every_flag_that_a_sentence_names_exists() -> None:
    command = typer.main.get_command(single_app(LAUNCHER, launch, []))
    known = {name for parameter in command.params for name in parameter.opts}
    for word in synonyms.FLAGS:
        for part in re.split(r"[;,]", synonyms.of_flag(LAUNCHER, f"--{word}")):
            named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", part))
            assert named <= known or re.search(r"ps-(server|worker|runs)", part), (word, part)


@pytest.mark.parametrize(
    ("words", "program", "fix"),
    [
        ("--np 2", LAUNCHER, "-n N"), ("-np 2", LAUNCHER, "-n N"), ("--nproc_per_node=2", LAUNCHER, "-n N"),
        ("--num-workers 2", LAUNCHER, "-n N"), ("--gpus 2", LAUNCHER, "-n N"), ("--dashboard", LAUNCHER, "--web"),
        ("--metrics 9000", LAUNCHER, "--set server.metrics="), ("--wandb", LAUNCHER, "--track"),
        ("run.steps=20", LAUNCHER, "--set run.steps=20"), ("--run.steps=20", LAUNCHER, "--set run.steps="),
        ("a.yaml run.steps=20", LAUNCHER, "--set run.steps=20"), ("--mode ddp", LAUNCHER, "--mode allreduce"),
        ("--resume", LAUNCHER, "latest, never or PATH"), ("--resume --steps 5", LAUNCHER, "latest, never or PATH"),
        ("--web 127.0.0.1:80", LAUNCHER, "--set server.web=127.0.0.1:80"), ("status", LAUNCHER, "ps-runs list"),
        ("serve", LAUNCHER, "--serve"), ("--port 3", SERVER, "--listen"), ("--port 3", WORKER, "--server"),
        ("--port 3", SERVE, "--listen"), ("--steps --lr 3", LAUNCHER, "--steps VALUE"), 
        ("--mode sync --lr", LAUNCHER, "--lr VALUE"),
    ],
)  # fmt: skip
def test_a_word_of_another_tool_is_answered_with_ours(
    words: str, program: str, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program, *words.split()])
    with pytest.raises(SystemExit) as ended:
        launch_main.main() if program == LAUNCHER else run_command(program, COMMANDS[program])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert fix in error.partition("fix: ")[2], error
    assert "Possible options" not in error


def test_no_word_of_ours_is_a_synonym() -> None:
    assert set(synonyms.NAMES["mode"]).isdisjoint(MODES.names())
    assert set(synonyms.NAMES["codec"]).isdisjoint(CODECS.names())
    assert set(synonyms.COMMANDS[LAUNCHER]).isdisjoint(launch_main._COMMANDS)


@pytest.mark.parametrize(
    ("words", "fix"),
    [("rm last", "ps-runs delete"), ("serve", "ps-runs ui"), ("ls", "list"),
     *((words, "`last` is the newest run") for words in ("show latest", "compare newest last", "plot -1"))],
)  # fmt: skip
def test_a_word_of_another_tool_is_answered_by_ps_runs(
    words: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paramserver.catalog.main import main

    record = Record(Config.model_validate({"output": {"track_dir": str(tmp_path)}}), run="r", mode="sync")
    assert record.write()
    record.close()
    monkeypatch.setattr(sys, "argv", ["ps-runs", *words.split(), "--db", str(tmp_path / "paramserver.db")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert fix in capsys.readouterr().err.partition("fix: ")[2]


def test_the_package_names_its_programs() -> None:
    done = subprocess.run([sys.executable, "-m", "paramserver"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "ps-launch -n 4 train.py" in done.stderr


@pytest.mark.parametrize("name", sorted(synonyms.DROPPED_NAMES["codec"]))
def test_a_dropped_codec_is_refused_with_its_fix(name: str) -> None:
    assert name not in CODECS.names()
    with pytest.raises(UsageError, match=f"codec '{name}' was removed") as caught:
        CODECS.check(name)
    assert caught.value.fix == synonyms.DROPPED_NAMES["codec"][name]


@pytest.mark.parametrize("key", sorted(synonyms.DROPPED_SETTINGS))
def test_a_dropped_setting_is_refused_with_its_fix(key: str) -> None:
    assert key not in settings()
    with pytest.raises(UsageError, match=f"--set {key}: {key} was removed") as caught:
        load_config(None, {}, [f"{key}=1"], {})
    assert caught.value.fix == synonyms.DROPPED_SETTINGS[key]


@pytest.mark.parametrize("flag", ["--merge", "--merge-alpha", "--late-compensation"])
def test_a_dropped_flag_is_refused_with_its_fix(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ps-server", "--mode", "diloco", flag, "x"])
    with pytest.raises(SystemExit) as ended:
        run_command(SERVER, server)
    assert ended.value.code == UsageError.exit_code
    assert capsys.readouterr().err == f"ps-server: No such option: {flag}\n  fix: {synonyms.of_dropped_flag(flag)}\n"
