"""Martingale and exchangeability: exact for Bayes under every prior, broken by forgetting, within noise."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit, logit

from llmgeom.probes.evidence.martingale import BROKEN, DRIFT, ORDER, PERMUTED, measure_martingale
from llmgeom.probes.evidence.observers import Shown
from llmgeom.probes.evidence.predictions import MAIN, THEN, ExactAnswers
from llmgeom.prompts import nonce
from llmgeom.prompts.sula import Beta, Sula, TwoPoint

NAMES = (MAIN, *THEN, PERMUTED)


def samples(prior, n=50, seed=0):
    source = Sula(nonce.LABELS, prior)
    return {name: replace(source, condition=name or "main").sample(n, seed) for name in NAMES}


@pytest.fixture(scope="module")
def batches():
    return samples(TwoPoint())


def exact(batches):
    return {name: np.exp(ExactAnswers(batch).log_p[:, 0]) for name, batch in batches.items()}


def answers(batches, discount, slope=1.0, lapse=0.0, noise=0.0, seed=0):
    """P(first) of the exact observer (no discount), or of one that forgets; with noise in its log odds."""
    rng, clean = np.random.default_rng(seed), {}
    for name, batch in batches.items():
        shown = Shown.of(batch)
        k = (shown.labels >= 0).sum(1, keepdims=True)
        age = np.maximum(k - 1 - np.arange(shown.labels.shape[1]), 0)
        sign = np.select([shown.labels == 0, shown.labels == 1], [1.0, -1.0], 0.0)
        forgets = lapse + (1 - 2 * lapse) * expit(slope * ((discount or 0) ** age * sign).sum(1))
        clean[name] = np.exp(shown.exact[:, 0]) if discount is None else forgets
    return {name: expit(logit(p) + noise * rng.standard_normal(len(p))) for name, p in clean.items()}


def found(batches, own, seed=0):
    result = measure_martingale({name: ExactAnswers(batch) for name, batch in batches.items()}, own, seed)
    return result, {h.name: h for h in result.estimates}


def test_one_more_label_of_either_kind_is_written_after_the_same_prompt(batches):
    main = batches[MAIN]
    for label, name in enumerate(THEN):
        other = batches[name]
        for i in range(0, len(main), 7):
            word = main.columns[("first", "second")[label]][i]
            assert other.text[i].startswith(f"{main.text[i]} {word}")
            assert other.columns["seen"][i] == f"{main.columns['seen'][i]}{label}"
            assert other.columns["k"][i] == main.columns["k"][i] + 1 == len(other.columns["seen"][i])
            assert other.text[i].endswith(":") and other.columns["pair"][i] == main.columns["pair"][i]


@pytest.mark.parametrize("prior", [TwoPoint(0.9), TwoPoint(0.6), Beta(1, 1), Beta(3, 1)])
def test_every_bayesian_is_a_martingale_and_knows_no_order(prior):
    """P(next) = sum over the next label of P(label) P(the one after): the law of total probability."""
    batches = samples(prior, n=12)
    own = exact(batches)
    noisy = {name: expit(logit(p) + 1e-9 * np.arange(len(p))) for name, p in own.items()}  # a residual that is not 0
    _, rows = found(batches, noisy)
    assert rows[BROKEN].value == pytest.approx(0, abs=1e-9) and rows[ORDER].value == pytest.approx(0, abs=1e-9)
    assert rows[DRIFT].value == pytest.approx(0, abs=1e-6)


def test_a_forgetter_by_hand(batches):
    """After one label: log odds s. Another of the same kind gives 1.5 s at discount .5, the other kind -.5 s."""
    slope = 2.0
    own = answers(batches, 0.5, slope, noise=1e-6)
    result, _ = found(batches, own)
    p, same, other = expit(slope), expit(1.5 * slope), expit(-0.5 * slope)
    expected = p * same + (1 - p) * other
    kl = p * np.log2(p / expected) + (1 - p) * np.log2((1 - p) / (1 - expected))
    assert result.ticks["k"][0] == 1
    assert result.broken.value[0] == pytest.approx(kl, rel=1e-3) and result.drift[0] == pytest.approx(
        expected - p, rel=1e-3
    )


def test_noise_stays_within_the_band_and_forgetting_does_not():
    """Default size, sd .25: 20 exact models, at most 4 outside the band (binomial(20, .05): P = .003)."""
    beyond = {"exact": 0, "forgetting": 0}
    for seed in range(20):
        batches = samples(TwoPoint(), seed=seed)
        for rule, values in (("exact", (None,)), ("forgetting", (0.6, 1.5, 0.1))):
            _, rows = found(batches, answers(batches, *values, noise=0.25, seed=seed), seed)
            beyond[rule] += not rows[DRIFT].null_low <= rows[DRIFT].value <= rows[DRIFT].null_high
    assert beyond["exact"] <= 4 and beyond["forgetting"] >= 16, beyond
