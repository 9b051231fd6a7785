"""As `sparse`, with the 7 largest of every 64 values: 36.6 times fewer bytes.

For where 64 of 4,096 are too few to learn from. Places among 64 are 6 bits, four in three bytes, so that a kept value
costs 8 bits instead of 14: as many bytes as 256 of 4,096 would be, with 1.75 times the values.
"""

from __future__ import annotations

from .sparse import SparseCodec


class Sparse7Of64Codec(SparseCodec):
    name = "sparse_7_64"
    chunk = 64
    kept = 7


ENTRY = Sparse7Of64Codec
