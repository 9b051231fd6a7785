"""The next token: limits, seeds, and log probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from paramserver.serve.engine import Sampling, choose

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def draws(sampling: Sampling, number: int = 200) -> list[int]:
    generator = sampling.generator()
    return [choose(LOGITS, sampling, generator).token for _ in range(number)]


def test_limits_leave_out_the_less_likely_tokens() -> None:
    assert set(draws(Sampling(top_k=2, seed=1))) == {1, 2}
    assert set(draws(Sampling(top_p=0.6, seed=1))) == {1}  # token 1 has 0.66
    assert set(draws(Sampling(top_p=0.7, seed=1))) == {1, 2}


def test_a_seed_repeats_the_draws_and_other_seeds_draw_otherwise() -> None:
    assert draws(Sampling(seed=5)) == draws(Sampling(seed=5)) != draws(Sampling(seed=6))


def test_frequencies_are_the_probabilities() -> None:
    found = torch.tensor(draws(Sampling(seed=3), 4000)).bincount(minlength=4) / 4000
    assert torch.allclose(found, LOGITS.softmax(0), atol=0.03)


def test_log_probabilities_are_those_of_the_model() -> None:
    chosen = choose(LOGITS, Sampling(temperature=0, num_logprobs=2), torch.Generator())
    expected = LOGITS.log_softmax(0)
    assert chosen.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _ in chosen.likeliest] == [1, 2]
    assert [value for _, value in chosen.likeliest] == pytest.approx(expected[[1, 2]].tolist())


@given(
    temperature=st.floats(0, 2), top_p=st.floats(0, 1), top_k=st.integers(0, 3),
    logits=st.lists(st.floats(width=32, allow_nan=False, max_value=2.0**127), min_size=1, max_size=5),
)  # fmt: skip
def test_any_limits_draw_a_token_that_may_be_drawn(
    temperature: float, top_p: float, top_k: int, logits: list[float]
) -> None:
    assume(max(logits) > -torch.inf)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=1, num_logprobs=5)
    chosen = choose(torch.tensor(logits), sampling, sampling.generator())
    assert logits[chosen.token] > -torch.inf
    assert all(math.isfinite(value) for value in (chosen.logprob, *(value for _, value in chosen.likeliest)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_choose_nothing(value: float, temperature: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        choose(torch.tensor([0.0, value]), Sampling(temperature=temperature), torch.Generator())
