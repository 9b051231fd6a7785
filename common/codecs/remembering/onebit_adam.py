"""Signs of momentum, once Adam has warmed up: 31.9 times fewer bytes.

1-bit Adam (Tang et al. 2021, arXiv:2102.02888) with the server's `OneBitAdam`. While its second moment warms up,
gradients travel as bf16, and each worker adds them up: m <- b1 m + (1 - b1) g. From then on it sends m, as `sign_rms`
does, with error feedback, and says that b1 is 0, so that the server takes the mean of these for its own: the mean of
all workers' momentum is the momentum of the mean (`worker/lanes/onebit.py`). Published, the server's way down is
encoded by the same signs with a feedback of its own; here that is `worker.answer_codec`, one reference for all.
"""

from __future__ import annotations

from ..sign_rms import SignRmsCodec


class OneBitAdamCodec(SignRmsCodec):
    name = "onebit_adam"
    momentum = 0.9  # b1, unless the optimizer says otherwise
    optimizer = "OneBitAdam"
    modes = ("sync",)


ENTRY = OneBitAdamCodec
