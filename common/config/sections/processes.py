"""A server and a worker: where they are, what they exchange, keep and put up with."""

# No `from __future__ import annotations`: see __init__.py.
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from ...registry import AUTO, CODECS
from ..addresses import listening, reached, reached_or_none
from ..option import EVERY, LAUNCHER, SERVER, WORKER, Flag, Panel, Section

DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"


Codec = Annotated[str, AfterValidator(CODECS.check)]
CodecOrAuto = Annotated[str, AfterValidator(lambda name: name if name == AUTO else CODECS.check(name, AUTO))]
Transport = Literal["shared", "direct", "grpc"]
Listening = Annotated[str, AfterValidator(listening)]
Reached = Annotated[str, AfterValidator(reached)]
ReachedOrNone = Annotated[str, AfterValidator(reached_or_none)]
PemFile = Annotated[str | None, Flag(Panel.SECURITY, EVERY, metavar="FILE.pem")]


class ServerConfig(Section):
    listen: Annotated[Listening, Flag(Panel.RUN, (SERVER,), metavar="HOST:PORT")] = Field(
        DEFAULT_ADDRESS, description="HOST:PORT; port 0 takes a free one"
    )
    insecure: Annotated[bool, Flag(Panel.SECURITY, EVERY)] = Field(
        False, description="serve other machines without TLS"
    )
    shards: Annotated[int, Flag(Panel.HOSTS, metavar="S")] = Field(
        1, ge=1, le=256, description="server processes the model is divided among, by bytes"
    )
    shard: Annotated[int, Flag(Panel.HOSTS, (SERVER,), metavar="I")] = Field(
        0, ge=0, description="which of them this one is; 0 coordinates, and is what workers are told"
    )
    coordinator: Annotated[Reached, Flag(Panel.HOSTS, (SERVER,), metavar="HOST:PORT")] = Field(
        DEFAULT_ADDRESS, description="HOST:PORT of shard 0, for the other shards"
    )
    advertise: Annotated[Reached | None, Flag(Panel.HOSTS, (SERVER,), metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT at which workers reach this shard; none: where the coordinator sees it"
    )
    metrics: Annotated[Listening | None, Flag(Panel.OUTPUT, (SERVER,), metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT at which Prometheus reads metrics; none: nowhere"
    )
    web: Annotated[Listening | None, Flag(Panel.OUTPUT, (SERVER,), metavar="HOST:PORT")] = Field(
        None, description="HOST:PORT of the live dashboard of the run; none: nowhere"
    )
    max_staged: int = Field(4, ge=1, description="uploads held in memory at once; more wait in flow control")
    max_replies: int = Field(4, ge=1, description="versions of the weights on their way to workers at once")
    shared_memory: bool = Field(True, description="exchange tensors with workers on this host through shared memory")
    direct: bool = Field(True, description="a second port, where workers exchange without gRPC between")
    direct_port: int = Field(0, ge=0, le=65535, description="its number; 0: any, as of shards that ps-launch starts")
    status_interval_s: float = Field(1.0, gt=0, description="seconds between status events")
    absent_s: float = Field(15.0, ge=0, description="seconds a run's end waits for a worker lost before its last step")
    join_timeout_s: float = Field(30.0, gt=0, description="a connection that does not join by then is closed")
    lease_s: float = Field(5.0, ge=0.5, description="a worker that is not heard of for so long is let go")
    drain_s: float = Field(5.0, gt=0, description="seconds a stopping server lets its workers leave")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.shard >= self.shards:
            raise ValueError(f"shard is {self.shard}: with shards {self.shards} it is 0..{self.shards - 1}")
        return self


class WorkerConfig(Section):
    server: Annotated[ReachedOrNone, Flag(Panel.RUN, (WORKER,), metavar="HOST:PORT")] = Field(
        DEFAULT_ADDRESS, description="HOST:PORT of the server; 'none' trains alone"
    )
    rank: Annotated[int | None, Flag(Panel.RUN, (WORKER,))] = Field(
        None, ge=0, description="0..N-1; none: the server gives a free one"
    )
    local_rank: int | None = Field(None, ge=0, description="rank among this host's workers: the cuda device of `auto`")
    group: Annotated[bool, Flag(Panel.RUN, (WORKER,))] = Field(
        False, description="this process is one of several that are one worker, as torchrun says (RANK, WORLD_SIZE)"
    )
    device: Annotated[str, Flag(Panel.RUN, (WORKER, LAUNCHER), metavar="auto|cpu|cuda[:I]")] = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:I"
    )
    threads: int | None = Field(None, ge=1, description="torch threads; none: torch's default")
    codec: CodecOrAuto = Field(
        "raw", description="codec of contributions: bf16 and fp16 halve them, int8 is 1/3.9, q4 1/7.8; auto measures"
    )
    reply_codec: Codec = Field(
        "raw", description="codec of the server's weights; workers compute on rounded weights, the server on exact ones"
    )
    transports: tuple[Transport, ...] = Field(
        ("shared", "direct", "grpc"), description="how tensors travel: the first that is possible; grpc must be named"
    )
    max_mbit: float | None = Field(None, ge=1, description="most Mbit/s of tensors each way over the network")
    overlap: bool | None = Field(
        None, description="gradients leave while backward runs; none: in ps-worker yes, in scripts of your own no"
    )
    zero: Annotated[int, Flag(Panel.MODE, (LAUNCHER, WORKER), metavar="STAGE")] = Field(
        0, ge=0, le=3, description="ZeRO stage: 1 shards optimizer state (allreduce), 3 the model too (--group)"
    )
    zero_copies: int = Field(2, ge=1, le=2, description="workers that hold each part of it: with 2, any one may die")
    evaluate: Annotated[bool, Flag(Panel.RUN, (WORKER,))] = Field(
        False, description="train nothing: evaluate the run's weights while the workers of the run train"
    )
    accept_restarted_schedule: bool = Field(
        False, description="a script that takes a rank may restart its learning-rate schedule; false: it stops"
    )
    give_up_s: float = Field(60.0, gt=0, description="seconds without a server before exit 15")

    @field_validator("zero")
    @classmethod
    def _is_a_stage(cls, zero: int) -> int:
        if zero == 2:
            raise ValueError(
                "2 is not there: 1 divides what the optimizer remembers, and 3 gradients and parameters too; "
                "--shards S --colocate divides all but the model"
            )
        return zero

    @field_validator("transports", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """`direct,grpc` is a list as well."""
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value

    @field_validator("transports")
    @classmethod
    def _are_possible(cls, transports: tuple[Transport, ...]) -> tuple[Transport, ...]:
        if "grpc" not in transports:
            raise ValueError("grpc must be among them: a worker that can have none of the others goes over it")
        if len(set(transports)) < len(transports):
            raise ValueError(f"each once, got {', '.join(transports)}")
        return transports

    @property
    def wanted_transports(self) -> tuple[Transport, ...]:
        """Down to the one that is always there."""
        return self.transports[: self.transports.index("grpc") + 1]


class CheckpointConfig(Section):
    """Snapshots of the whole run, from which a server that was killed goes on."""

    dir: Annotated[str | None, Flag(Panel.SNAPSHOTS, name="checkpoint-dir", metavar="DIR")] = Field(
        None, description="keep snapshots there, and go on from the newest; of several modes in DIR-MODE each"
    )
    every_steps: Annotated[int | None, Flag(Panel.SNAPSHOTS, name="checkpoint-every", metavar="STEPS")] = Field(
        None, ge=1, description="training steps between two snapshots"
    )
    every_s: float | None = Field(None, gt=0, description="seconds between two; 30 when neither is given")
    keep: int = Field(3, ge=1, description="how many are kept; older ones are removed")
    resume: Annotated[str | None, Flag(Panel.SNAPSHOTS, metavar="latest|never|PATH")] = Field(
        None, description="a snapshot, a directory of them, latest or never; none: the newest in checkpoint.dir"
    )

    @model_validator(mode="after")
    def _has_directory(self) -> Self:
        if self.dir is None and (self.every_steps is not None or self.every_s is not None):
            raise ValueError("every_steps and every_s need checkpoint.dir: where snapshots are kept")
        if self.dir is None and self.resume == "latest":
            raise ValueError("resume: latest needs checkpoint.dir: where snapshots are kept")
        return self


class SecurityConfig(Section):
    """Encryption and identity; `ps-certs init` makes the files. The token itself is never a setting."""

    ca: PemFile = Field(None, description="PEM: certificates the other side's must be signed by")
    cert: PemFile = Field(None, description="PEM: this program's own certificate; a server with one speaks TLS")
    key: PemFile = Field(None, description="PEM: the key of security.cert")
    mutual: bool = Field(False, description="server: workers and other shards need a certificate signed by security.ca")
    token_file: Annotated[str | None, Flag(Panel.SECURITY, EVERY, metavar="FILE")] = Field(
        None, description="file with the token all share; or PS_TOKEN in the environment"
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("security.cert and security.key go together")
        if self.mutual and self.ca is None:
            raise ValueError("security.mutual needs security.ca: whose certificates are trusted")
        return self


class LimitsConfig(Section):
    """What a server puts up with from whoever can reach it."""

    workers: int = Field(1024, ge=1, description="live workers, where run.workers sets no number")
    model_bytes: int = Field(1 << 36, ge=1, description="size of a model that a worker may bring")
    state_bytes: int = Field(1 << 30, ge=1, description="size of what one worker's script remembers (session.state)")
    joins_per_s: float = Field(500.0, gt=0, description="joins taken in a second; more wait")
    upload_bytes_per_s: float | None = Field(None, gt=0, description="of one worker; none: any")
    progress_s: float = Field(30.0, gt=0, description="an upload or a reply that does not move for so long is ended")
