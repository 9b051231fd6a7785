"""Encodes one shard's contributions with error feedback: the residual of earlier ones is added.

The worker encodes c = x + e for a contribution x. The server decodes y. Once the contribution counts, the residual
becomes e <- c - y (Seide et al. 2014, Karimireddy et al. 2019). So the sum of sent values equals the sum of computed
values. The residual depends only on the outcome of the contribution:

    counts               e <- c - y
    is sent again        e stays, and the same bytes are sent
    is rejected          e stays
    is dropped           e stays. For a delta e <- c, with every codec: the model has taken its steps already
    a START arrives      e <- 0: the worker has a new membership, or the server went back and repeats steps

`commit`, `rollback` and `start` carry this out; `Up.replied` calls them. e has the tensors' own dtypes, in a second
payload. If contributions carry parts of the tensors in turn, each part has its own residual, and the other residuals
stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ...common.codecs.base import Codec, Encoder, payload_bytes
from ...common.codecs.shared.by_tensor import ROOM, ByTensor, Piece, PieceEncoder, only_rest, pieces_of
from ...common.tensors.layout import DTYPES, Kind, Layout, as_bytes, new_payload
from ...common.tensors.optimizers import Hyperparameters
from ..tensors.transfer import Stretch, copy_bytes


class Encoding:
    """Encodes one contribution after another. `layout` is that of the shard's part of the model."""

    codec: Codec
    _encoder: Encoder

    def __init__(self, codec: Codec, layout: Layout, num_exchanged: int) -> None:
        self._preparation = codec.preparation(layout) if isinstance(codec, ByTensor) else None
        if self._preparation is not None:
            codec = self._preparation.codec(0)
        self._layout, self._num_exchanged = layout, num_exchanged
        self.use(codec)
        self._out: torch.Tensor | None = None  # uint8 [payload_bytes], as it is sent
        # uint8 [exchange_bytes]: the gathered values; after encoding c - y
        self._payload: torch.Tensor | None = None
        self.residual: torch.Tensor | None = None  # e, as a payload; None: zeros
        self._square = 0.0  # squared norm of c - y; not finite where a value is not
        # squared norms of e, by the set of tensors that the part leaves out
        self._squares: dict[frozenset[str], float] = {}
        self._without: frozenset[str] = frozenset()  # tensors that the next contribution leaves out
        self._idle: frozenset[str] = frozenset()  # tensors without a gradient: they are sent as zeros, and e stays
        self._is_whole = False
        self._lost: float | None = None  # norm of a discarded e, until `take_lost`

    @property
    def norm(self) -> float:
        """The norm of e."""
        return math.sqrt(sum(self._squares.values()))

    def choose(self, without: frozenset[str]) -> None:
        """Leave these tensors out of the next contribution. A codec that works tensor by tensor does not send them."""
        self._without = without
        if isinstance(self._whole, ByTensor):
            self.codec = only_rest(self._whole, without)

    def rest(self, without_gradient: frozenset[str]) -> None:
        """In this attempt, send zeros for these tensors, which no optimizer steps, and keep their residuals."""
        self._idle = without_gradient

    @property
    def payload(self) -> memoryview | None:
        """The encoded contribution, to send or to send again; None: it is not encoded yet."""
        return self.completed() if self._is_whole else None

    def whole(self, stretch: Stretch) -> memoryview:
        """Encode a complete contribution."""
        if isinstance(self.codec, ByTensor):
            self.part(stretch, range(self._num_exchanged))
        else:
            payload, out = self._memory()
            _Gather(stretch, payload).until_end()
            num_bytes = self.codec.encoded_bytes(self._layout)
            if self.residual is not None:
                for values, residual in self._views(payload, self.residual):
                    values.add_(residual)
            self._encoder.begin(payload, out[:num_bytes])
            out[num_bytes:].copy_(payload[self._layout.parameter_bytes :])
        return self.completed()

    def completed(self) -> memoryview:
        """Return the contribution after all its parts were encoded."""
        self._is_whole = True
        assert self._out is not None
        return as_bytes(self._out)

    def part(self, stretch: Stretch, tensors: range) -> tuple[int, memoryview]:
        """Encode neighbouring tensors, each once. Returns where their bytes begin in the payload, and the bytes."""
        assert isinstance(self.codec, ByTensor)
        payload, out = self._memory()
        of_tensors, gather = pieces_of(self.codec, self._layout), _Gather(stretch, payload)
        if not self._has_feedback and len(tensors) == self._num_exchanged and not self.codec.without:
            gather.until_end()
            self._encoder.begin(payload, out[: self.codec.encoded_bytes(self._layout)])
        else:
            for pieces in of_tensors[tensors.start : tensors.stop]:
                for piece in pieces:
                    gather.until(piece.offset_end)
                    self._write(piece, payload, out)
            gather.until_end()
        if tensors.stop > len(of_tensors):  # buffers are copied without encoding
            first = max(self._layout.parameter_bytes, stretch.offset)
            start, end = self._encoded_offset(first), self._encoded_offset(self._layout.entries[tensors.stop - 1].end)
            out[start:end].copy_(payload[first : first + end - start])
        start, end = self._start(tensors.start), self._start(tensors.stop)
        return start, as_bytes(out)[start:end]

    def _write(self, piece: Piece, payload: torch.Tensor, out: torch.Tensor) -> None:
        codec, encoder, values = self.codec, self._encoder, piece.of_payload(payload)
        assert isinstance(codec, ByTensor) and isinstance(encoder, PieceEncoder)
        if not self._has_feedback:
            encoder.write(piece, values, out)
            return
        if self._idle and piece.name in self._idle:
            encoder.write(piece, values, out)  # zeros
            if self.residual is not None:
                self._square += _square(values.copy_(piece.of_payload(self.residual)))
            if self._preparation is not None:
                self._preparation.rest(piece)
            return
        if self._preparation is not None:
            self._preparation.apply(piece, values)
        if self.residual is not None:
            values.add_(piece.of_payload(self.residual), alpha=codec.decay)
        encoder.write(piece, values, out)
        decoded = ROOM.of("of what is sent", values.shape, values.dtype)
        codec.read(piece, out, decoded)
        self._square += _square(values.sub_(decoded))

    @property
    def _has_feedback(self) -> bool:
        if self.codec.has_feedback or self._preparation is not None:
            return True
        # Whether the residual has tensors of the next contribution.
        return self.residual is not None and (
            not self._without or self._without in self._squares or frozenset() in self._squares
        )

    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        num_bytes = payload_bytes(self.codec, self._layout)
        if self._payload is None:
            self._payload = new_payload(self._layout.exchange_bytes)
        if self._out is None or len(self._out) != num_bytes:
            self._out = new_payload(num_bytes)
        return self._payload, self._out

    def _start(self, tensor: int) -> int:
        """Where the bytes of a tensor begin in the encoded payload, including the gap before it."""
        assert isinstance(self.codec, ByTensor)
        of_tensors = pieces_of(self.codec, self._layout)
        if tensor > len(of_tensors):
            return self._encoded_offset(self._layout.entries[tensor - 1].end)
        ends = [pieces[-1].end for pieces in of_tensors[:tensor] if pieces]
        return ends[-1] if ends else 0

    def _encoded_offset(self, offset: int) -> int:
        """Where a byte after the parameters is in the encoded payload."""
        return self.codec.encoded_bytes(self._layout) + offset - self._layout.parameter_bytes

    # ---- the outcome --------------------------------------------------------------------------

    def recall(self) -> None:
        """Discard the encoded parts. A complete contribution stays as it is."""
        if not self._is_whole:
            self._square = 0.0

    def commit(self) -> None:
        """The contribution counts: update the residual."""
        self._encoder.commit()
        if self._is_whole and self._has_feedback:
            if isinstance(self.codec, ByTensor):
                self._retain()
            else:
                # c was sent without loss, so the residual becomes zero.
                assert self.residual is not None
                self._squares.pop(self._without, None)
                for (residual,) in self._views(self.residual):
                    residual.zero_()
                if not (self._without and self._squares):
                    self.residual, self._squares = None, {}
        self._forget_attempt()

    def rollback(self, work: Stretch | None = None) -> None:
        """The contribution does not count. `work`: a dropped delta, gathered again; the residual takes it."""
        self._encoder.rollback()
        if work is not None:
            payload, _ = self._memory()
            _Gather(work, payload).until_end()
            self._square, residuals = 0.0, payload if self.residual is None else self.residual
            for values, residual in self._views(payload, residuals):
                if self.residual is not None:
                    values.add_(residual, alpha=self.codec.decay)
                self._square += _square(values)
            self._retain()
        self._forget_attempt()

    def start(self) -> None:
        """The server has forgotten earlier contributions, so the residual is lost."""
        self._encoder = self.codec.encoder(self._layout)
        self._forget_attempt()
        if (norm := self._reset()) > 0:
            self._lose(norm)

    def take_lost(self) -> float | None:
        """The norm of residuals discarded since the last call; None: there was none."""
        lost, self._lost = self._lost, None
        return lost

    def use(self, codec: Codec) -> None:
        """Use another codec from the next contribution on. It also sends the residual; raw leaves no residual."""
        self.codec = self._whole = codec
        self._encoder = codec.encoder(self._layout)
        self.is_raw = codec.is_identity and self._preparation is None  # a residual is only that of a dropped delta

    def of_optimizer(self, groups: Sequence[Hyperparameters]) -> None:
        """Set the hyperparameters that the server's optimizer began with."""
        if self._preparation is not None:
            self._preparation.begin(groups)

    def ready(self, version: int) -> None:
        """The server has taken `version` steps before the next contribution."""
        if self._preparation is not None and (codec := self._preparation.codec(version)) is not self._whole:
            self.use(codec)

    def prepared(self, groups: tuple[Hyperparameters, ...]) -> tuple[Hyperparameters, ...]:
        """The hyperparameters to send with a contribution; equal input gives the same tuple."""
        return groups if self._preparation is None else self._preparation.hyperparameters(groups)

    def _views(self, *payloads: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yield each parameter of the contribution, [n], in each of these payloads."""
        for spec, offset, end in self._layout.entries:
            if spec.kind is Kind.PARAMETER and spec.name not in self._without:
                yield [payload[offset:end].view(DTYPES[spec.dtype]) for payload in payloads]

    def _retain(self) -> None:
        if self._without:
            assert self._payload is not None
            is_finite = math.isfinite(self._square)
            before = self._squares.get(self._without, 0.0)
            if not is_finite:
                self._lose(math.sqrt(before))
            self._squares.pop(frozenset(), None)
            self._squares[self._without] = self._square if is_finite else 0.0
            if self.residual is None:
                self.residual = torch.zeros_like(self._payload)
            for residual, values in self._views(self.residual, self._payload):
                residual.copy_(values) if is_finite else residual.zero_()
        elif not math.isfinite(self._square):
            self._lose(self._reset())
        else:
            self._squares = {frozenset(): self._square}
            self.residual, self._payload = self._payload, self.residual
            if self._preparation is not None:
                self._preparation.commit()

    def _reset(self) -> float:
        norm, self._squares = self.norm, {}
        self.residual = None
        if self._preparation is not None:
            self._preparation.reset()
        return norm

    def _lose(self, norm: float) -> None:
        self._lost = math.hypot(self._lost or 0.0, norm)

    def _forget_attempt(self) -> None:
        self._is_whole, self._square, self._idle = False, 0.0, frozenset()


def _square(values: torch.Tensor) -> float:
    """The squared norm of [n]."""
    wide = values if values.dtype.itemsize > 2 else values.float()
    return torch.dot(wide, wide).item()


_NOTHING = memoryview(b"")


class _Gather:
    """Copies a stretch into a payload, only as far as is encoded next, so that the bytes are still in the cache."""

    def __init__(self, stretch: Stretch, payload: torch.Tensor) -> None:
        self._target, self._at = as_bytes(payload), stretch.offset
        self._pieces, self._rest = iter(stretch.pieces), _NOTHING

    def until(self, end: int) -> None:
        """Copy up to this byte of the payload."""
        while self._at < end:
            piece = self._rest or next(self._pieces, _NOTHING)
            if piece is _NOTHING:
                return
            now, self._rest = piece[: end - self._at], piece[end - self._at :]
            copy_bytes(self._target[self._at : self._at + len(now)], now)
            self._at += len(now)

    def until_end(self) -> None:
        self.until(len(self._target))
