"""The published definitions, each against code that follows the paper's own words."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.plan import Plan
from llmgeom.probe import ProbeInput
from llmgeom.probes.evidence.predictions import MAIN, ExactAnswers, LabelPredictions, label_entropy
from llmgeom.prompts import text
from llmgeom.stats.manifold import shares
from llmgeom.wind_tunnels import load_world
from studies.published import focus, keys, sula as published, values
from tests.families import FAMILIES, ragged
from tests.observed import observe
from tests.refusals import refused
from tests.words import beyond

LENGTHS = tuple(range(4, 24))


def subject_of(family: str) -> Model:
    return Model.of(FAMILIES[family].model(), name=family)


def clouds(values: np.ndarray, draws: list[np.ndarray], entropy: np.ndarray, observations=None) -> ProbeInput:
    """A view whose last layer's values are these, of models whose values are `draws`."""
    batch = replace(ragged(lengths=(5,) * len(values)), cluster=tuple(f"t{i // 2}" for i in range(len(values))))

    def of(x: np.ndarray) -> Capture:
        rows = torch.arange(len(x))
        last = torch.full((len(x),), 4)
        return Capture(batch, rows, last, last + 1, {(Site.VALUE, 0): torch.from_numpy(x)[:, None]})

    return ProbeInput(
        of(values), entropy, untrained=tuple(map(of, draws)), shuffled=tuple(map(of, draws)), observations=observations
    )


def test_the_misread_projection_is_what_the_published_reshape_gives():
    subject, batch = subject_of("gpt_neox"), ragged(lengths=LENGTHS)
    found = values.misread(subject, batch)
    layer = subject.model.gpt_neox.layers[-1]
    heads = subject.facts["heads"]
    for i, length in enumerate(LENGTHS):
        with torch.no_grad():
            hidden = subject.model(batch.inputs.ids[i : i + 1, :length], output_hidden_states=True).hidden_states[-2]
            fused = layer.attention.query_key_value(layer.input_layernorm(hidden[0, -1]))
        wrong = fused.reshape(3, heads, -1)[2].flatten()
        np.testing.assert_allclose(found.values[i], wrong.numpy(), rtol=1e-4, atol=1e-5)
    # Pythia-410M's 16 heads: the "values" are head 10's, and all of the last five heads.
    assert values.Misread(np.zeros((1, 16)), 16).true == pytest.approx(0.375)
    place = [p for p in range(2 * heads, 3 * heads) if p % 3 == 2]
    for asked in (batch, Plan.of(subject, batch, {}, 0, 0, positions="-2:").inputs[""]):  # rows as of a capture
        read = values.misread(subject, asked).values
        right = subject.capture(asked, {Site.VALUE}).layers(Site.VALUE)[-1].double().numpy()
        width = right.shape[-1]
        for p in place:
            block = read[:, (p - 2 * heads) * width : (p - 2 * heads + 1) * width]
            np.testing.assert_allclose(block, right[:, p // 3], rtol=1e-4, atol=1e-5)
    assert found.true == len(place) / heads


def test_two_large_coordinates_are_all_that_an_unstandardised_share_sees():
    rng = np.random.default_rng(0)

    def cloud() -> np.ndarray:
        x = rng.standard_normal((60, 200))
        x[:, :2] *= 200
        return x

    x, entropy = cloud(), rng.random(60)
    result = values.measure(clouds(x, [cloud() for _ in range(20)], entropy))
    found = {h.name: h for h in result.estimates}
    share = found[f"PC1+PC2 share, {values.RAW}"]
    assert share.value == pytest.approx(PCA(2).fit(x).explained_variance_ratio_.sum()) and share.value > 0.99
    # Its own nulls are as high, permuted columns too: nothing is seen.
    assert share.null_low > 0.99 and beyond(share) == "no"
    assert shares(x).numbers[1] < 0.1
    assert found[f"PC1 share, {values.RAW}"].value == pytest.approx(PCA(1).fit(x).explained_variance_ratio_[0])
    scores = PCA(2).fit_transform(x)
    assert result["scores"] == pytest.approx(scores * np.sign(scores[0] * result["scores"][0]))
    z = (x - x.mean(0)) / x.std(0)
    ten = PCA(10).fit(z).explained_variance_
    assert found[values.PR].value == pytest.approx(ten.sum() ** 2 / np.square(ten).sum())
    first = PCA(1).fit_transform(z)[:, 0]
    assert found[values.PEARSON].value == pytest.approx(abs(np.corrcoef(first, entropy)[0, 1]))
    # Rows drawn with replacement raise a share of noise: the whole interval lies above the value itself.
    point, mean, low, _ = result["bootstrap"]
    assert point == pytest.approx(shares(x).numbers[0]) and mean > low > point


def test_focusing_is_that_of_eager_attention():
    subject, batch = subject_of("llama"), ragged(lengths=LENGTHS)
    view = ProbeInput(
        subject.capture(batch, focus.NEEDS.sites),
        np.zeros(len(batch)),
        untrained=(subject.untrained(1).capture(batch, focus.NEEDS.sites),),
        shuffled=(subject.untrained(2).capture(batch, focus.NEEDS.sites),),
        observations=observe(subject, batch, focus.NEEDS),
        control_observations=(observe(subject.untrained(1), batch, focus.NEEDS),),
    )
    result = focus.measure(view)
    subject.model.set_attn_implementation("eager")
    final, every = [], []
    for i, length in enumerate(LENGTHS):
        with torch.no_grad():
            rows = subject.model(batch.inputs.ids[i : i + 1, :length], output_attentions=True).attentions
        weights = torch.stack(rows)[:, 0].double()  # [layer head query key]
        entropy = -(weights * weights.clamp_min(1e-300).log2()).sum(-1)
        final.append(entropy[:, :, -1].mean(1).numpy())
        every.append(entropy.mean((1, 2)).numpy())
    final, every = np.mean(final, 0), np.mean(every, 0)
    found = {h.name: h.value for h in result.estimates}
    assert found[focus.FINAL] == pytest.approx(1 - final[-1] / final[0], abs=1e-4)
    assert found[focus.EVERY] == pytest.approx(1 - every[-1] / every[0], abs=1e-4)
    np.testing.assert_allclose(result["every"], every, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_keys_are_compared_as_the_papers_code_compares_them(family):
    subject, batch = subject_of(family), ragged(lengths=LENGTHS)
    own, seen = keys.read(subject, batch), subject.capture(batch, keys.NEEDS.sites)
    untrained = [subject.untrained(1), subject.untrained(2)]
    captured = tuple(control.capture(batch, keys.NEEDS.sites) for control in untrained)
    theirs = tuple(keys.read(control, batch) for control in untrained)
    view = ProbeInput(seen, np.zeros(len(batch)), captured, observations=own, control_observations=theirs)
    found = {h.name: h.value for h in keys.measure(view).estimates}
    heads = subject.facts["heads"]

    def mean_over_pairs(vectors, of=abs):
        unit = [v / np.linalg.norm(v) for v in np.asarray(vectors, dtype=float)]
        return np.mean([of(unit[i] @ unit[j]) for i in range(len(unit)) for j in range(i)])

    flat = seen.layers(Site.KEY)[-1].flatten(1).double().numpy()
    pieces = [np.split(row, heads) for row in flat]  # by query heads, whatever the number of key heads
    assert found[keys.HEADS] == pytest.approx(np.mean([mean_over_pairs(p) for p in pieces]))
    assert found[keys.EMBEDDINGS] == pytest.approx(mean_over_pairs(own.embeddings))
    signed = np.mean([mean_over_pairs(head, of=float) for head in own.keys])
    assert found[keys.SIGNED] == pytest.approx(signed)
    # Two layers: the early one is layer 0.
    if keys.COLUMNS in found:
        assert found[keys.COLUMNS] == pytest.approx(own.columns[0].mean())


def heard(p: np.ndarray) -> LabelPredictions:
    log_p = np.log(np.stack([p, 1 - p], 1))
    return LabelPredictions(log_p, np.ones(len(p)))


def test_the_published_target_is_another_variable_and_a_constant_is_nearly_as_good():
    world = load_world("two-point", text=True)
    truth = {name: ExactAnswers(text.sample(world, 200, 0, condition=name)) for name in published.CONDITIONS}
    rng, n = np.random.default_rng(0), len(truth[MAIN].batch)
    target = label_entropy(published.latent(truth[MAIN]))
    value = np.outer(target, rng.standard_normal(16)) + 0.05 * rng.standard_normal((n, 16)) + 3
    value[:, 3] = 1.0  # a coordinate that does not vary has no part in the axis
    model = {name: heard(np.exp(published.latent(one)[:, 0])) for name, one in truth.items()}
    # The right answer to the question that is asked, the next label, misses the published target.
    right = {name: heard(np.exp(one.log_p[:, 0])) for name, one in truth.items()}
    vectors = [value, *rng.standard_normal((3, n, 16))]
    even = {name: heard(np.full(n, 0.5)) for name in truth}
    with refused(Exception, "prompt"):
        published.measure_published(truth, [model, even], vectors[:2])
    noise = {name: heard(0.5 + 0.01 * rng.random(n)) for name in truth}
    result = published.measure_published(truth, [model, *[noise] * 3], vectors)
    found = {h.name: h.value for h in result.estimates}
    assert found[published.ERROR] == pytest.approx(0, abs=1e-8)
    assert found[published.PEARSON] == pytest.approx(1) and found[published.REMAP] == pytest.approx(0, abs=1e-8)
    assert found[published.RANKED] > 0.9
    assert result["constant"] == pytest.approx(0.328, abs=0.015)
    assert result["after"] < 1e-12
    missed = published.measure_published(truth, [right, *[noise] * 3], vectors)
    # Exact entropies of the next label and of the latent class at k = 0, 1, 2, 4, 8: Paper III's own target.
    gap = np.mean([0, 0.6801 - 0.4690, 0.5893 - 0.2579, 0.5040 - 0.0781, 0.4725 - 0.0081])
    assert missed.estimates[0].value == pytest.approx(gap, abs=0.02)
