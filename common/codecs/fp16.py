"""float32 and float64 as float16: as few bytes as bf16, 11 bits of mantissa instead of 8, and little range.

What is larger than 65,504 becomes infinite: a gradient is rejected then, as any that is not finite, and weights on
their way down are refused. What is smaller than 6e-8 becomes zero.
"""

from __future__ import annotations

import torch

from .bf16 import Bf16Codec


class Fp16Codec(Bf16Codec):
    name = "fp16"
    dtype = torch.float16
    largest = torch.finfo(torch.float16).max


ENTRY = Fp16Codec
