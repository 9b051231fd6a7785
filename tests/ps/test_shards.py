"""What shards say to each other, and when what they have heard happens; the processes are in tests/loopback."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.errors import ParamServerError, Reason
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core.judgement import SOUND, Judgement, Limits, judge_whole
from paramserver.ps.shards import orders
from paramserver.ps.shards.attend import _reachable
from paramserver.ps.shards.gather import Gather
from paramserver.ps.shards.messages import order_from_proto, order_to_proto, report_from_proto, report_to_proto
from paramserver.ps.snapshots.common import Entry

numbers = st.integers(0, 2**31)
names = st.builds(orders.SnapshotName, numbers, numbers, st.text(max_size=9))
actions = st.sampled_from(["take", "reject", "skip", "halt"])
texts = st.text(max_size=9)
judgements = st.builds(Judgement, actions, texts, texts, st.booleans(), st.floats(0, 1e9), st.floats(0, 1))
_FIELDS = {
    "snapshots": st.lists(st.builds(Entry, names, texts, st.booleans()), max_size=3).map(tuple),
    "snapshot": st.none() | names,
    "judgement": judgements,
    "bytes": st.dictionaries(st.text(max_size=5), numbers, max_size=3),
    "traffic": st.dictionaries(numbers, st.tuples(numbers, numbers), max_size=3),
    "evaluators": st.lists(numbers, max_size=3).map(tuple),
    "keeps_snapshots": st.booleans(),
    **dict.fromkeys(("address", "program_version", "run", "config", "error", "message"), st.text(max_size=9)),
}


def _any_of(union: object) -> st.SearchStrategy:
    kinds = typing.get_args(union)
    return st.one_of([
        st.builds(kind, **{f.name: _FIELDS.get(f.name, numbers) for f in dataclasses.fields(kind)}) for kind in kinds
    ])  # fmt: skip


@given(_any_of(orders.Report))
def test_every_report_arrives_as_it_was_sent(report):
    assert report_from_proto(pb.ShardReport.FromString(report_to_proto(report).SerializeToString())) == report


@given(_any_of(orders.Order), st.floats(0, 1e9))
def test_every_order_arrives_as_it_was_sent(order, now):
    message = pb.ShardOrder.FromString(order_to_proto(order, now).SerializeToString())
    assert (order_from_proto(message), message.now) == (order, now)


@pytest.mark.parametrize(
    "message",
    [pb.ShardReport(), pb.ShardReport(staged=pb.Staged(verdict=pb.Verdict(action="eat")))],
)
def test_what_no_shard_says_is_refused(message):
    with pytest.raises(ParamServerError) as caught:
        report_from_proto(message)
    assert caught.value.reason is Reason.BAD_REQUEST


@given(st.permutations(range(4)))
def test_what_has_come_to_all_happens_once(order):
    gather = Gather(4)
    happened = [gather.add(shard, orders.Staged(7, 1, 3)) for shard in order]
    assert [bool(reports) for reports in happened] == [False, False, False, True]
    assert gather.missing(orders.Staged, 7) == []


def test_parts_of_different_steps_and_incarnations_are_not_one_thing():
    gather = Gather(2)
    assert not gather.add(0, orders.Staged(0, 1, 5))
    assert not gather.add(1, orders.Staged(0, 1, 4))
    assert not gather.add(1, orders.Staged(0, 2, 5))
    assert not gather.add(1, orders.Asked(0, 1, 5))
    assert gather.add(1, orders.Staged(0, 1, 5))


def test_who_begins_again_begins_with_nothing():
    gather = Gather(2)
    gather.add(1, orders.Staged(0, 1, 5))
    gather.forget(0, 1)
    assert not gather.add(0, orders.Staged(0, 1, 5))
    gather.add(1, orders.Staged(3, 2, 1))
    gather.forget(3, 1)  # an older one of that rank
    assert gather.add(0, orders.Staged(3, 2, 1))


def test_the_missing_are_named():
    gather = Gather(3)
    assert gather.missing(orders.Staged, 0) == []
    gather.add(1, orders.Staged(0, 1, 1))
    assert gather.missing(orders.Staged, 0) == [0, 2]


def test_what_one_shard_cannot_take_none_takes():
    skip, reject, halt = (Judgement(action, "NaN", "limit") for action in ("skip", "reject", "halt"))
    assert judge_whole(Limits(), [SOUND, skip, SOUND]) is skip
    assert judge_whole(Limits(), [skip, reject, SOUND]) is reject
    assert judge_whole(Limits(), [reject, halt]) is halt
    clipped = Judgement("take", "NaN", "limit", is_clipped=True)
    assert judge_whole(Limits(), [SOUND, clipped]) is clipped


def test_the_norm_is_that_of_all_parts():
    parts = [Judgement("take", norm=3.0), Judgement("take", norm=4.0)]
    assert judge_whole(Limits(max_norm=5.01), parts).scale == 1.0
    whole = judge_whole(Limits(max_norm=0.5), parts)
    assert whole.is_taken and whole.is_clipped
    assert whole.scale == pytest.approx(0.1, rel=1e-5)
    assert judge_whole(Limits(max_norm=0.5, on_large="reject"), parts).action == "reject"


@pytest.mark.parametrize(
    ("address", "peer", "expected"),
    [
        ("10.0.0.7:50052", "ipv4:1.2.3.4:999", "10.0.0.7:50052"),
        ("0.0.0.0:50052", "ipv4:1.2.3.4:999", "1.2.3.4:50052"),
        ("[::]:50052", "ipv6:%5Bfe80::1%5D:999", "[fe80::1]:50052"),
        ("0.0.0.0:50052", "unix:", "127.0.0.1:50052"),
    ],
)
def test_where_workers_find_a_shard_that_listens_everywhere(address, peer, expected):
    assert _reachable(address, peer) == expected
