"""The next token: limits, seeds, and log probabilities."""

from __future__ import annotations

import pytest
import torch

from paramserver.serve.sampling import Sampling, choose

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def draws(sampling: Sampling, number: int = 200) -> list[int]:
    generator = sampling.generator()
    return [choose(LOGITS, sampling, generator).token for _ in range(number)]


def test_temperature_0_takes_the_likeliest_token() -> None:
    assert set(draws(Sampling(temperature=0))) == {1}


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
