"""The value manifold on captures whose answer is known: planted structure, noise, and formulas done another way."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.probe import ProbeInput
from llmgeom.probes import value_manifold
from llmgeom.probes.shared import representation_geometry
from llmgeom.probes.shared.representation_geometry import OF_CURVE, OF_DRAW, PARTIAL, R2, RHO, Axis
from llmgeom.probes.shared.rows import Target
from llmgeom.probes.value_manifold import DIMENSION
from llmgeom.stats.ridge_probe import decodability, repeated_folds
from tests.refusals import refused
from tests.words import beyond

N, LAYERS, KV, WIDTH, UNTRAINED = 80, 2, 2, 16, 10
LAST, NOUGHT = np.full(N, 11), np.zeros(N, dtype=int)


@pytest.fixture(autouse=True, scope="module")
def few_draws():
    """No word here needs more: 99 orders give a p of .01."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(representation_geometry, "RIDGE_PERMUTATIONS", 99)
        patch.setattr(value_manifold, "GAUSSIANS_OF_CONTROLS", 9)
        yield


def capture(tensors: dict, position: np.ndarray = LAST, final: np.ndarray = NOUGHT) -> Capture:
    """Of prompts that end at these positions in these tokens."""
    at, ids = torch.from_numpy(position), torch.zeros(N, position.max() + 1, dtype=torch.int64)
    ids[torch.arange(N), at] = torch.from_numpy(final)
    batch = Batch(Tokens(ids, at + 1), tuple(f"t{i // 2}" for i in range(N)), {"name": "planted"})
    return Capture(batch, torch.arange(N), at, at + 1, tensors)


def values(rng: np.random.Generator, factor: np.ndarray | None, strength: float = 0.0) -> dict:
    """Noise at every layer; at the last, `strength` of a common direction along `factor`. An entropy of its own."""
    found = {(Site.ENTROPY, -1): torch.from_numpy(rng.uniform(0, 8, N).astype(np.float32))}
    for layer in range(LAYERS):
        x = rng.standard_normal((N, KV, WIDTH))
        if factor is not None and layer == LAYERS - 1:
            x = x + strength * factor[:, None, None] * rng.standard_normal((KV, WIDTH))
        found[Site.VALUE, layer] = torch.from_numpy(x.astype(np.float32))
    return found


def view(strength: float, seed: int, twin_strength: float = 0.0) -> ProbeInput:
    rng = np.random.default_rng(seed)
    entropy = rng.uniform(0, 8, N)
    factor = (entropy - entropy.mean()) / entropy.std()
    return ProbeInput(
        capture=capture(values(rng, factor, strength)),
        entropy=entropy,
        untrained=tuple(capture(values(rng, factor, twin_strength)) for _ in range(UNTRAINED)),
        shuffled=tuple(capture(values(rng, None)) for _ in range(UNTRAINED)),
        seed=seed,
    )


@cache
def measured(strength: float, seed: int, twin_strength: float = 0.0):
    return value_manifold.measure(view(strength, seed, twin_strength))


def verdicts(result) -> dict[str, str]:
    return {h.name: beyond(h) for h in result.estimates}


def last(of: Capture, layer: int = LAYERS - 1) -> np.ndarray:
    return of.tensors[Site.VALUE, layer].flatten(1).double().numpy()


def with_last(of: Capture, x: np.ndarray, layer: int = LAYERS - 1) -> Capture:
    tensor = torch.from_numpy(x).view(N, KV, WIDTH)
    return replace(of, tensors={**of.tensors, (Site.VALUE, layer): tensor})


def test_shares_rho_and_r2_are_those_of_scikit_learn_and_scipy():
    shown, result = view(1.5, 1), measured(1.5, 1)
    for layer in range(LAYERS):
        z = StandardScaler().fit_transform(last(shown.capture, layer))
        pca = PCA().fit(z)
        ratio = pca.explained_variance_ratio_
        assert result["pc1"][layer] == pytest.approx(ratio[0])
        assert result["pc12"][layer] == pytest.approx(ratio[:2].sum())
        assert result["participation"][layer] == pytest.approx(1 / (ratio**2).sum())
        assert result["rho"][layer] == pytest.approx(abs(spearmanr(pca.transform(z)[:, 0], shown.entropy)[0]))
        # R2 is a mean over divisions into folds: of all at the last layer, which is judged.
        every, at_last = repeated_folds(shown.clusters, shown.seed), layer == LAYERS - 1
        own, of_controls = (every, every[:OF_DRAW]) if at_last else (every[:OF_CURVE], every[:1])
        assert result["r2"][layer] == pytest.approx(decodability(z, shown.entropy, own), abs=1e-6)
        untrained = [decodability(last(control, layer), shown.entropy, of_controls) for control in shown.untrained]
        assert result["r2_null"][layer] == pytest.approx((min(untrained), max(untrained)))
    # The plane that the page shows next to the model's own is the first untrained copy's, up to signs.
    twin = PCA(2).fit_transform(StandardScaler().fit_transform(last(shown.untrained[0])))
    for column in (0, 1):
        both = np.stack([result["control_scores"][:, column], twin[:, column]])
        assert min(np.abs(both[0] - both[1]).max(), np.abs(both[0] + both[1]).max()) < 1e-6 * np.abs(both).max()


def test_a_planted_entropy_axis_is_found_at_the_last_layer_and_nowhere_else():
    result, found = measured(1.5, 1), verdicts(measured(1.5, 1))
    assert found["PC1 share"] == "yes"
    assert found["participation ratio"] == "yes"
    assert found[RHO] == found[R2] == "yes"
    assert result["pc1"][-1] > result["pc1_null"][-1, 1]
    assert result["pc1"][0] < result["pc1_null"][0, 1] * 1.3
    assert result["r2"][-1] > 0.8 > 0.1 > result["r2"][0]


def test_an_axis_of_little_variance_is_decoded_though_the_first_component_misses_it():
    shown = view(0.0, 4)
    rng = np.random.default_rng(4)
    factor = (shown.entropy - shown.entropy.mean()) / shown.entropy.std()
    x = last(shown.capture) + 4 * rng.standard_normal((N, 1)) * rng.standard_normal(KV * WIDTH)
    x += 0.8 * factor[:, None] * rng.standard_normal(KV * WIDTH)
    found = verdicts(value_manifold.measure(replace(shown, capture=with_last(shown.capture, x))))
    assert found[RHO] != "yes"
    assert found[R2] == "yes"


def test_noise_is_not_called_a_manifold():
    for seed in (10, 11):
        assert "yes" not in verdicts(measured(0.0, seed)).values()


def test_what_an_untrained_model_has_too_is_not_above_its_null():
    found = verdicts(measured(1.5, 2, twin_strength=1.5))
    for name in ("PC1 share", RHO, R2):
        assert found[name] != "yes", name


def test_a_curve_is_below_its_gaussian_unless_twins_are_curved_too():
    shown = view(0.0, 6)
    rng = np.random.default_rng(6)
    loading = rng.standard_normal((6, KV * WIDTH))

    def curved(seed: int) -> np.ndarray:
        place = np.random.default_rng(seed).uniform(0, 3, N)
        waves = np.stack([np.sin((k + 1) * place + k) for k in range(6)], axis=1)
        return waves @ loading + 0.01 * rng.standard_normal((N, KV * WIDTH))

    bent = replace(shown, capture=with_last(shown.capture, curved(0)))
    result = value_manifold.measure(bent)
    assert verdicts(result)[DIMENSION] == "yes"
    estimate = next(h for h in result.estimates if h.name == DIMENSION)
    assert estimate.value == pytest.approx(float(result["dimension"] / result["dimension_gaussian"]))
    assert estimate.n == estimate.clusters == N // 2
    untrained = tuple(with_last(control, curved(1 + i)) for i, control in enumerate(shown.untrained))
    assert verdicts(value_manifold.measure(replace(bent, untrained=untrained)))[DIMENSION] != "yes"


def test_a_correlation_that_the_final_token_carries_is_gone_given_the_final_token():
    """Values and entropy both depend on which of four tokens a prompt ends in, and on nothing else in common."""
    rng = np.random.default_rng(5)
    token = rng.integers(4, size=N)
    factor = token - token.mean()
    entropy = 2.0 * token + 0.1 * rng.standard_normal(N)
    main = capture(values(rng, factor, 1.5), final=token)
    noise = tuple(capture(values(rng, None)) for _ in range(UNTRAINED))
    found = {h.name: h for h in value_manifold.measure(ProbeInput(main, entropy, noise, noise)).estimates}
    assert found[RHO].value > 0.9
    assert beyond(found[RHO]) == "yes"
    given = found[f"{RHO}, {PARTIAL}"]
    assert given.value < 0.3 and beyond(given) != "yes"


def test_a_correlation_that_length_carries_is_gone_given_length_although_both_rise_and_fall_with_it():
    rng = np.random.default_rng(5)
    position = rng.integers(9, 49, size=N)
    effect = 4 * np.square((position - 29) / 20)
    main = capture(values(rng, effect - effect.mean(), 1.5), position)
    noise = tuple(capture(values(rng, None)) for _ in range(UNTRAINED))
    entropy = effect + 0.6 * rng.standard_normal(N)
    found = {h.name: h for h in value_manifold.measure(ProbeInput(main, entropy, noise, noise)).estimates}
    assert found[RHO].value > 0.8
    assert beyond(found[RHO]) == "yes"
    # .96 with the ranks of length alone; here .31 by chance, at a standard error of .12.
    given = found[f"{RHO}, {PARTIAL}"]
    assert given.value < 0.4 and beyond(given) != "yes"


def test_vectors_that_differ_by_rounding_alone_are_not_ranked():
    # Without context, prompts with one final token have one vector a fold; batches of other sizes round it otherwise.
    shown, rng = view(1.0, 5), np.random.default_rng(0)
    target = Target.of(shown.capture, shown.entropy).require()
    one_a_fold = rng.standard_normal((5, KV * WIDTH))[np.arange(N) // 2 % 5]
    found = []
    for _ in range(4):
        rounded = (one_a_fold * (1 + 1e-7 * rng.standard_normal((N, KV * WIDTH)))).astype(np.float32)
        value, fewer = Axis.of(rounded.astype(float), target, shown.clusters, seed=0).rhos()
        found.append([value, *fewer])
    np.testing.assert_allclose(found, [found[0]] * 4, rtol=1e-9)


def test_a_layer_that_is_the_same_for_every_prompt_is_drawn_as_0_and_said():
    shown = view(1.5, 1)

    def flat(of: Capture) -> Capture:
        return with_last(of, np.ones((N, KV * WIDTH)), 0)

    parts = {name: tuple(map(flat, getattr(shown, name))) for name in ("untrained", "shuffled")}
    result = value_manifold.measure(replace(shown, capture=flat(shown.capture), **parts))
    assert (result["pc1"][0], result["participation"][0], result["rho"][0]) == (0, 0, 0)
    assert result.warnings == ("layer 0: the value vectors are the same for every prompt; drawn as 0",)
    assert result["pc1"][-1] == pytest.approx(measured(1.5, 1)["pc1"][-1])
    same = with_last(shown.capture, np.ones((N, KV * WIDTH)))
    with refused(UserError, "last layer", 80):
        value_manifold.measure(replace(shown, capture=same))


def test_what_an_untrained_model_s_own_values_say_of_its_own_entropy_is_a_null_too():
    """Controls whose PC1 follows their own entropy, and not ours, take the verdict away; controls of noise leave it."""
    main = view(1.5, 1)
    rng = np.random.default_rng(8)

    def untrained() -> Capture:
        own = rng.uniform(0, 8, N)
        tensors = values(rng, (own - own.mean()) / own.std(), 2.0)
        return capture(tensors | {(Site.ENTROPY, -1): torch.from_numpy(own.astype(np.float32))})

    held = replace(main, untrained=tuple(untrained() for _ in range(UNTRAINED)))
    both = [{h.name: h for h in value_manifold.measure(seen).estimates} for seen in (main, held)]
    for name in (RHO, R2):
        left, taken = (found[name] for found in both)
        assert beyond(left) == "yes" and left.value == taken.value
        assert beyond(taken) != "yes" and taken.null == f"untrained, own entropy ({UNTRAINED} draws)"


@pytest.mark.parametrize(("shared", "claimed", "told"), [(0, False, "0 of 80"), (30, True, "30 of 80"), (40, True, "")])
def test_the_final_token_is_called_fixed_only_where_prompts_share_it(shared, claimed, told):
    """Values and entropy depend on the final token alone; each is of ten prompts, or of two, which holds nothing."""
    rng = np.random.default_rng(5)
    token = np.where(np.arange(N) < shared, np.arange(N) // 10, 10 + np.arange(N) // 2)
    effect = rng.standard_normal(N)[token]
    main = capture(values(rng, effect, 1.5), 10 + np.arange(N) % 2, token)
    noise = tuple(capture(values(rng, None)) for _ in range(UNTRAINED))
    result = value_manifold.measure(ProbeInput(main, effect, noise, noise))
    given = {h.name: h for h in result.estimates}[f"{RHO}, {PARTIAL}"]
    assert given.value > 0.5 or shared == 40
    assert bool(given.claim) is claimed
    assert [note for note in result.notes if note.startswith(PARTIAL)] == [
        f"{PARTIAL}: {told} rows end in a token of three rows or more; for the others length alone is held fixed"
    ] * bool(told)


def test_rows_of_unusual_length_and_rows_that_coincide_are_named():
    shown = view(0.0, 9)
    x = last(shown.capture)
    x[17], x[3] = 9 * x[17], 6 * x[3]
    x[40:44] = x[50:54]
    final = NOUGHT.copy()
    final[[17, 3]] = 7, 5
    main = with_last(capture(shown.capture.tensors, final=final), x)
    warnings = value_manifold.measure(replace(shown, capture=main)).warnings
    norms = "value norms at the last layer lie more than 6 robust sd off the median for "
    assert f"{norms}prompt 17 (token 7), prompt 3 (token 5)" in warnings
    assert "the dimension leaves out 2 prompts whose values equal those of another prompt" in warnings
    assert not measured(1.5, 1).warnings


def test_too_few_points_leave_the_dimension_out_and_say_so():
    shown = view(0.0, 9)
    copies = np.arange(N) % 14 // 2 * 2  # 7 places for 40 units
    x = last(shown.capture)[copies]
    result = value_manifold.measure(replace(shown, capture=with_last(shown.capture, x)))
    assert DIMENSION not in verdicts(result) and "dimension" not in result.arrays
    assert f"{DIMENSION}: not measured, because an intrinsic dimension needs 10 distinct points, and has 7" in (
        result.warnings
    )
