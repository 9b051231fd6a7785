"""Judges a contribution that is not finite, or whose gradient is too large.

    reject   the worker gets fresh weights; the contribution does not count; too many in a row end the run
    skip     the contribution counts, and nothing of it is folded
    clip     the server folds it with those values as 0, or scaled down as torch.nn.utils.clip_grad_norm_ does
    halt     the run ends

`ps/tensors/sanity.py` measures payloads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..config.sections.training import StoreConfig
from ..errors import DivergedError, ParamServerError, Reason, refusal

Action = Literal["reject", "skip", "clip", "halt"]

# As clip_grad_norm_: a gradient of exactly the cap is scaled a little too.
_EPSILON = 1e-6
# From the mildest to the most severe. All shards follow the most severe one.
_SEVERITY = {"take": 0, "skip": 1, "reject": 2, "halt": 3}


def factor_to(most: float, norm: float) -> float:
    """Returns the factor that scales a gradient of `norm` to norm `most`, as clip_grad_norm_ does."""
    return most / (norm + _EPSILON)


class Judgement(NamedTuple):
    """The action for a contribution: `take`, clipped or not, or one of the others.

    `problem` describes the defect and `limit` the setting that decides; both are empty for a sound contribution.
    """

    action: Literal["take", "reject", "skip", "halt"]
    problem: str = ""
    limit: str = ""
    is_clipped: bool = False
    norm: float = 0.0  # of this shard's part of a gradient, with several shards and store.max_norm
    scale: float = 1.0  # multiplies all parts before they are folded

    @property
    def is_taken(self) -> bool:
        return self.action == "take"


SOUND = Judgement("take")


def decide(limits: StoreConfig, is_finite: bool, norm: float) -> tuple[Action | Literal["take"], str, str]:
    """Returns (action, problem, setting that decides) for a contribution with a gradient of `norm`.

    `limits.max_norm` None: any norm is taken, and none is computed."""
    if not is_finite:
        return limits.on_nonfinite, "NaN or Inf", f"store.on_nonfinite is {limits.on_nonfinite}"
    if limits.max_norm is not None and norm > limits.max_norm:
        problem = f"a gradient of norm {norm:.4g}"
        return limits.on_large, problem, f"store.max_norm is {limits.max_norm:g}, store.on_large is {limits.on_large}"
    return "take", "", ""


def judge_whole(limits: StoreConfig, parts: Sequence[Judgement]) -> Judgement:
    """Returns the judgement for all shards: the most severe of the parts', or else that of the whole norm."""
    worst = max(parts, key=lambda part: _SEVERITY[part.action])
    if not worst.is_taken:
        return worst
    taken = next((part for part in parts if part.is_clipped), worst)
    norm = math.hypot(*(part.norm for part in parts))
    action, problem, limit = decide(limits, True, norm)
    if action == "take":
        return taken
    if action == "clip":
        assert limits.max_norm is not None
        return Judgement("take", problem, limit, is_clipped=True, scale=factor_to(limits.max_norm, norm))
    return Judgement(action, problem, limit)


def unsound_start(rank: int, name: str) -> ParamServerError:
    """Returns the refusal of initial weights with NaN or Inf in the tensor of this name."""
    message = f"the initial weights of rank {rank} have NaN or Inf in '{name}'"
    fix = "check its initialisation; a mask with -inf can be a buffer with persistent=False"
    return refusal(Reason.OPTIMIZER_UNSUPPORTED, message, fix=fix)


# ---- what the run says about it -------------------------------------------------------------


def halted(rank: int, number: int, version: int, judgement: Judgement) -> DivergedError:
    """Returns the error of a run that ends at the first such contribution."""
    sent = f"rank {rank} sent {judgement.problem} as its contribution {number} ({judgement.limit})"
    message = f"{sent}; nothing of it was applied, the weights are at version {version}"
    fix = "lower --lr, clip gradients, look at the rank's data; or let the server reject, skip or clip these"
    return DivergedError(message, fix=fix, reason=Reason.DIVERGED)


def rejected_too_often(rank: int, in_a_row: int, limit: int, version: int, judgement: Judgement) -> DivergedError:
    """Returns the error of a run that rejected too many contributions of one worker in a row."""
    sent = f"rank {rank} sent {in_a_row} contributions with {judgement.problem} in a row"
    settings = f"store.max_nonfinite is {limit}; {judgement.limit}"
    message = f"{sent} ({settings}); the server's weights are finite, at version {version}"
    return DivergedError(message, fix="lower --lr, clip gradients, or look at the rank's data", reason=Reason.DIVERGED)


_MOST_NAMED = 5  # contributions


def overflowed(
    version: int, where: str, contributions: Sequence[tuple[int, int, int]], hyperparameters: Mapping[str, Any]
) -> DivergedError:
    """Returns the error of a run whose weights became NaN or Inf by a step along finite values.

    `contributions` and `hyperparameters` made the version; a contribution is (rank, incarnation, number)."""
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
