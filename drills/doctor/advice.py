"""Turns measured machines and links into advice: problems, the speed of each mode, sentences.

The simulator (`paramserver/simulate`) predicts steps per second from the real rules of each mode, the measured
computing time and the measured link. The number of local steps K follows from one formula: an exchange of E seconds
takes at most 20 % of the time if K >= 4 E / C, with C seconds of computing in a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ...common import registry
from ...common.errors import UsageError
from ...simulate.plan import Flags, resolve, worlds
from ...simulate.results.summary import metrics
from ...simulate.run.simulation import Simulation
from .measure import Link, Measured

CODECS = ("raw", "bf16", "int8", "q4")
MODES = ("sync", "async", "ssp", "dssp", "buffered", "localsgd", "diloco", "async_diloco")
_SHARE = 0.2  # of the time in exchanges, at most
_GOOD = 0.77  # of ideal; a run's first weights are raw
_STEPS = 200
_COPIES = 4  # of the model in a worker's memory: weights, gradients, two moments
_NAMES_THE_SAME = ("program", "torch", "python")


@dataclass(frozen=True)
class Finding:
    """One finding. `level`: ok, warn or fail; `fix`: empty if no action is needed."""

    level: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Foreseen:
    """The predicted speed of all workers together."""

    mode: str
    codec: str
    steps_per_s: float
    of_ideal: float
    local_steps: int = 1
    sets: tuple[str, ...] = ()  # settings of the codec, without those that the mode refuses

    @property
    def is_good(self) -> bool:
        """Whether transfers leave enough time to compute."""
        return round(self.of_ideal, 2) >= _GOOD  # as it is printed

    @property
    def flags(self) -> str:
        """The flags of ps-launch."""
        local = [f"--local-steps {self.local_steps}"] if self.local_steps > 1 else []
        codec = [f"--set {item}" for item in self.sets if self.codec != CODECS[0]]
        return " ".join([f"--mode {self.mode}", *local, *codec])


def checks(measured: Measured) -> list[Finding]:
    """Returns the problems that would fail a run on these machines or slow it down."""
    machines = measured.machines
    found = []
    for name in _NAMES_THE_SAME:
        of = {rank: item[name] for rank, item in sorted(machines.items())}
        if len(set(of.values())) > 1:
            values = ", ".join(f"worker {rank} {value}" for rank, value in of.items())
            text = f"versions of {name} differ: {values}"
            found.append(Finding("fail" if name == "program" else "warn", text, "install the same version everywhere"))
    for name, item, behind_s in measured.named_machines():
        found += _of_machine(name, item, measured.megabytes, behind_s or 0.0)
    if "TLS" not in measured.security and len({machine["host"] for machine in machines.values()}) > 1:
        message = "the connections have no TLS: others can read and change the data"
        found.append(Finding("warn", message, "ps-certs init, see docs/running.md"))
    found = found or [Finding("ok", f"{len(machines)} workers, all with the same versions")]
    return found + [
        Finding("ok", f"worker {rank} ({machines[rank]['host']}) has no transport {transport}: {why}")
        for rank, transport, why in measured.refused
    ]


def _of_machine(who: str, item: dict[str, Any], megabytes: float, behind_s: float) -> Iterable[Finding]:
    memory, disk = int(_COPIES * megabytes * 1e6), int(10 * megabytes * 1e6)
    fsync_s, folder = item["fsync_s"], item["folder"]
    problems = (
        (item["free_memory"] < memory, "fail",
         f"{item['free_memory'] / 1e9:.1f} GB of memory are free, but {memory / 1e9:.1f} GB are needed",
         "use another machine, or --shards and a smaller model"),
        (item["free_disk"] < disk, "warn", f"{item['free_disk'] / 1e9:.1f} GB of disk are free in {folder}",
         "snapshots need ten times the model: free space, or write elsewhere (--checkpoint-dir)"),
        (fsync_s < 0, "warn", f"nothing can be written in {folder}", "start it elsewhere (workdir)"),
        (fsync_s > 0.1, "warn", f"writing a MiB to the disk takes {fsync_s:.2f} s",
         "take fewer snapshots (--checkpoint-every), or use another disk"),
        (item["files"] < 1024, "warn", f"{item['files']} open files are the limit", "ulimit -n 65536"),
        (abs(behind_s) > 2.0, "warn", f"its clock differs by {behind_s:+.1f} s",
         "only times in logs depend on it; correct it with chrony or ntpd"),
        (_is_loaded(item), "warn", f"load {item['load']:.1f} on {item['cores']} cores",
         "other programs slow this machine down: stop them"),
    )  # fmt: skip
    return [Finding(level, f"{who}: {text}", fix) for is_found, level, text, fix in problems if is_found]


def _is_loaded(item: dict[str, Any]) -> bool:
    return bool(item["load"] > 1.5 * item["cores"])


def are_uneven(measured: Measured) -> bool:
    """Returns whether other programs slow some of the workers' machines down, and not all."""
    return len({_is_loaded(item) for item in measured.machines.values()}) > 1


def typical(links: Sequence[Link]) -> Link:
    """Returns one link that stands for all workers while all exchange: medians of their best transports."""
    up, down = median(link.up / link.together for link in links), median(link.down / link.together for link in links)
    return Link(-1, links[0].transport, up, down, median(link.exchange_s * link.together for link in links))


def local_steps_for(exchange_s: float, compute_s: float) -> int:
    """Returns the fewest local steps with which exchanges take at most a fifth of the time."""
    if compute_s <= 0:
        raise UsageError("the time of a training step must be positive", fix="--compute 100ms")
    return max(1, math.ceil(exchange_s * (1 - _SHARE) / _SHARE / compute_s - 1e-9))


def foresee(
    config: str | None, num_workers: int, megabytes: float, compute_s: float, link: Link, trip_s: float,
    sets: Sequence[str] = (),
) -> list[Foreseen]:  # fmt: skip
    """Returns every mode with every codec; exchanges with local steps take a fifth of the time."""
    machines = Flags(
        megabytes=megabytes, compute=f"{compute_s * 1e3:.4f}ms", jitter=0.0, latency=f"{trip_s * 1e3:.4f}ms",
        bandwidth=f"{link.down * 8 / 1e6:.4f}mbit/{link.up * 8 / 1e6:.4f}mbit", fold="0ms", step="0ms",
    )  # fmt: skip
    found = []
    for mode in MODES:
        for codec in CODECS:
            for ways in (("worker.codec", "worker.reply_codec"), ("worker.codec",)):
                settings = tuple(f"{way}={codec}" for way in ways)
                with suppress(UsageError):  # not every mode takes every codec both ways
                    simulated = _foreseen(config, mode, codec, num_workers, machines, [*sets, *settings])
                    found.append(replace(simulated, sets=settings))
                    break
    return found


def load_codecs() -> None:
    """Load what `foresee` needs beyond this module. It takes a second or two, for torch."""
    with suppress(ImportError, UsageError):  # `foresee` raises it again
        for name in CODECS:
            registry.CODECS.load(name)


def _foreseen(
    config: str | None, mode: str, codec: str, num_workers: int, machines: Flags, settings: list[str]
) -> Foreseen:
    flags = {"run.steps": _STEPS}
    chosen = resolve(config, mode, num_workers, flags, settings, {})[0]
    world = worlds([chosen], machines)[0][1]
    if hasattr(chosen.policy.options(mode), "local_steps"):
        exchange_s = world.latency_s + world.sizes.up / world.up + world.sizes.down / world.down
        local = local_steps_for(exchange_s, world.compute_s)
        flags = {"run.steps": local * max(30, _STEPS // local)}  # whole rounds
        chosen = resolve(config, mode, num_workers, flags, [*settings, f"policy.local_steps={local}"], {})[0]
    simulation = Simulation(*worlds([chosen], machines)[0], time.perf_counter)
    simulation.go()
    final = metrics(simulation)
    return Foreseen(mode, codec, final["steps/s"], final["of ideal"], simulation.policy.local_steps)


def sentences(
    foreseen: Sequence[Foreseen], link: Link, trip_s: float, compute_s: float, megabytes: float, *, uneven: bool = False
) -> list[str]:
    """Returns the advice as sentences: the metrics, why `first_try` is chosen, and how to try it."""
    exchange_s = trip_s + megabytes * 1e6 * (1 / link.up + 1 / link.down)
    rate = f"{link.up * 8 / 1e6:,.0f} Mbit/s up, {link.down * 8 / 1e6:,.0f} down, {trip_s * 1e3:.1f} ms round trip"
    best = first_try(foreseen, uneven=uneven)
    is_apart = uneven and not registry.MODES.load(best.mode).has_rounds
    return [
        f"A step computes for {compute_s * 1e3:,.1f} ms; {megabytes:.3g} MB go up and come back in "
        f"{exchange_s * 1e3:,.1f} ms ({rate}).",
        _reason(foreseen, best),
        *(["Other programs slow some machines down, so nobody waits for all in this mode."] if is_apart else []),
        f"First try: {best.flags}: about {best.steps_per_s:,.1f} steps per second in all; workers compute "
        f"{best.of_ideal:.0%} of the time.",
    ]


def _reason(foreseen: Sequence[Foreseen], best: Foreseen) -> str:
    """Returns why `best` is the first to try, as a sentence."""
    fitting = ", ".join(
        item.mode for item in foreseen if item.is_good and (item.codec, item.local_steps) == (best.codec, 1)
    )
    if not best.is_good:
        return f"In every mode and with every codec, workers would compute less than {_GOOD:.0%} of the time."
    if best.local_steps > 1:
        steps = ", ".join(f"{item.local_steps} with {item.codec}" for item in foreseen if item.mode == best.mode)
        return (
            "No codec makes gradients of every step fit: local steps keep transfer below a fifth of the time "
            f"({best.mode}: {steps})."
        )
    if best.codec == CODECS[0]:
        return f"Raw gradients of every step fit this link: {fitting} compute {_GOOD:.0%} of the time or more."
    return f"Raw, transfer takes more than a fifth of the time; {best.codec} makes it fit ({fitting})."


def first_try(foreseen: Sequence[Foreseen], *, uneven: bool = False) -> Foreseen:
    """Returns the best choice: the least lossy codec with which gradients of every step leave enough time to compute.

    If there is none, it takes the fewest local steps, because a codec costs less than local steps do (claims N5 and
    N7). It prefers modes that send differences (N6). If that fails too, it takes the fastest choice. On `uneven`
    machines it prefers modes without rounds, where nobody waits for the slowest worker.
    """
    good = [item for item in foreseen if item.is_good]
    if not good:
        return max(foreseen, key=lambda item: item.of_ideal)
    every_step = [item for item in good if item.local_steps == 1]
    if every_step:
        least = min(CODECS.index(item.codec) for item in every_step)
        good = [item for item in every_step if item.codec == CODECS[least]]

    def order(item: Foreseen) -> tuple[bool, int, bool]:
        mode = registry.MODES.load(item.mode)
        return uneven and mode.has_rounds, item.local_steps, bool(not every_step and not mode.kind.holds_differences)

    return min(good, key=order)
