"""The 0.1 % of sums of gradients with momentum that are largest: 546 times fewer bytes, in front of plain SGD.

Deep gradient compression (Lin et al. 2018, arXiv:1712.01887), on each worker: u <- 0.9 u + g, v <- v + u; of each 4,096
values of v the 5 that are largest in size are sent, as `topk` does, and u and v are zero from then on where they were.
(`worker.momentum` is another number for 0.9.) v is what error feedback keeps, u lies beside it
(`worker/lanes/encoding.py`). Where a tensor is not encoded all of u is sent, and goes on.
"""

from __future__ import annotations

from ..largest.topk import TopkCodec


class DgcCodec(TopkCodec):
    name = "dgc"
    suits_momentum = False
    one_of = 1000
    momentum = 0.9
    masks_momentum = True


ENTRY = DgcCodec
