"""Every code block of the pages is right: run, or offered to what it is written for (blocks.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from paramserver.common.config.sources import load_config
from paramserver.common.errors import UsageError
from paramserver.launch.plan.hosts import load_hosts
from paramserver.tests.docs.blocks import LANGUAGES, PAGES, ROOT, Block, blocks
from paramserver.tests.docs.commands import check, simple_commands

BLOCKS = [block for page in PAGES for block in blocks(page)]
# Their blocks need what is an extra: with the trainers' own tests.
TRAINERS = "docs/trainers.md"


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def pages_with(found: list[Block]) -> list[str]:
    return list(dict.fromkeys(block.page for block in found))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the root of a checkout, to be written into, with the files that pages tell their readers to write."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "examples", "docker"):
        (folder / name).symlink_to(ROOT / name)
    for block in BLOCKS:
        if block.text.startswith("# my_task.py"):
            (folder / "my_task.py").write_text(block.text)
        elif block.language == "yaml" and "\nhosts:" in block.text:
            (folder / "hosts.yaml").write_text(block.text)
    (folder / "train.py").touch()
    return folder


def environ() -> dict[str, str]:
    """As in a reader's shell: the programs are on the path, and nothing is set."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1"}


def test_every_block_says_what_it_is() -> None:
    assert [f"{block}: {block.language or 'none'}" for block in BLOCKS if block.language not in LANGUAGES] == []
    assert len(BLOCKS) > 60


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_commands_are_what_the_programs_take(block: Block, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    unknown = list(filter(None, map(check, simple_commands(block.text))))
    assert not unknown or block.mark, f"say before the block whether it is run: {unknown}"


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_a_configuration_or_names_hosts(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "page.yaml"
    path.write_text(block.text)
    if "hosts" in yaml.safe_load(block.text):
        assert load_hosts(str(path))
    else:
        load_config(str(path), {}, [], {}, is_worker=False)


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param([page for page in pages_with(of("python")) if page != TRAINERS], id="all but the trainers'"),
        pytest.param([TRAINERS], marks=pytest.mark.trainers, id=TRAINERS),
    ],
)
def test_python_runs(pages: list[str], tmp_path: Path) -> None:
    for name in ("lightning", "transformers", "accelerate") if pages == [TRAINERS] else ():
        pytest.importorskip(name, reason="make trainers installs it")
    command = [sys.executable, "-m", "paramserver.tests.docs.blocks", *(str(ROOT / page) for page in pages)]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(Path(page).name in done.stdout for page in pages)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages_with([block for block in BLOCKS if block.mark == "run"]))
def test_what_is_marked_is_run(page: str, checkout: Path) -> None:
    for block in BLOCKS:
        if block.page == page and block.mark == "run":
            shell = ["bash", "-euo", "pipefail", "-c", block.text]
            code, output = run_in_a_group(shell, checkout)
            assert code == 0, f"{block}\n{output}"


def run_in_a_group(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output; nothing that it left in the background is there afterwards."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environ(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(400)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return code, output.read()


# ---- the test of the tests ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ps-server --mode ssp --made-up 3", "--made-up"),
        ("ps-server --set policy.made_up=3", "made_up"),
        ("ps-launch configs/made_up.yaml", "made_up.yaml"),
        ("PS_RUN__MADE_UP=1 ps-launch configs/digits.yaml", "made_up"),
        ("torchrun --nproc-per-node 4 -m paramserver.worker --made-up", "--made-up"),
        ("ps-launch doctor --made-up", "--made-up"),
        ("ps-runs made-up", "made-up"),
        ("ps-sim configs/digits.yaml --set run.made_up=1", "made_up"),
        ("ps-made-up", "ps-made-up"),
        ("make made-up", "made-up"),
        ("python examples/made_up.py", "made_up.py"),
        ("sleep 1 && (ps-certs init certs --made-up | cat)", "--made-up"),
    ],
)
def test_what_is_made_up_is_found(line: str, reason: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    with pytest.raises(UsageError, match=reason):
        list(map(check, simple_commands(line)))


def test_blocks_of_all_kinds_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n    ps-server --made-up\n\nText.\n\n- item\n\n    goes on\n\n  ```python\n  1 / 0\n  ```\n\n"
        "<!-- not run: docker -->\n```sh\ndocker ps\n```\n\n```\nuntagged\n```\n"
    )
    found = [(block.language, block.text, block.mark) for block in blocks(page)]
    assert found == [
        ("sh", "ps-server --made-up\n", ""),
        ("python", "1 / 0\n", ""),
        ("sh", "docker ps\n", "not run: docker"),
        ("", "untagged\n", ""),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "paramserver.tests.docs.blocks", str(page)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "ZeroDivisionError" in done.stderr
