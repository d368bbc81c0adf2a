"""Each form of key orthogonality: read off the model's own modules, and unchanged or changed by a change of basis."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import ortho_group, t

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import Unavailable, UserError
from llmgeom.model.model import Model
from llmgeom.probes import key_orthogonality as probe
from llmgeom.probes.key_orthogonality import BY_HEAD, COLUMNS, SEEN, Reading
from llmgeom.stats.similarity import mean_abs_cosine, random_cosine
from tests.families import FAMILIES, ragged
from tests.observed import observe
from tests.refusals import refused
from tests.words import beyond, named

SMALL = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}


def tiny(family: str) -> transformers.PreTrainedModel:
    """A float64 model whose parameters, norms and biases included, are all random."""
    if family == "gpt_neox":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        config = transformers.GPTNeoXConfig(**SMALL, num_attention_heads=4, rope_parameters=rope)
    else:
        config = transformers.LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def measures(model) -> dict[str, float]:
    reading = observe(Model.of(model), ragged(lengths=(40, 40)), probe.NEEDS)
    return {
        COLUMNS: reading.columns.mean(),
        BY_HEAD: mean_abs_cosine(reading.keys).mean(),
        SEEN: mean_abs_cosine(reading.seen, True).mean(),
    }


def complex_pairs(rng, pairs: int) -> np.ndarray:
    """A rotation times a scale of each rotary pair (i, i + pairs): it commutes with every rotary embedding."""
    angle, scale = rng.uniform(0, 2 * np.pi, pairs), rng.uniform(0.3, 3, pairs)
    c, s = np.diag(scale * np.cos(angle)), np.diag(scale * np.sin(angle))
    return np.block([[c, -s], [s, c]])


def allowed(rng, family: str) -> np.ndarray:
    """R [16 16] of one key head: general where nothing rotates (NeoX's last 12 dimensions), else scaled rotations."""
    if family == "llama":
        return complex_pairs(rng, 8)
    r = np.zeros((16, 16))
    r[:4, :4] = complex_pairs(rng, 2)
    r[4:, 4:] = ortho_group.rvs(12, random_state=rng) @ np.diag(rng.uniform(0.3, 3, 12))
    r[4:, 4:] += 0.3 * rng.standard_normal((12, 12))
    return r


@torch.no_grad()
def change_basis(model, family: str, seed: int, shift: bool = False) -> None:
    """Keys k -> R' k and queries q -> R^-1 q of every head, biases too; R is one a key head, for its whole group.

    shift: instead, a constant added to the keys where nothing rotates, which the softmax does not see.
    """
    rng = np.random.default_rng(seed)
    for index in range(2):
        if family == "gpt_neox":
            fused = model.gpt_neox.layers[index].attention.query_key_value
            rows = [(fused, 48 * head, fused, [48 * head]) for head in range(4)]
            rows = [(fused, k + 16, fused, q) for _, k, _, q in rows]
        else:
            attention = model.model.layers[index].self_attn
            rows = [(attention.k_proj, 16 * g, attention.q_proj, [32 * g, 32 * g + 16]) for g in range(2)]
        for key, at, query, queries in rows:
            if shift:
                key.bias[at + 4 : at + 16] += torch.from_numpy(rng.standard_normal(12))
                continue
            r = torch.from_numpy(allowed(rng, family))
            for linear, start, matrix in [(key, at, r.T), *((query, q, torch.linalg.inv(r)) for q in queries)]:
                part = slice(start, start + 16)
                linear.weight[part] = matrix @ linear.weight[part]
                linear.bias[part] = matrix @ linear.bias[part]


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_change_of_basis_that_attention_does_not_see_changes_all_but_what_queries_see(family, seed):
    model = tiny(family)
    ids = torch.randint(120, (2, 30), generator=torch.Generator().manual_seed(seed))
    before, logits = measures(model), model(ids).logits
    change_basis(model, family, seed)
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=1e-8)
    after = measures(model)
    assert after[SEEN] == pytest.approx(before[SEEN], abs=1e-9)
    for name in (COLUMNS, BY_HEAD):
        assert abs(after[name] - before[name]) > 1e-4, name


def test_a_key_bias_that_the_softmax_does_not_see_changes_all_but_the_centred_measures():
    model = tiny("gpt_neox")
    ids = torch.randint(120, (2, 30), generator=torch.Generator().manual_seed(2))
    before, logits = measures(model), model(ids).logits
    change_basis(model, "gpt_neox", 3, shift=True)
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=1e-8)
    after = measures(model)
    for name in (SEEN, COLUMNS):
        assert after[name] == pytest.approx(before[name], abs=1e-9)
    assert abs(after[BY_HEAD] - before[BY_HEAD]) > 1e-3


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_token_keys_are_the_model_s_own_norm_then_its_own_projection(family):
    model, batch = tiny(family), ragged(lengths=(60, 30))
    subject = Model.of(model)
    ids = torch.tensor(probe.token_ids(subject, batch))
    with torch.no_grad():
        if family == "gpt_neox":
            layer = model.gpt_neox.layers[0]
            x = layer.input_layernorm(model.gpt_neox.embed_in(ids))
            keys = layer.attention.query_key_value(x).view(len(ids), 4, 3, 16)[:, :, 1]
            w_q = layer.attention.query_key_value.weight.view(4, 3, 16, 64)[:, 0]
            metric = w_q @ w_q.mT
        else:
            layer = model.model.layers[0]
            x = layer.input_layernorm(model.model.embed_tokens(ids))
            keys = layer.self_attn.k_proj(x).view(len(ids), 2, 16)
            w_q = layer.self_attn.q_proj.weight.view(2, 2, 16, 64)
            metric = (w_q @ w_q.mT).sum(1)
    reading = observe(subject, batch, probe.NEEDS)
    np.testing.assert_allclose(reading.keys, keys.transpose(0, 1).numpy(), atol=1e-12)
    inner = torch.einsum("tgi,gij,sgj->gts", keys, metric, keys).numpy()
    np.testing.assert_allclose(reading.seen @ reading.seen.swapaxes(1, 2), inner, rtol=1e-9, atol=1e-9)


def test_tokens_are_the_most_frequent_ties_by_id_without_pads_and_special_ones(monkeypatch):
    ids = torch.tensor([[0, 9, 9, 5, 7, 7], [0, 5, 9, 3, 8, 8]])
    batch = Batch(Tokens(ids, torch.tensor([6, 4])), ("a", "b"), {})

    class Tokenizer:
        all_special_ids = (0,)

    subject = replace(Model.of(FAMILIES["llama"].model()), tokenizer=Tokenizer())
    assert probe.token_ids(subject, batch) == [9, 5, 7, 3]
    assert probe.token_ids(replace(subject, tokenizer=None), batch) == [9, 0, 5, 7, 3]
    many = Batch(Tokens(torch.arange(50)[None], torch.tensor([50])), ("a",), {})
    monkeypatch.setattr(probe, "MOST_TOKENS", 32)
    assert probe.token_ids(subject, many) == list(range(1, 33))


LAYERS, KV, DIM, D_MODEL, TOKENS = 2, 3, 8, 64, 40


def reading(rng, planted: bool = False, layers: int = LAYERS, normed: bool = False) -> Reading:
    """Gaussian weights and keys; planted: one head's columns and another's keys are orthogonal frames."""

    w = rng.standard_normal((layers, KV, DIM, D_MODEL))
    keys = rng.standard_normal((KV, TOKENS, DIM))
    if planted:
        w[:, 1] = np.linalg.qr(w[0, 1].T)[0].T
        keys[2] = np.tile(np.eye(DIM), (TOKENS // DIM, 1))
    return Reading(mean_abs_cosine(w), keys, keys, D_MODEL, normed)


def view(seed=0, planted=False, twin_planted=False, **more) -> SimpleNamespace:
    rng = np.random.default_rng(seed)
    controls = tuple(reading(rng, twin_planted, **more) for _ in range(20))
    return SimpleNamespace(observations=reading(rng, planted, **more), control_observations=controls)


def test_planted_orthogonal_heads_are_found_where_they_are():
    result = probe.measure(view(planted=True))
    np.testing.assert_allclose(result["columns"][:, 1], 0, atol=1e-12)
    assert (result["columns"][:, [0, 2]] > 0.5 * random_cosine(D_MODEL)).all()
    found = named(result)
    assert found[COLUMNS].value < found[COLUMNS].null_low and found[COLUMNS].p < 0.1  # three layers
    assert beyond(found[BY_HEAD]) == "yes"


def test_gaussian_models_lie_on_their_references_and_are_not_called_orthogonal():
    result = probe.measure(view(seed=1))
    assert result["columns_mean"].mean() == pytest.approx(result["columns_gaussian"], rel=0.1)
    found = named(result)
    assert found[BY_HEAD].value == pytest.approx(result["head_gaussian"], rel=0.05)
    for seed in range(1, 4):
        assert "yes" not in {beyond(h) for h in probe.measure(view(seed=seed)).estimates}


def test_what_untrained_models_have_too_is_not_below_null_and_less_than_they_have_is_said():
    same = named(probe.measure(view(seed=2, planted=True, twin_planted=True)))
    assert beyond(same[BY_HEAD]) != "yes"
    result = probe.measure(view(seed=3, twin_planted=True))
    (said, *_) = result.notes
    assert said.startswith("less orthogonal than chance, above the whole band of the null: ")
    assert BY_HEAD in said
    assert not any("less orthogonal" in text for text in probe.measure(view(seed=4)).notes)


def test_what_cannot_be_read_is_a_row_with_its_reason():
    model = FAMILIES["llama"].model()
    model.model.layers[1].self_attn.k_proj = torch.nn.Sequential(model.model.layers[1].self_attn.k_proj)
    with refused(Unavailable, "key weights"):
        observe(Model.of(model), ragged(), probe.NEEDS)
    few = Batch(Tokens(torch.tensor([[4, 5, 4, 5]]), torch.tensor([4])), ("a",), {})
    with refused(UserError, 2):
        observe(Model.of(FAMILIES["llama"].model()), few, probe.NEEDS)
    with refused(UserError, "untrained"):
        probe.measure(SimpleNamespace(observations=view().observations, control_observations=()))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_that_normalises_keys_after_their_projection_says_so(name):
    reading = observe(Model.of(FAMILIES[name].model(), name=name), ragged(), probe.NEEDS)
    assert reading.normed == FAMILIES[name].key_norm


@pytest.mark.parametrize(
    ("tokens", "centre", "clusters", "what"),
    [(40, True, 40, "tokens"), (160, True, 32, "groups of tokens"), (40, False, 40, "tokens")],
)
def test_the_jackknife_error_of_token_keys_is_the_spread_over_samples_of_tokens(tokens, centre, clusters, what):
    """Uneven keys, 60 samples: half widths over Student's quantile average their standard deviation."""
    rng, values, errors = np.random.default_rng(8), [], []
    for _ in range(60):
        x = rng.standard_normal((1, tokens, DIM)) * np.linspace(0.3, 2, DIM)
        value, interval = probe._tokens(x, centre)
        values.append(value)
        errors.append((interval.high - interval.low) / 2 / t.ppf(0.975, clusters - 1))
        assert interval.method == f"jackknife over {clusters} {what}"
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.25)


def test_few_heads_have_no_interval_and_norms_are_told():
    result = probe.measure(view(seed=7, layers=1, normed=True))
    assert COLUMNS not in named(result)
    assert result.warnings[-2].startswith("columns of W_K: 3 heads in all are too few")
    assert result.warnings[-1].startswith("queries and keys are normalised after their projection")
