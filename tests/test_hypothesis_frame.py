"""Frames of hypotheses: subspaces whose overlap is known, models set by hand, bases that do not matter."""

import copy

import numpy as np
import pytest
import torch
import transformers
from scipy.linalg import subspace_angles
from torch import nn

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import Unavailable, UserError
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.model.weights import key_weight, norm_gain, query_weight
from llmgeom.probes.interventions import hypothesis_frame
from llmgeom.probes.interventions.hypothesis_frame import (
    KEY_VALUE,
    VALUE_OUT,
    centred,
    frames_of,
    input_norms,
    measure_frames,
    overlap,
    random_overlap,
    read_frames,
)
from llmgeom.run import run_probes
from llmgeom.wind_tunnels import load_world
from tests.families import FAMILIES, ragged
from tests.refusals import refused
from tests.words import beyond

RECALL = load_world("recall")


def grams(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
    return x @ x.T, y @ y.T, x @ y.T


# ---- overlap ---------------------------------------------------------------------------------------------------------


def test_overlap_is_the_mean_squared_cosine_of_scipy_s_principal_angles():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((5, 12)), rng.standard_normal((5, 12))
    expected = np.cos(subspace_angles(x.T, y.T)) ** 2
    assert overlap(*grams(x, y), 5) == pytest.approx(expected.mean(), abs=1e-10)
    # Of fewer directions, those of the largest variance: by numpy's SVD.
    u, w = (np.linalg.svd(v, full_matrices=False)[2][:3] for v in (x, y))
    assert overlap(*grams(x, y), 3) == pytest.approx(np.square(u @ w.T).sum() / 3, abs=1e-10)


@pytest.mark.parametrize(("r_u", "r_w", "dim"), [(3, 3, 10), (2, 5, 16), (6, 6, 32), (8, 8, 8)])
def test_overlap_of_random_subspaces_is_the_larger_over_the_dimension(r_u, r_w, dim):
    rng = np.random.default_rng(1)
    found = []
    for _ in range(400):
        x, y = rng.standard_normal((r_u, dim)), rng.standard_normal((r_w, dim))
        found.append(overlap(*grams(x, y), max(r_u, r_w)) if r_u == r_w else unequal(x, y))
    assert np.mean(found) == pytest.approx(random_overlap(r_u, r_w, dim), abs=4 * np.std(found) / 20 + 1e-9)


def unequal(x: np.ndarray, y: np.ndarray) -> float:
    """More directions than the smaller set has are not there to be taken."""
    many = max(len(x), len(y))
    x, y = (np.concatenate([v, np.zeros((many - len(v), v.shape[1]))]) for v in (x, y))
    return float(overlap(*grams(x, y), many))


# ---- what is read from a model ---------------------------------------------------------------------------------------

FAMILY = ["llama", "gpt_neox", "gpt2", "phi", "phi3", "qwen2", "gemma2", "olmo2", "opt"]


@pytest.mark.parametrize("name", FAMILY)
def test_frames_are_the_derivatives_of_what_attention_does(name):
    """A token's write, its key and its readout, from the modules themselves: the projection is run on the normed
    embedding, W_O on one head at a time, and the readout by autograd through the final norm."""
    family = FAMILIES[name]
    model = family.model()
    subject = Model.of(model, None, name)
    ids, n = list(range(5, 17)), 12
    found = frames_of(subject, ids)
    heads, group = subject.facts["heads"], subject.facts["heads"] // subject.facts["kv_heads"]
    e = model.get_input_embeddings().weight[ids].detach()
    for layer, norm in enumerate(input_norms(subject)):
        attention = family.layer(model, layer).get_submodule(family.attention)
        projected = family.part(model, layer, family.projection)(norm(e[None]))
        values = family.values(projected, attention)[0].repeat_interleave(group, 1)  # [token head dim]
        out = family.part(model, layer, family.output)
        for head in (0, heads - 1):
            alone = torch.zeros_like(values)
            alone[:, head] = values[:, head]
            write = (out(alone.flatten(1)) - out(0 * alone.flatten(1))).double().detach().numpy()
            write -= write.mean(0)
            ours = centred(found.value[layer, head])
            np.testing.assert_allclose(ours, write @ write.T, atol=1e-4 * abs(ours).max())
    assert found.rank == min(n - 2, subject.facts["head_dim"] // 2) and found.d_model == subject.facts["d_model"]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2", "gemma2", "opt"])
def test_key_directions_and_readouts_are_gradients_at_the_residual_stream(name):
    """At a residual of mean 0 and mean square 1 (+1 and -1 in turn) a norm's gradient is its gain, but for the part
    along the residual itself, and along the mean where it takes it off: both are projected out on either side."""
    model = FAMILIES[name].model().double()
    subject = Model.of(model, None, name)
    ids = list(range(5, 17))
    with torch.no_grad():
        e = model.get_input_embeddings().weight[ids]
    width, final = subject.facts["d_model"], subject.unembed.norm
    at = torch.ones(width, dtype=torch.float64)
    at[1::2] = -1
    off = torch.eye(width, dtype=torch.float64) - torch.outer(at, at) / width - 1 / width

    def gradients(function, count: int) -> np.ndarray:
        rows = torch.autograd.functional.jacobian(function, at.clone())
        assert rows.shape == (count, width)
        rows = rows @ off
        return (rows - rows.mean(0)).numpy()

    head = model.get_output_embeddings()
    read_out = gradients(lambda r: head(final(r[None, None]))[0, 0, ids], 12)
    ours = norm_gain(final, e.shape[1])[None] * head.weight[ids].detach()
    ours = ((ours - ours.mean(0)) @ off).detach().numpy()
    np.testing.assert_allclose(read_out, ours, atol=1e-3 * abs(ours).max())

    norm = input_norms(subject)[1]
    group = subject.facts["heads"] // subject.facts["kv_heads"]
    w_q, w_k = query_weight(subject, 1, 3), key_weight(subject, 1, 3 // group)
    with torch.no_grad():
        keys = norm(e[:, None])[:, 0] @ w_k
    found = gradients(lambda r: norm(r[None, None])[0, 0] @ w_q @ keys.T, 12)
    frames = frames_of(subject, ids)
    gain = norm_gain(norm, e.shape[1])
    direction = (keys @ w_q.T * gain).numpy()
    np.testing.assert_allclose(frames.key[1, 3], direction @ direction.T, atol=1e-6 * abs(frames.key).max())
    direction = (torch.from_numpy(direction - direction.mean(0)) @ off).numpy()
    np.testing.assert_allclose(found, direction, atol=1e-3 * abs(direction).max())


def gauge(model, rng: torch.Generator) -> None:
    """Another basis for the values and for queries and keys of GPT-2's first head, and its norm's gains put into the
    weights behind them: the model says the same."""
    block = model.transformer.h[1]
    width, dim = block.attn.embed_dim, block.attn.head_dim
    r, s = (torch.eye(dim) + 0.3 * torch.randn(dim, dim, generator=rng) for _ in range(2))
    with torch.no_grad():
        for part, change in ((0, s), (1, torch.linalg.inv(s).T), (2, r)):
            columns = slice(part * width, part * width + dim)
            block.attn.c_attn.weight[:, columns] = block.attn.c_attn.weight[:, columns] @ change
            block.attn.c_attn.bias[columns] = block.attn.c_attn.bias[columns] @ change
        block.attn.c_proj.weight[:dim] = torch.linalg.inv(r) @ block.attn.c_proj.weight[:dim]
        block.attn.c_attn.bias += block.ln_1.bias @ block.attn.c_attn.weight
        block.attn.c_attn.weight *= block.ln_1.weight[:, None]
        block.ln_1.bias.zero_()
        block.ln_1.weight.fill_(1)


def test_no_basis_of_a_head_and_no_place_of_a_gain_changes_a_frame():
    model = FAMILIES["gpt2"].model()
    other = copy.deepcopy(model)
    gauge(other, torch.Generator().manual_seed(0))
    one, two = Model.of(model, None, "one"), Model.of(other, None, "two")
    batch = ragged()
    said = [each.capture(batch, {Site.LOG_PROBS}).log_probs for each in (one, two)]
    torch.testing.assert_close(*said, atol=1e-4, rtol=0)
    before, after = (frames_of(each, list(range(5, 17))) for each in (one, two))
    for name, value in before.measures(np.arange(12)).items():
        np.testing.assert_allclose(value, after.measures(np.arange(12))[name], atol=1e-4)
    for field in ("value", "key", "value_out", "key_value"):
        ours = centred(getattr(before, field))
        np.testing.assert_allclose(ours, centred(getattr(after, field)), atol=1e-4 * abs(ours).max())


def small(task, seed: int = 0, **more) -> Model:
    given = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.18} | more
    given |= {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=task.vocabulary, tie_word_embeddings=False, **given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model.of(transformers.GPT2LMHeadModel(config))


def coinciding(sign: float) -> Model:
    """The last layer copies every token's embedding (or its opposite) into the stream, which is read out by it."""
    subject = small(RECALL)
    model, width = subject.model, 32
    with torch.no_grad():
        nn.init.orthogonal_(model.transformer.wte.weight)
        model.lm_head.weight.copy_(model.transformer.wte.weight)
        attention = model.transformer.h[1].attn
        attention.c_attn.weight[:, 2 * width :] = torch.eye(width)
        attention.c_proj.weight.copy_(sign * torch.eye(width))
    return subject


def test_a_model_that_writes_hypotheses_where_they_are_read_out():
    record = run_probes(coinciding(1.0), RECALL.truncated(60, 0), {"hypothesis_frame": hypothesis_frame})
    measured = record.results["hypothesis_frame"]
    found = {h.name: h for h in measured.estimates}
    assert beyond(found[VALUE_OUT]) == "yes" and found[VALUE_OUT].value > 0.4
    assert beyond(found[KEY_VALUE]) != "yes"
    # Each head has half of the coordinates: the cosine is the root of a half, its sign the head's.
    assert measured.arrays["match"][1].mean() == pytest.approx(0.5**0.5, abs=0.1)
    opposite = frames_of(coinciding(-1.0), list(range(8, 16))).measures(np.arange(8))
    assert opposite["match"][1].mean() == pytest.approx(-(0.5**0.5), abs=0.1)
    assert opposite[VALUE_OUT][1].mean() == pytest.approx(found[VALUE_OUT].value, abs=0.05)
    assert abs(measured.arrays["match"][0]).max() < 0.4
    assert measured.arrays["random"] == pytest.approx(6 / 32) and measured.arrays["rank"] == 6
    assert measured.notes == ("8 hypotheses: 8, 9, 10, 11, 12, 13, 14, 15",)


# ---- which tokens ----------------------------------------------------------------------------------------------------


def test_hypotheses_of_prompts_are_the_likeliest_next_tokens_and_the_others_the_most_frequent():
    subject = Model.of(FAMILIES["llama"].model(), None, "llama")
    ids = torch.randint(3, 60, (30, 8), generator=torch.Generator().manual_seed(0))
    batch = Batch(Tokens(ids, torch.full((30,), 8)), tuple(map(str, range(30))), {})
    found = read_frames(subject, batch)
    p = subject.capture(batch, {Site.LOG_PROBS}).log_probs.exp().mean(0).numpy()
    assert found.names == tuple(map(str, np.argsort(-p)[:32]))
    counts = np.bincount(ids.flatten().numpy(), minlength=60)
    common = sorted(range(60), key=lambda token: (-counts[token], token))[:32]
    np.testing.assert_allclose(found.others.out, frames_of(subject, common).out)
    assert found.others.out.shape == (32, 32)
    measured = measure_frames(found, (found,) * 20)
    others = found.others.measures(np.arange(32))[VALUE_OUT][-1].mean()
    assert measured.notes[1].startswith("as many other tokens")
    # The null is read at those other tokens.
    assert measured.estimates[0].null_low == pytest.approx(others) and f"{others:.3f}" in measured.notes[1]


def test_what_has_no_frame_is_refused_with_the_reason():
    subject = small(RECALL)
    with refused(UserError, 2, 5):
        read_frames(small(load_world("coin")), load_world("coin:steps=12").truncated(20, 0))
    hidden = load_world("hmm:encoding=tokens,steps=2,states=5")
    with refused(UserError, 103):
        read_frames(small(hidden), hidden.truncated(8, 0))
    rows = load_world("hmm")
    with refused(Unavailable, "embedding"):
        read_frames(subject, rows.truncated(5, 0))
    batch = RECALL.truncated(40, 0)
    with refused(UserError, "--control-models 20"):
        measure_frames(read_frames(subject, batch), ())


def test_a_layer_whose_values_come_from_elsewhere_is_not_read(monkeypatch):
    subject = small(RECALL)
    monkeypatch.setattr(hypothesis_frame, "value_bias", lambda *_: 1.0)
    with refused(Unavailable, "layer 0"):
        input_norms(subject)
