"""Sections for output, costs, logs, starting processes and relays."""

# No `from __future__ import annotations`: see __init__.py.
import re
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ...registry import TRACKERS
from ..option import EVERY, LAUNCHER, SERVER, Flag, Panel, Section, checked_by
from .processes import Codec, ReachedList
from .run import Mode, Until


class SlowdownConfig(Section):
    """Delays added to a worker's steps, to simulate unequal machines. Seconds are per step."""

    base_s: float = Field(0.0, ge=0, description="seconds added to every step of every worker")
    jitter_s: float = Field(0.0, ge=0, description="maximum of a uniform random delay added to every step, seconds")
    straggler_rank: int | None = Field(None, ge=0, description="rank of the slow worker; none: any")
    straggler_every: int | None = Field(None, ge=1, description="every Nth step of straggler_rank is slow")
    straggler_factor: float = Field(5.0, ge=1, description="a slow step takes this many times the normal time")
    straggler_probability: float = Field(0.0, ge=0, le=1, description="probability that a step of any worker is slow")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.straggler_rank is None) != (self.straggler_every is None):
            raise ValueError("straggler_rank and straggler_every go together: which rank, and every how many steps")
        return self


def _names_in(text: str | None) -> list[str]:
    """Return the names in `a, b`, each once."""
    return list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def _matching(pattern: str, otherwise: str) -> AfterValidator:
    """Return a validator that text matches `pattern`. `otherwise` is the error message."""

    def read(text: str) -> None:
        if not re.search(pattern, text):
            raise ValueError(otherwise)

    return checked_by(read)


_SAFETENSORS = _matching(r"\.safetensors$", "weights are written as safetensors: the name must end in .safetensors")
_CURVE = _matching(r"\.(csv|jsonl)$", "evaluations are CSV or JSON lines: the name must end in .csv or .jsonl")
Weights = Annotated[str, _SAFETENSORS]
Curve = Annotated[str, _CURVE]
Url = Annotated[str, _matching(r"^https?://", "is the address of a collector, such as http://127.0.0.1:4318")]
_NAME = _matching(r"^(?!last$)[^\x00-\x1f\x7f]+$", "can be printed, and `last` is the newest run")
RunName = Annotated[str, Field(max_length=100), _NAME]
Trackers = Annotated[str, checked_by(lambda text: [TRACKERS.check(name) for name in _names_in(text)])]


class OutputConfig(Section):
    """Files and services that receive the results of a run."""

    save: Annotated[Weights | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.safetensors", is_for_alone=True)] = Field(
        None, description="file for the final weights; with several modes, FILE-MODE.safetensors for each"
    )
    save_averaged: bool = Field(False, description="save the Polyak average (store.polyak) instead of the weights")
    best_weights: Weights | None = Field(
        None, description="file for the weights of the best evaluation; none: best.safetensors beside output.save"
    )
    curve: Annotated[Curve | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.csv|.jsonl", is_for_alone=True)] = Field(
        None, description="file for all evaluations; with several modes, FILE-MODE for each"
    )
    summary: Annotated[str | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.json", is_for_alone=True)] = Field(
        None, description="file for the results as JSON"
    )
    history: Annotated[str | None, Flag(Panel.OUTPUT, EVERY, metavar="FILE.jsonl")] = Field(
        None, description="file for all events, for ps-launch check; with several modes, FILE-MODE.jsonl for each"
    )

    report: Annotated[str | None, Flag(Panel.OUTPUT, (LAUNCHER,), metavar="DIR")] = Field(
        None, min_length=1, description="folder for report.html and report.md, which compare the runs"
    )

    target: Annotated[Until | None, Flag(Panel.OUTPUT, (LAUNCHER,), metavar="METRIC>=X|<=X")] = Field(
        None, description="goal for compared runs, such as 'accuracy >= 0.95'; the report has its time in each run"
    )

    track: Annotated[Trackers | None, Flag(Panel.OUTPUT, metavar="NAME,...")] = Field(
        None, description="experiment trackers: tensorboard, wandb, mlflow, trackio; see docs/tracking.md"
    )
    project: str = Field("paramserver", min_length=1, description="the project's name in experiment trackers")
    track_dir: str = Field("runs", min_length=1, description="folder of the run store (paramserver.db) and of trackers")
    name: Annotated[RunName | None, Flag(Panel.OUTPUT, name="name", metavar="NAME")] = Field(
        None, description="name of the run in the run store and in trackers; of several runs, NAME-MODE for each"
    )
    note: Annotated[str, Flag(Panel.OUTPUT, metavar="TEXT")] = Field(
        "", max_length=1000, description="what the run is for; ps-runs shows it"
    )
    store: Annotated[bool, Flag(Panel.OUTPUT, (SERVER, LAUNCHER))] = Field(
        True, description="record the run in the run store, for ps-runs; see docs/runs.md"
    )

    traces: Annotated[Url | None, Flag(Panel.OUTPUT, EVERY, metavar="http://HOST:PORT")] = Field(
        None, description="OTLP endpoint (HTTP) for OpenTelemetry spans of every exchange; see docs/tracing.md"
    )

    @property
    def trackers(self) -> list[str]:
        """Names of the experiment trackers."""
        return _names_in(self.track)

    @property
    def tables(self) -> str | None:
        """File for tables of rows, beside the weights."""
        return None if self.save is None else f"{self.save.removesuffix('.safetensors')}-tables.safetensors"

    @property
    def best(self) -> str | None:
        """File for the weights of the best evaluation."""
        beside = None if self.save is None else str(PurePath(self.save).with_name("best.safetensors"))
        return self.best_weights or beside


class CostConfig(Section):
    """Prices of machines. The dashboard and the summary show the cost of a run; ps-launch --estimate predicts it."""

    per_hour: float | None = Field(None, ge=0, description="price of one machine per hour; hosts.yaml overrides it")
    total_per_hour: float | None = Field(None, ge=0, description="price of all machines per hour; none: cost.per_hour")
    currency: str = Field("USD", pattern=r"^\S{1,8}$", description="currency of the prices")

    @property
    def rate(self) -> float | None:
        """Price of an hour of the run."""
        return self.per_hour if self.total_per_hour is None else self.total_per_hour


class LogConfig(Section):
    """Log lines of all processes."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is shown")
    format: Annotated[
        Literal["text", "json"], Flag(Panel.OUTPUT, (LAUNCHER,), name="log-format", metavar="text|json")
    ] = Field("text", description="text for people, json for programs")


class LaunchConfig(Section):
    """Settings of ps-launch: hosts, backends, restarts."""

    web: Annotated[bool, Flag(Panel.OUTPUT, (LAUNCHER,))] = Field(
        False, description="serve a live dashboard of the run, at server.web or at a free port of this machine"
    )
    serve: Annotated[int | None, Flag(Panel.OUTPUT, (LAUNCHER,), metavar="[PORT]")] = Field(
        None, ge=0, le=65535, description="start ps-serve beside the run; without PORT, or 0: that of serve.listen"
    )
    backend: Annotated[str | None, Flag(Panel.HOSTS, (LAUNCHER,), metavar="NAME")] = Field(
        None, description="backend that starts processes: local, slurm, ray, ssh; none: ssh with --hosts, else local"
    )
    ray_address: str = Field("auto", min_length=1, description="HOST:PORT of a Ray cluster; auto: this machine's")
    ray_worker: dict[str, float] = Field({"CPU": 1}, description="Ray resources of each worker, e.g. {CPU: 4, GPU: 1}")
    ray_server: dict[str, float] = Field({"CPU": 1}, description="Ray resources of the server, and of each shard")
    ray_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="Ray's placement strategy for the processes"
    )
    ray_wait_s: float = Field(60.0, gt=0, description="seconds in which Ray must place all processes")
    hosts: Annotated[str | None, Flag(Panel.HOSTS, (LAUNCHER,), metavar="FILE.yaml")] = Field(
        None, description="YAML file of the machines to use, see docs/remote.md"
    )
    regions: Annotated[int | None, Flag(Panel.HOSTS, (LAUNCHER,), metavar="N")] = Field(
        None, ge=2, description="regions on this machine, each with a relay and equally many workers; to try relays"
    )
    colocate: Annotated[bool, Flag(Panel.HOSTS, (LAUNCHER,))] = Field(
        False, description="run one server shard on each host that has workers"
    )
    sync_code: Annotated[bool, Flag(Panel.HOSTS, (LAUNCHER,))] = Field(
        False, description="copy the task file or script to every host that has workers"
    )
    ssh: str = Field("ssh", min_length=1, description="the ssh command, with its options")
    connect_s: float = Field(10.0, gt=0, description="seconds a host has to reply")
    lost_after_s: float = Field(20.0, ge=5, description="seconds until a silent host is lost and ends its processes")
    script: Annotated[str | None, Flag(Panel.RUN, (LAUNCHER,), metavar="FILE.py")] = Field(
        None, description="training script that each worker runs; its arguments follow --"
    )
    torch_variables: Annotated[bool, Flag(Panel.OTHER, (LAUNCHER,))] = Field(
        False, description="set RANK and WORLD_SIZE for a script; trainers then expect a process group"
    )
    group: Annotated[int, Flag(Panel.RUN, (LAUNCHER,), metavar="G")] = Field(
        1, ge=1, le=254, description="processes of each worker; they run on one host, share a rank and divide its batch"
    )
    group_min: int | None = Field(
        None, ge=1, description="fewest processes of a worker; a pipeline may lose the others"
    )
    seeds: Annotated[int, Flag(Panel.RUN, (LAUNCHER,), metavar="N")] = Field(
        1, ge=1, le=100, description="runs of each mode, with seeds run.seed, run.seed + 1, ...; they are compared"
    )
    port: Annotated[int | None, Flag(Panel.OTHER, (LAUNCHER,))] = Field(
        None, ge=0, le=65535, description="server port; none: a free one"
    )
    status_interval_s: float = Field(2.0, gt=0, description="seconds between status lines without a terminal")
    grace_s: float = Field(10.0, gt=0, description="seconds from Ctrl-C to a kill; servers have ten times as long")
    max_restarts: Annotated[int, Flag(Panel.SNAPSHOTS, (LAUNCHER,), metavar="N")] = Field(
        3, ge=0, description="restarts of each process before the job ends with exit code 17; 0: no restarts"
    )
    backoff_s: float = Field(0.5, ge=0, description="seconds before the first restart; doubles up to 10 s")


class UpstreamConfig(Section):
    """The run above (docs/regions.md) of a relay: a server for its region, and one worker of that run."""

    server: Annotated[ReachedList | None, Flag(Panel.HOSTS, (SERVER,), name="upstream", metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT[,HOST:PORT] of the server above; this server is then the relay of a region"
    )
    rank: Annotated[int | None, Flag(Panel.HOSTS, (SERVER,), name="upstream-rank")] = Field(
        None, ge=0, description="rank of the region in the run above; none: the server above gives a free rank"
    )
    region: str | None = Field(None, description="name of the region, for displays; none: this host's")
    every: Annotated[int | None, Flag(Panel.HOSTS, name="upstream-every", metavar="K")] = Field(
        None, ge=0, description="steps between exchanges; 0: the region waits for each; none: as the run above says"
    )
    mode: Mode = Field("diloco", description="mode of the run above with ps-launch and every of at least 1")
    ahead: int | None = Field(None, ge=1, description="most steps of the region without a reply from above; none: 4 K")
    codec: Codec = Field("raw", description="codec of contributions to the server above")
    reply_codec: Codec = Field("raw", description="codec of weights from the server above")
    cert: str | None = Field(None, description="certificate (PEM) for the server above; none: security.cert")
    key: str | None = Field(None, description="private key (PEM) of upstream.cert")
