"""Sections of the server, the worker and serving: addresses, exchange, snapshots, security and limits."""

# No `from __future__ import annotations`: see __init__.py.
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from ...registry import CODECS
from ..addresses import listening, reached, reached_list, reached_list_or_none
from ..conditions import every
from ..option import EVERY, LAUNCHER, SERVE, SERVER, WORKER, Flag, Panel, Section, checked_by
from .run import Interval

DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"  # a server listens there (server.listen), a worker connects to it


Codec = Annotated[str, AfterValidator(CODECS.check)]
Transport = Literal["shared", "direct", "grpc"]
Listening = Annotated[str, AfterValidator(listening)]
Reached = Annotated[str, AfterValidator(reached)]
ReachedList = Annotated[str, AfterValidator(reached_list)]  # tried in order
ReachedListOrNone = Annotated[str, AfterValidator(reached_list_or_none)]
PemFile = Annotated[str | None, Flag(Panel.SECURITY, (*EVERY, SERVE), metavar="FILE.pem")]


class ServerConfig(Section):
    """Addresses, shards, memory and time limits of a server."""

    listen: Annotated[Listening, Flag(Panel.RUN, (SERVER,), metavar="HOST:PORT")] = Field(
        DEFAULT_ADDRESS, description="HOST:PORT at which the server listens; port 0 takes a free port"
    )
    insecure: Annotated[bool, Flag(Panel.SECURITY, (*EVERY, SERVE))] = Field(
        False, description="serve other machines without TLS"
    )
    shards: Annotated[int, Flag(Panel.HOSTS, metavar="S")] = Field(
        1, ge=1, le=256, description="server processes among which the model is divided, by bytes"
    )
    shard: Annotated[int, Flag(Panel.HOSTS, (SERVER,), metavar="I")] = Field(
        0, ge=0, description="number of this shard; shard 0 coordinates, and workers connect to it first"
    )
    coordinator: Annotated[Reached, Flag(Panel.HOSTS, (SERVER,), metavar="HOST:PORT")] = Field(
        DEFAULT_ADDRESS, description="HOST:PORT of shard 0, for the other shards"
    )
    advertise: Annotated[Reached | None, Flag(Panel.HOSTS, (SERVER,), metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT at which workers reach this shard; none: the address that the coordinator sees"
    )
    metrics: Annotated[Listening | None, Flag(Panel.OUTPUT, (SERVER,), metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT at which Prometheus reads metrics; none: no metrics port"
    )
    web: Annotated[Listening | None, Flag(Panel.OUTPUT, (SERVER,), metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT of the live dashboard of the run; none: no dashboard"
    )
    max_staged: int = Field(4, ge=1, description="uploads in memory at once; more wait in flow control")
    max_replies: int = Field(4, ge=1, description="versions of the weights that are being sent at once")
    shared_memory: bool = Field(True, description="exchange tensors with workers on this host through shared memory")
    direct: bool = Field(True, description="open a second port for direct connections, which bypass gRPC")
    direct_port: int = Field(0, ge=0, le=65535, description="port for direct connections; 0: any free port")
    status_interval_s: float = Field(1.0, gt=0, description="seconds between status events")
    absent_s: float = Field(15.0, ge=0, description="seconds that a run's end waits for a lost worker's last steps")
    join_timeout_s: float = Field(30.0, gt=0, description="seconds until a connection that does not join is closed")
    lease_s: float = Field(5.0, ge=0.5, description="seconds without a heartbeat after which a worker is released")
    drain_s: float = Field(5.0, gt=0, description="seconds that a stopping server waits for its workers to leave")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.shard >= self.shards:
            raise ValueError(f"shard is {self.shard}: with shards {self.shards} it is 0..{self.shards - 1}")
        return self


class WorkerConfig(Section):
    """Server address, device, codecs and transports of a worker."""

    server: Annotated[ReachedListOrNone, Flag(Panel.RUN, (WORKER, SERVE), metavar="HOST:PORT[,...]")] = Field(
        DEFAULT_ADDRESS, description="HOST:PORT of the server, or several to try in turn; 'none' trains alone"
    )
    rank: Annotated[int | None, Flag(Panel.RUN, (WORKER,))] = Field(
        None, ge=0, description="rank of this worker, 0..N-1; none: the server gives a free rank"
    )
    local_rank: int | None = Field(None, ge=0, description="rank among this host's workers; device auto is that GPU")
    group: Annotated[bool, Flag(Panel.RUN, (WORKER,))] = Field(
        False, description="join a replica group: torchrun's processes (RANK, WORLD_SIZE) are one worker"
    )
    device: Annotated[str, Flag(Panel.RUN, (WORKER, LAUNCHER), metavar="auto|cpu|cuda[:I]")] = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="device for training: auto, cpu, cuda or cuda:I"
    )
    threads: int | None = Field(None, ge=1, description="torch threads; none: torch's default")
    codec: Codec = Field("raw", description="codec of contributions: bf16 and fp16 halve them, int8 is 1/3.9, q4 1/7.8")
    reply_codec: Codec = Field("raw", description="codec of weights from the server, which keeps the exact weights")
    transports: tuple[Transport, ...] = Field(
        ("shared", "direct", "grpc"), description="transports to try, in this order; grpc must be one of them"
    )
    max_mbit: float | None = Field(None, ge=1, description="limit on tensors over the network, Mbit/s each way")
    overlap: bool | None = Field(None, description="send gradients while backward runs; none: only in ps-worker")
    zero: Annotated[int, Flag(Panel.MODE, (LAUNCHER, WORKER), metavar="STAGE")] = Field(
        0, ge=0, le=3, description="ZeRO stage: 1 shards optimizer state (allreduce), 3 the model too (--group)"
    )
    pipeline: Annotated[bool, Flag(Panel.MODE, (LAUNCHER, WORKER))] = Field(
        False, description="cut the layers of the model into stages, one in each process of the worker (--group)"
    )
    schedule: str = Field("1F1B", min_length=1, description="of a pipeline; also GPipe, Interleaved1F1B, ZBVZeroBubble")
    microbatches: int | None = Field(None, ge=1, description="parts of each batch in a pipeline; none: 2 a process")
    cut: Literal["auto"] | list[Annotated[int, Field(ge=1)]] = Field(
        "auto", description="layers of each stage, such as [6, 6]; auto: stages of equal time"
    )
    memory: int | None = Field(None, ge=1, description="bytes that a pipeline may use in each process; none: any")
    zero_copies: int = Field(2, ge=1, le=2, description="workers that keep each ZeRO part; with 2, one may crash")
    evaluate: Annotated[bool, Flag(Panel.RUN, (WORKER,))] = Field(
        False, description="evaluate the run's weights while its workers train, without training here"
    )
    accept_restarted_schedule: bool = Field(
        False, description="let a replaced script restart its learning-rate schedule; false: stop it with an error"
    )
    accept_other_data: bool = Field(
        False, description="train on data of another length than the run's; false: an error"
    )
    give_up_s: float = Field(60.0, gt=0, description="seconds without a server before exit 15")

    @field_validator("zero")
    @classmethod
    def _is_a_stage(cls, zero: int) -> int:
        if zero == 2:
            raise ValueError(
                "2 is not available: 1 shards optimizer state, and 3 also gradients and parameters; "
                "--shards S --colocate shards everything except the model"
            )
        return zero

    @field_validator("transports", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Accept `direct,grpc` as a list."""
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value

    @field_validator("transports")
    @classmethod
    def _are_possible(cls, transports: tuple[Transport, ...]) -> tuple[Transport, ...]:
        if "grpc" not in transports:
            raise ValueError("grpc must be included: a worker uses it if no other transport is possible")
        if len(set(transports)) < len(transports):
            raise ValueError(f"each transport at most once, got {', '.join(transports)}")
        return transports

    @property
    def wanted_transports(self) -> tuple[Transport, ...]:
        """The transports up to grpc, which is always possible."""
        return self.transports[: self.transports.index("grpc") + 1]


class CheckpointConfig(Section):
    """Snapshots of the whole run, from which a restarted server continues."""

    dir: Annotated[str | None, Flag(Panel.SNAPSHOTS, name="checkpoint-dir", metavar="DIR")] = Field(
        None, description="folder for snapshots; a run continues from the newest; with several modes, DIR-MODE for each"
    )
    every_steps: Annotated[int | None, Flag(Panel.SNAPSHOTS, name="checkpoint-every", metavar="STEPS")] = Field(
        None, ge=1, description="training steps between snapshots"
    )
    every_s: float | None = Field(
        None, gt=0, description="seconds between snapshots; none: 30, or no limit with checkpoint.every_steps"
    )
    keep: int = Field(3, ge=1, description="number of snapshots to keep; older snapshots are removed")
    resume: Annotated[str | None, Flag(Panel.SNAPSHOTS, metavar="latest|never|PATH")] = Field(
        None, description="snapshot or folder of snapshots, latest or never; none: the newest in checkpoint.dir"
    )

    @model_validator(mode="after")
    def _has_directory(self) -> Self:
        if self.dir is None and (self.every_steps is not None or self.every_s is not None):
            raise ValueError("every_steps and every_s need checkpoint.dir, the folder of snapshots")
        if self.dir is None and self.resume == "latest":
            raise ValueError("resume: latest needs checkpoint.dir, the folder of snapshots")
        return self


class SecurityConfig(Section):
    """TLS files and the token. `ps-certs init` makes the files. The token itself is never a setting."""

    ca: PemFile = Field(None, description="certificates (PEM) that must have signed the other side's certificate")
    cert: PemFile = Field(None, description="this program's certificate (PEM); with it, a server uses TLS")
    key: PemFile = Field(None, description="private key (PEM) of security.cert")
    mutual: bool = Field(False, description="server: workers and other shards need a certificate signed by security.ca")
    token_file: Annotated[str | None, Flag(Panel.SECURITY, (*EVERY, SERVE), metavar="FILE")] = Field(
        None, description="file with the token that all processes share; PS_TOKEN in the environment is the other way"
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("security.cert and security.key go together")
        if self.mutual and self.ca is None:
            raise ValueError("security.mutual needs security.ca, the certificates to trust")
        return self


class LimitsConfig(Section):
    """Limits that protect a server from faulty or malicious clients."""

    workers: int = Field(1024, ge=1, description="live workers, if run.workers is not set")
    model_bytes: int = Field(1 << 36, ge=1, description="bytes of the model that the first worker uploads")
    state_bytes: int = Field(1 << 30, ge=1, description="bytes that one worker's script saves (session.state)")
    readers: int = Field(8, ge=0, description="processes such as ps-serve that fetch a version at the same time")
    joins_per_s: float = Field(500.0, gt=0, description="joins per second; more wait")
    upload_bytes_per_s: float | None = Field(None, gt=0, description="bytes per second from one worker; none: no limit")
    progress_s: float = Field(30.0, gt=0, description="seconds without progress until an upload or reply is ended")


def _not_epochs(text: str) -> None:
    if every(text).unit == "epochs":
        raise ValueError(f"'{text}' is in epochs: versions are counted, 100, or seconds, 10s")


class ServeConfig(Section):
    """Serving the weights of a run (`ps-serve`)."""

    listen: Annotated[Listening, Flag(Panel.RUN, (SERVE,), metavar="HOST:PORT")] = Field(
        "127.0.0.1:8000", description="HOST:PORT of the HTTP server; port 0 takes a free port"
    )
    every: Annotated[Interval, checked_by(_not_epochs), Flag(Panel.RUN, (SERVE,), metavar="N|10s")] = Field(
        "10s", description="how often a newer version is fetched: after N versions, or so many seconds"
    )
    slots: Annotated[int, Flag(Panel.RUN, (SERVE,), metavar="N")] = Field(
        8, ge=1, le=1024, description="requests that are decoded at once"
    )
    queue: int = Field(64, ge=0, description="requests that wait at most; more are refused with 429")
    max_tokens: int = Field(1024, ge=1, description="most tokens of a reply")
    swap: Annotated[Literal["pinned", "in-flight", "recompute"], Flag(Panel.RUN, (SERVE,), metavar="HOW")] = Field(
        "pinned", description="replies under way at a new version: pinned, in-flight or recompute; see docs/serving.md"
    )
    drain_s: float = Field(30.0, ge=0, description="seconds that replies may keep an old version back (pinned)")
    reply_s: float = Field(600.0, gt=0, description="seconds without a token or a result, after which a reply is 504")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="bytes of a request; a longer one is refused with 413")
    stage_silence_s: float = Field(
        10.0, ge=2, description="seconds without a sign of life of a process (--group), after which it is started again"
    )
    threads: int = Field(1, ge=1, description="torch threads of each process")
    group: Annotated[int, Flag(Panel.RUN, (SERVE,), metavar="G")] = Field(
        1, ge=1, le=64, description="processes on this host that the model's layers are divided over"
    )
