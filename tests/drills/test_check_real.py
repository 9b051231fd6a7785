"""ps-launch check: real histories are accepted, with drawn options and a drawn event in each run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.tests.combinations.options import DEFAULTS
from paramserver.tests.drills.real_runs import Drawn, drawn, record

# Replies of async that a codec of differences sends: their weights may be of an older version than the reply.
OLDER = Drawn({**DEFAULTS, "mode": "async", "workers": "2", "reply_codec": "q4"}, "none", "", 3)


def accept(it: Drawn, folder: Path) -> None:
    recorded = record(it, folder / "run")
    assert recorded.num_lines and not recorded.problems, (str(it), recorded.problems, recorded.output[-2000:])


@pytest.mark.slow
def test_weights_of_an_older_version_are_accepted(tmp_path: Path) -> None:
    accept(OLDER, tmp_path)
    assert '"reference":' in (tmp_path / "run" / "history.jsonl").read_text()


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(16))
def test_real_histories_are_accepted(seed: int, tmp_path: Path) -> None:
    accept(drawn(seed), tmp_path)
