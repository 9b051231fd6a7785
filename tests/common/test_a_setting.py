"""A new setting is one field in one file: flag, --set, environment, YAML, help and errors follow from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = "common/config/sections/run.py"
BEFORE = "    seed: Annotated[int, Flag(Panel.RUN)]"
FIELD = '    wheels: Annotated[int, Flag(Panel.RUN)] = Field(4, ge=1, description="how many wheels a run has")\n'

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs ps-launch of a copy of the product in which one file has one more field."""
    folder = tmp_path_factory.mktemp("product")
    for package in ("common", "launch", "ps", "proto", "worker"):
        shutil.copytree(ROOT / package, folder / "paramserver" / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", folder / "paramserver")
    text = (ROOT / FILE).read_text(encoding="utf-8")
    assert text.count(BEFORE) == 1
    (folder / "paramserver" / FILE).write_text(text.replace(BEFORE, FIELD + BEFORE), encoding="utf-8")
    (folder / "run.yaml").write_text("run:\n  wheels: 5\n")

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paramserver.launch", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "100", **environ}
        return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)

    return run


def test_its_help_its_errors_and_the_processes_know_it(program: Run) -> None:
    assert "how many wheels a run has" in program("--help").stdout
    refused = program("--wheels", "0")
    assert (refused.returncode, "flag --wheels: run.wheels: " in refused.stderr) == (2, True)
    assert "--set run.wheels=9" in program("--wheels", "9", "--dry-run").stdout
