"""As `sign`, with the root of the mean square for a scale: norm2(c) / sqrt(n), as in DeepSpeed's 1-bit Adam."""

from __future__ import annotations

import math

import torch

from .sign import SignCodec


class SignRmsCodec(SignCodec):
    name = "sign_rms"
    contracts = False  # of values of very different sizes it makes more than there was

    def scale(self, values: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(values)) / math.sqrt(len(values))


ENTRY = SignRmsCodec
