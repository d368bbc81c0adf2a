"""Metrics of entropy use the exact entropy within position, are refused where it does not vary, and need context."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmgeom.batch import Batch
from llmgeom.claims import entries
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.probes import known
from llmgeom.probes.shared import representation_geometry
from llmgeom.probes.shared.representation_geometry import R2, RHO, Axis
from llmgeom.probes.shared.rows import Constant, Target, centred
from llmgeom.prompts import pool as pools
from llmgeom.prompts.domains import Domain
from llmgeom.run import run_probes
from llmgeom.stats.ridge_probe import folds, permuted_decodability, read
from llmgeom.stats.tests import correlation_test, regrouped_interval
from llmgeom.wind_tunnels import load_world
from tests.test_belief_clusters import tunnel_subject

# What a trained look-up of the last token must not pass.
PROBES = ("value_manifold", "attention_focus", "belief_clusters")
OF_CONTEXT = {
    (probe, name)
    for (probe, name), claim in entries().items()
    if claim.claim and probe in PROBES and (probe != "value_manifold" or "entropy" in name)
}
CONFIRMED = ("holds", "small")


def domain_sample(subject: Model, domain: str, seed: int, n: int = 60) -> Batch:
    pool = Domain(domain).sample(5 * n, seed)
    return pools.stratify(pool, subject.entropy(pool), n, seed=seed)


def without_attention(name: str) -> Model:
    """A pocket model whose attention writes nothing: W_O and its bias are 0."""
    subject = Model.load(f"pocket:{name}", device="cpu")
    with torch.no_grad():
        for block in subject.blocks:
            inner = dict(block.attention.named_children())
            output = next(inner[key] for key in ("o_proj", "dense", "c_proj", "out_proj") if key in inner)
            for parameter in output.parameters():
                parameter.zero_()
    return subject


def test_the_target_is_the_exact_entropy_less_its_mean_at_the_position():
    """The oracle sums p log p in numpy, row by row."""
    batch = load_world("coin:steps=12").truncated(40, 0)
    subject = tunnel_subject("gpt2", load_world("coin:steps=12"), 0)
    capture = subject.capture(batch, {Site.ENTROPY})
    target = Target.of(capture, capture.entropy.numpy())
    p = batch.posterior.predictive[:, 0].double().exp().numpy()
    exact = np.array([-sum(x * np.log2(x) for x in row if x > 0) for row in p])
    position = capture.position.numpy()
    expected = exact - np.array([exact[position == at].mean() for at in position])
    np.testing.assert_allclose(target.values, expected, atol=1e-6)
    np.testing.assert_allclose(np.asarray(batch.columns["exact_entropy"]), exact, atol=1e-5)


def test_scores_without_a_group_have_the_sign_of_all_rows(monkeypatch):
    """The sign of a component is arbitrary: here it depends on how many rows there are."""
    rng = np.random.default_rng(0)
    x, group = rng.normal(size=(47, 1)), np.zeros(47, dtype=int)
    target = Target(x[:, 0] + 0.3 * rng.normal(size=47), group, False)
    monkeypatch.setattr(representation_geometry, "pca", lambda x: SimpleNamespace(scores=x * (-1) ** len(x)))
    axis = Axis.of(x, target, np.arange(47), 0)
    assert len({len(rows) for rows, _ in axis.without}) == 2
    value, without = axis.rhos()
    assert value > 0.8 and (without > 0.8).all()


def test_a_task_whose_exact_entropy_is_a_function_of_position_is_not_measured():
    """In the bijection without replacement the number of pairs that were shown decides the entropy."""
    task = load_world("bijection:vocab=6,pairs=5")
    subject = tunnel_subject("gpt2", load_world("bijection:vocab=6,pairs=5"), 0)
    capture = subject.capture(batch := task.truncated(60, 0), {Site.ENTROPY})
    with pytest.raises(Constant, match="does not vary"):
        Target.of(capture, capture.entropy.numpy()).require()
    record = run_probes(subject, batch, known(["value_manifold"]), controls=2)
    names = {estimate.name for estimate in record.results["value_manifold"].estimates}
    assert not names & {RHO, R2} and {"PC1 share"} <= names
    assert "the exact entropy does not vary within a position" in record.unmeasured[f"value_manifold: {R2}"]
    assert "r2" not in record.results["value_manifold"].arrays


def test_a_model_that_answers_the_marginal_is_not_measured_on_its_own_entropy():
    """Its entropy varies by rounding at most, which a rank would follow. One sentence above all claims says so."""
    subject = Model.load("pocket:llama", device="cpu")
    batch = domain_sample(subject, "math", 0)
    with torch.no_grad():
        subject.model.lm_head.weight *= 0
    record = run_probes(subject, batch, known(["value_manifold"]), controls=2)
    names = {estimate.name for estimate in record.results["value_manifold"].estimates}
    of_entropy = {name for probe, name in OF_CONTEXT if probe == "value_manifold"}
    assert of_entropy and not names & of_entropy
    assert {f"value_manifold: {name}" for name in of_entropy} <= set(record.unmeasured)
    assert "entropy does not vary (sd " in record.unmeasured[f"value_manifold: {R2}"]
    assert "Next-token entropy is log2 1,024 = 10.000 bits" in record.facts["flat entropy"]


NAMES = ("llama", "llama-noicl", "mistral", "phi", "pythia")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "domain", "seed"), [(name, ("mixed", "math")[i % 2], i % 2) for i, name in enumerate(NAMES)]
)
def test_with_attention_cut_no_claim_about_context_holds_in_any_pocket_model(name, domain, seed):
    subject = without_attention(name)
    results = run_probes(subject, domain_sample(subject, domain, seed), known(PROBES), controls=20, seed=seed).results
    every = {(probe, h.name): h.verdict for probe, measured in results.items() for h in measured.estimates}
    words = {of: word for of, word in every.items() if of in OF_CONTEXT}
    assert len(words) >= 4 and not [of for of, word in words.items() if word in CONFIRMED], words


def test_noise_within_position_is_not_read():
    """75 sequences at 23 positions: with means over all rows R2 reached .33, and .22 in one of ten."""
    values, rejected = [], []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        group = np.unique(rng.integers(0, 23, 75), return_inverse=True)[1]
        x, cluster = rng.normal(size=(75, 64)), np.arange(75)
        target, fold = Target(centred(rng.normal(size=75), group), group, True), folds(cluster, seed)
        values.append(read(x, target.values[:, None], fold, stratum=target.stratum).r2[0])
        moved = permuted_decodability(x, target.values, fold, cluster, 39, seed, target.stratum)
        scores = Axis.of(x, target, cluster, seed).scores
        test = correlation_test(scores, target.values, cluster, 99, seed, target.covariates())
        rejected.append([(moved >= values[-1]).sum() < 1, test.p <= 0.03])
    assert np.quantile(values, 0.9) < 0.1 and max(values) < 0.2 and np.median(values) > -0.1
    assert (np.mean(rejected, 0) < 0.15).all()  # .025 and .03 are expected


@pytest.mark.slow
def test_the_interval_of_a_component_covers_where_the_next_has_nearly_its_variance():
    """Two directions of sd 1 and .95, one of them that of the target: with PC1 held fixed .5 were covered."""
    drawn = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        factors = (0.8 * rng.normal(size=(40, 2))).repeat(2, 0) + 0.6 * rng.normal(size=(80, 2))
        directions = np.random.default_rng(7).normal(size=(2, 32))
        directions *= 4 / np.linalg.norm(directions, axis=1, keepdims=True)
        x = factors * [1, 0.95] @ directions + rng.normal(size=(80, 32))
        target = Target(factors[:, 0] + 0.7 * rng.normal(size=80), np.zeros(80, dtype=int), False)
        axis = Axis.of(x, target, np.arange(80) // 2, seed)
        drawn.append((axis.rhos()[0], regrouped_interval(*axis.rhos(), axis.group)))
    truth = np.mean([value for value, _ in drawn])
    assert np.mean([span.low <= truth <= span.high for _, span in drawn]) > 0.85
