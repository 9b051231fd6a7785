"""Protocol behaviour as transcripts under version control: one file beside this one is one story.

    mode sync                       which policy
    option num_workers 2            its options, and those of Common in ps/policies/base.py
    # a comment; blank lines are kept

    join w0            -> what the policy decides, in its own words
    contribute w0 s1   -> rank 0 sends its step 1, on the version it was last given
    contribute w0 s1 broken         a report of the generation it was told last, which came to nothing (allreduce)
    contribute w0 s1 on v3 x64      the same, on version 3, from 64 samples; delayed_update, gradients are on
                                    the version given one reply earlier
    reject w0          -> rank 0 sends a contribution that cannot be used
    disconnect w0      -> rank 0 loses its connection, and is still a member
    left w0            -> rank 0 is gone
    after 2.5 s        -> time passes

PS_UPDATE_SCENARIOS=1 writes the right-hand sides anew; read the diff before you commit it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.registry import MODES
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Commit, Discard, Fold, Outcome, Policy, Refuse, Reply, names
from paramserver.ps.policies.shared.decisions import Wait
from paramserver.tests.scenarios.telling import compare, play

from ..records import contribution_of, generation_of

STORIES = sorted(Path(__file__).parent.glob("*.txt"))
_NAMES = {
    Outcome.START: "",
    Outcome.APPLIED: "",
    Outcome.REPEATED: " (repeated: nothing folded)",
    Outcome.DROPPED: " (dropped: nothing folded)",
    Outcome.REJECTED: " (rejected: nothing folded)",
}
_CONTRIBUTE = re.compile(r"contribute w(\d+) s(\d+)(?: on v(\d+))?(?: of e(\d+))?(?: x(\d+))?( broken)?")


@dataclass
class Teller:
    """Feeds events to a policy and says what it decided."""

    policy: Policy
    now: float = 0.0
    bases: dict[int, int] = field(default_factory=dict)  # version of the next contribution
    computed_on: dict[int, int] = field(default_factory=dict)  # version of the weights in the worker's model
    generations: dict[int, int] = field(default_factory=dict)  # that they were told last
    staleness: dict[int, int] = field(default_factory=dict)  # of the last contribution
    folded: list[str] = field(default_factory=list)  # since the last commit, in the order of folding

    def tell(self, event: str) -> str:
        if match := _CONTRIBUTE.fullmatch(event):
            rank, step = int(match[1]), int(match[2])
            base = int(match[3]) if match[3] else self.bases.get(rank, 0)
            generation = int(match[4]) if match[4] else self.generations.get(rank, 0)
            num_steps = self.policy.next_local_steps(rank) or 1
            contribution = contribution_of(
                step, base, int(match[5] or 1), num_steps, generation=generation, failed=bool(match[6])
            )
            self.staleness[rank] = self.policy.staleness(rank, contribution)
            return self._say(self.policy.contributed(rank, contribution, self.now), rank)
        if match := re.fullmatch(r"(join|left) w(\d+)", event):
            rank = int(match[2])
            if match[1] == "join":
                return self._say(self.policy.joined(rank, self.now), rank)
            return self._say(self.policy.left(rank, self.now), None)
        if match := re.fullmatch(r"reject w(\d+)", event):
            return self._say(self.policy.rejected(int(match[1]), self.now), int(match[1]))
        if match := re.fullmatch(r"disconnect w(\d+)", event):
            self.policy.disconnected(int(match[1]))
            return "(nothing)"
        if match := re.fullmatch(r"after (\d+(?:\.\d+)?) s", event):
            self.now += float(match[1])
            return self._say(self.policy.tick(self.now), None)
        raise AssertionError(f"no such event: {event}")

    def _say(self, decisions: list[Any], rank: int | None) -> str:
        lines: list[str] = []
        replies: dict[str, list[int]] = {}
        for decision in decisions:
            match decision:
                case Fold(folded, weight):
                    self.folded.append(f"w{folded}" + (f"*{weight:g}" if weight != 1 else ""))
                case Commit(ranks, reason, lr_scale, among):
                    assert sorted(ranks) == sorted(int(re.match(r"w(\d+)", name)[1]) for name in self.folded)
                    stale = max(self.staleness[rank] for rank in ranks)
                    late = f"; staleness {stale}" if stale else ""
                    late += f"; rate x{lr_scale:.3g}" if lr_scale != 1 else ""
                    late += f"; momentum among {among}" if among > 1 else ""
                    lines.append(f"commit [{' '.join(self.folded)}] ({reason}{late})")
                    self.folded = []
                case Reply(replied, outcome):
                    self._take_weights(replied, outcome)
                    replies.setdefault(self._going_on(replied) + _NAMES[outcome], []).append(replied)
                case Refuse(refused, kind, reason):
                    lines.append(f"refuse w{refused} {kind} ({reason})")
                case Discard() | Wait():
                    pass  # the reply or refusal says so
        lines += [f"reply {', '.join(f'w{r}' for r in ranks)} {how}" for how, ranks in replies.items()]
        if rank is not None and (reason := self.policy.waiting(self.now).get(rank)) is not None:
            lines.append(f"(w{rank} waits: {reason})")
        return "; ".join(lines) or "(nothing)"

    def _take_weights(self, rank: int, outcome: Outcome) -> None:
        """What the replied worker's next contribution is based on."""
        policy = self.policy
        is_computed = policy.common.delayed_update and not policy.kind.worker_steps and outcome != Outcome.START
        self.bases[rank] = self.computed_on[rank] if is_computed else policy.version
        self.computed_on[rank], self.generations[rank] = policy.version, generation_of(policy, rank)

    def _going_on(self, rank: int) -> str:
        steps = self.policy.next_local_steps(rank)
        if steps == 0:
            how = ", all steps done"
        elif self.policy.local_steps > 1:
            how = f", {steps} local step{'s' if steps > 1 else ''}"
        else:
            group = self.policy.group_info(rank)
            how = "" if group is None else f", generation {group.generation} of {names(group.members)}"
        return f"version {self.policy.version}{how}"


def begin(settings: dict[str, Any], _: list[str]) -> Callable[[str], str]:
    return Teller(policy_of(settings.pop("mode"), settings)).tell


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    compare(path, play(path.read_text(encoding="utf-8"), begin))


def test_every_mode_ships_with_a_story() -> None:
    modes = {re.search(r"^mode (\w+)$", path.read_text(encoding="utf-8"), re.MULTILINE)[1] for path in STORIES}
    assert modes == set(MODES.names())


def test_a_changed_decision_fails_with_a_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: a story that tells something else is not accepted."""
    monkeypatch.delenv("PS_UPDATE_SCENARIOS", raising=False)
    path = tmp_path / "wrong.txt"
    path.write_text("mode async\n\njoin w0 -> reply w0 version 7\n")
    with pytest.raises(AssertionError, match=r"-join w0 -> reply w0 version 7\n *\+join w0 -> reply w0 version 0"):
        test_story(path)
