"""Damaged and forged snapshots: noticed, named, and the one before is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paramserver.common.config.schema import Config
from paramserver.common.errors import CheckpointError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.ps.snapshots.available import Available
from paramserver.ps.snapshots.files import candidates, prepare, prune, writing_to
from paramserver.ps.snapshots.manifest import OPTIMIZER, WEIGHTS, load, write
from paramserver.tests.ps.snapshots.making import LAYOUT, files_of, hidden, load_newest, manifest_of, snapshot


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink, become_directory, become_fifo])
@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER, "manifest.json", "manifest.json.sha256"])
def test_damage_of_any_file_is_noticed_and_the_previous_one_used(
    tmp_path: Path, file: str, harm: Callable[[Path], object]
) -> None:
    snapshot(tmp_path, 1)
    path = snapshot(tmp_path, 2)
    harm(path / file)
    available = Available(Config(checkpoint={"dir": str(tmp_path)}))
    found = available.load(available.newest())
    assert found.manifest.version == 1 and available.skipped == [path]
    newest, older = available.entries
    assert newest.name.version == 2 and ("manifest.json" in newest.problem or file in newest.problem)
    assert older.is_whole
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        load_newest(path)


def test_none_left_names_each_and_why(tmp_path: Path) -> None:
    paths = [snapshot(tmp_path, version) for version in (1, 2)]
    truncate(paths[0] / WEIGHTS)
    (paths[1] / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_newest(tmp_path)
    assert caught.value.exit_code == 14 and caught.value.fix
    size = (paths[0] / WEIGHTS).stat().st_size
    assert f"{paths[0]}: {WEIGHTS} has {size} bytes, {size + 1} were written" in caught.value.message
    assert f"{paths[1]}: it has no manifest.json" in caught.value.message


def test_a_place_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for use in (load_newest, candidates, prepare):
        with pytest.raises(CheckpointError):
            use(tmp_path / "file")


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, with a hash that is right."""
    document = json.loads((path / "manifest.json").read_text())
    change(document)
    put_manifest(path, json.dumps(document).encode())


def put_manifest(path: Path, text: bytes) -> None:
    (path / "manifest.json").write_bytes(text)
    (path / "manifest.json.sha256").write_text(hashlib.sha256(text).hexdigest() + "  manifest.json\n")


def forge_file(path: Path, file: str, tensors: dict[str, torch.Tensor] | bytes) -> None:
    if isinstance(tensors, bytes):
        (path / file).write_bytes(tensors)
    else:
        save_file(tensors, path / file)
    content = (path / file).read_bytes()
    entry = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(path, lambda m: m["files"].update({file: entry}))


def group(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["optimizer"]["groups"][0]["hyperparameters"].update(values)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version of text": (lambda m: m.update(version="7"), "version: Input should be a valid integer"),
    "huge version": (lambda m: m.update(version=2**70), "version"),
    "nothing in it": (lambda m: m.clear(), "Field required"),
    "unknown key": (lambda m: m.update(more=1), "more: Extra inputs"),
    "a row of no rank": (lambda m: m["rows"].update(x=[1, 1, 1, 1, 0]), r"rows\.x"),
    "a row that is too short": (lambda m: m["rows"].update({"0": [1, 1]}), r"rows\.0"),
    "other format": (lambda m: m.update(format=1), "format 1, this version of paramserver reads format 3"),
    "path out of the directory": (lambda m: m["files"].update({"../../etc/passwd": m["files"][WEIGHTS]}), "files"),
    "no weights": (lambda m: m["files"].pop(WEIGHTS), "has no weights.safetensors"),
    "no optimizer": (lambda m: m.update(optimizer=None), "no optimizer"),
    "unknown dtype": (lambda m: m["tensors"][0].update(dtype="complex64"), "complex64"),
    "other dtype": (lambda m: m["tensors"][0].update(dtype="float64"), "'w' is torch.float32"),
    "unknown kind": (lambda m: m["tensors"][0].update(kind="OTHER"), "kind"),
    "other shape": (lambda m: m["tensors"][0].update(shape=[2, 3]), r"\[3, 2\], the manifest says .* \[2, 3\]"),
    "impossible shape": (lambda m: m["tensors"][0].update(shape=[2**62, 2**62]), "impossible shape"),
    "negative shape": (lambda m: m["tensors"][0].update(shape=[-3, -2]), "impossible shape"),
    "missing tensor": (lambda m: m["tensors"].pop(), "has a tensor 'count' that the manifest does not know"),
    "extra tensor": (lambda m: m["tensors"].append({**m["tensors"][0], "name": "x/../y", "aliases": []}), "no tensor"),
    "two of one name": (lambda m: m["tensors"].append(m["tensors"][0]), "two tensors are named 'w'"),
    "all at once": (lambda m: m.update(tensors=[]), "not a parameter of the model"),
    "optimizer unknown": (lambda m: m["optimizer"].update(name="Oracle"), "unknown optimizer 'Oracle'"),
    "optimizer not elementwise": (lambda m: m["optimizer"].update(name="LBFGS"), "elementwise"),
    "optimizer of another kind": (lambda m: m["optimizer"].update(name="Rprop"), "cannot continue from it"),
    "optimizer without groups": (lambda m: (m["optimizer"].update(groups=[]), m.update(hyperparameters=[])), "exp_avg"),
    "rate of text": (group(lr="fast"), "cannot continue from it"),
    "betas a number": (group(betas=1.0), "cannot continue from it"),
    "current rate of text": (lambda m: m["hyperparameters"][0].update(lr=[[]]), "cannot continue from it"),
    "params among them": (group(params=[1, 2]), "'params' is not a hyperparameter"),
    "groups that differ": (lambda m: m["hyperparameters"].append({}), "hyperparameters of 2 groups for 1"),
    "group of a buffer": (lambda m: m["optimizer"]["groups"][0].update(tensors=["w", "count"]), "'count' is not a p"),
    "group twice": (lambda m: m["optimizer"]["groups"][0].update(tensors=["w", "b", "w"]), "'w' is not a p"),
    "group without b": (lambda m: m["optimizer"]["groups"][0].update(tensors=["w"]), "does not know"),
    "step for each element": (lambda m: m.update(scalars=[]), "step/w"),
    "Adagrad's": (lambda m: m["optimizer"].update(name="Adagrad"), "cannot continue from it"),
    "rate of 1e308": (group(lr=1e308), "Adam: lr is 1e\\+308; at most 1e\\+09"),
    "rate of infinity": (group(lr=math.inf), "Adam: lr is inf"),
    "current rate of 1e308": (lambda m: m["hyperparameters"][0].update(lr=1e308), "lr is 1e\\+308; at most"),
    "current rate below 0": (lambda m: m["hyperparameters"][0].update(lr=-1.0), "Invalid learning rate"),
    "current rate of NaN": (lambda m: m["hyperparameters"][0].update(lr=math.nan), "lr is nan; at most"),
    "lr_scale of NaN": (lambda m: m["training"].update(controls={"lr_scale": math.nan}), "lr_scale is nan"),
    "lr_scale of text": (lambda m: m["training"].update(controls={"lr_scale": "1"}), "lr_scale is '1'"),
    "scalar exp_avg": (lambda m: m.update(scalars=["step", "exp_avg"]), "exp_avg/w"),
}


@pytest.mark.parametrize("text", FORGED)
def test_a_forged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    change, why = FORGED[text]
    path = snapshot(tmp_path, 2)
    forge(path, change)
    with pytest.raises(CheckpointError, match=why):
        load(path)


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"{", b"[" * 100_000, b"\xff\xfe", b'{"version": ' + b"9" * 100_000 + b"}"]
)
def test_a_manifest_that_is_none(tmp_path: Path, text: bytes) -> None:
    path = snapshot(tmp_path, 2)
    put_manifest(path, text)
    with pytest.raises(CheckpointError, match="manifest is damaged"):
        load(path)


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


NOT_FINITE = "weights.safetensors: tensor 'b' is not finite: 2 of 4 numbers, the first is nan"


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        (WEIGHTS, b"", "not safetensors"),
        (WEIGHTS, header(w={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 64]}), "not safetensors"),
        (WEIGHTS, header(w={"dtype": "F8_E8M0", "shape": [64], "data_offsets": [0, 64]}), "weights.safetensors"),
        (WEIGHTS, header(w={"dtype": "NOPE", "shape": [64], "data_offsets": [0, 64]}), "not safetensors"),
        (WEIGHTS, {}, "no tensor"),
        (OPTIMIZER, {k: v for k, v in files_of(1)[OPTIMIZER].items() if k != "exp_avg/b"}, "no tensor 'exp_avg/b'"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "step/b": torch.tensor([9.0])}, "'step/b' is"),
        (OPTIMIZER, {"exp_avg/w": torch.zeros(3, 2), "exp_avg/b": torch.zeros(4)}, "cannot continue from it"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "exp_avg/x": torch.tensor(9.0)}, "'exp_avg/x' that the manifest"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "exp_avg/b": torch.zeros(5)}, "'exp_avg/b' is"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "no slash": torch.zeros(5)}, "'no slash'"),
        (WEIGHTS, {**files_of(1)[WEIGHTS], "b": torch.tensor([1.0, math.nan, 3.0, -math.inf])}, NOT_FINITE),
        (WEIGHTS, {**files_of(1)[WEIGHTS], "tied": torch.full((3, 2), math.inf)}, "'tied' is not finite: 6 of 6"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "exp_avg/b": torch.full((4,), math.inf)}, "'exp_avg/b' is not finite"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "step/w": torch.tensor(math.nan)}, "'step/w' is not finite"),
    ],
)
def test_forged_tensors_are_refused(tmp_path: Path, file: str, content: Any, why: str) -> None:
    path = snapshot(tmp_path, 1)
    forge_file(path, file, content)
    with pytest.raises(CheckpointError, match=why) as caught:
        load(path)
    assert caught.value.exit_code == 14 and ("not finite" not in why or "start a new run" in caught.value.fix)


def test_none_is_written_that_could_not_be_loaded(tmp_path: Path) -> None:
    snapshot(tmp_path, 1)
    files = files_of(2)
    files[OPTIMIZER]["exp_avg_sq/w"][0, 0] = math.inf
    with pytest.raises(
        CheckpointError, match=r"snapshot of version 2 not written.*'exp_avg_sq/w' is not finite: 1 of 6"
    ):
        write(tmp_path, manifest_of(2), files)
    assert load_newest(tmp_path).manifest.version == 1


def test_a_frozen_mask_may_hold_infinity(tmp_path: Path) -> None:
    layout = Layout([*LAYOUT.specs, TensorSpec("mask", Kind.FROZEN, "float32", (2,))])
    files = files_of(1)
    files[WEIGHTS]["mask"] = torch.tensor([0.0, -math.inf])
    path = write(tmp_path, manifest_of(1, tensors=layout.specs), files).path
    assert load(path).files[WEIGHTS]["mask"][1] == -math.inf


# ---- test disks -----------------------------------------------------------------------------------------

# Disks that are full, read-only or forbidden, directories with another writer or with leftovers.


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own; skips where this user may not mount."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"NOT TESTED: mounting a tmpfs needs root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("num_free", [0, 8 << 10, 40 << 10, 44 << 10])
def test_a_full_disk_leaves_the_old_snapshot_and_no_new_one(tmp_path: Path, num_free: int) -> None:
    """Nothing fits; some of the weights; the weights; the weights and the manifest."""
    with mounted(tmp_path / "disk", "size=160k") as disk:
        good = snapshot(disk, 1)
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - num_free))
        layout = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (10_000,))])
        manifest = manifest_of(2, tensors=layout.specs, optimizer=None, hyperparameters=None)
        files = {WEIGHTS: {"w": torch.ones(10_000)}}
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            write(disk, manifest, files)
        assert (
            ", for 0.0 MB (0." in caught.value.message
            and "MB are free" in caught.value.message
            and "older snapshots are unchanged" in caught.value.fix
        )
        assert hidden(disk) == ["ballast"] and candidates(disk) == [good]
        load(good)
        (disk / "ballast").unlink()
        assert write(disk, manifest, files).path == candidates(disk)[0] != good, "goes on when there is space"


def test_a_read_only_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        good = snapshot(disk, 1)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        tries: list[Callable[[], object]] = [
            lambda: snapshot(disk, 2), lambda: prune(disk, 0), lambda: prepare(disk / "new"),
        ]  # fmt: skip
        for use in tries:
            with pytest.raises(CheckpointError, match="Read-only file system"):
                use()
        found = load_newest(disk)
        assert found is not None and found.path == good


def test_a_directory_without_permission(tmp_path: Path) -> None:
    """As a user who is not root, since root may do anything."""
    directory = tmp_path / "snapshots"
    good = snapshot(directory, 1).relative_to(tmp_path)
    tmp_path.chmod(0o755)
    directory.chmod(0o555)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.chdir(tmp_path)  # the directories above are pytest's and closed
            if os.geteuid() == 0:
                os.setuid(65534)
            is_refused = refuses(lambda: prepare(Path("snapshots")))
            status = 0 if is_refused and load(good).manifest.version == 1 else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    directory.chmod(0o755)


def refuses(use: Callable[[], object]) -> bool:
    try:
        use()
    except CheckpointError as error:
        return "Permission denied" in error.message and error.exit_code == 14
    return False


def test_two_writers_in_one_directory(tmp_path: Path) -> None:
    with writing_to(tmp_path), pytest.raises(CheckpointError, match="another process is writing snapshots"):
        snapshot(tmp_path, 1)
    snapshot(tmp_path, 1)


def test_leftovers_go_with_the_next_writer(tmp_path: Path) -> None:
    for name in (f".writing-{os.getpid()}-abcd", ".writing-1-x", ".removing-y"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    prepare(tmp_path)
    assert hidden(tmp_path) == ["mine"]
