"""One shard's contributions as a codec has them, with what it left out of earlier ones: error feedback.

Of a contribution x, c = x + e is encoded; what the server will make of it is y, and e <- c - y once it counts (Seide et
al. 2014, Karimireddy et al. 2019), so that what is sent adds up to what was computed. Until then nothing is decided:

    counts            e <- c - y
    sent again        the same bytes
    dropped, refused  e as before: a gradient that does not count was never computed
    dropped, a delta  e <- c, in every codec: work that was done is sent with the next one
    START             e <- 0: another membership, or a server that went back, whose steps are done again

e lies where the payload was gathered, in the tensors' own dtypes: one payload more than without. Of contributions of a
part
of the tensors, by turns, each has its own of e, and the others' stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ...common.codecs.base import Codec, Coder, payload_bytes
from ...common.codecs.shared.by_tensor import ROOM, ByTensor, Piece, PieceEncoder, only_rest, pieces_of
from ...common.tensors.layout import DTYPES, Kind, Layout, as_bytes, new_payload
from ...common.tensors.optimizers import Hyperparameters
from ..tensors.transfer import Stretch, copy_bytes


class Encoding:
    """Attempts at one contribution after another. `layout` is of the part of the model that lies on the shard."""

    def __init__(self, codec: Codec, layout: Layout, num_exchanged: int) -> None:
        self._preparation = codec.preparation(layout) if isinstance(codec, ByTensor) else None
        if self._preparation is not None:
            codec = self._preparation.codec(0)
        self.codec = self._whole = codec
        self._layout, self._num_exchanged = layout, num_exchanged
        self._coder: Coder = codec.encoder(layout)
        self._out: torch.Tensor | None = None  # uint8 [payload_bytes], as it is sent
        self._payload: torch.Tensor | None = (
            None  # uint8 [exchange_bytes], as gathered; of a part that is encoded, c - y
        )
        self._left: torch.Tensor | None = None  # e, as a payload; None: zeros
        self._square = 0.0  # of the norm of c - y; not finite where a value is not
        self._squares: dict[frozenset[str], float] = {}  # of e, by what it is without
        self._without: frozenset[str] = frozenset()  # tensors that the next contribution has nothing of
        self._is_whole = False
        self._lost: float | None = None  # norm of e where it was let go, until that is told

    @property
    def norm(self) -> float:
        """Of e."""
        return math.sqrt(sum(self._squares.values()))

    def choose(self, without: frozenset[str]) -> None:
        """The next contribution has nothing of these tensors, whose bytes stay at home where the codec is one of
        pieces."""
        self._without = without
        if isinstance(self._whole, ByTensor):
            self.codec = only_rest(self._whole, without)

    @property
    def payload(self) -> memoryview | None:
        """What is to be sent, or sent again; None before it is encoded."""
        return self.completed() if self._is_whole else None

    def whole(self, stretch: Stretch) -> memoryview:
        """Encode all of a contribution."""
        if isinstance(self.codec, ByTensor):
            self.part(stretch, range(self._num_exchanged))
        else:
            payload, out = self._memory()
            _Gather(stretch, payload).until_end()
            num_bytes = self.codec.encoded_bytes(self._layout)
            if self._left is not None:
                for values, kept in self._views(payload, self._left):
                    values.add_(kept)
            self._coder.begin(payload, out[:num_bytes])
            out[num_bytes:].copy_(payload[self._layout.parameter_bytes :])
        return self.completed()

    def completed(self) -> memoryview:
        """All of its parts are encoded."""
        self._is_whole = True
        assert self._out is not None
        return as_bytes(self._out)

    def part(self, stretch: Stretch, tensors: range) -> tuple[int, memoryview]:
        """Encode some tensors, neighbours, each once: their bytes, and where those are in what is sent."""
        assert isinstance(self.codec, ByTensor)
        payload, out = self._memory()
        of_tensors, gather = pieces_of(self.codec, self._layout), _Gather(stretch, payload)
        if not self._has_feedback and len(tensors) == self._num_exchanged and not self.codec.without:
            gather.until_end()
            self._coder.begin(payload, out[: self.codec.encoded_bytes(self._layout)])
        else:
            for pieces in of_tensors[tensors.start : tensors.stop]:
                for piece in pieces:
                    gather.until(piece.offset_end)
                    self._write(piece, payload, out)
            gather.until_end()
        if tensors.stop > len(of_tensors):  # buffers as they are
            first = max(self._layout.parameter_bytes, stretch.offset)
            start, end = self._place(first), self._place(self._layout.entries[tensors.stop - 1].end)
            out[start:end].copy_(payload[first : first + end - start])
        start, end = self._start(tensors.start), self._start(tensors.stop)
        return start, as_bytes(out)[start:end]

    def _write(self, piece: Piece, payload: torch.Tensor, out: torch.Tensor) -> None:
        codec, coder, values = self.codec, self._coder, piece.of_payload(payload)
        assert isinstance(codec, ByTensor) and isinstance(coder, PieceEncoder)
        if not self._has_feedback:
            coder.write(piece, values, out)
            return
        if self._preparation is not None:
            self._preparation.apply(piece, values)
        if self._left is not None:
            values.add_(piece.of_payload(self._left), alpha=codec.decay)
        coder.write(piece, values, out)
        decoded = ROOM.of("of what is sent", values.shape, values.dtype)
        codec.read(piece, out, decoded)
        self._square += _square(values.sub_(decoded))

    @property
    def _has_feedback(self) -> bool:
        if self.codec.has_feedback or self._preparation is not None:
            return True
        return self._left is not None and self._has_kept

    @property
    def _has_kept(self) -> bool:
        """Something of what the next contribution has."""
        return not self._without or self._without in self._squares or frozenset() in self._squares

    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        num_bytes = payload_bytes(self.codec, self._layout)
        if self._payload is None:
            self._payload = new_payload(self._layout.exchange_bytes)
        if self._out is None or len(self._out) != num_bytes:
            self._out = new_payload(num_bytes)
        return self._payload, self._out

    def _start(self, tensor: int) -> int:
        """Where the bytes of a tensor begin in what is sent, the gap before it included."""
        assert isinstance(self.codec, ByTensor)
        of_tensors = pieces_of(self.codec, self._layout)
        if tensor > len(of_tensors):
            return self._place(self._layout.entries[tensor - 1].end)
        ends = [pieces[-1].end for pieces in of_tensors[:tensor] if pieces]
        return ends[-1] if ends else 0

    def _place(self, offset: int) -> int:
        """Of a byte of the payload behind the parameters."""
        return self.codec.encoded_bytes(self._layout) + offset - self._layout.parameter_bytes

    # ---- what became of it ------------------------------------------------------------------------

    def recall(self) -> None:
        """Parts that were encoded are not what is to be sent; what is whole stays as it is."""
        if not self._is_whole:
            self._square = 0.0

    def commit(self) -> None:
        """It counts."""
        self._coder.commit()
        if self._is_whole and self._has_feedback:
            if isinstance(self.codec, ByTensor):
                self._keep()
            else:
                self._let_go()
        self._forget_attempt()

    def rollback(self, work: Stretch | None = None) -> None:
        """It does not, and never will. `work`: all of it, gathered once more, which is to be sent with the next one."""
        self._coder.rollback()
        if work is not None:
            self._keep_all(work)
        self._forget_attempt()

    def start(self) -> float:
        """Whatever was before, the server has forgotten it. The norm of what was left out, and never comes."""
        self._coder = self.codec.encoder(self._layout)
        self._forget_attempt()
        norm = self._reset()
        if norm > 0:
            self._lose(norm)
        return norm

    def take_lost(self) -> float | None:
        """The norm of what was let go since this was asked last; None: nothing was."""
        lost, self._lost = self._lost, None
        return lost

    def use(self, codec: Codec) -> None:
        """Another codec from the next contribution on; what was left out is sent in it (also in raw, and then it is
        over)."""
        self.codec = self._whole = codec
        self._coder = codec.encoder(self._layout)

    def of_optimizer(self, groups: Sequence[Hyperparameters]) -> None:
        """What the server's optimizer was begun with."""
        if self._preparation is not None:
            self._preparation.begin(groups)

    def ready(self, version: int) -> None:
        """Before anything of the next contribution: the server has taken so many steps."""
        if self._preparation is not None and (codec := self._preparation.codec(version)) is not self._whole:
            self.use(codec)

    def told(self, groups: tuple[Hyperparameters, ...]) -> tuple[Hyperparameters, ...]:
        """These as they are to be said with what is sent; the same tuple for the same one."""
        return groups if self._preparation is None else self._preparation.hyperparameters(groups)

    @property
    def owes(self) -> bool:
        """Something of earlier contributions has still to be sent."""
        return self._left is not None

    def _views(self, *payloads: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Each parameter that a contribution has something of, [n], as it is in these payloads."""
        for spec, offset, end in self._layout.entries:
            if spec.kind is Kind.PARAMETER and spec.name not in self._without:
                yield [payload[offset:end].view(DTYPES[spec.dtype]) for payload in payloads]

    def _keep_all(self, work: Stretch) -> None:
        if self._payload is None:
            self._payload = new_payload(self._layout.exchange_bytes)
        _Gather(work, self._payload).until_end()
        self._square = 0.0
        for values, kept in self._views(self._payload, self._payload if self._left is None else self._left):
            if self._left is not None:
                values.add_(kept, alpha=self.codec.decay)
            self._square += _square(values)
        self._keep()

    def _let_go(self) -> None:
        """All of c was sent."""
        assert self._left is not None
        self._squares.pop(self._without, None)
        for (kept,) in self._views(self._left):
            kept.zero_()
        if not (self._without and self._squares):
            self._left, self._squares = None, {}

    def _keep(self) -> None:
        if self._without:
            self._keep_part()
        elif not math.isfinite(self._square):
            self._lose(self._reset())
        else:
            self._squares = {frozenset(): self._square}
            self._left, self._payload = self._payload, self._left
            if self._preparation is not None:
                self._preparation.commit()

    def _keep_part(self) -> None:
        assert self._payload is not None
        is_finite = math.isfinite(self._square)
        before = self._squares.get(self._without, 0.0)
        if not is_finite:
            self._lose(math.sqrt(before))
        self._squares.pop(frozenset(), None)
        self._squares[self._without] = self._square if is_finite else 0.0
        if self._left is None:
            self._left = torch.zeros_like(self._payload)
        for kept, values in self._views(self._left, self._payload):
            kept.copy_(values) if is_finite else kept.zero_()

    def _reset(self) -> float:
        norm, self._squares = self.norm, {}
        self._left = None
        if self._preparation is not None:
            self._preparation.reset()
        return norm

    def _lose(self, norm: float) -> None:
        self._lost = math.hypot(self._lost or 0.0, norm)

    def _forget_attempt(self) -> None:
        self._is_whole, self._square = False, 0.0


def _square(values: torch.Tensor) -> float:
    """Of the norm of [n]."""
    wide = values if values.dtype.itemsize > 2 else values.float()
    return torch.dot(wide, wide).item()


_NOTHING = memoryview(b"")


class _Gather:
    """Copies a stretch to its place in a payload, as far as it is to be worked on next: it is in the cache then."""

    def __init__(self, stretch: Stretch, payload: torch.Tensor) -> None:
        self._target, self._at = as_bytes(payload), stretch.offset
        self._pieces, self._rest = iter(stretch.pieces), _NOTHING

    def until(self, end: int) -> None:
        """So many bytes of the payload; a piece that has been begun may go on."""
        while self._at < end:
            piece = self._rest or next(self._pieces, _NOTHING)
            if piece is _NOTHING:
                return
            now, self._rest = piece[: end - self._at], piece[end - self._at :]
            copy_bytes(self._target[self._at : self._at + len(now)], now)
            self._at += len(now)

    def until_end(self) -> None:
        self.until(len(self._target))
