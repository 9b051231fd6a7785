"""Every field of every message: what hostile values of it are like, and who on the receiving side checks it.

A new field in proto/parameter_server.proto has no rule, and `test_fields.py` fails until it has one. `header`: in
`common/wire/checks.py`, which a test tries field by field. Others name the function that refuses, or say why nothing
has to: `compared` (with what the receiver knows itself), `shown` (to people, cut and escaped there), `any` (every value
means something), `unread`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from paramserver.proto import parameter_server_pb2 as pb


class Rule(NamedTuple):
    kind: str  # of its values: a key of KINDS
    checked_by: str


# How hostile values are made (`hostile.py`), and of which types a field may be that has the rule.
_WHOLE = {FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_SINT32}
KINDS = {
    "part": {FieldDescriptor.TYPE_MESSAGE},  # a message with rules of its own
    "values": {FieldDescriptor.TYPE_MESSAGE},  # a Struct
    "text": {FieldDescriptor.TYPE_STRING},
    "address": {FieldDescriptor.TYPE_STRING},
    "json": {FieldDescriptor.TYPE_STRING},
    "whole": _WHOLE,
    "hash": {FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_FIXED64},
    "real": {FieldDescriptor.TYPE_DOUBLE},
    "flag": {FieldDescriptor.TYPE_BOOL},
    "choice": {FieldDescriptor.TYPE_ENUM},
    "bytes": {FieldDescriptor.TYPE_BYTES},
}

_TABLE = """
WorkerMessage     join model initial_weights contribution finish leave begin taken stop : part Stream.read
WorkerMessage     state metrics rows optimizer ask_again : part Stream.read
WorkerMessage     out_of_band offset left_out : whole PayloadReader
WorkerMessage     data : bytes PayloadReader
Join              run host device program_version process region : text header
Join              rank : whole header
Join              incarnation server_incarnation : whole compared
Join              pid : whole shown
Join              num_workers : whole header
Join              seated resumed : flag any
Model             tensors : part layout_from_proto
Model             fingerprint : text compared
Model             optimizer : part optimizer_from_proto
Model             segment : part open_segment
Model             reply_codec : text header
Model             codecs : text codec_named
Model             direct : flag Joining.meet
Model             contribution : choice compared
Model             transport_reason : text shown
Model             rendezvous : address header
Segment           host : text compared
Segment           label : text open_segment
Segment           pid descriptor num_bytes : whole open_segment
TensorSpec        name dtype aliases : text layout_from_proto
TensorSpec        kind : choice layout_from_proto
TensorSpec        shape : whole Layout
TensorSpec        averaged : flag compared
Optimizer         name : text find_optimizer
Optimizer         groups tables : part optimizer_from_proto
Optimizer         sums : flag any
Table             name : text _tables_from_proto
Table             dtype optimizer : text make_spec
Table             num_rows dim : whole make_spec
Table             init_std : real make_spec
Table             hyperparameters : values make_spec
ParameterGroup    tensors : text optimizer_from_proto
ParameterGroup    hyperparameters : values check_hyperparameters
InitialWeights    payload_bytes : whole compared
Begin             num_bytes : whole compared
Begin             codec : text header
Begin             in_shared_memory : flag Transport.carries
Begin             continues : whole header
Rows              table count : whole Tables.read
Contribution      seq : whole header
Contribution      counts base timing payload training completion first position : part header
Contribution      residual : part note_residual
Counts            num_samples num_batches num_workers : whole header
Counts            num_steps part : whole policy
Base              version : whole header
Base              has_all : flag any
Base              reference : whole compared
Timing            compute_s transfer_s : real header
PayloadInfo       codec : text header
PayloadInfo       num_bytes : whole compared
PayloadInfo       in_shared_memory : flag Transport.carries
PayloadInfo       without_gradient : whole Model.names_here
TrainingInfo      hyperparameters : values check_hyperparameters
TrainingInfo      clip_norm : real header
TrainingInfo      loss : real shown
TrainingInfo      wants_weights evaluates : flag any
TrainingInfo      iteration : whole header
ResidualInfo      norm lost_norm : real note_residual
ResidualInfo      num_lost : whole shown
CompletionInfo    generation peer_bytes : whole header
CompletionInfo    failed : flag any
FirstInfo         num_samples run_steps : whole header
FirstInfo         digest : hash any
FirstInfo         rates : real header
FirstInfo         work : json header
Position          step batches epoch epoch_batches : whole header
Position          local_steps : whole any
AskAgain          seq : whole header
AskAgain          reference : whole compared
State             num_bytes offset : whole header
State             piece : bytes header
Rates             first last : real header
Rates             num_changes : whole header
Finish            transfer_s : real header
Finish            can_evaluate : flag any
Finish            residual : part note_residual
Stop              reason : text header
EvaluationMetrics version step : whole header
EvaluationMetrics metrics : part header
EvaluationMetrics failure : text header
EvaluationMetrics exit_code : whole evaluation_event
MetricsEntry      key : text header
MetricsEntry      value : real evaluation_event
Leave             final_metrics : part header
Leave             finished : flag any
Leave             failure : text header
Leave             exit_code : whole Conversation._leave
FinalMetricsEntry key : text header
FinalMetricsEntry value : real shown
ServerMessage     welcome send_weights waiting reply final snapshot shared_memory state : part Shard._expect
ServerMessage     out_of_band offset left_out : whole PayloadReader
ServerMessage     data : bytes PayloadReader
Welcome           run : text header
Welcome           rank seq : whole header
Welcome           incarnation server_incarnation : whole compared
Welcome           settings : part read_settings
Welcome           probe : part open_segment
Welcome           resumed takes_left_out : flag any
Welcome           lease_s : real header
Welcome           shards : address header
Welcome           direct partial_transfer : part header
PartialTransfer   seq payload_bytes : whole header
PartialTransfer   codec : text header
PartialTransfer   ranges : whole header
PartialTransfer   crc : hash compared
Direct            port : whole header
Direct            ticket : bytes header
HeartbeatRequest              run process : text header
HeartbeatRequest              rank : whole Roster.is_member
HeartbeatRequest              evaluates : flag any
HeartbeatRequest              metrics : part header
HeartbeatReply             is_gone : flag any
HeartbeatReply             lease_s : real unread
HeartbeatReply             durable_version over_generation server_incarnation : whole compared
SharedMemory      accepted : flag any
SharedMemory      reason : text shown
RunSettings       mode task eval_every : text header
RunSettings       contribution : choice read_settings
RunSettings       num_workers steps batch_size seed fragments outstanding : whole header
RunSettings       pull_every overlap_steps epochs : whole any
RunSettings       task_args : values check_named_by_server
RunSettings       optimizer : part check_arguments
RunSettings       polyak : real header
RunSettings       delayed_update ends_by_metrics union_batch in_region : flag any
RunSettings       train : values TrainConfig
Waiting           reason : text shown
Reply             result next_work weights group start : part header
Result            outcome : choice header
Result            seq version : whole header
Result            staleness : whole unread
Result            gate_wait_s : real header
Result            reason : text shown
NextWork          training_steps run_steps num_workers worker_index same_batches_as : whole header
NextWork          local_steps : whole any
NextWork          has_evaluator : flag any
WeightsInfo       num_bytes : whole header
WeightsInfo       codec : text header
WeightsInfo       segment : part open_segment
WeightsInfo       reference : part header
ReferenceInfo     number : whole header
ReferenceInfo     checked : whole compared
ReferenceInfo     crc : hash compared
ReferenceInfo     left_out : part Down._codecs
LeftOut           tensors : whole Down._codecs
GroupInfo         generation members : whole header
GroupInfo         rendezvous : address header
GroupInfo         secret : bytes header
GroupInfo         has_weights uploads_weights uploads_optimizer returns_weights : flag any
StartInfo         num_batches : whole header
StartInfo         in_step : whole any
StartInfo         rates position : part header
Final             version : whole header
Final             evaluate : flag any
Final             weights : part header
Snapshot          run : text header
Snapshot          version payload_bytes : whole header
Snapshot          tensors : part layout_from_proto
ShardReport       number num_received : whole Tape
ShardReport       message : json Lines.read
ShardOrder        number num_received : whole Tape
ShardOrder        message : json Lines.read
PullRequest       averaged keep optimizer : flag any
PullRequest       version : whole ParameterServerService._kept
PullRequest       reader : text header
RowsRequest       run : text compared
RowsRequest       rank table : whole Tables.pull
RowsRequest       ids : bytes Tables.pull
RowsReply         rows : bytes Shard.pull_rows
RowsReply         shards : address header
StatusReply       run : text header
StatusReply       status : json unread
StatusReply       version step incarnation : whole header
StatusReply       settings : part read_settings
"""


def _read(table: str) -> Iterator[tuple[tuple[str, str], Rule]]:
    for line in table.strip().splitlines():
        named, _, rule = line.partition(" : ")
        message, *fields = named.split()
        for field in fields:
            yield (message, field), Rule(*rule.split())


RULES: dict[tuple[str, str], Rule] = dict(_read(_TABLE))


def all_fields(file: object = pb.DESCRIPTOR) -> dict[tuple[str, str], FieldDescriptor]:
    """Of every message of the file, by names of message and field."""
    pending, found = list(file.message_types_by_name.values()), {}  # type: ignore[attr-defined]
    while pending:
        message = pending.pop()
        pending += message.nested_types
        found |= {(message.name, field.name): field for field in message.fields}
    return found


def wrong(file: object = pb.DESCRIPTOR) -> list[str]:
    """Fields without a rule, rules without a field, and rules for a field of another type, as sentences."""
    fields = all_fields(file)
    missing = [f"{'.'.join(field)} has no rule in tests/hostile/fields.py" for field in fields.keys() - RULES.keys()]
    stale = [f"there is no {'.'.join(rule)} any more" for rule in RULES.keys() - fields.keys()]
    other = [
        f"{'.'.join(item)} is no {RULES[item].kind}"
        for item, field in fields.items()
        if item in RULES and field.type not in KINDS[RULES[item].kind]
    ]
    return sorted(missing + stale + other)
