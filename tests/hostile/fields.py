"""Every field of every message: what hostile values of it are like, and who on the receiving side checks it.

`check_header` of `common/wire/checks.py` refuses hostile values of every field, which a test tries field by field. The
table has the exceptions, and either the function that refuses or why nothing has to: `compared` (with what the receiver
knows itself), `shown` (to people, cut and escaped there), `any` (every value means something), `unread`. So a new field
in proto/parameter_server.proto without a check fails `test_fields.py`. Flags and single messages need no check.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from paramserver.proto import parameter_server_pb2 as pb

_TABLE = """
WorkerMessage     out_of_band offset left_out data : PayloadReader
Join              incarnation server_incarnation : compared
Join              pid : shown
Model             tensors : layout_from_proto
Model             fingerprint contribution : compared
Model             codecs : codec_named
Model             transport_reason : shown
Segment           host : compared
Segment           label pid descriptor num_bytes : open_segment
TensorSpec        name dtype aliases kind : layout_from_proto
TensorSpec        shape : Layout
Optimizer         name : find_optimizer
Optimizer         groups tables : optimizer_from_proto
Table             name : _tables_from_proto
Table             dtype optimizer num_rows dim init_std hyperparameters : make_spec
ParameterGroup    tensors : optimizer_from_proto
ParameterGroup    hyperparameters : check_hyperparameters
InitialWeights    payload_bytes : compared
Begin             num_bytes : compared
Rows              table count : Tables.read
Counts            num_steps part : policy
Base              reference : compared
PayloadInfo       num_bytes : compared
PayloadInfo       without_gradient : Model.names_here
TrainingInfo      hyperparameters : check_hyperparameters
TrainingInfo      loss : shown
ResidualInfo      norm lost_norm : note_residual
ResidualInfo      num_lost : shown
FirstInfo         digest : any
Position          local_steps : any
AskAgain          reference : compared
Metrics           exit_code : metrics_event
MetricsEntry      value : metrics_event
Leave             exit_code : Conversation._leave
FinalMetricsEntry value : shown
ServerMessage     out_of_band offset left_out data : PayloadReader
Welcome           incarnation server_incarnation : compared
PartialTransfer   crc : compared
HeartbeatRequest  rank : Roster.is_member
HeartbeatReply    lease_s : unread
HeartbeatReply    durable_version over_generation server_incarnation : compared
SharedMemory      reason : shown
RunSettings       contribution : read_settings
RunSettings       pull_every overlap_steps epochs : any
RunSettings       task_args : check_named_by_server
RunSettings       train : TrainConfig
Waiting           reason : shown
Result            staleness : unread
Result            reason : shown
NextWork          local_steps : any
ReferenceInfo     checked crc : compared
ReferenceInfo     left_out : Down._codecs
LeftOut           tensors : Down._codecs
StartInfo         in_step : any
Snapshot          tensors : layout_from_proto
ShardReport       number num_received : Tape
ShardReport       message : Lines.read
ShardOrder        number num_received : Tape
ShardOrder        message : Lines.read
PullRequest       version : ParameterServerService._kept
RowsRequest       run : compared
RowsRequest       rank table ids : Tables.pull
RowsReply         rows : Shard.pull_rows
StatusReply       status : unread
"""


def _read(table: str) -> Iterator[tuple[tuple[str, str], str]]:
    for line in table.strip().splitlines():
        named, _, checked_by = line.partition(" : ")
        message, *fields = named.split()
        for field in fields:
            yield (message, field), checked_by


EXCEPTIONS: dict[tuple[str, str], str] = dict(_read(_TABLE))

# How hostile values are made (`hostile.py`).
_KINDS = {
    FieldDescriptor.TYPE_STRING: "text", FieldDescriptor.TYPE_BYTES: "bytes", FieldDescriptor.TYPE_DOUBLE: "real",
    FieldDescriptor.TYPE_BOOL: "flag", FieldDescriptor.TYPE_ENUM: "choice", FieldDescriptor.TYPE_MESSAGE: "part",
}  # fmt: skip
_KINDS_OF_TEXT = {"rendezvous": "address", "shards": "address", "work": "json", "message": "json", "status": "json"}


def kind_of(field: Any) -> str:
    """Of its values; "whole" of all numbers that are not real."""
    return _KINDS_OF_TEXT.get(field.name) or _KINDS.get(field.type, "whole")


def all_fields() -> dict[tuple[str, str], FieldDescriptor]:
    """Of every message, by names of message and field."""
    pending, found = list(pb.DESCRIPTOR.message_types_by_name.values()), {}
    while pending:
        message = pending.pop()
        pending += message.nested_types
        found |= {(message.name, field.name): field for field in message.fields}
    return found
