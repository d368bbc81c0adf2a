"""Each probe is read on captures whose answer is known: planted structure, noise, and formulas done another way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from llmgeom.batch import Batch, Tokens
from llmgeom.capture import Capture, Site
from llmgeom.errors import Refused
from llmgeom.probes import attention_focus, known, names, value_manifold
from llmgeom.scan import View

N, LAYERS, KV, WIDTH = 80, 3, 2, 24


def batch(n=N, per_unit=2) -> Batch:
    tokens = Tokens(torch.zeros(n, 12, dtype=torch.int64), torch.full((n,), 12))
    return Batch(tokens, tuple(f"t{i // per_unit}" for i in range(n)), {"name": "planted"})


def capture(tensors: dict, positions=None) -> Capture:
    n = next(iter(tensors.values())).shape[0]
    position = torch.full((n,), 11) if positions is None else positions
    return Capture(batch(n), torch.arange(n), position, position + 1, tensors)


def values(rng: np.random.Generator, factor: np.ndarray | None, strength: float = 0.0) -> dict:
    """Noise at every layer; at the last, `strength` of a common direction along `factor`."""
    found = {}
    for layer in range(LAYERS):
        x = rng.standard_normal((N, KV, WIDTH))
        if factor is not None and layer == LAYERS - 1:
            x = x + strength * factor[:, None, None] * rng.standard_normal((KV, WIDTH))
        found[Site.VALUE, layer] = torch.from_numpy(x.astype(np.float32))
    return found


def manifold_view(strength: float, seed: int, twin_strength: float = 0.0) -> View:
    rng = np.random.default_rng(seed)
    entropy = rng.uniform(0, 8, N)
    factor = (entropy - entropy.mean()) / entropy.std()
    other = rng.standard_normal(N)
    return View(
        capture=capture(values(rng, factor, strength)),
        entropy=entropy,
        twins=tuple(capture(values(rng, factor, twin_strength)) for _ in range(20)),
        shuffled=tuple(capture(values(rng, other, 0.0)) for _ in range(20)),
        seed=seed,
    )


def verdicts(result) -> dict[str, str]:
    return {h.name: h.verdict for h in result.headlines}


def test_shares_are_scikit_learn_s_on_standardised_values():
    view = manifold_view(0.7, 0)
    result = value_manifold.measure(view)
    for layer in range(LAYERS):
        x = view.capture.tensors[Site.VALUE, layer].flatten(1).double().numpy()
        ratio = PCA().fit(StandardScaler().fit_transform(x)).explained_variance_ratio_
        assert result.pc1[layer] == pytest.approx(ratio[0])
        assert result.pc12[layer] == pytest.approx(ratio[:2].sum())
        assert result.participation[layer] == pytest.approx(1 / (ratio**2).sum())


def test_a_planted_entropy_axis_is_found_at_the_last_layer_and_nowhere_else():
    result = value_manifold.measure(manifold_view(1.5, 1))
    found = verdicts(result)
    assert found["PC1 share"] == "above null"
    assert found["participation ratio"] == "below null"
    assert found["|rho| of PC1 and entropy"] == "above null"
    assert result.pc1[-1] > result.pc1_null[-1, 1]
    assert (result.pc1[:-1] < result.pc1_null[:-1, 1] * 1.3).all()


def test_noise_is_not_called_a_manifold():
    for seed in range(4):
        assert "above null" not in verdicts(value_manifold.measure(manifold_view(0.0, 10 + seed))).values()


def test_an_axis_that_an_untrained_model_has_too_is_not_above_its_null():
    result = value_manifold.measure(manifold_view(1.5, 2, twin_strength=1.5))
    assert verdicts(result)["PC1 share"] != "above null"
    assert verdicts(result)["|rho| of PC1 and entropy"] != "above null"


def test_a_correlation_that_the_final_token_carries_is_gone_given_the_final_token():
    """Values and entropy both depend on which of four tokens a prompt ends in, and on nothing else in common."""
    rng = np.random.default_rng(5)
    token = rng.integers(4, size=N)
    factor = token - token.mean()
    entropy = 2.0 * token + 0.1 * rng.standard_normal(N)
    main = capture(values(rng, factor, 1.5))
    ids = main.batch.inputs.ids.clone()
    ids[:, 11] = torch.from_numpy(token)
    main = replace(main, batch=replace(main.batch, inputs=Tokens(ids, main.lengths)))
    noise = tuple(capture(values(rng, None)) for _ in range(20))
    view = View(main, entropy, noise, noise)
    found = {h.name: h for h in value_manifold.measure(view).headlines}
    assert found["|rho| of PC1 and entropy"].value > 0.9
    assert found["|rho| of PC1 and entropy"].verdict == "above null"
    given = found["|rho| of PC1 and entropy, given length and final token"]
    assert given.value < 0.3 and given.verdict != "above null"


def test_every_headline_has_n_units_interval_and_null():
    for h in value_manifold.measure(manifold_view(1.0, 3)).headlines:
        assert (h.n, h.units) == (N, N // 2)
        assert h.low <= h.value <= h.high
        assert h.null_low <= h.null_high and "draws" in h.null
        assert 0 < h.p <= 1


def rows(weights: np.ndarray) -> tuple[float, float, float]:
    """Entropy (nats), first weight, entropy of the rest, by numpy."""

    def nats(p):
        p = p[p > 0]
        return float(-(p * np.log(p)).sum())

    return nats(weights), float(weights[0]), nats(weights[1:] / weights[1:].sum())


def focus_capture(rng, spread: list[float], n=N, heads=4, length=12, sink: float = 0.0) -> Capture:
    """Softmax rows whose temperature differs by layer; `sink` of the last layer's mass sits on the first token."""
    tensors = {}
    for layer, sharp in enumerate(spread):
        found = np.zeros((3, n, heads))
        for i in range(n):
            for h in range(heads):
                w = np.exp(sharp * rng.standard_normal(length))
                w /= w.sum()
                if sink and layer == len(spread) - 1:
                    w = (1 - sink) * w
                    w[0] += sink
                found[:, i, h] = rows(w)
        for site, x in zip((Site.ATTENTION_ENTROPY, Site.ATTENTION_FIRST, Site.ATTENTION_REST), found, strict=True):
            tensors[site, layer] = torch.from_numpy(x.astype(np.float32))
    return capture(tensors)


def focus_view(spread, seed, sink=0.0) -> View:
    rng = np.random.default_rng(seed)
    flat = [0.5] * len(spread)
    return View(
        capture=focus_capture(rng, spread, sink=sink),
        entropy=rng.uniform(0, 8, N),
        twins=tuple(focus_capture(rng, flat) for _ in range(20)),
        shuffled=tuple(focus_capture(rng, flat) for _ in range(20)),
        seed=seed,
    )


def test_focusing_is_one_minus_the_ratio_of_the_mean_entropies():
    view = focus_view([0.5, 1.5, 3.0], 0)
    result = attention_focus.measure(view)
    first = view.capture.tensors[Site.ATTENTION_ENTROPY, 0].double().mean() / np.log(12)
    last = view.capture.tensors[Site.ATTENTION_ENTROPY, 2].double().mean() / np.log(12)
    (focusing, rest, _) = result.headlines
    assert focusing.value == pytest.approx(1 - float(last / first), abs=1e-6)
    assert result.normalised[0] == pytest.approx(float(first), abs=1e-6)
    assert focusing.verdict == "above null" and rest.verdict == "above null"


def test_a_sink_alone_narrows_attention_but_not_without_the_first_token():
    found = verdicts(attention_focus.measure(focus_view([0.5, 0.5, 0.5], 1, sink=0.9)))
    assert found["focusing"] == "above null"
    assert found["focusing without the first token"] != "above null"
    assert found["weight on the first token"] == "above null"


def test_uniform_attention_is_at_its_maximum_of_one():
    view = focus_view([0.0, 0.0, 3.0], 2)
    result = attention_focus.measure(view)
    np.testing.assert_allclose(result.normalised[:2], 1, atol=1e-6)
    np.testing.assert_allclose(result.entropy[:2], np.log2(12), atol=1e-5)
    np.testing.assert_allclose(result.rest[:2], 1, atol=1e-6)


def test_short_prompts_are_left_out_and_said_so():
    view = focus_view([0.5, 0.5, 0.5], 3)
    position = view.capture.position.clone()
    position[:10] = 1
    short = Capture(view.capture.batch, view.capture.prompt, position, position + 1, view.capture.tensors)
    result = attention_focus.measure(View(short, view.entropy, view.twins, view.shuffled, None, 0))
    assert result.headlines[0].n == N - 10
    assert result.warnings == ("10 prompts of fewer than 3 tokens were left out",)


def test_too_few_long_prompts_are_refused():
    view = focus_view([0.5, 0.5, 0.5], 3)
    short = Capture(view.capture.batch, view.capture.prompt, view.capture.position * 0, view.capture.lengths, {})
    with pytest.raises(Refused, match="0 prompts have 3 tokens or more; attention focus needs at least 5"):
        attention_focus.measure(View(short, view.entropy, (), (), None, 0))


def test_every_probe_has_needs_a_result_and_texts():
    for name, module in known().items():
        assert module.NEEDS.sites and callable(module.measure)
        for text in ("TITLE", "MEANING", "COMPUTED", "NULL", "FAILURE_MODES"):
            assert len(getattr(module.Result, text)) > 5, (name, text)
        assert any(q.figure for q in module.Result.quantities().values())


def test_an_unknown_probe_gets_a_suggestion():
    with pytest.raises(Refused, match=r"unknown probe 'value_manifolds': did you mean 'value_manifold'\? known: atten"):
        known(["value_manifolds"])
    assert names() == ("attention_focus", "value_manifold")
