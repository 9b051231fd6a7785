"""Snapshots on a real disk: whole or not at all, verified, ordered; full disks, killed writers, forged contents."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paramserver.common.config.schema import Config
from paramserver.common.errors import CheckpointError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.ps.snapshots.available import Available
from paramserver.ps.snapshots.checkpoint import Loaded, Written, load, write
from paramserver.ps.snapshots.files import candidates, next_incarnation, prepare, prune, writing_to
from paramserver.ps.snapshots.manifest import AVERAGED, OPTIMIZER, WEIGHTS, Manifest

LAYOUT = Layout([
    TensorSpec("w", Kind.PARAMETER, "float32", (3, 2), ("tied",)),
    TensorSpec("b", Kind.PARAMETER, "float32", (4,)),
    TensorSpec("count", Kind.BUFFER, "int64", ()),
])  # fmt: skip
ADAM = OptimizerSpec("Adam", (GroupSpec(("w", "b"), {"lr": 0.1, "betas": [0.9, 0.99]}),))


def manifest_of(version: int, incarnation: int = 1, **changes: Any) -> Manifest:
    return Manifest(**{
        "run": "run", "server_incarnation": incarnation, "version": version, "mode": "sync",
        "policy": {"started": -float("inf"), "members": [1, 2.5, None]}, "steps": {0: version, 3: 1},
        "num_joins": {0: 2, 3: 1}, "training": {"note": "ünï"}, "tensors": LAYOUT.specs,
        "optimizer": ADAM, "hyperparameters": ({"lr": 0.1 + 0.2},), "scalars": ("step",),
        "seed": 7, "paramserver_version": "0", **changes,
    })  # fmt: skip


def files_of(version: int) -> dict[Any, dict[str, torch.Tensor]]:
    w, b, step = torch.full((3, 2), float(version)), torch.arange(4.0) + version, torch.tensor(float(version))
    return {
        WEIGHTS: {"w": w, "tied": w.clone(), "b": b, "count": torch.tensor(version)},
        OPTIMIZER: {
            "exp_avg/w": -w, "exp_avg_sq/w": w * w, "step/w": step,
            "exp_avg/b": -b, "exp_avg_sq/b": b * b, "step/b": step.clone(),
        },
    }  # fmt: skip


def snapshot(directory: Path, version: int, incarnation: int = 1) -> Path:
    return write(directory, manifest_of(version, incarnation), files_of(version)).path


def hidden(directory: Path) -> list[str]:
    """What lies there beside snapshots."""
    return sorted(
        path.name for path in directory.iterdir() if not re.fullmatch(r"snapshot-\d{12}-\d+|\.lock", path.name)
    )


# ---- written and read ------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    manifest, files = manifest_of(12), files_of(12)
    written = write(tmp_path / "new" / "directory", manifest, files)
    assert written.path.name == "snapshot-000000000012-1"
    assert sorted(path.name for path in written.path.iterdir()) == [
        "manifest.json", "manifest.json.sha256", "optimizer.safetensors", "weights.safetensors",
    ]  # fmt: skip
    loaded = load(written.path)
    assert loaded.manifest.model_copy(update={"files": {}}) == manifest
    assert loaded.layout.specs == LAYOUT.specs and loaded.layout.fingerprint == LAYOUT.fingerprint
    assert loaded.manifest.optimizer is not None and not loaded.manifest.optimizer.differences(ADAM)
    for file, tensors in files.items():
        assert loaded.files[file].keys() == tensors.keys()
        assert all(torch.equal(loaded.files[file][name], tensor) for name, tensor in tensors.items())
    assert AVERAGED not in loaded.files and loaded.manifest.files[WEIGHTS].sha256 == written.sha256
    assert written.num_bytes == sum((written.path / name).stat().st_size for name in files)


def test_files_are_what_other_programs_expect(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 5)
    weights = path / WEIGHTS
    assert torch.equal(load_file(weights)["w"], torch.full((3, 2), 5.0))
    with safe_open(weights, framework="pt") as file:
        assert sorted(file.keys()) == ["b", "count", "tied", "w"]
    checked = subprocess.run(["sha256sum", "-c", "manifest.json.sha256"], cwd=path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"][WEIGHTS]["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert (
        weights.stat().st_mode & 0o777 == (tmp_path.stat().st_mode | path.stat().st_mode) & 0o666 & path.stat().st_mode
    )


def test_a_snapshot_without_an_optimizer(tmp_path: Path) -> None:
    manifest = manifest_of(3, optimizer=None, hyperparameters=None, scalars=())
    loaded = load(write(tmp_path, manifest, {WEIGHTS: files_of(3)[WEIGHTS]}).path)
    assert loaded.manifest.optimizer is None and loaded.state == {}


def test_an_optimizer_that_workers_run_may_be_any(tmp_path: Path) -> None:
    spec = OptimizerSpec("TheirOwn", (GroupSpec(("b",), {"temperature": 3.0}),))
    manifest = manifest_of(3, mode="localsgd", optimizer=spec, hyperparameters=None)
    loaded = load(write(tmp_path, manifest, {WEIGHTS: files_of(3)[WEIGHTS]}).path)
    assert loaded.manifest.optimizer == spec


def test_writing_leaves_the_interpreter_to_others(tmp_path: Path) -> None:
    """Another thread runs on meanwhile, and no second copy of the tensors is made."""
    layout = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (20_000_000,))])
    manifest = manifest_of(1, tensors=layout.specs, optimizer=None, hyperparameters=None)
    files = {WEIGHTS: {"w": torch.ones(20_000_000)}}
    longest, num_ticks, done = 0.0, 0, threading.Event()

    def tick() -> None:
        nonlocal longest, num_ticks
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            longest, last, num_ticks = max(longest, now - last), now, num_ticks + 1

    peak = peak_rss()
    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    try:
        write(tmp_path, manifest, files)
    finally:
        took = time.perf_counter() - began
        done.set()
        thread.join()
    assert num_ticks > 10
    assert longest < max(0.1, took / 4)
    assert peak_rss() - peak < 40e6, "no second copy of 80 MB"


def peak_rss() -> float:
    status = Path("/proc/self/status").read_text()
    return float(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1e3  # type: ignore[index]


def load_newest(place: Path) -> Loaded | None:
    """As a server of one process finds it."""
    available = Available(Config(checkpoint={"dir": str(place)}))
    name = available.newest()
    return available.load(name) if name is not None else None


# ---- which is the newest ----------------------------------------------------------------------------


def test_the_newest_is_of_the_newest_server(tmp_path: Path) -> None:
    assert candidates(tmp_path) == [] and load_newest(tmp_path) is None and load_newest(tmp_path / "no") is None
    assert next_incarnation(tmp_path) == next_incarnation(tmp_path / "no") == 1
    for version, incarnation in [(900, 1), (1000, 1), (950, 2), (10**12, 1), (20, 10)]:
        snapshot(tmp_path, version, incarnation)
    (tmp_path / "snapshot-of-something-else").mkdir()
    names = [path.name for path in candidates(tmp_path)]
    assert names == [
        "snapshot-000000000020-10", "snapshot-000000000950-2", "snapshot-1000000000000-1",
        "snapshot-000000001000-1", "snapshot-000000000900-1",
    ]  # fmt: skip
    assert next_incarnation(tmp_path) == 11
    newest = load_newest(tmp_path)
    assert newest is not None and newest.manifest.version == 20
    one = load_newest(tmp_path / names[3])
    assert one is not None and one.manifest.version == 1000
    best = (tmp_path / names[4]).rename(tmp_path / "best")  # a name of one's own
    renamed = load_newest(best)
    assert renamed is not None and renamed.manifest.version == 900


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for version in range(5):
        snapshot(tmp_path, version, 1)
    snapshot(tmp_path, 1, 2)
    removed = prune(tmp_path, 3)
    assert [path.name[-14:] for path in candidates(tmp_path)] == ["000000000001-2", "000000000004-1", "000000000003-1"]
    assert len(removed) == 3 and hidden(tmp_path) == []
    assert prune(tmp_path, 3) == []


def test_pruning_keeps_the_newest_that_all_shards_have(tmp_path: Path) -> None:
    """Another shard's disk has been full for longer than checkpoint.keep."""
    for version in range(5):
        snapshot(tmp_path, version, 1)
    assert [path.name[-14:] for path in prune(tmp_path, 2, least_common=1)] == ["000000000002-1", "000000000000-1"]
    assert [path.name[-14:] for path in candidates(tmp_path)] == ["000000000004-1", "000000000003-1", "000000000001-1"]
    snapshot(tmp_path, 5, 1)
    prune(tmp_path, 2, least_common=5)
    assert [path.name[-14:] for path in candidates(tmp_path)] == ["000000000005-1", "000000000004-1"]


def test_the_same_version_again_takes_the_place_of_the_old(tmp_path: Path) -> None:
    snapshot(tmp_path, 4)
    write(tmp_path, manifest_of(4, steps={0: 99}), files_of(4))
    assert len(candidates(tmp_path)) == 1 and hidden(tmp_path) == []
    assert load(candidates(tmp_path)[0]).manifest.contributions == {0: 99}


def test_killed_between_the_two_renames_of_a_replacement(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 4)
    old = path.rename(path.with_name(path.name + ".old"))
    assert candidates(tmp_path) == [old]
    found = load_newest(tmp_path)
    assert found is not None and found.manifest.version == 4
    write(tmp_path, manifest_of(4, steps={0: 99}), files_of(4))
    assert candidates(tmp_path) == [path] and hidden(tmp_path) == []


# ---- damage -----------------------------------------------------------------------------------------


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
    "negative version": (lambda m: m.update(version=-1), "version"),
    "huge version": (lambda m: m.update(version=2**70), "version"),
    "nothing in it": (lambda m: m.clear(), "Field required"),
    "unknown key": (lambda m: m.update(more=1), "more: Extra inputs"),
    "steps of no rank": (lambda m: m["steps"].update(x=1), r"steps\.x"),
    "policy a list": (lambda m: m.update(policy=[]), "policy"),
    "other format": (lambda m: m.update(format=2), "format 2, this version of paramserver reads format 1"),
    "path out of the directory": (lambda m: m["files"].update({"../../etc/passwd": m["files"][WEIGHTS]}), "files"),
    "no weights": (lambda m: m["files"].pop(WEIGHTS), "has no weights.safetensors"),
    "no optimizer": (lambda m: m.update(optimizer=None), "no optimizer"),
    "hash of text": (lambda m: m["files"][WEIGHTS].update(sha256="../x"), "sha256"),
    "negative size": (lambda m: m["files"][WEIGHTS].update(num_bytes=-5), "num_bytes"),
    "unknown dtype": (lambda m: m["tensors"][0].update(dtype="complex64"), "complex64"),
    "other dtype": (lambda m: m["tensors"][0].update(dtype="float64"), "'w' is torch.float32"),
    "unknown kind": (lambda m: m["tensors"][0].update(kind="OTHER"), "kind"),
    "other shape": (lambda m: m["tensors"][0].update(shape=[2, 3]), r"\[3, 2\], the manifest says .* \[2, 3\]"),
    "impossible shape": (lambda m: m["tensors"][0].update(shape=[2**62, 2**62]), "impossible shape"),
    "negative shape": (lambda m: m["tensors"][0].update(shape=[-3, -2]), "impossible shape"),
    "shape of floats": (lambda m: m["tensors"][0].update(shape=[3.5]), "shape"),
    "missing tensor": (lambda m: m["tensors"].pop(), "has a tensor 'count' that the manifest does not know"),
    "extra tensor": (lambda m: m["tensors"].append({**m["tensors"][0], "name": "x/../y", "aliases": []}), "no tensor"),
    "two of one name": (lambda m: m["tensors"].append(m["tensors"][0]), "two tensors are named 'w'"),
    "all at once": (lambda m: m.update(tensors=[]), "no parameter of the model"),
    "optimizer unknown": (lambda m: m["optimizer"].update(name="Oracle"), "unknown optimizer 'Oracle'"),
    "optimizer not elementwise": (lambda m: m["optimizer"].update(name="LBFGS"), "elementwise"),
    "optimizer of another kind": (lambda m: m["optimizer"].update(name="Rprop"), "cannot go on from it"),
    "optimizer without groups": (lambda m: (m["optimizer"].update(groups=[]), m.update(hyperparameters=[])), "exp_avg"),
    "rate of text": (group(lr="fast"), "cannot go on from it"),
    "betas a number": (group(betas=1.0), "cannot go on from it"),
    "three betas": (group(betas=[0.1, 0.2, 0.3]), "cannot go on from it"),
    "current rate of text": (lambda m: m["hyperparameters"][0].update(lr=[[]]), "cannot go on from it"),
    "params among them": (group(params=[1, 2]), "'params' is no hyperparameter"),
    "fused among them": (group(fused="yes"), "'fused' is no hyperparameter"),
    "groups that differ": (lambda m: m["hyperparameters"].append({}), "hyperparameters of 2 groups for 1"),
    "group of a buffer": (lambda m: m["optimizer"]["groups"][0].update(tensors=["w", "count"]), "'count' is no param"),
    "group twice": (lambda m: m["optimizer"]["groups"][0].update(tensors=["w", "b", "w"]), "'w' is no param"),
    "group without b": (lambda m: m["optimizer"]["groups"][0].update(tensors=["w"]), "does not know"),
    "step for each element": (lambda m: m.update(scalars=[]), "step/w"),
    "Adagrad's": (lambda m: m["optimizer"].update(name="Adagrad"), "cannot go on from it"),
    "scalar exp_avg": (lambda m: m.update(scalars=["step", "exp_avg"]), "exp_avg/w"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_manifest_is_refused(tmp_path: Path, what: str) -> None:
    change, why = FORGED[what]
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


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        (WEIGHTS, b"", "not safetensors"),
        (WEIGHTS, b"\xff" * 100, "not safetensors"),
        (WEIGHTS, header(w={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 64]}), "not safetensors"),
        (WEIGHTS, header(w={"dtype": "F8_E8M0", "shape": [64], "data_offsets": [0, 64]}), "weights.safetensors"),
        (WEIGHTS, header(w={"dtype": "NOPE", "shape": [64], "data_offsets": [0, 64]}), "not safetensors"),
        (WEIGHTS, {}, "no tensor"),
        (OPTIMIZER, {"exp_avg/w": torch.zeros(3, 2)}, "no tensor 'exp_avg/b'"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "step/b": torch.tensor(9.0)}, "'step' differs between"),
        (OPTIMIZER, {"exp_avg/w": torch.zeros(3, 2), "exp_avg/b": torch.zeros(4)}, "cannot go on from it"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "exp_avg/x": torch.tensor(9.0)}, "'exp_avg/x' that the manifest"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "exp_avg/b": torch.zeros(5)}, "'exp_avg/b' is"),
        (OPTIMIZER, {**files_of(1)[OPTIMIZER], "no slash": torch.zeros(5)}, "'no slash'"),
    ],
)
def test_forged_tensors_are_refused(tmp_path: Path, file: str, content: Any, why: str) -> None:
    path = snapshot(tmp_path, 1)
    forge_file(path, file, content)
    with pytest.raises(CheckpointError, match=why):
        load(path)


# ---- disks and locks ---------------------------------------------------------------------------------


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
            and "older snapshots are as they were" in caught.value.fix
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


# ---- killed at any moment ------------------------------------------------------------------------------

# Forks a writer for every line it reads, so that torch is loaded once.
WRITERS = """
import os, sys, torch
sys.path.insert(0, sys.argv[2])
from test_checkpoint import snapshot, prune, next_incarnation, Path
torch.set_num_threads(1)
place = Path(sys.argv[1])
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        version, incarnation = int(line), next_incarnation(place)
        while True:
            version += 1
            snapshot(place, version, incarnation)
            os.write(1, b"%d\\n" % version)
            prune(place, 2)
    os.write(1, b"pid %d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


def test_a_writer_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    chance = random.Random(1)
    program = [sys.executable, "-c", WRITERS, str(tmp_path), str(Path(__file__).parent)]
    writers = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert writers.stdin is not None and writers.stdout is not None
    num_leftovers = durable = 0
    try:
        for _ in range(20):
            writers.stdin.write(b"%d\n" % durable)
            said = read_until(writers, b"pid ")
            pid = int(said.rsplit(b"pid ")[1].split(b"\n")[0])
            time.sleep(chance.uniform(0, 0.02))  # when, not whether: any moment will do
            os.kill(pid, signal.SIGKILL)
            said += read_until(writers, b"gone\n")
            told = [int(line) for line in said.split(b"\n") if line.isdigit()]
            durable = check_after_kill(tmp_path, max([durable, *told]))
            num_leftovers += bool(hidden(tmp_path))
    finally:
        writers.kill()
        writers.wait()
        writers.stdin.close()
        writers.stdout.close()
    assert num_leftovers > 0, "no kill came while something was written"
    snapshot(tmp_path, durable + 1, next_incarnation(tmp_path))
    assert hidden(tmp_path) == []


def read_until(process: subprocess.Popen[bytes], end: bytes) -> bytes:
    assert process.stdout is not None
    said, deadline = b"", time.monotonic() + 30
    while end not in said or not said.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        assert ready, f"no {end!r} in {said!r}"
        said += os.read(process.stdout.fileno(), 4096)
    return said


def check_after_kill(place: Path, durable: int) -> int:
    """The newest is whole and at least what was said to be durable; no other is damaged either."""
    if not candidates(place):
        assert durable == 0
        return 0
    newest = load_newest(place)
    assert newest is not None and newest.path == candidates(place)[0]
    version = newest.manifest.version
    assert durable <= version <= durable + 1
    assert hashlib.sha256((newest.path / WEIGHTS).read_bytes()).hexdigest() == newest.manifest.files[WEIGHTS].sha256
    for path in candidates(place):
        loaded = load(path)
        assert torch.equal(loaded.files[WEIGHTS]["w"], torch.full((3, 2), float(loaded.manifest.version)))
    return version


def test_the_hash_is_that_of_the_weights_alone(tmp_path: Path) -> None:
    one, other = (write(tmp_path, manifest_of(1, run=run), files_of(1)) for run in ("one", "other"))
    assert isinstance(one, Written) and one.sha256 == other.sha256
