"""A matrix as the product of two vectors: nm / (n + m) times fewer bytes.

PowerSGD (Vogels et al. 2019, arXiv:1905.13727) of rank 1, computed by each worker alone. A tensor is a matrix M, with
its first dimension as rows. Q comes from the worker's previous contribution. P = M Q, scaled to length 1, and
Q' = M^T P. The payload is P, then Q', float32, and is decoded as P Q'^T. If the contribution counts, Q' is the next Q.
The first Q is normal, from a seed. A tensor that would not shrink to half is sent as bf16.

In the paper, workers average P before they compute Q', so that all have the two vectors of the mean. That needs two
exchanges in sequence, in which no worker may be late. Here each worker has its own vectors, and the server adds up
their products.
"""

from __future__ import annotations

import torch

from ..tensors.layout import Layout, TensorSpec
from .shared.by_tensor import ByTensor, Piece, PieceEncoder, all_pieces

_VALUE_BYTES = 4
_LEAST_RATIO = 2


class PowerSgdCodec(ByTensor):
    name = "powersgd"
    piece = 1 << 62

    def encodes(self, spec: TensorSpec) -> bool:
        if not super().encodes(spec):
            return False
        return spec.num_elements * _VALUE_BYTES >= _LEAST_RATIO * self.size_of(spec.num_elements, spec.shape[0])

    def size_of(self, num_elements: int, rows: int) -> int:
        return (rows + num_elements // rows) * _VALUE_BYTES

    def encoder(self, layout: Layout) -> PieceEncoder:
        return _Encoder(self, layout)

    def read(self, piece: Piece, encoded: torch.Tensor, values: torch.Tensor) -> None:
        if not piece.is_encoded:
            super().read(piece, encoded, values)
            return
        both = encoded[piece.start : piece.end].view(torch.float32)
        values.view(piece.rows, -1).copy_(torch.outer(both[: piece.rows], both[piece.rows :]))


class _Encoder(PieceEncoder):
    """Encodes pieces, and keeps Q of each matrix."""

    def __init__(self, codec: PowerSgdCodec, layout: Layout) -> None:
        super().__init__(codec, layout)
        self._q: dict[int, torch.Tensor] = {}  # by the matrix's offset in a payload
        self._next: dict[int, torch.Tensor] = {}

    def begin(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        for piece in all_pieces(self.codec, self.layout):
            self.write(piece, piece.of_payload(payload), out)

    def write(self, piece: Piece, values: torch.Tensor, out: torch.Tensor) -> None:
        if not piece.is_encoded:
            super().write(piece, values, out)
            return
        matrix = values.float().view(piece.rows, -1)
        both = out[piece.start : piece.end].view(torch.float32)
        p, q = both[: piece.rows], both[piece.rows :]
        old = self._q.get(piece.offset)
        torch.mv(matrix, _first(piece.offset, len(q)) if old is None else old, out=p)
        norm = torch.linalg.vector_norm(p)
        p.copy_(torch.full_like(p, len(p) ** -0.5) if norm == 0 else p / norm)
        torch.mv(matrix.T, p, out=q)
        if q.any():  # a zero gradient gives no direction
            self._next[piece.offset] = q.clone()

    def commit(self) -> None:
        self._q |= self._next
        self.rollback()

    def rollback(self) -> None:
        self._next = {}


def _first(seed: int, num_columns: int) -> torch.Tensor:
    return torch.randn(num_columns, generator=torch.Generator().manual_seed(seed), device="cpu")


ENTRY = PowerSgdCodec
