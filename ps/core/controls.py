"""Controls of a running run, from the dashboard or a program.

A control is an event: every shard applies it at the same point, the history records it, and a replay repeats it.

    snapshot            one is taken with the next commit
    drain               the next reply of every worker is the last; final weights are saved
    evict RANK          the worker's call is refused, and the rank may not come back in this run
    pause RANK          the worker's next reply waits until a resume; the mode decides whether others wait for it
    resume RANK         its reply leaves
    set NAME VALUE      `lr_scale` multiplies the server's learning rate from the next commit on; any other NAME is one
                        of the options in `Policy.changeable`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from . import effects
from .effects import Effect, Log
from .ending import Ending
from .events import Controlled
from .roster import evicted
from .state import LR_SCALE, MOST_LR_SCALE, RunState

_RESUME = "stop it and start the server again with --resume latest --mode M: it continues from its snapshot"
_MOST_WHOLE = 2**53  # beyond it a reader of JSON may see another number


class CannotError(Exception):
    """A control cannot be carried out; the message is the reason, as a sentence."""


def offered(run: Ending) -> list[str]:
    """Names of the controls that this run accepts."""
    kept = ["snapshot"] if run.rhythm.is_kept else []
    return [*kept, "drain", "pause", "resume", "evict", *(f"set {name}" for name in _settings(run))]


def _settings(run: Ending) -> list[str]:
    return [*([LR_SCALE] if run.policy.kind.server_steps else []), *run.policy.changeable]


def follow(run: Ending, event: Controlled) -> Iterator[Effect]:
    """Yields the fact that the control was taken or refused, then its effects."""
    found: list[Effect] = []
    try:
        if event.do not in ("drain", "evict", "pause", "resume", "snapshot", "set"):
            raise CannotError(f"nothing is called '{event.do[:40]}'; there are: {', '.join(offered(run))}")
        if run.is_closed or run.is_done or run.policy.is_stopping:
            raise CannotError("the run is ending")
        result = _set(run, event, found) if event.do == "set" else _result_of(run, event, found)
    except CannotError as why:
        yield effects.ControlTaken(event, str(why), False)
        return
    yield Log("info", "control", {"result": result})
    yield effects.ControlTaken(event, result, True)
    yield from found


def _result_of(run: Ending, event: Controlled, found: list[Effect]) -> str:
    """Carry out a control other than `set`. Returns its result, as a sentence, and adds its effects to `found`."""
    rank, policy, at = event.rank, run.policy, event.at
    if event.do == "drain":
        found += run.stop("drained by a user", at)
        return "the next reply of every worker is the last"
    if event.do == "snapshot":
        if not run.rhythm.is_kept:
            raise CannotError("this server keeps no snapshots; start it with --checkpoint-dir DIR")
        run.rhythm.is_asked = True
        return "a snapshot is taken with the next commit"
    if event.do == "resume":
        if rank not in policy.paused:
            raise CannotError(f"worker {rank} is not paused; paused: {_ranks(policy.paused)}")
        found += run.performed(policy.resume(rank, at), at)
        return f"worker {rank} is resumed"
    if rank is None or rank not in policy.members:
        raise CannotError(f"no worker {rank} is in the run; there are: {_ranks(policy.members)}")
    if event.do == "pause":
        policy.paused.add(rank)
        return f"worker {rank} is paused: its next reply waits for a resume"
    worker = run.roster.workers[rank]
    run.roster.evicted.add(rank)
    found.append(Log("warning", "evicted", {"rank": rank}))
    found.append(effects.WorkerLeft(rank, worker.incarnation, "finished", ""))
    found += run.performed(policy.finished(rank, at), at)
    found += run.expel(worker, evicted(rank), at)
    return f"worker {rank} is evicted"


def _set(run: Ending, event: Controlled, found: list[Effect]) -> str:
    policy, name, value = run.policy, event.name, event.value
    if isinstance(value, int) and abs(value) > _MOST_WHOLE:
        raise CannotError(f"'{name[:40]}' must be at most 2^53, got a whole number of {value.bit_length()} bits")
    if name == LR_SCALE and policy.kind.server_steps:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST_LR_SCALE:
            raise CannotError(f"lr_scale must be a number from 0 to {MOST_LR_SCALE:,.0f}, got {value!r:.40}")
        before: Any = run.contributions.lr_scale
        run.contributions.lr_scale = float(value)
    elif name == "mode":
        raise CannotError(f"the mode of a run does not change while workers train; {_RESUME}")
    elif name in policy.changeable:
        before = getattr(policy.options, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise CannotError(f"{name} must be a finite number, got {value!r}")
        try:
            options = policy.options_with({name: value})
        except ValueError as why:
            raise CannotError(str(why)) from None
        least = policy.staleness_in_flight * policy.num_in_flight
        if getattr(options, "staleness", least) < least:
            raise CannotError(f"with delayed_update {name} must be {least} or more, got {value}: all would wait")
        run.changed[name] = run.changed.get(name, (before,))[0], getattr(options, name)
        found += run.performed(policy.change(options, event.at), event.at)
    else:
        names = ", ".join(_settings(run)) or "nothing"
        raise CannotError(f"'{name[:40]}' cannot be changed while {run.mode} runs; changeable: {names}")
    return f"{name} is {value}, was {before}"


def _ranks(ranks: Any) -> str:
    known = sorted(ranks)
    rest = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return (", ".join(map(str, known[:20])) or "none") + rest


def keep_out(run: RunState, ranks: Iterable[int]) -> None:
    """Keep evicted ranks out of a run that goes back in its process: the run neither admits them nor waits for them.
    A restarted server admits them again."""
    for rank in ranks:
        run.roster.evicted.add(rank)
        run.policy.finished(rank, 0.0)
