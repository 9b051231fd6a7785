"""As `sparse`, with 256 of every 4,096 values: 36.6 times fewer bytes.

For where 64 are too few to learn from: a kept value costs 14 bits whatever the others are.
"""

from __future__ import annotations

from .sparse import SparseCodec


class Sparse256Codec(SparseCodec):
    name = "sparse_256"
    kept = 256


ENTRY = Sparse256Codec
