"""Runs in a notebook: what they show, and that nothing named by people is taken for HTML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.reporting.curve import Point
from paramserver.common.reporting.pictures.notebook import Card, Losses, of_list, of_session, of_stored, of_summary
from paramserver.common.reporting.summary import Summary, WorkerStatus
from paramserver.common.runstore.reading import StoredRun
from paramserver.tests.docs.blocks import ROOT
from paramserver.tests.docs.test_blocks import environ
from paramserver.tests.tags import Tags

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"
ALLOWED = {
    "div", "strong", "table", "tr", "th", "td", "p", "figure", "figcaption", "svg", "polyline", "text",
}  # fmt: skip


def evil_cards() -> list[Card]:
    points = [Point(step=step, version=step, metrics={EVIL: 0.5 * step}) for step in (1, 2)]
    run = StoredRun(key=1, id=EVIL, name=EVIL, work=EVIL, state=EVIL, mode=EVIL, ended_by=EVIL, metrics={EVIL: 1.0})
    return [
        of_summary(Summary(mode=EVIL, ended_by=EVIL, final={EVIL: 1.0}, curve=points, workers=[WorkerStatus(rank=0)])),
        of_stored(run, [], points),  # type: ignore[arg-type]
        of_list(EVIL, [run]),
        of_session(EVIL, (0, 1, 2, True), [(1.0, 1.0), (2.0, 0.5)], {EVIL: 1.0}),
        Card(EVIL, [(EVIL, EVIL)], [(EVIL, [(EVIL, [(0.0, 1.0), (1.0, 2.0)])], EVIL)], [EVIL]),
    ]


@pytest.mark.parametrize("card", evil_cards(), ids=lambda card: f"{len(card.metrics)} metrics")
def test_names_are_text(card: Card) -> None:
    tags = Tags(card.html())
    assert set(tags.found) <= ALLOWED
    assert not any(name.startswith("on") or name in ("src", "href") for name in tags.attributes)
    assert "alert" in card.html() and "<script" not in card.html()


def test_a_summary_has_its_metrics_and_its_curve() -> None:
    points = [Point(step=step, version=step, metrics={"accuracy": 0.4 * step}) for step in (1, 2)]
    shown = Summary(mode="ssp", staleness_bound=3, version=7, final={"accuracy": 0.8}, curve=points)._repr_mimebundle_()
    assert shown["text/plain"].startswith("ssp (staleness 3)  accuracy 0.800  wall s 0.0  version 7")
    assert "<svg" in shown["text/html"] and "accuracy, evaluated" in shown["text/html"]
    assert "<svg" not in Summary(mode="sync")._repr_mimebundle_()["text/html"]


def test_losses_are_bounded() -> None:
    losses = Losses()
    for step in range(100_000):
        losses.note(step, 1.0)
    assert 256 <= len(losses.points) <= 512
    gaps = {b[0] - a[0] for a, b in zip(losses.points, losses.points[1:], strict=False)}
    assert len(gaps) == 1


@pytest.mark.slow
def test_without_a_notebook_ipython_is_not_imported() -> None:
    code = """
import sys, paramserver, torch
session = paramserver.connect()
model = torch.nn.Linear(2, 2)
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
session.show()
for (x,) in session.shard(torch.utils.data.TensorDataset(torch.randn(8, 2)), batch_size=4, epochs=1):
    optimizer.step()
    session.record(loss=0.25)
print(session._repr_mimebundle_()["text/plain"])
print("IPython" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environ(), capture_output=True, text=True, check=True)
    first, *_, last, is_there = done.stdout.splitlines()
    assert first.startswith("session: single") and is_there == "False"
    assert "step 2" in last and "loss 0.250" in last


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PATH", environ()["PATH"])
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    nbclient.NotebookClient(
        book, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert all(not cell.get("outputs") for cell in nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4).cells)
    outputs: list[list[dict[str, Any]]] = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    live, session, record, summary = (shown[0]["data"] for shown in (outputs[1], outputs[2], outputs[4], outputs[5]))
    for shown in (live, session, record, summary):
        assert set(Tags(shown["text/html"]).found) <= ALLOWED and shown["text/plain"]
    assert "accuracy" in live["text/plain"] and "<svg" in live["text/html"], "it was shown anew in its place"
    assert "done" in record["text/plain"] and "ssp" in summary["text/plain"]
