"""The wheel and the sdist that `python -m build` makes, and the demo of the wheel in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

from paramserver.tests.benchmarks.test_packaging import ROOT, tracked_copy

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"paramserver-{PROJECT['version']}"
SOURCES = {"__init__.py", "LICENSE", "README.md", "pyproject.toml", "setup.cfg", "PKG-INFO", "MANIFEST.in"}


def test_every_file_has_the_one_version() -> None:
    bench = tomllib.loads((ROOT / "benchmarks/pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"0\.\d+\.\d+", PROJECT["version"])
    assert bench["version"] == PROJECT["version"]
    assert bench["dependencies"] == [f"paramserver=={PROJECT['version']}"]
    assert f"paramserver-bench=={PROJECT['version']}" in PROJECT["optional-dependencies"]["bench"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, the wheel from the sdist. Build isolation needs the package index for setuptools alone."""
    pytest.importorskip("build", reason="pip install build")
    folder = tmp_path_factory.mktemp("dist")
    tracked_copy(ROOT, folder / "copy")
    command = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(folder / "copy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    return folder / "dist"


@pytest.mark.slow
def test_the_sdist_has_the_package_and_no_tests(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    assert names >= {"pyproject.toml", "constraints.txt", "LICENSE", "web/static/style.css", "ps/main.py"}
    assert not [name for name in names if re.match(r"(tests|benchmarks|docs|\.)", name)]


@pytest.mark.slow
def test_the_installed_wheel_runs_the_demo_in_an_empty_folder(dist: Path, tmp_path: Path) -> None:
    """A .pth file shares the dependencies of the tests' interpreter: torch is too large to install again."""
    home, empty = tmp_path / "venv", tmp_path / "empty"
    venv.create(home, with_pip=True)
    empty.mkdir()
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(home / "bin/pip"), "install", "--quiet", "--no-deps", str(next(dist.glob("*.whl")))]
    subprocess.run(install, check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2_000:]
        return done.stdout + done.stderr

    where = run(str(home / "bin/python"), "-c", "import paramserver.web.app as web; print(web.__file__)")
    assert Path(where.strip()).is_relative_to(home)
    output = run(str(home / "bin/ps-launch"), "--task", "digits", "-n", "2", "--steps", "30", "--no-store")
    assert "accuracy" in output
