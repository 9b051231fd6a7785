"""What `make gpu-test` does: run the tests of this folder with an interpreter that may know nothing of the project.

    python tests/gpu/run.py [--device cuda|cpu] [--out DIR] [--packages DIR] [pytest arguments ...]

It installs nothing. It needs the packages of pyproject.toml, pytest and hypothesis, and says which of them the
interpreter lacks (exit code 2). DIR of `--packages` holds what `make gpu-packages` fetched. It ends after ten minutes,
whatever has run by then. `--out` has tests.xml and the metrics of ps-bench afterwards.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"  # of compiled packages too
BUDGET_S = 600.0
_END_S = 20.0  # for tests that are interrupted to end what they started
_LEAST_BENCH_S = 30.0
_TESTS_NEED = ("pytest>=8", "hypothesis>=6.100")
_OWN = ("torch", "numpy")  # the interpreter's own
_BENCHMARKS = {"exchange": ("exchange", "--mb", "100", "--runs", "5"), "latency": ("latency",)}


def needed() -> list[str]:
    """Requirements such as `grpcio>=1.80`, of the project and of its tests."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *_TESTS_NEED]


def lacking(requirements: list[str]) -> list[str]:
    """Those that this interpreter does not meet, with what it has."""
    found = []
    for requirement in requirements:
        name, _, least = requirement.partition(">=")
        try:
            has = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} (none)")
            continue
        if _numbers(has) < _numbers(least):
            found.append(f"{requirement} (has {has})")
    return found


def _numbers(version: str) -> list[int]:
    """`2.7.0a0+cu12` is 2, 7, 0."""
    return [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0])]


def importable(out: Path) -> Path:
    """A folder from which `import paramserver` finds this checkout, whatever its own folder is called."""
    folder = out / "path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "paramserver"
    if not (link.is_symlink() and link.resolve() == ROOT):
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT, target_is_directory=True)
    return folder


def within(command: list[str], env: dict[str, str], until: float) -> int | None:
    """The exit code; None where time was up: then it was interrupted, and killed if that did not help."""
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def say(text: str) -> None:
    print(f"gpu-test: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu-test")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--packages", type=Path, default=ROOT / "build" / f"gpu-packages-{VERSION}")
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--requirements", action="store_true", help="print all but torch and numpy, and end")
    options, more = parser.parse_known_args()
    if options.requirements:
        print(*(text for text in needed() if text.partition(">=")[0] not in _OWN))
        return 0
    began, out = time.monotonic(), options.out.resolve()
    who = f"{sys.executable} (Python {sys.version.split()[0]})"
    if sys.version_info < (3, 11):  # noqa: UP036  (it is anybody's interpreter)
        say(f"{who} is too old: paramserver needs Python 3.11 or newer")
        return 2
    if options.packages.is_dir():
        sys.path.insert(0, str(options.packages))
    if missing := lacking(needed()):
        say(f"nothing has run: {who} lacks {', '.join(missing)}")
        say("nothing is installed here; give another interpreter (PYTHON=), or fetch all but torch and numpy into")
        say(f"build/gpu-packages-{VERSION} where there is a network: make gpu-packages FOR={VERSION}")
        return 2
    path = [str(importable(out)), *([str(options.packages.resolve())] if options.packages.is_dir() else [])]
    if given := os.environ.get("PYTHONPATH"):
        path.append(given)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "GPU_TEST_DEVICE": options.device}
    env |= {"PYTHONDONTWRITEBYTECODE": ""}
    flags = ["-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu", f"--junitxml={out / 'tests.xml'}"]
    if find_spec("xdist") and not any(text.startswith("-n") for text in more):
        flags += ["-n", "4" if options.device == "cuda" else "2"]
    code = within([sys.executable, "-m", "pytest", *flags, *(more or ["tests/gpu"])], env, began + BUDGET_S)
    if code is None:
        say(f"ended after {BUDGET_S:.0f} s; {out / 'tests.xml'} has what ran until then, if anything")
        return 1
    if not _has_device(options.device, env):
        say("NOTHING HAS RUN: there is no CUDA device here, see the reason above")
        return code
    if code == 0 and not options.no_bench:
        code = bench(out, env, began + BUDGET_S)
    say(f"{time.monotonic() - began:.0f} s on {options.device}; results in {out}")
    return code


def _has_device(device: str, env: dict[str, str]) -> bool:
    asked = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return device == "cpu" or subprocess.run(asked, env=env, check=False).returncode == 0


def bench(out: Path, env: dict[str, str], until: float) -> int:
    """The metrics of ps-bench, one file each, while there is time for them; the exit code of the first that fails."""
    for name, arguments in _BENCHMARKS.items():
        if until - time.monotonic() < _LEAST_BENCH_S:
            say(f"ps-bench {name} has not run: no time was left")
            continue
        path = out / f"bench-{name}.json"
        command = [sys.executable, "-m", "paramserver.benchmarks", *arguments, "--json", str(path)]
        if name == "exchange":
            command += ["--device", env["GPU_TEST_DEVICE"]]
        code = within(command, env, until)
        if code is None:
            say(f"ps-bench {name} was ended: the {BUDGET_S:.0f} s were over")
        elif code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
