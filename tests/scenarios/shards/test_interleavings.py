"""Whatever order messages arrive in, and whoever dies meanwhile: all shards do the same, and everything counts once."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.errors import Reason
from paramserver.common.tensors.judgement import SOUND, Judgement
from paramserver.ps.core import effects, events
from paramserver.tests.scenarios.sharded import Shards, scattered
from paramserver.tests.scenarios.telling import make_run

from ...records import contributed

NUM_SHARDS, NUM_WORKERS, STEPS = 3, 2, 4
# What a worker that does everything right may be told all the same.
MAY_BE_TOLD = {Reason.REPLACED, Reason.NOT_JOINED}


class Client:
    """A worker as `worker/conversation` has it: sends again what does not count, and asks again for what does."""

    def __init__(self, rank: int, shards: Shards) -> None:
        self.rank, self.shards = rank, shards
        self.num_processes = self.incarnation = self.stream = 0
        self.phase = "gone"  # joining, offering, waiting, bringing, computing, contributing, asking, done
        self.to_tell: list[int] = []  # shards that have not been told yet
        self.heard: dict[int, effects.SendReply] = {}
        self.looked_at = [0] * NUM_SHARDS
        self.number = self.counted = self.version = 0
        self.is_resumed = self.has_started = False
        self.refusals: list[Reason | None] = []

    @property
    def process(self) -> str:
        return f"w{self.rank}-{self.num_processes}"

    @property
    def seat(self) -> tuple[int, int]:
        return self.rank, self.incarnation

    # ---- what it does ---------------------------------------------------------------------

    def begin(self) -> None:
        """A new process."""
        self.num_processes += 1
        self.incarnation, self.has_started, self.is_resumed = 0, False, False
        self.shards.offer(events.HeartbeatBegan(self.process))
        self._join()

    def _join(self) -> None:
        self.stream += NUM_WORKERS
        stream = self.stream + self.rank
        self.phase, self.heard = "joining", {}
        known = self.shards.run.incarnation if self.has_started else 0
        self.shards.offer(events.Joined(stream, self.rank, "", self.incarnation, known, self.process))

    def reset(self) -> None:
        """Its streams break off, and it makes them again."""
        if self.phase == "gone":
            return
        if self.incarnation:
            self.shards.offer(events.Disconnected(*self.seat))
        self._join()

    def die(self) -> None:
        if self.phase == "gone":
            return
        if self.incarnation:
            self.shards.offer(events.Disconnected(*self.seat))
        self.shards.offer(events.HeartbeatStopped(self.process))
        self.phase = "gone"

    def act(self, chance: random.Random) -> None:
        """The next thing it has to do, if there is one."""
        self.look()
        if self.phase == "gone":
            self.begin()
        elif self.phase == "computing":
            self._tell("contributing", self.number + 1)
        elif self.to_tell and self.phase in ("offering", "bringing", "contributing", "asking"):
            shard = chance.choice(self.to_tell)
            if not self._is_seated_at(shard):
                return
            self.to_tell.remove(shard)
            self.shards.offer(self._event(chance), [shard])
            if not self.to_tell:
                self._take_messages()

    def _is_seated_at(self, shard: int) -> bool:
        """As `Engine.seated`: a stream waits until its shard has heard of it."""
        worker = self.shards.shards[shard].run.roster.workers.get(self.seat[0])
        return worker is not None and worker.incarnation == self.seat[1]

    def _tell(self, phase: str, number: int) -> None:
        self.phase, self.number, self.to_tell = phase, number, list(range(NUM_SHARDS))

    def _event(self, chance: random.Random) -> events.Event:
        if self.phase == "offering":
            return events.Offered(*self.seat, "model", "sgd")
        if self.phase == "bringing":
            return events.Brought(*self.seat)
        if self.phase == "asking":
            return events.AskedAgain(*self.seat, self.number)
        bad = Judgement(chance.choice(["reject", "skip"]), "NaN", "limit")
        return contributed(*self.seat, self.number, self.version, judgement=bad if chance.random() < 0.05 else SOUND)

    def _take_messages(self) -> None:
        """All shards have it."""
        is_back = self.phase == "offering" and self.is_resumed
        self.phase = "waiting"
        if is_back and self.number <= self.counted:
            self._tell("asking", self.counted)
        elif is_back:
            self._tell("contributing", self.counted + 1)

    # ---- what it hears --------------------------------------------------------------------

    def look(self) -> None:
        """Hear what the shards have for it."""
        for shard in range(NUM_SHARDS):
            applied = self.shards.shards[shard].applied
            while self.looked_at[shard] < len(applied):
                _, found = applied[self.looked_at[shard]]
                self.looked_at[shard] += 1
                for effect in found:
                    self._hear(shard, effect)

    def _hear(self, shard: int, effect: effects.Effect) -> None:
        match effect:
            case effects.Seated(stream, _, incarnation, is_resumed, counted) if shard == 0:
                if stream == self.stream + self.rank and self.phase == "joining":
                    self.incarnation, self.is_resumed, self.counted = incarnation, is_resumed, counted
                    self.phase, self.to_tell = "offering", list(range(NUM_SHARDS))
            case effects.AskForWeights(rank, incarnation) if (rank, incarnation) == self.seat and shard == 0:
                if self.phase == "waiting":
                    self._tell("bringing", self.number)
            case effects.Refuse(rank, incarnation, error) if (rank, incarnation) == self.seat and shard == 0:
                if self.phase not in ("gone", "joining"):
                    self.refusals.append(error.reason)
                    self.shards.offer(events.Left(*self.seat, "closed", error.message))
                    self.die()
            case effects.SendReply(rank, incarnation) if (rank, incarnation) == self.seat:
                if self.phase in ("gone", "joining"):
                    return  # it came to a stream that has ended
                self.heard[shard] = effect
                if len(self.heard) == NUM_SHARDS:
                    self._replied()

    def _replied(self) -> None:
        first, *others = self.heard.values()
        assert all(other == first for other in others), "the parts of one reply"
        self.heard, self.has_started = {}, True
        self.number, self.version = first.reply.result.seq, first.reply.result.version
        self.phase = "computing" if first.reply.next_work.local_steps else "done"


def check(shards: Shards) -> None:
    """All did the same, and each contribution that counts is folded once, into one version."""
    shards.check()
    assert len({shard.run.digest() for shard in shards.shards}) == 1
    done = [effect for _, found in shards.shards[0].applied for effect in found]
    taken = [effect for effect in done if isinstance(effect, effects.ContributionTaken)]
    taken = [effect for effect in taken if effect.outcome in ("accepted", "skipped")]
    kept = Counter(effect.contribution.id for effect in taken if effect.is_kept)
    folded = Counter(effect.id for effect in done if isinstance(effect, effects.Fold))
    committed = Counter(
        contribution for effect in done if isinstance(effect, effects.Commit) for contribution in effect.contributions
    )
    empty = [effect.contribution.id for effect in taken if not effect.is_kept]
    assert kept == folded == committed and max(kept.values(), default=1) == 1
    for rank in range(NUM_WORKERS):
        numbers = sorted(snapshot.seq for snapshot in [*kept, *empty] if snapshot.rank == rank)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "each number counts once"
    versions = [effect.version for effect in done if isinstance(effect, effects.Commit)]
    assert versions == list(range(1, len(versions) + 1))


@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "localsgd"])
@given(seed=st.integers(0, 2**32), num_moves=st.integers(10, 250))
@settings(max_examples=30, deadline=None)
def test_resets_deaths_and_cuts(mode: str, seed: int, num_moves: int) -> None:
    chance = random.Random(seed)
    options = {"mode": mode, "num_workers": NUM_WORKERS, "training_steps": STEPS, "staleness": 1, "local_steps": 1}
    shards = Shards(partial(make_run, options), NUM_SHARDS)
    clients = [Client(rank, shards) for rank in range(NUM_WORKERS)]
    for _ in range(num_moves):
        shards.now += 0.01
        move = chance.random()
        client = chance.choice(clients)
        if move < 0.45:
            scattered(chance, shards)
        elif move < 0.92:
            client.act(chance)
        elif move < 0.95:
            client.reset()
        elif move < 0.96:
            client.die()
        elif move < 0.97:
            client.begin()  # another process, while this one is not known to be gone
        elif move < 0.99:
            shards.pause()
        else:
            shards.go_on()
    for _ in range(200):  # nothing goes wrong any more: everyone comes to the end
        shards.settle()
        if all(client.phase == "done" for client in clients):
            break
        for client in clients:
            client.act(chance)
    assert [client.phase for client in clients] == ["done"] * NUM_WORKERS, [vars(client) for client in clients]
    assert {reason for client in clients for reason in client.refusals} <= MAY_BE_TOLD
    check(shards)
