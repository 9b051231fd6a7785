from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_BAD_REQUEST: _ClassVar[Reason]
    REASON_RANK_OUT_OF_RANGE: _ClassVar[Reason]
    REASON_RUN_FULL: _ClassVar[Reason]
    REASON_RUN_MISMATCH: _ClassVar[Reason]
    REASON_MODEL_MISMATCH: _ClassVar[Reason]
    REASON_OPTIMIZER_MISMATCH: _ClassVar[Reason]
    REASON_OPTIMIZER_UNSUPPORTED: _ClassVar[Reason]
    REASON_REPLACED: _ClassVar[Reason]
    REASON_NOT_JOINED: _ClassVar[Reason]
    REASON_SEQ_GAP: _ClassVar[Reason]
    REASON_DIVERGED: _ClassVar[Reason]
    REASON_DRAINING: _ClassVar[Reason]
    REASON_NOT_READY: _ClassVar[Reason]
    REASON_UNAUTHENTICATED: _ClassVar[Reason]
    REASON_PERMISSION_DENIED: _ClassVar[Reason]
    REASON_LIMIT_EXCEEDED: _ClassVar[Reason]
    REASON_TOO_SLOW: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
    REASON_SHARD_MISMATCH: _ClassVar[Reason]
    REASON_EVICTED: _ClassVar[Reason]
REASON_UNSPECIFIED: Reason
REASON_BAD_REQUEST: Reason
REASON_RANK_OUT_OF_RANGE: Reason
REASON_RUN_FULL: Reason
REASON_RUN_MISMATCH: Reason
REASON_MODEL_MISMATCH: Reason
REASON_OPTIMIZER_MISMATCH: Reason
REASON_OPTIMIZER_UNSUPPORTED: Reason
REASON_REPLACED: Reason
REASON_NOT_JOINED: Reason
REASON_SEQ_GAP: Reason
REASON_DIVERGED: Reason
REASON_DRAINING: Reason
REASON_NOT_READY: Reason
REASON_UNAUTHENTICATED: Reason
REASON_PERMISSION_DENIED: Reason
REASON_LIMIT_EXCEEDED: Reason
REASON_TOO_SLOW: Reason
REASON_INTERNAL: Reason
REASON_SHARD_MISMATCH: Reason
REASON_EVICTED: Reason

class WorkerMessage(_message.Message):
    __slots__ = ("join", "model", "initial_weights", "contribution", "finish", "leave", "begin", "taken", "stop", "state", "metrics", "rows", "ask_again", "optimizer", "out_of_band", "offset", "data", "left_out")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INITIAL_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ASK_AGAIN_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_BAND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    join: Join
    model: Model
    initial_weights: InitialWeights
    contribution: Contribution
    finish: Finish
    leave: Leave
    begin: Begin
    taken: Taken
    stop: Stop
    state: State
    metrics: Metrics
    rows: Rows
    ask_again: AskAgain
    optimizer: State
    out_of_band: int
    offset: int
    data: bytes
    left_out: int
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., initial_weights: _Optional[_Union[InitialWeights, _Mapping]] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., metrics: _Optional[_Union[Metrics, _Mapping]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ..., ask_again: _Optional[_Union[AskAgain, _Mapping]] = ..., optimizer: _Optional[_Union[State, _Mapping]] = ..., out_of_band: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., left_out: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("run", "rank", "incarnation", "host", "pid", "device", "program_version", "server_incarnation", "process", "seated", "resumed", "num_workers", "region")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SEATED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    run: str
    rank: int
    incarnation: int
    host: str
    pid: int
    device: str
    program_version: str
    server_incarnation: int
    process: str
    seated: bool
    resumed: bool
    num_workers: int
    region: str
    def __init__(self, run: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., program_version: _Optional[str] = ..., server_incarnation: _Optional[int] = ..., process: _Optional[str] = ..., seated: _Optional[bool] = ..., resumed: _Optional[bool] = ..., num_workers: _Optional[int] = ..., region: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("tensors", "fingerprint", "optimizer", "segment", "reply_codec", "direct", "contribution", "transport_reason", "rendezvous", "codecs")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    REPLY_CODEC_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_REASON_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    fingerprint: str
    optimizer: Optimizer
    segment: Segment
    reply_codec: str
    direct: bool
    contribution: RunSettings.ContributionKind
    transport_reason: str
    rendezvous: str
    codecs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., fingerprint: _Optional[str] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., reply_codec: _Optional[str] = ..., direct: _Optional[bool] = ..., contribution: _Optional[_Union[RunSettings.ContributionKind, str]] = ..., transport_reason: _Optional[str] = ..., rendezvous: _Optional[str] = ..., codecs: _Optional[_Iterable[str]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("host", "pid", "descriptor", "label", "num_bytes")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    host: str
    pid: int
    descriptor: int
    label: str
    num_bytes: int
    def __init__(self, host: _Optional[str] = ..., pid: _Optional[int] = ..., descriptor: _Optional[int] = ..., label: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "kind", "dtype", "shape", "aliases", "averaged")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[TensorSpec.Kind]
        PARAMETER: _ClassVar[TensorSpec.Kind]
        BUFFER: _ClassVar[TensorSpec.Kind]
        FROZEN: _ClassVar[TensorSpec.Kind]
    KIND_UNSPECIFIED: TensorSpec.Kind
    PARAMETER: TensorSpec.Kind
    BUFFER: TensorSpec.Kind
    FROZEN: TensorSpec.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: TensorSpec.Kind
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    averaged: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[TensorSpec.Kind, str]] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., aliases: _Optional[_Iterable[str]] = ..., averaged: _Optional[bool] = ...) -> None: ...

class Optimizer(_message.Message):
    __slots__ = ("name", "groups", "tables", "sums")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    groups: _containers.RepeatedCompositeFieldContainer[ParameterGroup]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    sums: bool
    def __init__(self, name: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[ParameterGroup, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., sums: _Optional[bool] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "num_rows", "dim", "dtype", "init_std", "optimizer", "hyperparameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    INIT_STD_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_rows: int
    dim: int
    dtype: str
    init_std: float
    optimizer: str
    hyperparameters: _struct_pb2.Struct
    def __init__(self, name: _Optional[str] = ..., num_rows: _Optional[int] = ..., dim: _Optional[int] = ..., dtype: _Optional[str] = ..., init_std: _Optional[float] = ..., optimizer: _Optional[str] = ..., hyperparameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ParameterGroup(_message.Message):
    __slots__ = ("tensors", "hyperparameters")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedScalarFieldContainer[str]
    hyperparameters: _struct_pb2.Struct
    def __init__(self, tensors: _Optional[_Iterable[str]] = ..., hyperparameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class InitialWeights(_message.Message):
    __slots__ = ("payload_bytes",)
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    def __init__(self, payload_bytes: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("num_bytes", "codec", "in_shared_memory", "continues")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    IN_SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    codec: str
    in_shared_memory: bool
    continues: int
    def __init__(self, num_bytes: _Optional[int] = ..., codec: _Optional[str] = ..., in_shared_memory: _Optional[bool] = ..., continues: _Optional[int] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("table", "count")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    table: int
    count: int
    def __init__(self, table: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("seq", "counts", "base", "timing", "payload", "training", "residual", "completion", "first", "position")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    seq: int
    counts: Counts
    base: Base
    timing: Timing
    payload: PayloadInfo
    training: TrainingInfo
    residual: ResidualInfo
    completion: CompletionInfo
    first: FirstInfo
    position: Position
    def __init__(self, seq: _Optional[int] = ..., counts: _Optional[_Union[Counts, _Mapping]] = ..., base: _Optional[_Union[Base, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., payload: _Optional[_Union[PayloadInfo, _Mapping]] = ..., training: _Optional[_Union[TrainingInfo, _Mapping]] = ..., residual: _Optional[_Union[ResidualInfo, _Mapping]] = ..., completion: _Optional[_Union[CompletionInfo, _Mapping]] = ..., first: _Optional[_Union[FirstInfo, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("num_samples", "num_steps", "num_batches", "part", "num_workers")
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCHES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    num_samples: int
    num_steps: int
    num_batches: int
    part: int
    num_workers: int
    def __init__(self, num_samples: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_batches: _Optional[int] = ..., part: _Optional[int] = ..., num_workers: _Optional[int] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("version", "has_all", "reference")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_ALL_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    has_all: bool
    reference: int
    def __init__(self, version: _Optional[int] = ..., has_all: _Optional[bool] = ..., reference: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("compute_s", "transfer_s")
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    compute_s: float
    transfer_s: float
    def __init__(self, compute_s: _Optional[float] = ..., transfer_s: _Optional[float] = ...) -> None: ...

class PayloadInfo(_message.Message):
    __slots__ = ("codec", "num_bytes", "in_shared_memory", "without_gradient")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    codec: str
    num_bytes: int
    in_shared_memory: bool
    without_gradient: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, codec: _Optional[str] = ..., num_bytes: _Optional[int] = ..., in_shared_memory: _Optional[bool] = ..., without_gradient: _Optional[_Iterable[int]] = ...) -> None: ...

class TrainingInfo(_message.Message):
    __slots__ = ("hyperparameters", "clip_norm", "loss", "wants_weights", "wants_exact", "iteration")
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WANTS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WANTS_EXACT_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    hyperparameters: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Struct]
    clip_norm: float
    loss: float
    wants_weights: bool
    wants_exact: bool
    iteration: int
    def __init__(self, hyperparameters: _Optional[_Iterable[_Union[_struct_pb2.Struct, _Mapping]]] = ..., clip_norm: _Optional[float] = ..., loss: _Optional[float] = ..., wants_weights: _Optional[bool] = ..., wants_exact: _Optional[bool] = ..., iteration: _Optional[int] = ...) -> None: ...

class ResidualInfo(_message.Message):
    __slots__ = ("norm", "num_lost", "lost_norm")
    NORM_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    LOST_NORM_FIELD_NUMBER: _ClassVar[int]
    norm: float
    num_lost: int
    lost_norm: float
    def __init__(self, norm: _Optional[float] = ..., num_lost: _Optional[int] = ..., lost_norm: _Optional[float] = ...) -> None: ...

class CompletionInfo(_message.Message):
    __slots__ = ("generation", "failed", "peer_bytes")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PEER_BYTES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    failed: bool
    peer_bytes: int
    def __init__(self, generation: _Optional[int] = ..., failed: _Optional[bool] = ..., peer_bytes: _Optional[int] = ...) -> None: ...

class FirstInfo(_message.Message):
    __slots__ = ("num_samples", "digest", "run_steps", "rates", "work")
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUN_STEPS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    num_samples: int
    digest: int
    run_steps: int
    rates: _containers.RepeatedScalarFieldContainer[float]
    work: str
    def __init__(self, num_samples: _Optional[int] = ..., digest: _Optional[int] = ..., run_steps: _Optional[int] = ..., rates: _Optional[_Iterable[float]] = ..., work: _Optional[str] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("step", "local_steps", "batches", "epoch", "epoch_batches")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_BATCHES_FIELD_NUMBER: _ClassVar[int]
    step: int
    local_steps: int
    batches: int
    epoch: int
    epoch_batches: int
    def __init__(self, step: _Optional[int] = ..., local_steps: _Optional[int] = ..., batches: _Optional[int] = ..., epoch: _Optional[int] = ..., epoch_batches: _Optional[int] = ...) -> None: ...

class AskAgain(_message.Message):
    __slots__ = ("seq", "reference")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    reference: int
    def __init__(self, seq: _Optional[int] = ..., reference: _Optional[int] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("num_bytes", "offset", "piece")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    offset: int
    piece: bytes
    def __init__(self, num_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., piece: _Optional[bytes] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("first", "last", "num_changes")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NUM_CHANGES_FIELD_NUMBER: _ClassVar[int]
    first: _containers.RepeatedScalarFieldContainer[float]
    last: _containers.RepeatedScalarFieldContainer[float]
    num_changes: int
    def __init__(self, first: _Optional[_Iterable[float]] = ..., last: _Optional[_Iterable[float]] = ..., num_changes: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("transfer_s", "stays", "residual")
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    transfer_s: float
    stays: bool
    residual: ResidualInfo
    def __init__(self, transfer_s: _Optional[float] = ..., stays: _Optional[bool] = ..., residual: _Optional[_Union[ResidualInfo, _Mapping]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("version", "step", "metrics", "failure", "exit_code")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    version: int
    step: int
    metrics: _containers.ScalarMap[str, float]
    failure: str
    exit_code: int
    def __init__(self, version: _Optional[int] = ..., step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., failure: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("final_metrics", "finished", "failure", "exit_code")
    class FinalMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FINAL_METRICS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    final_metrics: _containers.ScalarMap[str, float]
    finished: bool
    failure: str
    exit_code: int
    def __init__(self, final_metrics: _Optional[_Mapping[str, float]] = ..., finished: _Optional[bool] = ..., failure: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("welcome", "send_weights", "waiting", "reply", "final", "snapshot", "shared_memory", "state", "out_of_band", "offset", "data", "left_out")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SEND_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_BAND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    send_weights: SendWeights
    waiting: Waiting
    reply: Reply
    final: Final
    snapshot: Snapshot
    shared_memory: SharedMemory
    state: State
    out_of_band: int
    offset: int
    data: bytes
    left_out: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., send_weights: _Optional[_Union[SendWeights, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemory, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., out_of_band: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., left_out: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run", "rank", "incarnation", "seq", "settings", "probe", "server_incarnation", "resumed", "lease_s", "shards", "direct", "takes_left_out", "partial_transfer")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    TAKES_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    run: str
    rank: int
    incarnation: int
    seq: int
    settings: RunSettings
    probe: Segment
    server_incarnation: int
    resumed: bool
    lease_s: float
    shards: _containers.RepeatedScalarFieldContainer[str]
    direct: Direct
    takes_left_out: bool
    partial_transfer: PartialTransfer
    def __init__(self, run: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., seq: _Optional[int] = ..., settings: _Optional[_Union[RunSettings, _Mapping]] = ..., probe: _Optional[_Union[Segment, _Mapping]] = ..., server_incarnation: _Optional[int] = ..., resumed: _Optional[bool] = ..., lease_s: _Optional[float] = ..., shards: _Optional[_Iterable[str]] = ..., direct: _Optional[_Union[Direct, _Mapping]] = ..., takes_left_out: _Optional[bool] = ..., partial_transfer: _Optional[_Union[PartialTransfer, _Mapping]] = ...) -> None: ...

class PartialTransfer(_message.Message):
    __slots__ = ("seq", "payload_bytes", "codec", "ranges", "crc")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    seq: int
    payload_bytes: int
    codec: str
    ranges: _containers.RepeatedScalarFieldContainer[int]
    crc: int
    def __init__(self, seq: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., codec: _Optional[str] = ..., ranges: _Optional[_Iterable[int]] = ..., crc: _Optional[int] = ...) -> None: ...

class Direct(_message.Message):
    __slots__ = ("port", "ticket")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("run", "rank", "process", "metrics")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    run: str
    rank: int
    process: str
    metrics: Metrics
    def __init__(self, run: _Optional[str] = ..., rank: _Optional[int] = ..., process: _Optional[str] = ..., metrics: _Optional[_Union[Metrics, _Mapping]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("is_gone", "lease_s", "durable_version", "over_generation", "server_incarnation")
    IS_GONE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DURABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OVER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    is_gone: bool
    lease_s: float
    durable_version: int
    over_generation: int
    server_incarnation: int
    def __init__(self, is_gone: _Optional[bool] = ..., lease_s: _Optional[float] = ..., durable_version: _Optional[int] = ..., over_generation: _Optional[int] = ..., server_incarnation: _Optional[int] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("accepted", "reason")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    def __init__(self, accepted: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class RunSettings(_message.Message):
    __slots__ = ("mode", "contribution", "num_workers", "steps", "batch_size", "seed", "pull_every", "task", "task_args", "optimizer", "polyak", "delayed_update", "train", "eval_every", "ends_by_metrics", "fragments", "overlap_steps", "outstanding", "union_batch", "in_region", "epochs")
    class ContributionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CONTRIBUTION_KIND_UNSPECIFIED: _ClassVar[RunSettings.ContributionKind]
        GRADIENT: _ClassVar[RunSettings.ContributionKind]
        WEIGHTS: _ClassVar[RunSettings.ContributionKind]
        DELTA: _ClassVar[RunSettings.ContributionKind]
        COMPLETION: _ClassVar[RunSettings.ContributionKind]
        DELTA_OF_FRAGMENT: _ClassVar[RunSettings.ContributionKind]
        DELTA_OVERLAPPED: _ClassVar[RunSettings.ContributionKind]
    CONTRIBUTION_KIND_UNSPECIFIED: RunSettings.ContributionKind
    GRADIENT: RunSettings.ContributionKind
    WEIGHTS: RunSettings.ContributionKind
    DELTA: RunSettings.ContributionKind
    COMPLETION: RunSettings.ContributionKind
    DELTA_OF_FRAGMENT: RunSettings.ContributionKind
    DELTA_OVERLAPPED: RunSettings.ContributionKind
    MODE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PULL_EVERY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TASK_ARGS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    POLYAK_FIELD_NUMBER: _ClassVar[int]
    DELAYED_UPDATE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    EVAL_EVERY_FIELD_NUMBER: _ClassVar[int]
    ENDS_BY_METRICS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_STEPS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    UNION_BATCH_FIELD_NUMBER: _ClassVar[int]
    IN_REGION_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    contribution: RunSettings.ContributionKind
    num_workers: int
    steps: int
    batch_size: int
    seed: int
    pull_every: int
    task: str
    task_args: _struct_pb2.Struct
    optimizer: Optimizer
    polyak: float
    delayed_update: bool
    train: _struct_pb2.Struct
    eval_every: str
    ends_by_metrics: bool
    fragments: int
    overlap_steps: int
    outstanding: int
    union_batch: bool
    in_region: bool
    epochs: int
    def __init__(self, mode: _Optional[str] = ..., contribution: _Optional[_Union[RunSettings.ContributionKind, str]] = ..., num_workers: _Optional[int] = ..., steps: _Optional[int] = ..., batch_size: _Optional[int] = ..., seed: _Optional[int] = ..., pull_every: _Optional[int] = ..., task: _Optional[str] = ..., task_args: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., polyak: _Optional[float] = ..., delayed_update: _Optional[bool] = ..., train: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., eval_every: _Optional[str] = ..., ends_by_metrics: _Optional[bool] = ..., fragments: _Optional[int] = ..., overlap_steps: _Optional[int] = ..., outstanding: _Optional[int] = ..., union_batch: _Optional[bool] = ..., in_region: _Optional[bool] = ..., epochs: _Optional[int] = ...) -> None: ...

class SendWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("result", "next_work", "weights", "group", "start")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[Reply.Outcome]
        START: _ClassVar[Reply.Outcome]
        APPLIED: _ClassVar[Reply.Outcome]
        REPEATED: _ClassVar[Reply.Outcome]
        DROPPED: _ClassVar[Reply.Outcome]
        REJECTED: _ClassVar[Reply.Outcome]
    OUTCOME_UNSPECIFIED: Reply.Outcome
    START: Reply.Outcome
    APPLIED: Reply.Outcome
    REPEATED: Reply.Outcome
    DROPPED: Reply.Outcome
    REJECTED: Reply.Outcome
    RESULT_FIELD_NUMBER: _ClassVar[int]
    NEXT_WORK_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    result: Result
    next_work: NextWork
    weights: WeightsInfo
    group: GroupInfo
    start: StartInfo
    def __init__(self, result: _Optional[_Union[Result, _Mapping]] = ..., next_work: _Optional[_Union[NextWork, _Mapping]] = ..., weights: _Optional[_Union[WeightsInfo, _Mapping]] = ..., group: _Optional[_Union[GroupInfo, _Mapping]] = ..., start: _Optional[_Union[StartInfo, _Mapping]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("outcome", "seq", "version", "staleness", "gate_wait_s", "reason")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    GATE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    outcome: Reply.Outcome
    seq: int
    version: int
    staleness: int
    gate_wait_s: float
    reason: str
    def __init__(self, outcome: _Optional[_Union[Reply.Outcome, str]] = ..., seq: _Optional[int] = ..., version: _Optional[int] = ..., staleness: _Optional[int] = ..., gate_wait_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class NextWork(_message.Message):
    __slots__ = ("local_steps", "training_steps", "num_workers", "worker_index", "run_steps", "is_asked", "same_batches_as")
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    RUN_STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_ASKED_FIELD_NUMBER: _ClassVar[int]
    SAME_BATCHES_AS_FIELD_NUMBER: _ClassVar[int]
    local_steps: int
    training_steps: int
    num_workers: int
    worker_index: int
    run_steps: int
    is_asked: bool
    same_batches_as: int
    def __init__(self, local_steps: _Optional[int] = ..., training_steps: _Optional[int] = ..., num_workers: _Optional[int] = ..., worker_index: _Optional[int] = ..., run_steps: _Optional[int] = ..., is_asked: _Optional[bool] = ..., same_batches_as: _Optional[int] = ...) -> None: ...

class WeightsInfo(_message.Message):
    __slots__ = ("num_bytes", "codec", "segment", "reference")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    codec: str
    segment: Segment
    reference: ReferenceInfo
    def __init__(self, num_bytes: _Optional[int] = ..., codec: _Optional[str] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., reference: _Optional[_Union[ReferenceInfo, _Mapping]] = ...) -> None: ...

class ReferenceInfo(_message.Message):
    __slots__ = ("number", "checked", "crc", "left_out")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    number: int
    checked: int
    crc: int
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    def __init__(self, number: _Optional[int] = ..., checked: _Optional[int] = ..., crc: _Optional[int] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensors: _Optional[_Iterable[int]] = ...) -> None: ...

class GroupInfo(_message.Message):
    __slots__ = ("generation", "members", "rendezvous", "has_weights", "secret", "uploads_weights", "uploads_optimizer", "returns_weights")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    HAS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    RETURNS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    members: _containers.RepeatedScalarFieldContainer[int]
    rendezvous: str
    has_weights: bool
    secret: bytes
    uploads_weights: bool
    uploads_optimizer: bool
    returns_weights: bool
    def __init__(self, generation: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., rendezvous: _Optional[str] = ..., has_weights: _Optional[bool] = ..., secret: _Optional[bytes] = ..., uploads_weights: _Optional[bool] = ..., uploads_optimizer: _Optional[bool] = ..., returns_weights: _Optional[bool] = ...) -> None: ...

class StartInfo(_message.Message):
    __slots__ = ("num_batches", "in_step", "rates", "position")
    NUM_BATCHES_FIELD_NUMBER: _ClassVar[int]
    IN_STEP_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    num_batches: int
    in_step: int
    rates: Rates
    position: Position
    def __init__(self, num_batches: _Optional[int] = ..., in_step: _Optional[int] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("version", "is_asked", "weights")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_ASKED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    is_asked: bool
    weights: WeightsInfo
    def __init__(self, version: _Optional[int] = ..., is_asked: _Optional[bool] = ..., weights: _Optional[_Union[WeightsInfo, _Mapping]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("run", "version", "payload_bytes", "tensors")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    payload_bytes: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class ShardReport(_message.Message):
    __slots__ = ("number", "num_received", "message")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    number: int
    num_received: int
    message: str
    def __init__(self, number: _Optional[int] = ..., num_received: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class ShardOrder(_message.Message):
    __slots__ = ("number", "num_received", "message")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    number: int
    num_received: int
    message: str
    def __init__(self, number: _Optional[int] = ..., num_received: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("averaged", "keep", "optimizer", "version", "reader")
    AVERAGED_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    averaged: bool
    keep: bool
    optimizer: bool
    version: int
    reader: str
    def __init__(self, averaged: _Optional[bool] = ..., keep: _Optional[bool] = ..., optimizer: _Optional[bool] = ..., version: _Optional[int] = ..., reader: _Optional[str] = ...) -> None: ...

class RowsRequest(_message.Message):
    __slots__ = ("run", "rank", "table", "ids")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    rank: int
    table: int
    ids: bytes
    def __init__(self, run: _Optional[str] = ..., rank: _Optional[int] = ..., table: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class RowsReply(_message.Message):
    __slots__ = ("rows", "shards")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    shards: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rows: _Optional[bytes] = ..., shards: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run", "settings", "version", "step", "status", "incarnation")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    settings: RunSettings
    version: int
    step: int
    status: str
    incarnation: int
    def __init__(self, run: _Optional[str] = ..., settings: _Optional[_Union[RunSettings, _Mapping]] = ..., version: _Optional[int] = ..., step: _Optional[int] = ..., status: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...
