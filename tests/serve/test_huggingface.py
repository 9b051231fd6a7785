"""Causal models of transformers write the tokens of their own `generate`, with prompts of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paramserver.common.config.schema import ServeConfig
from paramserver.serve.engine import End, Request
from paramserver.tests.serve.conftest import GREEDY, Reply, Served, randomize
from paramserver.tests.serve.layered import Bytes

pytestmark = pytest.mark.slow

NUM_TOKENS = 20


def llama(transformers: Any) -> Any:
    """Rotary positions, and fewer heads of keys than of queries."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128,
        )
    )  # fmt: skip


def gpt2(transformers: Any) -> Any:
    """Learned positions."""
    config = transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    return transformers.GPT2LMHeadModel(config)


class Text(Bytes):
    def __init__(self, make: Callable[[], Any]) -> None:
        self.model = make


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_model_of_transformers_is_served(make: Callable[[Any], Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'paramserver[huggingface]'")
    served = Served(Text(lambda: make(transformers)), ServeConfig(), seed=1)
    plain = randomize(make(transformers), 1).eval()
    prompts = [tuple(torch.randint(256, (length,)).tolist()) for length in (1, 5, 17, 40)]
    replies = [Reply(served.engine, Request(prompt, NUM_TOKENS, GREEDY)) for prompt in prompts]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert isinstance(reply.end(), End)
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = plain.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        assert reply.tokens == expected
    served.engine.close()
