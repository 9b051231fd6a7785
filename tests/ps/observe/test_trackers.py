"""Experiment trackers: what they are told, and each with its own package, read back."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paramserver.common.registry import TRACKERS
from paramserver.common.reporting.summary import Status, WorkerStatus
from paramserver.ps.observe.trackers.base import metrics_of
from paramserver.tests.cluster import Cluster

_BLOCK_BYTES = 1 << 15


def test_metrics_of_a_status() -> None:
    workers = [WorkerStatus(rank=rank, loss=0.5 * rank, step=rank, wait_s=0.1, compute_s=0.9) for rank in range(20)]
    found = metrics_of(Status(version=3, workers=workers, num_workers=20))
    assert (found["train/loss"], found["train/version"], found["train/num_workers"]) == (4.75, 3, 20)
    assert (found["worker3/loss"], found["worker3/wait_share"]) == (1.5, 0.1)
    assert "worker15/step" in found and "worker16/step" not in found


@pytest.mark.slow
def test_a_tracker_that_is_not_installed_or_not_known(cluster: Cluster) -> None:
    """Before anything is started; its own package, and not one that it would need."""
    names = TRACKERS.names()
    assert names == ["mlflow", "tensorboard", "trackio", "wandb"]
    for name in names:
        try:
            TRACKERS.load(name)
        except ModuleNotFoundError:
            result = cluster.command("ps", "--track", name, "--listen", "127.0.0.1:0")
            assert result.returncode == 2 and f"pip install 'paramserver[{name}]'" in result.stderr, result.stderr
            break
    result = cluster.command("ps", "--track", "tensorbord", "--listen", "127.0.0.1:0")
    assert result.returncode == 2 and "tensorboard" in result.stderr and "Traceback" not in result.stderr


def read_tensorboard(folder: Path) -> dict[str, list[float]]:
    """All scalars, of the records of all files: length, its checksum, data, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[float]] = {}
    for path in sorted(folder.glob("runs/*/events*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack_from("<Q", data)
            event = Event.FromString(data[12 : 12 + size])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(value.simple_value)
            data = data[16 + size :]
    return found


def read_mlflow(folder: Path) -> dict[str, list[float]]:
    with sqlite3.connect(folder / "runs" / "mlflow.db") as store:
        found: dict[str, list[float]] = {}
        for key, value in store.execute("SELECT key, value FROM metrics ORDER BY step"):
            found.setdefault(key, []).append(value)
        assert store.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)], "two servers, one run"
    return found


def read_trackio(folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with sqlite3.connect(folder / "trackio" / "paramserver.db") as store:
        for (metrics,) in store.execute("SELECT metrics FROM metrics"):
            for key, value in json.loads(metrics).items():
                found.setdefault(key, []).append(value)
    return found


def wandb_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log: blocks of 32 KiB, parts of records with a checksum, their size, and 1 whole, 2 first, 3, 4 last.
    The last one may be torn: its server was killed."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if _BLOCK_BYTES - at % _BLOCK_BYTES < 7:
            at += _BLOCK_BYTES - at % _BLOCK_BYTES
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + size]
        if not kind or len(part) < size:
            return
        record, at = part if kind in (1, 2) else record + part, at + 7 + size
        if kind in (1, 4):
            yield record


def read_wandb(folder: Path) -> dict[str, list[float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[float]] = {}
    for path in sorted(folder.glob("runs/wandb/offline-run-*/*.wandb")):
        for chunk in wandb_records(path.read_bytes()):
            record = Record.FromString(chunk)
            for item in (*record.history.item, *record.summary.update):
                name = item.key or ".".join(item.nested_key)
                found.setdefault(name, []).append(json.loads(item.value_json))
    return found


READ: dict[str, tuple[str, Callable[[Path], dict[str, list[float]]]]] = {
    "tensorboard": ("tensorboardX", read_tensorboard),
    "wandb": ("wandb", read_wandb),
    "mlflow": ("mlflow", read_mlflow),
    "trackio": ("trackio", read_trackio),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_a_run_is_tracked_also_when_its_server_is_killed(cluster: Cluster, name: str) -> None:
    module, read = READ[name]
    package = pytest.importorskip(module, reason=f"pip install 'paramserver[{name}]'")
    if name == "mlflow":  # a process that is killed while mlflow makes its tables leaves a store that is of no use
        (cluster.folder / "runs").mkdir()
        package.MlflowClient(f"sqlite:///{cluster.folder}/runs/mlflow.db").search_experiments()
    offline = {
        "WANDB_MODE": "offline", "DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1",
        "TRACKIO_DIR": str(cluster.folder / "trackio"), "PS_SERVER__STATUS_INTERVAL_S": "0.05",
    }  # fmt: skip
    flags = (
        "--mode", "async", "--workers", "1", "--steps", "400", "--task", "digits", "--track", name, "--checkpoint-dir",
        "snapshots", "--checkpoint-every", "20", "--summary", "s.json", "--eval-every", "100",
    )  # fmt: skip
    server = cluster.server(*flags, **offline)
    worker = cluster.worker(0, "--set", "slowdown.base_s=0.005")
    server.until(lambda: any(event["version"] >= 100 for event in server.events("snapshot")), "snapshot")
    server.kill()
    server = cluster.server(*flags, "--listen", cluster.address, **offline)
    assert [process.wait() for process in (worker, server)] == [0, 0], server.output
    assert not server.events("sink_off"), server.output
    found, summary = read(cluster.folder), json.loads((cluster.folder / "s.json").read_text())
    assert found["final/accuracy"][-1] == pytest.approx(summary["final"]["accuracy"])
    assert found["final/version"][-1] == 400
    assert len(found["eval/accuracy"]) >= 3
    assert max(found["worker0/step"]) > 300 and min(found["worker0/step"]) < 100
