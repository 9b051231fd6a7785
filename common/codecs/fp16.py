"""float32 and float64 as float16: the same bytes as bf16, 11 bits of mantissa instead of 8, and a smaller range.

Values above 65,504 become infinite. The server then rejects a gradient as not finite, and refuses to send weights.
Values below 6e-8 become zero.
"""

from __future__ import annotations

import torch

from .bf16 import Bf16Codec


class Fp16Codec(Bf16Codec):
    name = "fp16"
    fallback_dtype = torch.float16
    largest = torch.finfo(torch.float16).max


ENTRY = Fp16Codec
