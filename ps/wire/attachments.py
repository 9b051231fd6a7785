"""Collects the parts of a contribution that arrive before it: states in pieces, and gradients of rows."""

from __future__ import annotations

from functools import partial

from ...common.errors import CheckpointError, Reason, refusal
from ...common.wire.frames import Frame
from ...proto import parameter_server_pb2 as pb
from ..snapshots.store_state import read_optimizer
from ..tensors.flat_optimizer import OptimizerState
from ..tensors.model import Model
from ..tensors.tables import Rows
from ..tensors.thread import TensorThread

# Bounds of an optimizer's state: a multiple of the parameters' bytes, and bytes for names.
_MAX_KEYS, _MORE_BYTES = 8, 1 << 20


class StateAssembler:
    """Joins the bytes of consecutive State messages."""

    def __init__(self) -> None:
        self._num_bytes, self._data = 0, bytearray()

    def add(self, message: pb.State) -> None:
        """Append a piece. Raises a BAD_REQUEST refusal if it does not follow the previous pieces."""
        if not message.offset:
            self._num_bytes, self._data = message.num_bytes, bytearray()
        if message.num_bytes != self._num_bytes or message.offset != len(self._data):
            problem = f"a piece of a State at {message.offset} that does not follow {len(self._data)}"
            raise refusal(Reason.BAD_REQUEST, problem)
        self._data += message.piece

    def check_complete(self) -> None:
        """Raise a BAD_REQUEST refusal if pieces are missing."""
        if len(self._data) < self._num_bytes:
            problem = f"a Contribution after {len(self._data)} of {self._num_bytes} bytes of a State"
            raise refusal(Reason.BAD_REQUEST, problem)

    def take(self) -> bytes | None:
        """Return the whole state and start over, or None if the state has not arrived completely."""
        if not self._data or len(self._data) < self._num_bytes:
            return None
        data, self._data, self._num_bytes = bytes(self._data), bytearray(), 0
        return data


class Attachments:
    """Parts that belong to the next contribution: gradients of rows, and the optimizer's state after its step."""

    def __init__(self, rank: int, model: Model, tensors: TensorThread) -> None:
        self._rank, self._model, self._tensors = rank, model, tensors
        self._optimizer_state = StateAssembler()
        self._optimizer: OptimizerState | None = None
        self._rows: list[Rows] = []

    def check(self, received: Frame) -> None:
        """Raise a BAD_REQUEST refusal for rows in a run without tables, or a state too large for this model."""
        model, header = self._model, received.header
        if isinstance(header, pb.Rows) and not (model.has_weights and model.store.tables):
            raise refusal(Reason.BAD_REQUEST, "rows of a run that has no tables yet, or none at all")
        if isinstance(header, pb.State) and not (
            model.has_weights
            and model.layout is not None
            and header.num_bytes <= _MAX_KEYS * model.layout.parameter_bytes + _MORE_BYTES
        ):
            problem = f"rank {self._rank}: {header.num_bytes:,} bytes of an optimizer of this model"
            raise refusal(Reason.BAD_REQUEST, problem)

    async def add(self, received: Frame) -> None:
        """Store a checked message. Raises a BAD_REQUEST refusal for rows or a state that do not fit this model."""
        header = received.header
        if isinstance(header, pb.Rows) and self._model.store.tables is not None:
            read = self._model.store.tables.read
            self._rows.append(read(header.table, header.count, received.data, self._rows))
        elif isinstance(header, pb.State):
            self._optimizer_state.add(header)
            if (data := self._optimizer_state.take()) is not None:
                try:
                    self._optimizer = await self._tensors.run(partial(read_optimizer, self._model, data))
                except CheckpointError as error:
                    problem = f"the optimizer state of rank {self._rank}: {error.message}"
                    raise refusal(Reason.BAD_REQUEST, problem) from None

    def take(self) -> tuple[list[Rows], OptimizerState | None]:
        """Return the rows and the optimizer's state, and clear both."""
        found = self._rows, self._optimizer
        self._rows, self._optimizer = [], None
        return found
