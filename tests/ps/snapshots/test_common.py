"""Which moment all shards go on from: the newest that every one of them has whole, or a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.errors import CheckpointError, UsageError
from paramserver.ps.snapshots.common import Entry, SnapshotName, choose_common


def whole(version: int, incarnation: int = 1, run: str = "r") -> Entry:
    return Entry(SnapshotName(incarnation, version, run))


def damaged(version: int, incarnation: int = 1) -> Entry:
    return Entry(SnapshotName(incarnation, version, ""), "weights.safetensors has changed since it was written")


def test_a_run_that_has_let_nobody_in_yet_begins_again():
    """A shard was killed while it wrote the first snapshot of all."""
    first = Entry(SnapshotName(1, 0, "r"), has_begun=False)
    assert choose_common({0: [first], 1: []}) is None
    assert choose_common({0: [first], 1: [damaged(0)._replace(has_begun=False)]}) is None
    assert choose_common({0: [first], 1: [first]}) == first.name
    for begun in (first._replace(has_begun=True), whole(7)):
        with pytest.raises(CheckpointError):
            choose_common({0: [first, begun], 1: []})


def test_what_is_missing_where_is_said():
    snapshots = {0: [whole(version) for version in range(10, 17)], 1: [damaged(8, 2)], 2: []}
    with pytest.raises(CheckpointError) as caught:
        choose_common(snapshots)
    assert caught.value.exit_code == 14
    assert caught.value.message == (
        "no snapshot is complete on all shards: shard 0 has version 16 of server incarnation 1, version 15 of server "
        "incarnation 1, version 14 of server incarnation 1, version 13 of server incarnation 1, version 12 of server "
        "incarnation 1, 2 older; shard 1 has version 8 of server incarnation 2 (unusable: weights.safetensors has "
        "changed since it was written); shard 2 has none"
    )
    assert "--resume never" in caught.value.fix


def test_snapshots_of_different_runs_are_a_mistake_of_the_command_line():
    with pytest.raises(UsageError, match="different runs: shard 0 of run a; shard 1 of run b"):
        choose_common({0: [whole(5, run="a")], 1: [whole(5, run="b")]})


names = st.builds(SnapshotName, st.integers(1, 3), st.integers(0, 4), st.just("r"))
entries = st.lists(st.builds(Entry, names, st.sampled_from(["", "damaged"]), st.just(True)), max_size=5)


@given(st.dictionaries(st.integers(0, 3), entries, min_size=1))
def test_what_is_chosen_is_whole_everywhere_and_nothing_newer_is(snapshots):
    """Only a run without any snapshot begins. A later incarnation is newer than a higher version."""
    everywhere = [item for item in {e.name for of in snapshots.values() for e in of}
                  if all(Entry(item) in of for of in snapshots.values())]  # fmt: skip
    if not everywhere and any(snapshots.values()):
        with pytest.raises(CheckpointError):
            choose_common(snapshots)
    else:
        newest = max(everywhere, key=lambda name: (name.server_incarnation, name.version), default=None)
        assert choose_common(snapshots) == newest
