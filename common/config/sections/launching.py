"""What comes out, and how processes are started."""

# No `from __future__ import annotations`: see __init__.py.
import re
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ...registry import TRACKERS
from ..option import EVERY, LAUNCHER, SERVER, Flag, Panel, Section
from .run import Until


class SlowdownConfig(Section):
    """Delays added to a worker's steps, to try unequal machines on equal ones. Seconds are per step."""

    base_s: float = Field(0.0, ge=0, description="added to every step of every worker")
    jitter_s: float = Field(0.0, ge=0, description="plus a uniform random 0..jitter_s")
    straggler_rank: int | None = Field(None, ge=0, description="the rank that is slow; none: any")
    straggler_every: int | None = Field(None, ge=1, description="it is slow every Nth step")
    straggler_factor: float = Field(5.0, ge=1, description="a slow step takes this many times the step")
    straggler_probability: float = Field(0.0, ge=0, le=1, description="chance of any step of any worker")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.straggler_rank is None) != (self.straggler_every is None):
            raise ValueError("straggler_rank and straggler_every go together: which rank, and every how many steps")
        return self


def _names_in(text: str | None) -> list[str]:
    """`a, b` as each name once."""
    return list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def _trackers(text: str) -> str:
    for name in _names_in(text):
        TRACKERS.check(name)
    return text


def _matching(pattern: str, otherwise: str) -> AfterValidator:
    """A check that a text matches; `otherwise`: the error's sentence."""

    def check(text: str) -> str:
        if not re.search(pattern, text):
            raise ValueError(otherwise)
        return text

    return AfterValidator(check)


Weights = Annotated[
    str, _matching(r"\.safetensors$", "weights are written as safetensors: let the name end in .safetensors")
]
Curve = Annotated[
    str, _matching(r"\.(csv|jsonl)$", "evaluations are CSV or JSON lines: let the name end in .csv or .jsonl")
]
Url = Annotated[str, _matching(r"^https?://", "is the address of a collector, such as http://127.0.0.1:4318")]


class OutputConfig(Section):
    save: Annotated[Weights | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.safetensors", is_for_alone=True)] = Field(
        None, description="final weights; of several modes FILE-MODE.safetensors each"
    )
    save_averaged: bool = Field(False, description="save the Polyak average (store.polyak) instead")
    best_weights: Weights | None = Field(None, description="weights of the best evaluation; none: beside output.save")
    curve: Annotated[Curve | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.csv|.jsonl", is_for_alone=True)] = Field(
        None, description="all evaluations; of several modes FILE-MODE each"
    )
    summary: Annotated[str | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.json", is_for_alone=True)] = Field(
        None, description="results as JSON"
    )
    history: Annotated[str | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.jsonl")] = Field(
        None, description="what was applied when, for ps-launch check; of several modes FILE-MODE.jsonl each"
    )

    report: Annotated[str | None, Flag(Panel.OUTPUT, (LAUNCHER,), metavar="DIR")] = Field(
        None, min_length=1, description="write report.html and report.md there: how the runs compare"
    )

    target: Annotated[Until | None, Flag(Panel.OUTPUT, (LAUNCHER,), metavar="METRIC>=X|<=X")] = Field(
        None, description="what runs that are compared are to reach, such as 'accuracy >= 0.95': when each came to it"
    )

    track: Annotated[Annotated[str, AfterValidator(_trackers)] | None, Flag(Panel.OUTPUT, metavar="NAME,...")] = Field(
        None, description="experiment trackers that are told: tensorboard, wandb, mlflow, trackio; see docs/tracking.md"
    )
    project: str = Field("paramserver", min_length=1, description="what trackers file runs under")
    track_dir: str = Field(
        "runs",
        min_length=1,
        description="folder of the run store (paramserver.db), and where trackers keep their files",
    )
    store: Annotated[bool, Flag(Panel.OUTPUT, (SERVER, LAUNCHER))] = Field(
        True, description="record the run in the run store, for ps-runs; see docs/runs.md"
    )

    traces: Annotated[Url | None, Flag(Panel.OUTPUT, EVERY, metavar="http://HOST:PORT")] = Field(
        None, description="OTLP endpoint (HTTP) that is sent OpenTelemetry spans of every exchange; see docs/tracing.md"
    )

    @property
    def trackers(self) -> list[str]:
        """Their names."""
        return _names_in(self.track)

    @property
    def tables(self) -> str | None:
        """Where tables of rows go, beside the weights."""
        return None if self.save is None else f"{self.save.removesuffix('.safetensors')}-tables.safetensors"

    @property
    def best(self) -> str | None:
        """Where the weights of the best evaluation go."""
        beside = None if self.save is None else str(PurePath(self.save).with_name("best.safetensors"))
        return self.best_weights or beside


class CostConfig(Section):
    """What machines cost: shown with the run, at its end, and before it by ps-launch --estimate."""

    per_hour: float | None = Field(None, ge=0, description="price of a machine's hour; hosts.yaml may give another")
    total_per_hour: float | None = Field(None, ge=0, description="price of an hour of all machines; none: of one")
    currency: str = Field("USD", pattern=r"^\S{1,8}$", description="in which prices are")

    @property
    def rate(self) -> float | None:
        """Of an hour of the run."""
        return self.per_hour if self.total_per_hour is None else self.total_per_hour


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level shown")
    format: Annotated[
        Literal["text", "json"], Flag(Panel.OUTPUT, (LAUNCHER,), name="log-format", metavar="text|json")
    ] = Field("text", description="text for people, json for programs")


class LaunchConfig(Section):
    web: Annotated[bool, Flag(Panel.OUTPUT, (LAUNCHER,))] = Field(
        False, description="live dashboard of the run; at server.web, or a free port of this machine"
    )
    backend: Annotated[str | None, Flag(Panel.HOSTS, (LAUNCHER,), metavar="NAME")] = Field(
        None, description="where processes start: local, slurm, ray or ssh; none: ssh with launch.hosts, else local"
    )
    ray_address: str = Field("auto", min_length=1, description="HOST:PORT of a Ray cluster; auto: this machine's")
    ray_worker: dict[str, float] = Field({"CPU": 1}, description="what each worker asks Ray for, e.g. {CPU: 4, GPU: 1}")
    ray_server: dict[str, float] = Field({"CPU": 1}, description="what the server, and each shard, asks Ray for")
    ray_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="how Ray lays processes on nodes"
    )
    ray_wait_s: float = Field(60.0, gt=0, description="seconds that Ray has to find room for all of them")
    hosts: Annotated[str | None, Flag(Panel.HOSTS, (LAUNCHER,), metavar="FILE.yaml")] = Field(
        None, description="YAML file of the machines to use, see docs/remote.md"
    )
    colocate: Annotated[bool, Flag(Panel.HOSTS, (LAUNCHER,))] = Field(
        False, description="each host that has workers carries one server shard"
    )
    sync_code: Annotated[bool, Flag(Panel.HOSTS, (LAUNCHER,))] = Field(
        False, description="copy the task file or script to every host that has workers"
    )
    ssh: str = Field("ssh", min_length=1, description="the ssh command, with options of your own")
    connect_s: float = Field(10.0, gt=0, description="seconds a host has to reply")
    lost_after_s: float = Field(
        20.0, ge=5, description="seconds of silence until a host is lost and ends its processes"
    )
    script: Annotated[str | None, Flag(Panel.RUN, (LAUNCHER,), metavar="FILE.py")] = Field(
        None, description="your own training script as each worker; its arguments follow --"
    )
    torch_variables: Annotated[bool, Flag(Panel.OTHER, (LAUNCHER,))] = Field(
        False, description="give a script RANK and WORLD_SIZE too, which trainers take for a process group"
    )
    group: Annotated[int, Flag(Panel.RUN, (LAUNCHER,), metavar="G")] = Field(
        1, ge=1, le=254, description="processes of each worker, on one host: they divide its batch, and are one rank"
    )
    seeds: Annotated[int, Flag(Panel.RUN, (LAUNCHER,), metavar="N")] = Field(
        1, ge=1, le=100, description="runs of each mode, with so many seeds from run.seed on, compared"
    )
    port: Annotated[int | None, Flag(Panel.OTHER, (LAUNCHER,))] = Field(
        None, ge=0, le=65535, description="server port; none: a free one"
    )
    status_interval_s: float = Field(2.0, gt=0, description="seconds between status lines without a terminal")
    grace_s: float = Field(10.0, gt=0, description="seconds from Ctrl-C to a kill; servers have ten times as long")
    max_restarts: Annotated[int, Flag(Panel.SNAPSHOTS, (LAUNCHER,), metavar="N")] = Field(
        3, ge=0, description="of each process, before the job ends with exit code 17; 0: its first failure ends the job"
    )
    backoff_s: float = Field(0.5, ge=0, description="before a first restart; doubles up to 10 s")
