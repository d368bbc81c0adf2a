"""A posterior that a branch wrote is read where it was written; read-out, lens and CKA against other roads to them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from llmgeom import claims, wind_tunnels
from llmgeom.batch import Batch, Posterior, Tokens
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.probe import LEAST_SEQUENCES, WHOLE, ProbeInput
from llmgeom.probes import belief_readout, known
from llmgeom.probes.belief_readout import FALL, FREE, GRADUAL, PENALTIES, SHARE, SKILL, fit, read
from llmgeom.probes.shared import belief_geometry
from llmgeom.probes.shared.belief_geometry import some_sequences
from llmgeom.run import run_probes
from llmgeom.stats.ridge_probe import folds
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.families import ragged
from tests.observed import observe
from tests.refusals import refused
from tests.words import beyond

# ---- the fit, against scikit-learn -----------------------------------------------------------------------------------


def by_sklearn(x: np.ndarray, p: np.ndarray, penalty: float) -> np.ndarray:
    """[coordinate outcome] weights: soft targets as rows that come once an outcome, weighted."""
    n, outcomes = p.shape
    model = LogisticRegression(C=1 / (penalty * n), fit_intercept=False, tol=1e-10, max_iter=20_000)
    model.fit(np.repeat(x, outcomes, 0), np.tile(np.arange(outcomes), n), sample_weight=p.ravel())
    return model.coef_.T


def probabilities(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(-1).numpy()


@pytest.mark.parametrize(("rows", "width"), [(80, 6), (25, 40)])
@pytest.mark.parametrize("penalty", [1.0, 0.03, 0.001])
def test_soft_targets_are_fitted_as_scikit_learn_fits_weighted_rows(rows, width, penalty):
    rng = np.random.default_rng(0)
    x, other = rng.standard_normal((2, rows, width))
    p = probabilities(2 * x[:, :4] + rng.standard_normal((rows, 4)))
    p[0] = [1, 0, 0, 0]
    found = fit(
        torch.tensor(np.stack([x, other])), torch.tensor(np.stack([p, p])), torch.tensor([penalty, 2 * penalty])
    )
    for one, mine, cost in ((x, found[0], penalty), (other, found[1], 2 * penalty)):
        theirs = by_sklearn(one, p, cost)
        np.testing.assert_allclose(probabilities(one @ mine.numpy()), probabilities(one @ theirs), atol=1e-4)
        new = rng.standard_normal((50, width))
        np.testing.assert_allclose(probabilities(new @ mine.numpy()), probabilities(new @ theirs), atol=1e-4)


def drawn(seed: int, sequences: int = 12, queries: int = 3, width: int = 5, outcomes: int = 3):
    rng = np.random.default_rng(seed)
    n = sequences * queries
    x = rng.standard_normal((n, width)) * np.arange(1, width + 1) + 7
    log_p = torch.from_numpy(x - 7)[:, :outcomes].log_softmax(-1)
    clusters = [f"s{i}" for i in np.repeat(np.arange(sequences), queries)]
    return x, log_p, torch.arange(queries).repeat(sequences), clusters


def test_reading_is_nested_cross_validation_by_whole_units():
    x, log_p, position, clusters = drawn(0)
    x[:, -1] = 3  # constant: says nothing
    noise = np.random.default_rng(1).standard_normal(x.shape)
    kl, penalties = read([torch.from_numpy(x), torch.from_numpy(noise)], log_p, position, clusters, seed=4)
    fold, p = folds(clusters, 4), log_p.exp().numpy()
    for site, one in enumerate((x, noise)):
        for held in range(5):
            rest, later = fold != held, fold == (held + 1) % 5
            size = one[rest].std(0)
            z = (one - one[rest].mean(0)) / np.where(size > 0, size, 1) / 5**0.5
            z = np.hstack([z, FREE * np.eye(3)[position]])
            tried = [by_sklearn(z[rest & ~later], p[rest & ~later], penalty) for penalty in PENALTIES[:-1]]
            losses = [-(p * np.log(probabilities(z @ w)))[later].sum(1).mean() for w in tried]
            chosen = penalties[site, held]
            if chosen in PENALTIES[:-1]:
                assert chosen == PENALTIES[int(np.argmin(losses))]
            q = probabilities(z @ by_sklearn(z[rest], p[rest], chosen))
            expected = (p * np.log2(p / q)).sum(1)[fold == held]
            np.testing.assert_allclose(kl[site, fold == held], expected, atol=2e-3)
    assert len({*penalties.ravel()}) > 1


def test_the_penalty_of_a_fold_is_chosen_without_it():
    x, log_p, position, clusters = drawn(3, sequences=15, width=9)
    fold, sites = folds(clusters, 0), [torch.from_numpy(x), torch.from_numpy(x[::-1].copy())]
    own = read(sites, log_p, position, clusters, 0)[1]
    changed = 0
    for held in range(5):
        other = torch.where(torch.from_numpy(fold == held)[:, None], log_p.roll(1, 1).flip(0), log_p)
        theirs = read(sites, other, position, clusters, 0)[1]
        np.testing.assert_array_equal(theirs[:, held], own[:, held])
        changed += (theirs != own).sum()
    assert changed, "the others' choices must be free to move, or the test says nothing"


def test_what_position_tells_is_not_counted_as_read():
    """A posterior that position decides is read without a residual, and certainty of 0 and 1 is no trouble."""
    position, clusters = torch.arange(4).repeat(10), np.repeat(np.arange(10), 4)
    log_p = torch.eye(4, dtype=torch.float64)[position].log()
    found, _ = read([torch.zeros(40, 3)], log_p, position, clusters, 0)
    assert found.min() >= 0 and found.max() < 0.01


# ---- residuals in which it is known who wrote the posterior ----------------------------------------------------------

SEQUENCES, QUERIES, OUTCOMES, WIDTH = 60, 3, 3, 16


def posteriors(seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(SEQUENCES, QUERIES, OUTCOMES, generator=rng, dtype=torch.float64)).log_softmax(-1)


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SEQUENCES * QUERIES, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def written(log_p: torch.Tensor, seed: int, amount: float = 1.0) -> torch.Tensor:
    """[row d_model]: the log-posterior in directions of its own, in float64."""
    into = torch.randn(OUTCOMES, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    return amount * log_p.flatten(0, 1) @ into


def held(writes: list[tuple[torch.Tensor, torch.Tensor]], exact: Posterior, seed: int, known_writes: bool = True):
    """A capture of whole sequences: noise at the input, then (attention, MLP) layer by layer."""
    query = torch.zeros(SEQUENCES, 2 * QUERIES, dtype=torch.bool)
    query[:, ::2] = True
    rng = torch.Generator().manual_seed(5)
    ids = torch.randint(6, (SEQUENCES, 2 * QUERIES), generator=rng)
    lengths = torch.full((SEQUENCES,), 2 * QUERIES)
    batch = Batch(Tokens(ids, lengths), tuple(f"s{i}" for i in range(SEQUENCES)), {}, query, None, {}, exact)
    prompt, position = query.nonzero(as_tuple=True)
    x, tensors = noise(seed), {}
    for layer, (attention, mlp) in enumerate(writes):
        tensors[Site.RESIDUAL, layer] = x
        if known_writes:
            tensors[Site.ATTN_OUT, layer] = attention
        x = x + attention + mlp
    tensors[Site.RESIDUAL, len(writes)] = x
    return Capture(batch, prompt, position, lengths, tensors)


def viewed(writes, exact: Posterior, untrained: int = 8, known_writes: bool = True) -> SimpleNamespace:
    """Untrained controls whose writes are noise alone."""
    drawn = [[(noise(50 + 9 * i + n), noise(3000 + 9 * i + n)) for n in range(len(writes))] for i in range(untrained)]
    null = tuple(held(of_noise, exact, 9000 + i, known_writes) for i, of_noise in enumerate(drawn))
    own = held(writes, exact, 1, known_writes)
    sample = ProbeInput(own, np.zeros(len(own.prompt)), null)
    return SimpleNamespace(capture=own, samples={WHOLE: sample}, seed=0)


def judged(made) -> dict:
    return {h.name: h for h in claims.judge({"belief_readout": made})["belief_readout"].estimates}


LOG_P = posteriors(0)
EXACT = Posterior(LOG_P, outcomes=tuple(range(OUTCOMES)))
STILL = torch.zeros(SEQUENCES * QUERIES, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(("writer", "share", "verdict"), [("mlp", 1, "holds"), ("attention", 0, "ruled out")])
def test_who_writes_the_posterior_has_the_share(writer, share, verdict, coarse):
    brought = written(LOG_P, 2, 5.0)
    first = (STILL, brought) if writer == "mlp" else (brought, STILL)
    made = belief_readout.measure(viewed([first, (STILL, STILL)], EXACT))
    found = judged(made)
    assert found[SHARE].value == pytest.approx(share, abs=0.01) and found[SHARE].verdict == verdict
    assert found[SHARE].clusters == SEQUENCES and found[SHARE].n == SEQUENCES * QUERIES
    assert made.ticks["site"] == ("in 0", "attention 0", "in 1", "attention 1", "out")
    falls = -np.diff(made["missed"])
    assert falls[1 if writer == "mlp" else 0] == pytest.approx(made["missed"][0] - made["missed"][-1], abs=1e-3)
    assert found[SKILL].value > 0.9 and beyond(found[SKILL]) == "yes"
    assert found[SKILL].value == pytest.approx(1 - made["missed"][-1] / made["position"])
    assert found[FALL].value == pytest.approx(made["missed"][0] - made["missed"][-1])
    # All at once is no accumulation.
    assert found[GRADUAL].value == pytest.approx(0, abs=0.01) and found[GRADUAL].verdict == "ruled out"
    assert made["position"] == pytest.approx(made["input"], rel=0.05) and made["shuffled"] >= made["position"] - 0.05


def test_evidence_that_arrives_in_parts_is_accumulated_and_shared(coarse):
    """The log-posterior is a sum of six parts, as of six observations; each write brings one."""
    rng = torch.Generator().manual_seed(2)
    parts = torch.randn(6, SEQUENCES, QUERIES, OUTCOMES, generator=rng, dtype=torch.float64)
    exact = Posterior(parts.sum(0).log_softmax(-1), outcomes=EXACT.outcomes)
    w = [written(part, 2, 5.0) for part in parts]
    made = belief_readout.measure(viewed([(w[0], w[1]), (w[2], w[3]), (w[4], w[5])], exact))
    found = judged(made)
    falls = -np.diff(made["missed"])
    assert found[SHARE].value == pytest.approx(falls[1::2].sum() / falls.sum()) and 0.2 < found[SHARE].value < 0.8
    assert found[GRADUAL].value == pytest.approx(1 - falls.max() / falls.sum())
    assert found[GRADUAL].verdict == "holds"


@pytest.fixture
def coarse(monkeypatch):
    """Two penalties do where nothing depends on a fine one, in half the time."""
    monkeypatch.setattr(belief_readout, "PENALTIES", (0.03, 0.001))


def test_a_residual_that_never_holds_the_posterior_passes_nothing(coarse):
    """Random writes, or a posterior that belongs to other sequences: no share, or none that passes."""
    for seed in range(2):
        writes = [(noise(700 + seed), noise(800 + seed))]
        exact = EXACT if seed % 2 else Posterior(posteriors(seed + 1), outcomes=EXACT.outcomes)
        if not seed % 2:
            writes = [(written(LOG_P, 3), written(LOG_P, 4))]
        made = belief_readout.measure(viewed(writes, exact))
        found = judged(made)
        assert beyond(found[SKILL]) != "yes"
        assert all(found[name].verdict != "holds" for name in (SHARE, GRADUAL) if name in found)
        if SHARE not in found:
            assert "not distinguishable from 0: shares of it are left out" in made.warnings[0]


@pytest.mark.slow
def test_an_untrained_model_that_mixes_tokens_does_not_pass(coarse):
    """What is readable by chance falls over its MLPs as over those of its untrained controls."""
    for seed in range(2):
        faint = [(STILL, written(LOG_P, 20 + seed, 0.3) + 0.5 * noise(seed))]
        view = viewed(faint, EXACT, untrained=0)
        untrained = tuple(
            held([(STILL, written(LOG_P, 60 + i, 0.3) + 0.5 * noise(30 + i))], EXACT, 200 + i) for i in range(20)
        )
        view.samples[WHOLE] = ProbeInput(view.capture, view.samples[WHOLE].entropy, untrained)
        found = judged(belief_readout.measure(view))
        assert found[SHARE].value == pytest.approx(1) and found[SHARE].verdict != "holds"
        assert beyond(found[SKILL]) != "yes"


def test_the_belief_is_read_where_there_is_one():
    exact = Posterior(posteriors(9), LOG_P, tuple(range(OUTCOMES)))
    made = belief_readout.measure(viewed([(STILL, written(LOG_P, 2, 5.0))], exact, untrained=2))
    assert made["missed"][-1] < 0.1 * made["position"]


def test_without_writes_there_is_a_curve_and_no_share():
    made = belief_readout.measure(viewed([(STILL, written(LOG_P, 2, 5.0))] * 2, EXACT, untrained=2, known_writes=False))
    assert made["missed"].shape == (3,) and made.ticks["site"] == ("in 0", "in 1", "out")
    assert {SHARE, GRADUAL}.isdisjoint(judged(made))
    assert "write is unknown" in made.warnings[0] and made.warnings[1].startswith(f"{GRADUAL}: left out")


def test_what_cannot_be_read_out_is_refused():
    writes = [(STILL, STILL)]
    with refused(UserError, "real"):
        belief_readout.measure(viewed(writes, Posterior(LOG_P[..., :2]), untrained=1))
    alike = torch.full_like(LOG_P, -np.log(OUTCOMES))
    with refused(UserError, "position"):
        belief_readout.measure(viewed(writes, Posterior(alike, outcomes=EXACT.outcomes), untrained=1))


def test_long_sequences_give_rows_at_the_same_evenly_spaced_queries(monkeypatch):
    capture = held([(STILL, STILL)], EXACT, 0)
    monkeypatch.setattr(belief_geometry, "MOST_ROWS", 2 * LEAST_SEQUENCES + 1)
    rows = some_sequences(capture, 3)
    assert len(np.unique(capture.prompt.numpy()[rows])) == LEAST_SEQUENCES < SEQUENCES
    assert set(capture.position.numpy()[rows]) == {0, 2 * (QUERIES - 1)} and len(rows) == 2 * LEAST_SEQUENCES


def test_another_sequence_s_posterior_is_at_the_same_position():
    capture = held([(STILL, STILL)], EXACT, 0)
    rows = torch.from_numpy(some_sequences(capture, 0))
    given = belief_readout._exchanged(capture, rows, [0, 1])
    assert torch.equal(capture.position[given], capture.position) and sorted(given) == list(range(len(rows)))
    donor = capture.prompt[given].view(SEQUENCES, QUERIES)
    assert (donor == donor[:, :1]).all() and (donor[:, 0] != torch.arange(SEQUENCES)).all()
    assert not torch.equal(given, belief_readout._exchanged(capture, rows, [0, 2]))


# ---- prompts: lens and alignment -------------------------------------------------------------------------------------


@torch.no_grad()
def test_what_is_observed_is_the_kl_of_the_answer_from_the_lens_of_each_depth(llama):
    """The lens itself is judged in test_unembedding.py."""
    batch = ragged()
    found, seen = observe(llama, batch, belief_readout.NEEDS), llama.capture(batch, {Site.RESIDUAL, Site.LOG_PROBS})
    p = seen.log_probs.double()
    for of_depth, x in zip(found, seen.layers(Site.RESIDUAL), strict=True):
        expected = (p.exp() * (p - llama.unembed(x).double())).sum(-1) / np.log(2)
        np.testing.assert_allclose(of_depth, expected, rtol=1e-3, atol=1e-5)


def test_the_way_of_the_lens():
    rng, n = np.random.default_rng(0), 30
    own = np.array([8.0, 4.0, 2.0, 1.0, 0.0])[:, None] * rng.uniform(0.9, 1.1, n)
    other = np.array([1.0, 1.5, 0.9, 0.5, 0.0])[:, None] * rng.uniform(0.9, 1.1, n)
    tokens = Tokens(torch.zeros(n, 2, dtype=torch.int64), torch.full((n,), 2))
    last = torch.ones(n, dtype=torch.int64)
    capture = Capture(Batch(tokens, tuple(f"t{i}" for i in range(n)), {}), torch.arange(n), last, last + 1, {})
    view = ProbeInput(capture, np.zeros(n), observations=own, control_observations=(other,) * 3)
    made = belief_readout.measure(view)
    (way,) = made.estimates
    assert way.value == pytest.approx(1 - own[2].mean() / own[0].mean())
    assert way.null_low == pytest.approx(1 - other[2].mean() / other[0].mean())
    np.testing.assert_allclose(made["missed"], own.mean(1))
    with refused(UserError, 1, 2):
        belief_readout.measure(ProbeInput(capture, np.zeros(n), observations=own[:2]))


# ---- the whole way ---------------------------------------------------------------------------------------------------


def test_a_chain_is_scanned_with_its_whole_sequences_its_belief_and_its_controls(coarse, tmp_path):
    spec = "edge_hmm:process=rrxor,steps=4"
    folder = train(Training(spec, arch="lstm", width=32, layers=2, heads=2, steps=3, batch=8), tmp_path / "t").out
    task = wind_tunnels.load_world(spec)
    samples = {WHOLE: task.sample(25, 0)}
    record = run_probes(
        Model.load(str(folder)), task.truncated(25, 0), known(["belief_readout"]), controls=2, samples=samples
    )
    found = record.results["belief_readout"]
    assert len(found.arrays["missed"]) == len(found.arrays["belief_r2"]) == 3
    assert found.arrays["belief_r2_null"].shape == (3, 2) and found.arrays["belief_held"].shape == (25, 2)
    assert found.notes[0] == "25 sequences, 100 queries, seed 0"
    assert found.estimates[0].n == 100 and found.estimates[0].clusters == 25
    assert {belief_geometry.OF_ALL, belief_geometry.FURTHER} <= {h.name for h in found.estimates if not h.verdict}
