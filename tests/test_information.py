"""Entropy, KL and TV against numpy on distributions with true zeros."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from llmgeom.stats import information
from llmgeom.stats.information import best_of_input, bits, entropy, kl, kl_of_rounded, tv

P = np.array([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
Q = np.array([[0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]])
LOG_P, LOG_Q = torch.tensor(P).log(), torch.tensor(Q).log()


def test_entropy_is_scipy_s_and_zeros_add_nothing():
    np.testing.assert_allclose(entropy(LOG_P).numpy(), stats.entropy(P, axis=1), atol=1e-12)


def test_kl_is_scipy_s_and_zeros_of_the_posterior_add_nothing():
    np.testing.assert_allclose(kl(LOG_P, LOG_Q).numpy(), stats.entropy(P, Q, axis=1), atol=1e-12)
    assert torch.isinf(kl(LOG_Q, LOG_P)[:2]).all()
    for log_p in (LOG_P, LOG_P.numpy()):  # zeros of both, in the same places
        np.testing.assert_array_equal(np.asarray(kl(log_p, log_p)), np.zeros(3))


@pytest.mark.parametrize("step", [1e-3, 0.1, 2.0])
def test_kl_in_float32_is_that_of_float64_however_small_and_of_equals_nothing(step):
    """In float64 the same logits give 5e-7 nats at .001: float32 rounds each log-probability by 1e-6."""
    logits = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)).double() * 3
    other = logits + step * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(1))
    exact = kl(logits.log_softmax(-1), other.log_softmax(-1)).numpy()
    p, q = (x.float().log_softmax(-1) for x in (logits, other))
    np.testing.assert_allclose(kl_of_rounded(p, q).numpy(), exact, rtol=1e-3)
    assert (kl_of_rounded(p, p) == 0).all()


def test_tv_is_half_the_l1_distance():
    np.testing.assert_allclose(tv(LOG_P, LOG_Q).numpy(), np.abs(P - Q).sum(1) / 2, atol=1e-12)


def test_a_fair_coin_is_one_bit():
    assert bits(math.log(2)) == 1.0
    assert bits(entropy(torch.tensor([0.5, 0.5]).log())).item() == 1.0


@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 40), (40,)])
def test_many_rows_give_what_all_at_once_gives_bit_for_bit(array, shape, monkeypatch):
    rng = np.random.default_rng(0)
    p, q = (array(np.log(rng.dirichlet(np.ones(shape[-1]), shape[:-1]))) for _ in range(2))
    at_once = [np.asarray(found) for found in (entropy(p), kl(p, q))]
    monkeypatch.setattr(information, "BLOCK", 90)  # two rows of forty
    for whole, parts in zip(at_once, (entropy(p), kl(p, q)), strict=True):
        assert whole.shape == shape[:-1]
        np.testing.assert_array_equal(np.asarray(parts), whole)


@pytest.mark.parametrize("real", [False, True])
def test_the_best_answer_of_an_input_is_a_mean_over_those_alike_and_over_the_rare_ones_together(real):
    rng = np.random.default_rng(1)
    exact, query = np.log(rng.dirichlet(np.ones(3), 60)), np.repeat([0, 1], 30)
    token = np.where(rng.random(60) < 0.2, rng.integers(5, 9, 60), rng.integers(0, 2, 60))
    inputs = np.stack([token * 0.1, -token], axis=1) if real else token
    counts = [np.sum((token == t) & (query == q)) for t, q in zip(token, query, strict=True)]
    assert min(counts) < 5 <= max(counts)
    for least in (1, 5):
        rare = np.array(counts) < least
        alike = [(query == query[i]) & (rare if rare[i] else token == token[i]) for i in range(60)]
        mean = np.log([np.exp(exact[rows]).mean(0) for rows in alike])
        np.testing.assert_allclose(best_of_input(exact, query, inputs, least), mean, rtol=1e-12)
