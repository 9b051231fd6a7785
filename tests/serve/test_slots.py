"""The states of three slots, under every order of arrivals, publications and drains."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paramserver.serve.slots import NUM_SLOTS, Slots, Version


class Machine(RuleBasedStateMachine):
    """A follower, an engine, and requests that keep a version."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self.number = 0
        self.served: list[int] = []  # versions, in the order of their publication

    @rule()
    def begin(self) -> None:
        is_busy = self.slots.arriving is not None or self.slots.whole is not None
        assert (self.slots.begin() is None) == is_busy

    @precondition(lambda self: self.slots.arriving is not None)
    @rule(is_there=st.booleans())
    def arrive(self, is_there: bool) -> None:
        slot = self.slots.arriving
        assert slot is not None
        self.number += is_there
        self.slots.arrived(slot, Version("run", 1, self.number) if is_there else None)
        assert (self.slots.arriving, self.slots.whole) == (None, slot if is_there else None)

    @rule()
    def publish(self) -> None:
        before = self.slots.serving
        may_publish = self.slots.whole is not None and self.slots.draining is None
        assert self.slots.publish() == (before if may_publish else None)
        if may_publish:
            self.served.append(self.number)

    @precondition(lambda self: self.slots.draining is not None)
    @rule()
    def drain(self) -> None:
        self.slots.drained()

    @invariant()
    def no_slot_has_two_roles_and_idle_ones_have_no_version(self) -> None:
        roles = [self.slots.arriving, self.slots.whole, self.slots.serving, self.slots.draining]
        taken = [slot for slot in roles if slot is not None]
        assert len({*taken}) == len(taken) <= NUM_SLOTS
        assert self.slots.arriving is None or self.slots.whole is None
        assert (self.slots.serving is not None) == bool(self.served)  # from the first publication on
        with_version = {slot for slot, version in enumerate(self.slots.versions) if version is not None}
        assert with_version == {*taken} - {self.slots.arriving}

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
