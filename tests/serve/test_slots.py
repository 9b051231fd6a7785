"""The states of three slots, under every order of arrivals, publications and drains."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paramserver.serve.slots import NUM_SLOTS, Slots, State, Version


class Machine(RuleBasedStateMachine):
    """A follower, an engine, and requests that keep a version."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self.number = 0
        self.served: list[int] = []  # versions, in the order of their publication

    @rule()
    def begin(self) -> None:
        is_busy = {State.ARRIVING, State.WHOLE} & {*self.slots.states}
        assert (self.slots.begin() is None) == bool(is_busy)

    @precondition(lambda self: self.slots.find(State.ARRIVING) is not None)
    @rule(is_there=st.booleans())
    def arrive(self, is_there: bool) -> None:
        slot = self.slots.find(State.ARRIVING)
        assert slot is not None
        self.number += is_there
        self.slots.arrived(slot, Version("run", 1, self.number) if is_there else None)
        assert self.slots.states[slot] is (State.WHOLE if is_there else State.IDLE)

    @rule()
    def publish(self) -> None:
        whole, before = self.slots.find(State.WHOLE), self.slots.find(State.SERVING)
        may_publish = whole is not None and self.slots.find(State.DRAINING) is None
        assert self.slots.publish() == (before if may_publish else None)
        if may_publish:
            self.served.append(self.number)

    @precondition(lambda self: self.slots.find(State.DRAINING) is not None)
    @rule()
    def drain(self) -> None:
        self.slots.drained()

    @invariant()
    def at_most_one_slot_has_each_role(self) -> None:
        states = self.slots.states
        assert len(states) == NUM_SLOTS
        assert sum(state in (State.ARRIVING, State.WHOLE) for state in states) <= 1
        assert states.count(State.DRAINING) <= 1
        assert states.count(State.SERVING) == bool(self.served)  # from the first publication on

    @invariant()
    def live_versions_are_the_last_ones_published_the_oldest_first(self) -> None:
        live = [self.slots.versions[slot] for slot in self.slots.live()]
        numbers = [version.number for version in live if version is not None]
        assert numbers == self.served[len(self.served) - len(live) :]


TestSlots = Machine.TestCase


def test_a_greater_incarnation_is_newer_than_any_version_before() -> None:
    version = Version("run", 2, 50)
    assert version.is_newer(None) and Version("run", 3, 10).is_newer(version)
    assert not Version("run", 2, 50).is_newer(version) and not Version("run", 1, 99).is_newer(version)


def test_two_versions_never_share_a_name() -> None:
    versions = [Version("run", incarnation, number) for incarnation in range(12) for number in range(120)]
    assert len({version.fingerprint for version in versions}) == len({version.name for version in versions}) == 1440
