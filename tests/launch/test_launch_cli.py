"""The command line: mistakes stop before any process starts, in a second, with the way out."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.common.config.sources import load_config
from paramserver.common.version import PROGRAM_VERSION
from paramserver.launch.main import fold_script_arguments

CONFIGS = Path(__file__).parents[2] / "configs"
STARTED_BY_OTHERS = {"slurm", "torchrun", "compose", "kubernetes"}  # which say how many workers there are


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("program", ["ps", "worker", "launch", "launch.certs", "benchmarks"])
def test_every_program_says_its_version(program: str) -> None:
    command = [sys.executable, "-m", f"paramserver.{program}", "--version"]
    program, text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
    assert program.startswith("ps-")
    assert text.strip() == f"{PROGRAM_VERSION} (protocol 5, snapshots 3, run store 4)"


def libraries_s() -> float:
    """CPU time of the libraries that every command loads, here and now."""
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", "import typer, pydantic; pydantic.BaseModel"], check=True)
    return cpu_seconds() - before


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--stalness", "2"], 2, ["--stalness"]),
        (["own.yaml", "--web", "127.0.0.1:8080"], 2, ["extra argument", "--web takes no value"]),
        (["--mode", "sync,zzzz"], 2, ["unknown mode 'zzzz'", "single"]),
        (["--mode", "sync,bsp"], 2, ["sync is named twice"]),
        (["--set", "launch.backend=locall"], 2, ["unknown backend 'locall'", "did you mean 'local'"]),
        ([], 2, ["no script and no file is given", "ps-launch -n 2 train.py"]),
        (["chek", "h.jsonl"], 2, ["chek is no file and no command", "did you mean 'ps-launch check'?"]),
        (["-n", "2", "no.py", "--epochs", "3"], 2, ["flag --script: no file no.py"]),
        (["--script", "a.py", "train.py"], 2, ["--script and train.py are two scripts"]),
        (["--script", "train.py", "--task", "xor"], 2, ["flag --task together with the script train.py", "leave one"]),
        (["--", "--epochs", "3"], 2, ["arguments after --", "ps-launch FILE.py ARGS"]),
        (["--save", "no/w.safetensors"], 14, ["cannot write no/w.safetensors", "mkdir -p no"]),
        (["--summary", "/proc/s.json"], 14, ["cannot write /proc/s.json"]),
        (["--mode", "single", "--script", __file__], 2, ["batches of its own", f"python {__file__}"]),
        (["--checkpoint-every", "5"], 2, ["every_steps and every_s need checkpoint.dir"]),
        (["--cert", "server.pem"], 2, ["security.cert and security.key go together"]),
        (["--task", "partial.py:Task"], 2, ["class Task has no train_data, loss, evaluate", "a task has the methods"]),
        (["--script", "bad.py"], 2, ["script bad.py: bad.py:1: SyntaxError"]),
        (["--init", "none.safetensors"], 2, ["--init none.safetensors: cannot be read: there is no such file"]),
        (["--set", "server.listen=nohost.invalid:0", "--insecure"], 10, ["host 'nohost.invalid' is not known here"]),
        (["--set", "server.metrics=192.0.2.1:0"], 10, ["server.metrics: cannot listen on 192.0.2.1:0"]),
        (["--report", "train.py/there"], 14, ["the report cannot be written to train.py/there: Not a", "--report DIR"]),
        (["--hosts", "none.yaml"], 2, ["cannot read the hosts"]),
        (["--hosts", "hosts.yaml", "-n", "9"], 2, ["9 workers", "3 slots: far 2, farther 1", "-n 3"]),
        (["--hosts", "hosts.yaml"], 11, ["the server at 10.1.2.3:0 can be reached", "neither encrypted", "--insecure"]),
        (["--hosts", "hosts.yaml", "--backend", "local"], 2, ["flag --backend: backend local takes no hosts"]),
        (["--backend", "ssh"], 2, ["flag --backend: backend ssh needs hosts", "--hosts hosts.yaml"]),
        (["--colocate"], 2, ["--colocate: there are no hosts"]),
        (["--shards", "2", "--set", "server.shard=1"], 2, ["--set server.shard: server.shard belongs to one server"]),
        (["--", "--epochs"], 2, ["arguments after -- (--epochs) belong to a script", "ps-launch FILE.py ARGS"]),
    ],
)
def test_a_mistake_stops_before_anything_starts(argv: list[str], code: int, words: list[str], marked) -> None:
    (marked.folder / "train.py").write_text("")
    (marked.folder / "hosts.yaml").write_text("hosts: [{host: far, address: 10.1.2.3, slots: 2}, farther]\n")
    (marked.folder / "bad.py").write_text("x = (\n")
    (marked.folder / "partial.py").write_text("class Task:\n    def model(self): ...\n")
    before = cpu_seconds()
    run = marked.run(*argv)
    assert (took_s := cpu_seconds() - before) < 1.0 or took_s < 5 * libraries_s()
    assert run.returncode == code, run.stderr
    for word in words:
        assert word in run.stderr
    assert run.stderr.startswith("ps-launch: ")
    assert "Traceback" not in run.stderr
    assert "starting" not in run.stderr + run.stdout
    assert "[server]" not in run.stderr


def test_a_try_of_the_outputs_leaves_no_trace(marked) -> None:
    (marked.folder / "old.json").write_text("old results")
    run = marked.run("--dry-run", "--summary", "old.json", "--save", "new.safetensors")
    assert run.returncode == 0
    assert (marked.folder / "old.json").read_text() == "old results"
    assert not (marked.folder / "new.safetensors").exists()


def test_dry_run_shows_the_commands(marked) -> None:
    run = marked.run("--dry-run", "--mode", "single,ssp", "-n", "3", "--staleness", "1")
    lines = run.stdout.splitlines()
    assert [line.split("]")[0] for line in lines] == [
        "# single: one worker alone, no server, 500 steps, batch 96, task digits",
        "[worker 0",
        "# ssp (staleness 1, lower momentum with more workers, above 8 lower rates for late gradients): "
        "a server and 3 workers, 500 steps, batch 32, task digits",
        *("[server", "[worker 0", "[worker 1", "[worker 2"),
    ]
    assert "--server HOST:PORT --rank 2" in lines[-1]
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("a.yaml -n 2", "a.yaml -n 2"), ("--script t.py -- x -- -n", "--script t.py --script-arg=x --script-arg=-- "
         "--script-arg=-n"),
        ("t.py", "--script t.py"),
        ("-n 4 --mode ssp t.py --lr 3 -n 2", "-n 4 --mode ssp --script t.py --script-arg=--lr --script-arg=3 "
         "--script-arg=-n --script-arg=2"),
        ("--web t.py x.py", "--web --script t.py --script-arg=x.py"),
        ("a.yaml t.py -- --lr 3", "a.yaml --script t.py --script-arg=--lr --script-arg=3"),
        ("--script t.py -n 2", "--script t.py -n 2"),
        ("--set launch.script=t.py -n 2", "--set launch.script=t.py -n 2"),
        ("--task my.py:Task -- t.py", "--task my.py:Task --script-arg=t.py"),
    ],
)  # fmt: skip
def test_the_first_file_of_python_is_the_script_and_the_words_after_it_are_its_own(given: str, read: str) -> None:
    assert fold_script_arguments(given.split()) == read.split()


RUNS = [path for path in sorted(CONFIGS.glob("*.yaml")) if not path.name.startswith("hosts.")]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_ready_made_configuration_is_valid(path: Path) -> None:
    config = load_config(str(path), {}, [], {}).config
    assert config.run.workers is not None or path.stem in STARTED_BY_OTHERS
    json.dumps(config.model_dump())
