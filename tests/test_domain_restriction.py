"""A domain is called flatter than mixed prompts where it was planted so, and where its words are not why."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import Unavailable, UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.probe import MATCHED, ProbeInput
from llmgeom.probes.shared.representation_geometry import numbers_of, pca
from llmgeom.probes.shared.rows import layer_matrices
from llmgeom.probes.value_manifold import gain_interval, measure_gain
from llmgeom.result import Result
from llmgeom.stats.manifold import share_intervals, shares
from llmgeom.stats.resampling import Interval
from tests.refusals import refused
from tests.words import beyond, named

N, D, LAYERS = 60, 32, 2
CLAIM = "gain in PC1+PC2 share, as diverse"


def capture(rng: np.random.Generator, strength: float, source: dict | None = None, n: int = N) -> Capture:
    """Noise at layer 0; at the last, two common directions of `strength` under it."""
    tensors = {}
    for layer in range(LAYERS):
        x = rng.standard_normal((n, D))
        if layer == LAYERS - 1:
            x = x + strength * rng.standard_normal((n, 2)) @ rng.standard_normal((2, D))
        tensors[Site.VALUE, layer] = torch.from_numpy(x.astype(np.float32)).reshape(n, 2, D // 2)
    tokens = Tokens(torch.zeros(n, 9, dtype=torch.int64), torch.full((n,), 9))
    batch = Batch(tokens, tuple(f"t{i // 2}" for i in range(n)), source or {"name": "math"})
    return Capture(batch, torch.arange(n), torch.full((n,), 8), torch.full((n,), 9), tensors)


def counts(wanted=(500, 30, 30), start=(600, 45, 30), reached=(500, 30, 30)) -> dict:
    return {"name": "mixed", "as_diverse": {"n": N, "wanted": wanted, "start": start, "reached": reached}}


def view(own: float, matched: float, untrained=(0.3, 0.3), seed=0, source: dict | None = None) -> ProbeInput:
    """Strengths of the planted plane in each sample, and in each sample's untrained controls."""
    rng = np.random.default_rng(seed)

    def sample(strength: float, control: float, told: dict) -> ProbeInput:
        null = tuple(capture(rng, control) for _ in range(20))
        return ProbeInput(capture(rng, strength, told), np.linspace(0, 8, N), null)

    main = sample(own, untrained[0], {"name": "math"})
    samples = {MATCHED: sample(matched, untrained[1], source or counts())}
    return ProbeInput(main.capture, main.entropy, main.untrained, samples=samples, seed=seed)


def measure(given: ProbeInput) -> Result:
    def numbers(of: Capture) -> np.ndarray:
        return numbers_of([*map(pca, layer_matrices(of, Site.VALUE))])

    return measure_gain(given, numbers(given.capture), np.array([numbers(control) for control in given.untrained]))


def test_gains_are_differences_of_scikit_learn_s_shares():
    given = view(0.9, 0.6)
    result = measure(given)

    def numbers(sample, layer):
        x = sample.tensors[Site.VALUE, layer].flatten(1).double().numpy()
        ratio = PCA().fit(StandardScaler().fit_transform(x)).explained_variance_ratio_
        return ratio[:2].sum()

    for layer in range(LAYERS):
        own, matched = (numbers(c, layer) for c in (given.capture, given.samples[MATCHED].capture))
        assert result["pc12"][layer] == pytest.approx(own - matched)
    heads = named(result)
    control = [
        numbers(a, 1) - numbers(b, 1) for a, b in zip(given.untrained, given.samples[MATCHED].untrained, strict=True)
    ]
    assert (heads[CLAIM].null_low, heads[CLAIM].null_high) == pytest.approx((min(control), max(control)))
    np.testing.assert_allclose(result["pc12_null"][1], (min(control), max(control)))


def test_a_domain_planted_flatter_gains_at_that_layer_only():
    result = measure(view(2.0, 0.3))
    heads = named(result)
    assert beyond(heads[CLAIM]) == "yes"
    assert abs(result["pc12"][0]) < 0.05 < 0.2 < result["pc12"][1]
    assert heads[CLAIM].claim


def test_a_gain_that_untrained_models_have_too_is_none():
    heads = named(measure(view(1.6, 0.4, untrained=(1.6, 0.4))))
    assert heads[CLAIM].value > 0.2 and beyond(heads[CLAIM]) != "yes"


def test_to_lose_less_than_untrained_models_is_no_gain():
    heads = named(measure(view(0.6, 0.6, untrained=(0.2, 2.0))))
    assert (heads[CLAIM].null, heads[CLAIM].centre) == ("no gain", 0) and beyond(heads[CLAIM]) == "no"


def test_the_limits_are_those_one_can_do_by_hand():
    one, two = (
        Interval(0.47, 0.54, 0.95, "jackknife over 9 clusters, log"),
        Interval(0.15, 0.24, 0.95, "jackknife over 8"),
    )
    both = gain_interval((0.5, one), (0.2, two))
    assert (both.low, both.high) == pytest.approx((0.3 - 0.05, 0.3 + 0.41**0.5 / 10))
    assert both.method == "jackknife over 9 clusters, and 8 of mixed prompts"


def test_without_mixed_prompts_it_is_not_measured():
    with pytest.raises(Unavailable):
        measure(replace(view(0.5, 0.5), samples={}))


def test_samples_of_unequal_size_are_refused():
    given = view(0.5, 0.5)
    rng = np.random.default_rng(0)
    small = ProbeInput(
        capture(rng, 0.5, counts(), n=40), np.zeros(40), tuple(capture(rng, 0.5, n=40) for _ in range(20))
    )
    with refused(UserError, 60, 40):
        measure(replace(given, samples=given.samples | {MATCHED: small}))


@pytest.mark.slow
def test_the_interval_covers_the_expected_gain():
    """A PC1+PC2 gain of about .13: two Gaussian factor models, prompts in pairs of templates."""
    rng = np.random.default_rng(3)
    clusters = np.repeat(np.arange(30), 2)
    axes = rng.standard_normal((5, 64))

    def sample(strengths):
        shared = rng.standard_normal((30, 5))[clusters]
        factors = (shared + rng.standard_normal((60, 5))) / 2**0.5
        return factors * strengths @ axes + rng.standard_normal((60, 64))

    strong, weak = np.array([1.2, 0.8, 0.5, 0.4, 0.3]), np.array([0.7, 0.6, 0.5, 0.4, 0.3])
    truth = np.subtract(*(np.mean([shares(sample(s)).numbers[1] for _ in range(600)]) for s in (strong, weak)))
    hits = 0
    for _ in range(60):
        both = [(shares(x).numbers[1], share_intervals(x, clusters)[1]) for x in (sample(strong), sample(weak))]
        limits = gain_interval(*both)
        hits += limits.low <= truth <= limits.high
    assert hits >= 0.88 * 60
