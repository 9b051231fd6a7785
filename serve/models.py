"""Runs the forward pass of a language model: with our cache, through transformers, or without a cache.

A task whose model writes text has encode(text), decode(tokens) and `context`, the tokens that the model reads at most.
`end` (a token) and `cache_shape` (layers, heads, channels) are optional.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch
from torch import nn

from ..common.errors import UsageError
from ..common.reporting.log import get_logger

log = get_logger()


class LanguageModel:
    """A model without a cache: `next_logits` gets one whole sequence (1, T) and returns the next logits (1, V).

    Kinds with `uses_cache` get the tokens (B, T) that are not in the cache, and return logits (B, V).
    """

    uses_cache = False
    vocabulary: int | None = None  # tokens are below it; None: not known

    def __init__(self, task: Any) -> None:
        self.context = int(task.context)
        self.cache_shape: tuple[int, int, int] = getattr(task, "cache_shape", (0, 0, 0))

    def new_cache(self, model: nn.Module, num_rows: int) -> KvCache | None:
        if not self.uses_cache:
            return None
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        return KvCache(self.cache_shape, num_rows, self.context, dtype)

    def next_logits(self, model: nn.Module, tokens: torch.Tensor, view: CacheView | None) -> torch.Tensor:
        return model(tokens)[:, -1]


class _WithCache(LanguageModel):
    uses_cache = True

    def next_logits(self, model: nn.Module, tokens: torch.Tensor, view: CacheView | None) -> torch.Tensor:
        return model(tokens, cache=view)[:, -1]


class _HuggingFace(LanguageModel):
    """A causal model of transformers: its attention layers call `update` of a cache, and take a mask (B, 1, T, S)."""

    uses_cache = True

    def __init__(self, task: Any, model: Any) -> None:
        config = model.config.get_text_config()
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        num_channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.context = int(getattr(task, "context", config.max_position_embeddings))
        self.cache_shape = config.num_hidden_layers, num_heads, num_channels
        is_renamed = "cache" in inspect.signature(model.forward).parameters  # since transformers 5.24
        self._cache_name = "cache" if is_renamed else "past_key_values"

    def next_logits(self, model: nn.Module, tokens: torch.Tensor, view: CacheView | None) -> torch.Tensor:
        assert view is not None
        options = {"use_cache": True, "logits_to_keep": 1, self._cache_name: _cache_class()(view)}
        found = model(input_ids=tokens, position_ids=view.positions, attention_mask=view.mask, **options)
        return found.logits[:, -1]


@cache
def _cache_class() -> Any:
    """Return the class that makes a cache of transformers from a view."""
    from transformers.cache_utils import Cache

    class Adapted(Cache):
        def __init__(self, view: CacheView) -> None:
            super().__init__(layers=[])
            self._view = view

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return self._view.append(layer_idx, key_states, value_states)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self._view.length - self._view.positions.shape[1]

    return Adapted


def language_model(task: Any, model: nn.Module) -> LanguageModel | None:
    """Return how this task's models are run; None if they do not write text. Raises UsageError."""
    if not callable(getattr(task, "encode", None)) or not callable(getattr(task, "decode", None)):
        return None
    if hasattr(model, "config") and hasattr(model, "generate"):
        found: LanguageModel = _HuggingFace(task, model)
    elif not hasattr(task, "context"):
        message = "the task has encode() and decode(), and does not say how many tokens its model reads"
        raise UsageError(message, fix="give it an attribute `context`, a whole number")
    elif hasattr(task, "cache_shape"):
        found = _WithCache(task)
    else:
        log.warning("serve_without_cache", meaning="each token computes the whole text again",
                    fix="docs/serving.md: a task with cache_shape, and a model that takes cache=")  # fmt: skip
        found = LanguageModel(task)
    embeddings = (module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    found.vocabulary = next(embeddings, None)  # the first layer of a language model
    return found


# ---- cache ----------------------------------------------------------------------------------------
# A cache of attention keys and values for several sequences of different lengths.
#
# A model that uses it takes it as `model(tokens, cache=view)`, with tokens (B, T) that follow those in the cache:
#
#     q, k = rotate(q, view.positions), rotate(k, view.positions)      # (B, T)
#     k, v = view.append(layer, k, v)                                  # (B, H, T, D) -> (B, H, S, D)
#     y = scaled_dot_product_attention(q, k, v, attn_mask=view.mask)   # (B, 1, T, S), True: may look


class Rows(NamedTuple):
    """The rows of one forward pass, the tokens that each has, and the number of tokens that each gets."""

    rows: Sequence[int]
    lengths: Sequence[int]
    num_tokens: int


class KvCache:
    """Memory [layers, 2, rows, heads, context, channels], allocated once; a row belongs to one sequence."""

    def __init__(self, shape: tuple[int, int, int], num_rows: int, context: int, dtype: torch.dtype) -> None:
        num_layers, num_heads, num_channels = shape
        self.context = context
        self._memory = torch.zeros(num_layers, 2, num_rows, num_heads, context, num_channels, dtype=dtype)
        self._free = list(range(num_rows))
        self._num_written = [0] * num_rows

    def take(self) -> int:
        """Take and return the lowest free row, so that the rows of a batch are mostly contiguous."""
        return heappop(self._free)

    def give_back(self, row: int) -> None:
        """Free a row."""
        heappush(self._free, row)

    def view(self, rows: Sequence[int], lengths: Sequence[int], num_tokens: int) -> CacheView:
        """Return a view of rows that have `lengths` tokens. Each gets `num_tokens` more."""
        for row, length in zip(rows, lengths, strict=True):
            if length == 0:  # a mask hides old values, but 0 * NaN is NaN
                self._memory[:, :, row, :, : self._num_written[row]] = 0
            self._num_written[row] = length + num_tokens
        return CacheView(self._memory, Rows(rows, lengths, num_tokens))


class CacheView:
    """The rows of one forward pass. `positions` (B, T); `mask` (B, 1, T, S)."""

    def __init__(self, memory: torch.Tensor, request: Rows) -> None:
        rows, lengths, num_tokens = request
        self.rows = request
        self._memory, self._rows = memory, torch.tensor(rows)
        begins = torch.tensor(lengths)
        self.positions = begins.unsqueeze(1) + torch.arange(num_tokens)
        self.length = int(begins.max()) + num_tokens  # S
        self.mask = (torch.arange(self.length) <= self.positions.unsqueeze(-1)).unsqueeze(1)
        # Contiguous rows are read in place; other rows are copied.
        is_range = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._read: slice | torch.Tensor = slice(rows[0], rows[0] + len(rows)) if is_range else self._rows

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values (B, H, T, D) of a layer. Return those of all S tokens, (B, H, S, D) each."""
        found = []
        for memory, new in zip(self._memory[layer], (k, v), strict=True):
            # Indexed by (B, T): the result of the two indices comes first.
            memory[self._rows.unsqueeze(1), :, self.positions] = new.transpose(1, 2)
            found.append(memory[self._read, :, : self.length])
        return found[0], found[1]
