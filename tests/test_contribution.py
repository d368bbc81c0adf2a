"""What a branch contributes is what plain hooks on its writer do, a prompt at a time; who does all of it has it all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmgeom import claims, wind_tunnels
from llmgeom.batch import Posterior
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.probes import contribution, known
from llmgeom.probes.contribution import MOST, OfEvidence, Replaced
from llmgeom.run import run_probes
from llmgeom.stats.resampling import band
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.families import FAMILIES, hooked
from tests.refusals import refused
from tests.test_replacing import LAST, alone, kl_of, last_log_probs, random_prompts, write_set, writes_of

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gemma2"])
def test_effects_norms_and_evidence_are_what_hooks_on_the_writers_do(name):
    family = FAMILIES[name]
    subject = Subject.of(family.model(), name=name)
    rng, outcomes = torch.Generator().manual_seed(1), (5, 40, 77)
    exact = torch.randn(12, 1, 3, generator=rng, dtype=torch.float64).log_softmax(-1)
    exact[0, 0] = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).log()
    batch = replace(random_prompts(), posterior=Posterior(exact, outcomes=outcomes))
    made = contribution.replaced(subject, batch)
    assert made.effect.shape == made.evidence.shape == made.norm.shape == (2, 2, 12)
    assert list(made.clusters) == list(batch.cluster)

    def missed(ids, p, *handles) -> float:
        with hooked(*handles):
            q = last_log_probs(subject.model, ids)[list(outcomes)]
        return sum(float(a.exp() * (a - b)) for a, b in zip(p[0], q, strict=True) if a > -np.inf) / np.log(2)

    for branch, path in enumerate((family.attention_write, family.mlp_write)):
        for layer in (0, 1):
            wrote = [writes_of(family, subject.model, layer, path, ids)[-1] for ids in alone(batch)]
            mean = torch.stack(wrote).mean(0)
            np.testing.assert_allclose(made.norm[branch, layer], [float(w @ w) for w in wrote], rtol=1e-4)
            expected = [
                kl_of(subject.model, ids, write_set(family, subject.model, layer, path, mean, LAST))
                for ids in alone(batch)
            ]
            np.testing.assert_allclose(made.effect[branch, layer], expected, rtol=2e-3, atol=1e-6)
            rises = [
                missed(ids, p, write_set(family, subject.model, layer, path, mean, LAST)) - missed(ids, p)
                for ids, p in zip(alone(batch), exact, strict=True)
            ]
            np.testing.assert_allclose(made.evidence[branch, layer], rises, rtol=2e-3, atol=1e-5)


def test_one_row_a_unit_and_not_more_than_said():
    subject = Subject.of(FAMILIES["llama"].model(), name="llama")
    two_each = random_prompts(clusters=8, each=2)
    assert contribution.replaced(subject, two_each).clusters.tolist() == list(two_each.cluster[::2])
    alone_first = contribution.replaced(subject, two_each.take(range(0, 16, 2)))
    np.testing.assert_allclose(contribution.replaced(subject, two_each).effect, alone_first.effect, atol=1e-6)
    assert len(contribution.replaced(subject, random_prompts(clusters=MOST + 7)).clusters) == MOST == 40
    with refused(UserError, 4, 5):
        contribution.replaced(subject, random_prompts(clusters=4))


def test_a_real_valued_answer_is_refused():
    batch = replace(random_prompts(), posterior=Posterior(torch.zeros(12, 1, 2)))
    with refused(UserError, "real"):
        contribution.replaced(Subject.of(FAMILIES["llama"].model(), name="llama"), batch)


# ---- shares of effects that are known --------------------------------------------------------------------------------


def drawn(attention: float, mlp: float, seed: int, size: float = 1.0, evidence: bool = False) -> Replaced:
    """Log-normal effects with these means over 30 units, in two layers."""
    rng = np.random.default_rng(seed)
    scale = size * np.array([attention, mlp])[:, None, None]
    effect = scale * np.exp(0.4 * rng.standard_normal((2, 2, 30)) - 0.08)
    clusters = np.array([f"u{i}" for i in range(30)])
    return Replaced(effect, 0.5 * effect if evidence else None, np.array([4.0, 9.0])[:, None, None] * effect, clusters)


def view(own: Replaced, untrained: list[Replaced]) -> SimpleNamespace:
    return SimpleNamespace(observations=own, control_observations=tuple(untrained))


def judged(own: Replaced, untrained: list[Replaced]) -> dict:
    made = contribution.measure(view(own, untrained))
    return {h.name: h for h in claims.judge({"contribution": made.lowered()})["contribution"].estimates}


SMALL = [drawn(1, 9, 100 + i, size=0.01, evidence=True) for i in range(20)]


def test_shares_are_sums_over_layers():
    own = drawn(1, 3, 0, evidence=True)
    found = judged(own, SMALL)
    attention, mlp = own.effect.mean(2).sum(1)
    assert found["MLPs' share of the effects"].value == pytest.approx(mlp / (mlp + attention))
    assert found["MLPs' share of the lost evidence"].value == pytest.approx(mlp / (mlp + attention))
    lengths = np.sqrt(own.norm.mean(2)).sum(1)
    assert found["MLPs over attentions, by norm"].value == pytest.approx(lengths[1] / lengths[0])
    made = contribution.measure(view(own, SMALL))
    assert isinstance(made, OfEvidence) and "0.8" in made.notes[1] and "0.9" in made.notes[1]
    np.testing.assert_allclose(made.mlp, own.effect[1].mean(1))
    np.testing.assert_allclose(made.attention_evidence, own.evidence[0].mean(1))
    np.testing.assert_allclose(made.attention_norm, np.sqrt(own.norm[0].mean(1)))


@pytest.mark.parametrize(
    ("attention", "mlp", "verdict"), [(1, 4, "PASS"), (4, 1, "FAIL"), (0, 2, "PASS"), (2, 0, "FAIL")]
)
def test_who_changes_the_answer_has_the_share(attention, mlp, verdict):
    found = judged(drawn(attention, mlp, 3), SMALL)["MLPs' share of the effects"]
    assert found.verdict == verdict
    if 0 in (attention, mlp):
        assert found.value == (mlp > 0)


def test_twins_are_held_against_what_the_model_itself_loses_in_all():
    """Their MLPs' bits over its total, not over their own: small effects make no large share."""
    own, untrained = drawn(1, 3, 0), [drawn(1, 3, 100 + i) for i in range(20)]
    found = judged(own, untrained)["MLPs' share of the effects"]
    total = own.effect.mean(2).sum()
    shares = [control.effect[1].mean(1).sum() / total for control in untrained]
    assert min(shares) > 0.5 and (found.null_low, found.null_high) == pytest.approx(tuple(band(np.array(shares))))


def test_a_branch_that_writes_nothing_has_no_ratio_of_norms():
    own = drawn(0, 2, 3)
    made = contribution.measure(view(own, SMALL))
    assert [h.name for h in made.estimates] == ["MLPs' share of the effects"] and "writes nothing" in made.warnings[0]
    made = contribution.measure(view(drawn(1, 2, 3), [own, *SMALL]))
    assert len(made.estimates) == 1 and "or in a re-initialised model" in made.warnings[0]


def test_an_untrained_model_does_not_pass_however_much_its_mlps_do():
    """Nine tenths of its effects are the MLPs', as in its untrained controls."""
    passed = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        drawn_alike = [drawn(1, 9, 1000 * seed + i, size=np.exp(0.2 * rng.standard_normal())) for i in range(21)]
        found = judged(drawn_alike[0], drawn_alike[1:])["MLPs' share of the effects"]
        assert found.value == pytest.approx(0.9, abs=0.03)
        passed += found.verdict == "PASS"
    assert not passed


def test_evidence_that_is_not_lost_is_not_shared_out():
    own = drawn(1, 3, 0, evidence=True)
    noise = np.random.default_rng(0).standard_normal(own.effect.shape)
    made = contribution.measure(view(replace(own, evidence=noise - noise.mean()), SMALL))
    assert [h.name for h in made.estimates] == ["MLPs' share of the effects", "MLPs over attentions, by norm"]
    assert "not distinguishable from 0: there is no evidence to share out" in made.warnings[0]
    with refused(UserError, "branch"):
        contribution.measure(view(replace(own, effect=0 * own.effect), SMALL))


@pytest.mark.parametrize("arch", ["neox", "lstm"])
def test_a_tunnel_is_measured_and_an_lstm_says_why_not(tmp_path, arch):
    folder = train(
        Training("hmm:steps=4", arch=arch, width=32, layers=2, heads=2, steps=3, batch=8), tmp_path / "t"
    ).out
    task = wind_tunnels.load_task("hmm:steps=4")
    record = run_probes(
        Subject.load(str(folder)), task.truncated(12, 0, "held-out"), known(["contribution"]), controls=2
    )
    if arch == "lstm":
        assert "no attention" in record.unmeasured["contribution"]
    else:
        arrays = record.results["contribution"].arrays
        assert arrays["mlp_evidence"].shape == arrays["attention"].shape == (2,)
        assert "12 rows of 12 units, edited in 4 passes" in record.results["contribution"].notes[0]
