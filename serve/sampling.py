"""Chooses the next token of a sequence from its logits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

import torch

_LEAST_TEMPERATURE = 1e-30  # a smaller one is 0 in float32


@dataclass(frozen=True)
class Sampling:
    """The rule that draws tokens. Temperature 0 takes the likeliest token; `top_k` 0 sets no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    num_logprobs: int | None = None  # likeliest tokens to name with each; None: no probabilities

    def generator(self) -> torch.Generator:
        """Return the random numbers of one request. So other requests in a batch change no draw."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return torch.Generator().manual_seed(seed)


class Chosen(NamedTuple):
    """A token, with its log probability and the likeliest tokens if the request wants them."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> Chosen:
    """Return the next token from logits (V,).

    Log probabilities are those of the model, before temperature and limits.
    """
    if not logits.max().isfinite():  # max() of NaN is NaN; a token that is never drawn may have -inf
        raise ValueError("the logits are not finite")
    token = _draw(logits, sampling, generator)
    if sampling.num_logprobs is None:
        return Chosen(token)
    logprobs = logits.float().log_softmax(-1)
    values, tokens = logprobs.topk(min(sampling.num_logprobs, int(logprobs.isfinite().sum())))
    return Chosen(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def _draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    # The likeliest token has 0 here, so that no temperature makes its quotient infinite.
    scaled = (logits.float() - logits.max()) / max(sampling.temperature, _LEAST_TEMPERATURE)
    probabilities, tokens = scaled.softmax(-1).sort(descending=True, stable=True)
    if sampling.top_k:
        probabilities = probabilities[: sampling.top_k]
    # Nucleus sampling (Holtzman et al., 2020): the fewest tokens that have top_p together.
    before = probabilities.cumsum(0) - probabilities
    is_kept = before < sampling.top_p
    is_kept[0] = True  # top_p may be 0 in float32
    return int(tokens[torch.multinomial(probabilities * is_kept, 1, generator=generator)])
