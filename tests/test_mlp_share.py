"""The MLPs' share of the effects: sums over layers, against untrained MLPs and one half; norms are those of hooks."""

import numpy as np
import pytest

from llmgeom import claims
from llmgeom.errors import UserError
from llmgeom.model.intervention import Effects
from llmgeom.model.model import Model
from llmgeom.probes.interventions.component_results import MLP_EVIDENCE, MLP_NORM, MLP_SHARE, measure_blocks
from llmgeom.stats.resampling import band
from tests.families import FAMILIES
from tests.test_component_ablation import HELD, ablated, alone, writes_of


@pytest.mark.parametrize("positions", ["query", "all"])
@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gemma2"])
def test_norms_are_of_what_the_writers_write_at_the_final_token(name, positions):
    family = FAMILIES[name]
    subject = Model.of(family.model(), name=name)
    made = ablated(subject, "blocks", positions)["mean"]
    assert made["norms"].shape == (2, 2, len(HELD))
    for branch, path in enumerate((family.attn_out, family.mlp_out)):
        for layer in (0, 1):
            wrote = [writes_of(family, subject.model, layer, path, ids)[-1] for ids in alone(HELD)]
            np.testing.assert_allclose(made["norms"][branch, layer], [float(w @ w) for w in wrote], rtol=1e-4)


HALF = np.arange(30) % 2


def drawn(attention: float, mlp: float, seed: int, size: float = 1.0, evidence: bool = False) -> Effects:
    """Log-normal effects with these means over 30 clusters, in two layers; blocks have the sum of both branches."""
    rng = np.random.default_rng(seed)
    scale = size * np.array([attention, mlp])[:, None, None]
    branches = scale * np.exp(0.4 * rng.standard_normal((2, 2, 30)) - 0.08)
    kl = np.concatenate([branches.reshape(4, 30), branches.sum(0)])
    norms = np.array([4.0, 9.0])[:, None, None] * branches
    return {"kl": kl, "norms": norms, "layers": 2, "half": HALF} | ({"evidence": 0.5 * kl} if evidence else {})


def measured(own: Effects, untrained: list[Effects]):
    return measure_blocks(own, untrained, "mean", np.arange(30), "query")


def judged(own: Effects, untrained: list[Effects]) -> dict:
    made = measured(own, untrained)
    return {h.name: h for h in claims.judge({"blocks_mean": made})["blocks_mean"].estimates}


def branches(model: Effects) -> np.ndarray:
    return model["kl"][:4].reshape(2, 2, 30)


SMALL = [drawn(1, 9, 100 + i, size=0.01, evidence=True) for i in range(20)]


def test_shares_are_sums_over_layers():
    own = drawn(1, 3, 0, evidence=True)
    found = judged(own, SMALL)
    attention, mlp = branches(own).mean(2).sum(1)
    assert found[MLP_SHARE].value == pytest.approx(mlp / (mlp + attention))
    assert found[MLP_EVIDENCE].value == pytest.approx(mlp / (mlp + attention))
    lengths = np.sqrt(own["norms"].mean(2)).sum(1)
    assert found[MLP_NORM].value == pytest.approx(lengths[1] / lengths[0])
    made = measured(own, SMALL)
    assert "evidence" in made.arrays and "0.8" in made.notes[-1] and "0.9" in made.notes[-1]
    np.testing.assert_allclose(made["mlp"], branches(own)[1].mean(1))
    np.testing.assert_allclose(made["attention_evidence"], 0.5 * branches(own)[0].mean(1))
    np.testing.assert_allclose(made["attention_norm"], np.sqrt(own["norms"][0].mean(1)))


@pytest.mark.parametrize(
    ("attention", "mlp", "verdict"), [(1, 4, "holds"), (4, 1, "ruled out"), (0, 2, "holds"), (2, 0, "opposite")]
)
def test_who_changes_the_answer_has_the_share(attention, mlp, verdict):
    own = drawn(attention, mlp, 3)
    if not attention:  # a ratio to attentions that do nothing does not exist
        own = own | {"kl": own["kl"] + 1e-12}
    found = judged(own, SMALL)[MLP_SHARE]
    assert found.verdict == verdict
    if 0 in (attention, mlp):
        assert found.value == pytest.approx(float(mlp > 0), abs=1e-9)


def test_untrained_controls_are_compared_over_the_trained_model_s_total():
    """Their MLPs' bits over its total, not over their own: small effects make no large share."""
    own, untrained = drawn(1, 3, 0), [drawn(1, 3, 100 + i) for i in range(20)]
    found = judged(own, untrained)[MLP_SHARE]
    total = branches(own).mean(2).sum()
    shares = [branches(control)[1].mean(1).sum() / total for control in untrained]
    assert min(shares) > 0.5 and (found.null_low, found.null_high) == pytest.approx(tuple(band(np.array(shares))))


def test_a_branch_that_writes_nothing_has_no_ratio_of_norms():
    own = drawn(1, 2, 3) | {"norms": drawn(0, 2, 3)["norms"]}
    made = measured(own, SMALL)
    assert MLP_NORM not in {h.name for h in made.estimates} and len(made.warnings) == 1
    made = measured(drawn(1, 2, 3), [own, *SMALL])
    assert MLP_NORM not in {h.name for h in made.estimates} and len(made.warnings) == 1


def test_evidence_that_is_not_lost_has_no_share():
    own = drawn(1, 3, 0, evidence=True)
    noise = np.random.default_rng(0).standard_normal((6, 30))
    made = measured(own | {"evidence": noise - noise.mean()}, SMALL)
    assert {MLP_SHARE, MLP_NORM} <= {h.name for h in made.estimates}
    assert MLP_EVIDENCE not in {h.name for h in made.estimates} and len(made.warnings) == 1
    with pytest.raises(UserError):
        measured({name: of for name, of in own.items() if name != "evidence"} | {"kl": 0 * noise}, SMALL)
