"""What the launcher decides, as transcripts. What holds for any sequence of events is in test_launch_restarts.py."""

from __future__ import annotations

import pytest

from paramserver.tests.launch.transcripts import played, transcripts

TRANSCRIPTS = transcripts()


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcript(name: str) -> None:
    assert played(TRANSCRIPTS[name]) == TRANSCRIPTS[name]
