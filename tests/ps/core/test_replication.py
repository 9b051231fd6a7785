"""When what has come to several shards happens, and that nothing is lost between them; no network."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.config.sections.training import StoreConfig
from paramserver.common.errors import ParamServerError, Reason
from paramserver.common.tensors.judgement import SOUND, Judgement, judge_whole
from paramserver.common.wire.records import TrainingInfo
from paramserver.ps.core import effects, events
from paramserver.ps.core.run import Coordinator, Outbox, Run
from paramserver.ps.core.state import Options
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.shards.attend import LINES, BeginRun, Order, Report
from paramserver.ps.snapshots.common import RUN_NAME

from ...records import contributed

numbers = st.integers(0, 2**31)
texts = st.text(max_size=9)
actions = st.sampled_from(["take", "reject", "skip", "halt"])
hyperparameters = st.lists(
    st.dictionaries(texts, st.one_of(numbers, texts, st.booleans(), st.lists(numbers)), max_size=3), max_size=2
)
st.register_type_strategy(  # hyperparameters are dict[str, Any], and Hypothesis can draw nothing for Any
    TrainingInfo,
    st.builds(
        TrainingInfo,
        hyperparameters=hyperparameters.map(tuple),
        clip_norm=st.floats(0, 1e9),
        loss=st.floats(),
        wants_weights=st.booleans(),
        wants_exact=st.booleans(),
    ),
)
judgements = st.builds(Judgement, actions, texts, texts, st.booleans(), st.floats(0, 1e9), st.floats(0, 1))


def _any_of(union: object) -> st.SearchStrategy[Any]:
    kinds = [kind for arg in typing.get_args(union) for kind in (events.KINDS if arg is events.Event else (arg,))]
    return st.one_of([st.builds(kind, **_fields(kind)) for kind in kinds])


def _fields(kind: type[Any]) -> dict[str, st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(kind)
    known = {"judgement": judgements} | ({"run": st.from_regex(RUN_NAME, fullmatch=True)} if kind is BeginRun else {})
    return {
        field.name: known.get(field.name, st.from_type(hints[field.name]).filter(lambda value: value == value))
        for field in dataclasses.fields(kind)
    }


@given(_any_of(Report) | _any_of(Order))
def test_what_shards_say_arrives_as_it_was_sent(message: Any) -> None:
    arrived = LINES.read(LINES.write(message))
    assert repr(arrived) == repr(message)  # which is the same for NaN too


@pytest.mark.parametrize(
    "text", ["", "{}", '{"kind": "Eaten"}', '{"kind": "Left", "rank": "x", "incarnation": 1}', "[]"]
)
def test_what_no_shard_says_is_refused(text: str) -> None:
    with pytest.raises(ParamServerError) as caught:
        LINES.read(text)
    assert caught.value.reason is Reason.BAD_REQUEST


# ---- gathering --------------------------------------------------------------------------------------


class Gathered(Coordinator):
    """A coordinator that takes the report of any shard, and notes what happens."""

    def __init__(self, num_shards: int) -> None:
        self.happened: list[events.Event] = []
        super().__init__(num_shards, happens=self.happened.append, now=lambda: 1.0, judge=lambda _: SOUND, digest=str)

    def add(self, shard: int, event: events.Event) -> bool:
        """Whether an event happens with this report."""
        before = len(self.happened)
        self._take(shard, event)
        return len(self.happened) > before


def test_other_contributions_and_incarnations_are_another_thing() -> None:
    gather = Gathered(2)
    assert not gather.add(0, contributed(0, 1, 5, 0))
    others = contributed(0, 1, 4, 0), contributed(0, 2, 5, 0), events.AskedAgain(0, 1, 5)
    assert not any(gather.add(1, other) for other in others)
    assert gather.add(1, contributed(0, 1, 5, 0))


def test_of_who_was_let_go_nothing_is_waited_for() -> None:
    gather = Gathered(2)
    gather.add(1, contributed(0, 1, 5, 0))
    gather.fenced(0, 1)
    assert not any(gather.add(shard, contributed(0, 1, 5, 0)) for shard in (0, 1)), "fenced, also for a late shard"
    assert not gather.add(1, contributed(3, 2, 1, 0))
    gather.fenced(3, 1)  # an older one of that rank
    assert gather.add(0, contributed(3, 2, 1, 0))


def test_the_norm_of_a_mean_is_that_of_all_its_parts_and_its_step_waits_for_it() -> None:
    gather = Gathered(3)
    assert not gather.add(0, events.Measured(7, 2.0)) and not gather.add(2, events.Measured(7, 6.0))
    assert not gather.add(2, events.Measured(8, 1.0))  # of a version that the others have not come to
    assert gather.add(1, events.Measured(7, 3.0))
    happened = [event for _, event in gather.outboxes[1].after(0)]
    assert happened == gather.happened == [events.Measured(7, 7.0, at=1.0)]
    assert Run(Options(), policy_of("sync", {}), "run").apply(happened[0]) == [effects.Clip(7, 7.0)]


def test_the_missing_are_named() -> None:
    gather = Gathered(3)
    assert gather.missing(0) == "" and not gather.add(1, contributed(0, 1, 1, 0))
    assert gather.missing(0) == "shard 0, 2 to have its part of the contribution"


# ---- messages that must not be lost -------------------------------------------------------------------


@given(st.lists(st.sampled_from(["put", "send", "break"]), max_size=60))
def test_over_connections_that_break_everything_arrives_once_and_in_order(moves: list[str]) -> None:
    outbox, other, got = Outbox[int](), Outbox[int](), []
    sent = 0  # on this connection

    def send() -> None:
        nonlocal sent
        for number, message in outbox.after(sent)[:1]:
            sent = number
            if other.hear(number):
                got.append(message)

    for move in [*moves, "break", *["send"] * len(moves)]:
        if move == "put":
            outbox.put(outbox.num_put)
        elif move == "send":
            send()
        else:  # the other side says how far it has heard; what it had only been sent may be gone
            assert outbox.can_go_on_after(other.num_received)
            outbox.acknowledge(other.num_received)
            sent = other.num_received
    assert got == list(range(outbox.num_put))


def test_a_gap_is_refused_and_what_came_before_is_not_new() -> None:
    outbox = Outbox[str]()
    assert outbox.hear(1)
    assert not outbox.hear(1)
    with pytest.raises(ParamServerError, match="message 3 after 1"):
        outbox.hear(3)


def test_what_was_heard_is_not_kept_and_cannot_be_gone_back_to() -> None:
    outbox = Outbox[str]()
    for text in "abc":
        outbox.put(text)
    outbox.acknowledge(2)
    assert outbox.after(0) == [(3, "c")]
    assert outbox.can_go_on_after(2) and outbox.can_go_on_after(3)
    assert not outbox.can_go_on_after(1) and not outbox.can_go_on_after(4)


# ---- one judgement of several parts -------------------------------------------------------------------


def test_what_one_shard_cannot_take_none_takes() -> None:
    skip, reject, halt = (Judgement(action, "NaN", "limit") for action in ("skip", "reject", "halt"))
    assert judge_whole(StoreConfig(), [SOUND, skip, SOUND]) is skip
    assert judge_whole(StoreConfig(), [skip, reject, SOUND]) is reject
    assert judge_whole(StoreConfig(), [reject, halt]) is halt
    clipped = Judgement("take", "NaN", "limit", is_clipped=True)
    assert judge_whole(StoreConfig(), [SOUND, clipped]) is clipped


def test_the_norm_is_that_of_all_parts() -> None:
    parts = [Judgement("take", norm=3.0), Judgement("take", norm=4.0)]
    assert judge_whole(StoreConfig(max_norm=5.01), parts).scale == 1.0
    whole = judge_whole(StoreConfig(max_norm=0.5), parts)
    assert whole.is_taken and whole.is_clipped
    assert whole.scale == pytest.approx(0.1, rel=1e-5)
    assert judge_whole(StoreConfig(max_norm=0.5, on_large="reject"), parts).action == "reject"
