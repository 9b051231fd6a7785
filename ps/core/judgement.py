"""What becomes of a contribution that is not finite, or whose gradient is too large.

    reject   replied to with fresh weights, nothing folded, not a contribution that counts; too many of a worker
             in a row end the run
    skip     counts as a contribution of the worker's, of which nothing is folded
    clip     taken, with those values as 0, or scaled down to the cap as torch.nn.utils.clip_grad_norm_ does
    halt     the end of the run

What measures payloads is `ps/tensors/sanity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...common.errors import DivergedError, Reason

Action = Literal["reject", "skip", "clip", "halt"]

# As clip_grad_norm_: a gradient of exactly the cap is scaled a little too.
_EPSILON = 1e-6
# From the mildest: what one shard cannot take, none takes.
_SEVERITY = {"take": 0, "skip": 1, "reject": 2, "halt": 3}


def factor_to(most: float, norm: float) -> float:
    """What a gradient of `norm` is multiplied with to have norm `most`, as clip_grad_norm_ does it."""
    return most / (norm + _EPSILON)


@dataclass(frozen=True)
class Limits:
    """The settings, as in the configuration's `store` section. `max_norm` None: any norm, and none is computed."""

    on_nonfinite: Action = "reject"
    max_norm: float | None = None
    on_large: Action = "clip"

    def factor(self, norm: float) -> float:
        """What a gradient of `norm` is multiplied with to have the largest one allowed."""
        assert self.max_norm is not None
        return factor_to(self.max_norm, norm)


class Judgement(NamedTuple):
    """What becomes of a contribution: `take` it, clipped or not, or one of the other actions.

    `what` was wrong, `limit` is the setting that says what to do about it; both empty for a sound one.
    """

    action: Literal["take", "reject", "skip", "halt"]
    problem: str = ""
    limit: str = ""
    is_clipped: bool = False
    norm: float = 0.0  # of this shard's part of a gradient, where there are several and store.max_norm is set
    scale: float = 1.0  # what all parts are multiplied with before they are folded

    @property
    def is_taken(self) -> bool:
        return self.action == "take"


SOUND = Judgement("take")


def decide(limits: Limits, is_finite: bool, norm: float) -> tuple[Action | Literal["take"], str, str]:
    """(what to do, what was wrong, the setting that says so) for a contribution with a gradient of `norm`."""
    if not is_finite:
        return limits.on_nonfinite, "NaN or Inf", f"store.on_nonfinite is {limits.on_nonfinite}"
    if limits.max_norm is not None and norm > limits.max_norm:
        problem = f"a gradient of norm {norm:.4g}"
        return limits.on_large, problem, f"store.max_norm is {limits.max_norm:g}, store.on_large is {limits.on_large}"
    return "take", "", ""


def judge_whole(limits: Limits, parts: Sequence[Judgement]) -> Judgement:
    """What all shards do with a contribution: the most severe of what each would do with its part, or what is done
    about the norm of the whole."""
    worst = max(parts, key=lambda part: _SEVERITY[part.action])
    if not worst.is_taken:
        return worst
    taken = next((part for part in parts if part.is_clipped), worst)
    norm = math.hypot(*(part.norm for part in parts))
    action, problem, limit = decide(limits, True, norm)
    if action == "take":
        return taken
    if action == "clip":
        return Judgement("take", problem, limit, is_clipped=True, scale=limits.factor(norm))
    return Judgement(action, problem, limit)


# ---- what the run says about it -------------------------------------------------------------


def halted(rank: int, number: int, version: int, judgement: Judgement) -> DivergedError:
    """The end of a run that is told to end at the first of these."""
    return DivergedError(
        f"rank {rank} sent {judgement.problem} as its contribution {number} ({judgement.limit}); nothing of it was "
        f"applied, the weights are at version {version}",
        fix="lower --lr, clip gradients, look at the rank's data; or let the server reject, skip or clip these",
        reason=Reason.DIVERGED,
    )


def rejected_too_often(rank: int, in_a_row: int, limit: int, version: int, judgement: Judgement) -> DivergedError:
    """The end of a run one of whose workers sends nothing else any more."""
    return DivergedError(
        f"rank {rank} sent {in_a_row} contributions with {judgement.problem} in a row (store.max_nonfinite is {limit}; "
        f"{judgement.limit}); the server's weights are finite, at version {version}",
        fix="lower --lr, clip gradients, or look at the rank's data",
        reason=Reason.DIVERGED,
    )


_MOST_NAMED = 5  # contributions


def overflowed(
    version: int, where: str, contributions: Sequence[tuple[int, int, int]], hyperparameters: Mapping[str, Any]
) -> DivergedError:
    """The end of a run whose weights a step along finite values has made NaN or Inf. `contributions` of the version:
    (rank, incarnation, number); `hyperparameters` that it was made with."""
    named = [f"{number} of rank {rank}" for rank, _, number in contributions[:_MOST_NAMED]]
    rest = f" and {len(contributions) - _MOST_NAMED} more" if len(contributions) > _MOST_NAMED else ""
    settings = ", ".join(f"{key} {hyperparameters[key]:g}" for key in ("lr", "eps") if key in hyperparameters)
    return DivergedError(
        f"the weights overflowed: version {version} has {where}, made of finite values in contribution "
        f"{', '.join(named)}{rest}{f' ({settings})' if settings else ''}; the last finite version is {version - 1}",
        fix="lower --lr, or clip gradients (--clip-norm); give Adam an eps above 0; the "
        "newest snapshot (--checkpoint-dir) is unchanged",
        reason=Reason.DIVERGED,
    )
