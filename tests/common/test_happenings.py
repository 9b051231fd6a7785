"""What people read of an event."""

from __future__ import annotations

from typing import Any

import pytest

from paramserver.common.reporting.summary import event


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("start", {"source": "", "mode": "ssp"}, "ssp, from the beginning"),
        ("start", {"source": "snap/7", "mode": "ssp"}, "continues from snap/7"),
        ("join", {"incarnation": 1, "resumed": False}, "worker 3 joined"),
        ("join", {"incarnation": 2, "resumed": False}, "worker 3 joined again"),
        ("join", {"incarnation": 2, "resumed": True}, "worker 3 came back where it was"),
        ("leave", {"how": "goodbye"}, "worker 3 left"),
        ("leave", {"how": "goodbye", "finished": True, "reason": "said goodbye"}, "worker 3 finished"),
        ("leave", {"how": "closed", "reason": "connection lost"}, "worker 3 is gone: connection lost"),
        ("leave", {"how": "failed", "reason": "no memory"}, "worker 3 failed: no memory"),
        ("snapshot", {"version": 9, "path": "snap/9"}, "snapshot of version 9 in snap/9"),
        ("evaluated", {"step": 4, "metrics": {"loss": 0.5, "accuracy": 0.25}, "best": True},
         "step 4: loss 0.500, accuracy 0.250, the best so far"),
        ("evaluated", {"step": 4, "metrics": {"loss": 0.5}}, "step 4: loss 0.500"),
        ("control", {"do": "pause", "result": "worker 3 is paused", "done": True}, "worker 3 is paused"),
        ("control", {"do": "pause", "result": "no worker 9", "done": False},
         "pause was refused: no worker 9"),
        ("end", {"version": 12, "reason": "stopped by a person"}, "stopped by a person"),
        ("end", {"version": 12}, "the run is over, at version 12"),
        ("teleported", {}, "teleported"),
        ("snapshot", {}, "snapshot"),
    ],
)  # fmt: skip
def test_an_event_is_a_sentence(kind: str, fields: dict[str, Any], expected: str) -> None:
    record = event(1.7e9, kind, 3, fields)
    assert (record.kind, record.text, record.rank) == (kind, expected, 3)
