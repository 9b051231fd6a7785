"""What an installation holds: the product, and the benchmarks when they were asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.tests.code_lines import PRODUCT

ROOT = Path(__file__).parents[2]
PS_BENCH = "from paramserver.launch.bench import main; main()"


def tracked_copy(project: Path, copy: Path) -> None:
    """A build leaves things in its folder."""
    tracked = subprocess.run(["git", "ls-files", "."], cwd=project, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(project / name, copy / name)


def build(project: Path, copy: Path, lib: Path) -> None:
    """Put into `lib` what a wheel of the project would hold, built from a copy."""
    tracked_copy(project, copy)
    code = f"import setuptools; setuptools.setup(script_args=['-q', 'build', '--build-lib', {str(lib)!r}])"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build(ROOT, folder / "copy", folder / "lib")
    return folder / "lib"


def ps_bench(lib: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """`ps-bench` of the installation in `lib`; -S leaves out the one that the tests run in."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(lib), *filter(None, sys.path)])}
    command = [sys.executable, "-S", "-c", PS_BENCH, *argv]
    return subprocess.run(command, env=environ, cwd=lib, capture_output=True, text=True, check=False)


def test_a_wheel_holds_every_package_but_the_benchmarks(lib: Path) -> None:
    assert [path.name for path in lib.iterdir()] == ["paramserver"]
    assert (lib / "paramserver/proto/parameter_server.proto").exists()
    found = {path.relative_to(lib / "paramserver").as_posix() for path in lib.rglob("*.py")}
    wanted = {path.relative_to(ROOT).as_posix() for name in PRODUCT for path in (ROOT / name).rglob("*.py")}
    assert found == {"__init__.py", "__main__.py", *wanted}
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "web/static").rglob("*.*")}
    assert pages == {path.relative_to(lib / "paramserver").as_posix() for path in lib.rglob("web/static/**/*.*")}


def test_without_them_ps_bench_names_the_extra(lib: Path) -> None:
    done = ps_bench(lib, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    sentence, fix = done.stderr.splitlines()
    assert sentence == "ps-bench: paramserver.benchmarks is not installed: the benchmarks are an extra"
    assert "pip install 'paramserver[bench]'" in fix


def test_with_them_it_runs(lib: Path, tmp_path: Path) -> None:
    both = tmp_path / "lib"
    shutil.copytree(lib, both)
    build(ROOT / "benchmarks", tmp_path / "copy", both)
    done = ps_bench(both, "--help")
    assert done.returncode == 0, done.stderr
    assert "exchange" in done.stdout
