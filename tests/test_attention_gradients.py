"""The gradient law judged by each family's own attention code, and scans by their recurrence."""

import copy
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from llmgeom import wind_tunnels
from llmgeom.batch import Batch, Posterior, Tokens
from llmgeom.dynamics import gradients
from llmgeom.dynamics.gradients import losses, signals, targets
from llmgeom.errors import Unavailable
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit
from llmgeom.model.model import Model
from llmgeom.wind_tunnels.models.architectures import build
from studies import unrolled
from studies.gradients import routing, step
from tests.families import FAMILIES, ragged
from tests.refusals import refused

NEAR = 2e-6  # families take softmax in float32, whatever their weights are
_added: dict = {}


def _own(module, query, key, value, mask, **kwargs):
    """The family's own eager attention, with leaves added to what it is given and to its scores."""
    leaves = _added.setdefault(
        module, [torch.zeros_like(x, requires_grad=True) for x in (query, key, value)] + [torch.zeros(
            *query.shape[:3], key.shape[2], dtype=query.dtype, requires_grad=True)]
    )  # fmt: skip
    q, k, v, s = leaves
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query + q, key + k, value + v, mask + s, **kwargs)


AttentionInterface.register("oracle", _own)
AttentionMaskInterface.register("oracle", eager_mask)


def eager(model):
    model = copy.deepcopy(model).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def own_gradients(model, batch: Batch):
    """(loss, [query, key, value, score] of every layer, model) by the family's own code."""
    model, _ = eager(model), _added.clear()
    model.config._attn_implementation = "oracle"
    ids = batch.inputs.ids
    logits = model(ids, use_cache=False).logits
    real = torch.arange(ids.shape[1]) < batch.inputs.lengths[:, None]
    loss = F.cross_entropy(logits[:, :-1][real[:, 1:]], ids[:, 1:][real[:, 1:]])
    loss.backward()
    return float(loss.detach()), [[leaf.grad for leaf in leaves] for leaves in _added.values()], model


@pytest.mark.parametrize("name", FAMILIES)
def test_the_law_is_what_each_family_s_own_attention_gives(name):
    model, batch = FAMILIES[name].model(), ragged()
    loss, theirs, own = own_gradients(model, batch)
    found = routing(Model.of(model), batch)
    assert found.loss == pytest.approx(loss, rel=1e-6) and found.queries == sum(n - 1 for n in (23, 9, 17, 2))
    cap = getattr(model.config, "attn_logit_softcapping", None)
    for layer, (one, (q, k, v, s)) in enumerate(zip(found.layers, theirs, strict=True)):
        assert max(float(e.max()) for e in one.errors.values()) < 1e-12
        score = one.law.score
        if cap:  # a mask is added after the cap
            score = score / (1 - (one.score / cap).tanh().square())
        for ours, other in ((one.law.query, q), (one.law.key, k), (one.law.value, v), (score, s)):
            assert ours.shape == other.shape
            assert float((ours - other).abs().max() / other.abs().max()) < NEAR * 5
        if not cap:
            torch.testing.assert_close(-one.weight * one.advantage, score * one.seen, atol=1e-15, rtol=1e-9)
        sums = one.law.score.sum(-1)
        if name == "gpt_oss":  # the sink is a key of value 0, and its own gradient balances the row
            sink = own.model.layers[layer].self_attn.sinks.grad
            torch.testing.assert_close(-sums.sum((0, 2)), sink, rtol=1e-4, atol=1e-9)
            assert sums.abs().max() > 1e-6
        elif not cap:
            assert sums.abs().max() < 1e-15


@pytest.mark.parametrize("entries", [gradients.ENTRIES, 8 * 23**2, 2 * 8 * 23**2])
def test_signals_are_of_the_summed_loss_and_do_not_depend_on_how_many_run_together(monkeypatch, entries):
    monkeypatch.setattr(gradients, "ENTRIES", entries)
    subject, batch = Model.of(FAMILIES["llama"].model()), ragged()
    found, plain = signals(subject, batch), routing(subject, batch)
    for layer, one in enumerate(plain.layers):
        score = plain.queries * one.autograd.score[one.seen].numpy()
        assert found["score_gradient"][layer] == pytest.approx(np.sqrt(np.mean(score**2)))
        value = [plain.queries * one.autograd.value[i, :, :n].flatten() for i, n in enumerate((23, 9, 17, 2))]
        assert found["value_gradient"][layer] == pytest.approx(np.sqrt(np.mean(torch.cat(value).numpy() ** 2)))


def test_the_loss_of_a_task_is_that_of_the_outcomes_drawn_at_its_queries():
    task = wind_tunnels.load_world("recall:pairs=3,keys=5,values=5,queries=2")
    subject = Model.of(build("gpt2", vocabulary=task.vocabulary, length=task.length, width=16))
    for batch in (task.sample(5, 0), task.truncated(5, 0)):
        form = task.answers.read(subject.capture(batch, {Site.LOG_PROBS}).log_probs)
        expected = task.answers.loss(form, batch.target.flatten()).mean()
        found = routing(subject, batch)
        assert found.loss == pytest.approx(float(expected), rel=1e-5)
        assert found.queries == batch.target.numel()


def test_the_loss_of_a_real_number_is_minus_its_log_density():
    logits, y = torch.randn(7, 2), torch.randn(7)
    normal = torch.distributions.Normal(logits[:, 0], (logits[:, 1] / 2).exp())
    torch.testing.assert_close(losses(logits, y), -normal.log_prob(y))
    task = wind_tunnels.load_world("regression")
    model = build("gpt2", vocabulary=2, length=task.length, features=task.features, width=16)
    batch = task.sample(4, 0)
    form = task.answers.read(Model.of(model).capture(batch, {Site.LOG_PROBS}).log_probs)
    assert form.shape[1] == 2
    found = routing(Model.of(model), batch)
    assert max(float(e.max()) for e in found.layers[0].errors.values()) < 1e-9


def test_a_query_beyond_a_sequence_s_end_takes_its_target_with_it():
    query = torch.tensor([[False, True, True], [False, True, True]])
    target = torch.tensor([[0, 1], [2, 0]])
    batch = Batch(
        Tokens(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([2, 3])),
        ("a", "b"),
        {},
        query=query,
        target=target,
        posterior=Posterior(torch.zeros(2, 2, 3), outcomes=(7, 8, 9)),
    )
    where, found = targets(batch, batch.inputs)
    assert where.tolist() == [[False, True, False], [False, True, True]] and found.tolist() == [7, 9, 7]


def test_a_law_that_is_not_the_model_s_own_is_not_told(monkeypatch):
    """With the cap forgotten, or a sink, the model says something else, and so do we."""
    attend = gradients.Explicit.attend
    for name, forgotten in (("gemma2", "softcap"), ("gpt_oss", "s_aux")):
        with monkeypatch.context() as patch:
            patch.setattr(
                gradients.Explicit,
                "attend",
                lambda *args, forgotten=forgotten, **kwargs: attend(*args, **{**kwargs, forgotten: None}),
            )
            with refused(Unavailable, name):
                routing(Model.of(FAMILIES[name].model()), ragged())


def test_what_gives_no_gradients_is_refused_with_the_reason(monkeypatch):
    subject = Model.of(FAMILIES["gpt2"].model())
    with subject.edited(Edit("z", lambda x, where: x)) as changed, refused(Unavailable, "edited"):
        routing(changed, ragged())
    lstm = Model.of(build("lstm", vocabulary=120, length=30, width=16))
    with refused(Unavailable, "attention"):
        routing(lstm, ragged())
    monkeypatch.setattr(gradients, "LARGEST", 10)
    with refused(Unavailable, "float64"):
        routing(subject, ragged())


def test_what_is_counted_is_real_and_bears_on_the_loss():
    """At padding, at the last token, which no target follows, and beyond a window nothing is seen."""
    found = routing(Model.of(FAMILIES["mistral"].model()), ragged())
    for one in found.layers:
        for row, length in zip(one.seen, (23, 9, 17, 2), strict=True):
            assert not row[:, length - 1 :].any()
            reach = row[0].sum(-1)[: length - 1]
            assert reach.tolist() == [min(i + 1, 7) for i in range(length - 1)]
        assert (one.advantage[~one.seen] == 0).all()
        torch.testing.assert_close(one.share, one.weight)


def test_the_step_is_plain_descent_on_every_parameter():
    """Held against a model stepped by hand, with the loss, the gradient and the attention that are its own."""
    model, batch = FAMILIES["gpt_neox"].model(), ragged()
    taken = step(Model.of(model), batch, decrease=0.02)
    loss, _, own = own_gradients(model, batch)
    size = sum(float(p.grad.square().sum()) for p in own.parameters())
    expected = 0.02 * min(1, loss)
    assert taken.expected == pytest.approx(expected)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter -= expected / size * parameter.grad
    own.config._attn_implementation = "eager"
    after = Model.of(own)
    attention = [s.capture(batch, {Site.ATTENTION}, positions="all") for s in (Model.of(eager(model)), after)]
    for layer, change in enumerate(taken.share):
        old, new = (one.layers(Site.ATTENTION)[layer].double() for one in attention)
        rows = attention[0].prompt, slice(None), attention[0].position
        seen = taken.before.layers[layer].seen[rows]
        moved = (new / old).log()[seen]
        assert moved.abs().max() > 1e-4
        torch.testing.assert_close(change[rows][seen], moved, atol=2e-5, rtol=1e-3)
    lowered = loss - own_gradients(own, batch)[0]
    assert taken.found == pytest.approx(lowered, rel=1e-3) and 0.5 < taken.found / taken.expected < 1.1
    small = step(Model.of(model), batch)
    assert small.found == pytest.approx(small.expected, rel=1e-2)


def test_the_model_itself_is_left_as_it_was():
    model = FAMILIES["mixtral"].model()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    kept = model.config._attn_implementation, model.config._experts_implementation
    step(Model.of(model), ragged())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert (model.config._attn_implementation, model.config._experts_implementation) == kept


def recurrence(mixer, u, kept=None):
    """y of the scan without D, position by position, from the mixer's own parameters; h is scaled by `kept` at each."""
    silu, softplus = F.silu, F.softplus

    def causal(x):
        conv = mixer.conv1d
        width = conv.weight.shape[-1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        parts = [padded[:, i : i + x.shape[1]] * conv.weight[:, 0, i] for i in range(width)]
        return silu(sum(parts) + conv.bias)

    if hasattr(mixer, "dt_proj"):
        x = causal(mixer.in_proj(u).chunk(2, -1)[0])
        dt, b, c = mixer.x_proj(x).split([mixer.dt_proj.in_features, mixer.state, mixer.state], -1)
        dt, x, a = softplus(mixer.dt_proj(dt)), x[..., None], -mixer.A_log.exp()
    else:
        wide = mixer.out_proj.in_features
        _, x, b, c, dt = mixer.in_proj(u).split([wide, wide, mixer.state, mixer.state, mixer.heads], -1)
        x, b, c = causal(torch.cat([x, b, c], -1)).split([wide, mixer.state, mixer.state], -1)
        dt, x, a = softplus(dt + mixer.dt_bias), x.unflatten(-1, (mixer.heads, -1)), -mixer.A_log.exp()[:, None]
    kept = torch.ones(u.shape[0], x.shape[2], u.shape[1], 1, dtype=u.dtype) if kept is None else kept
    h = torch.zeros(u.shape[0], x.shape[2], x.shape[3], mixer.state, dtype=u.dtype)
    y = []
    for t in range(u.shape[1]):
        keep = (a * dt[:, t, :, None]).exp()[:, :, None] * kept[:, :, t, :, None]
        h = keep * h + (dt[:, t, :, None, None] * x[:, t, ..., None]) * b[:, t, None, None]
        y.append(h @ c[:, t, None, :, None])
    return torch.stack(y, 2)[..., 0]


@pytest.mark.parametrize("arch", ["mamba2", "mamba"])
def test_unrolled_weights_are_the_recurrence(arch):
    mixer = build(arch, vocabulary=11, length=9, width=8, heads=2, inner=3).double().layers[0].mixer
    u, found = torch.randn(2, 9, 8, dtype=torch.float64), []
    out = unrolled.scan_of(mixer, found.append)(u)
    torch.testing.assert_close(out, mixer(u), atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(found[0].z, recurrence(mixer, u), atol=1e-12, rtol=1e-9)
    assert (found[0].weight.triu(1) == 0).all() and (found[0].weight < 0).any()


@pytest.mark.parametrize("arch", ["mamba2", "mamba"])
def test_the_law_of_a_scan_is_that_of_its_recurrence(arch):
    """What is kept, turned up at one step of the loop, changes y as the law's sums over what crosses that step say."""
    mixer = build(arch, vocabulary=11, length=7, width=8, heads=2, inner=3).double().layers[0].mixer
    u, found = torch.randn(2, 7, 8, dtype=torch.float64), []
    unrolled.scan_of(mixer, found.append)(u)
    one = found[0]
    kept = torch.zeros_like(one.step).requires_grad_()
    towards = torch.randn_like(one.z)
    (recurrence(mixer, u, kept.exp()) * towards).sum().backward()
    torch.testing.assert_close(one.law(towards).step, kept.grad, atol=1e-12, rtol=1e-9)
    assert (kept.grad[:, :, 0] == 0).all() and (kept.grad[:, :, 1:] != 0).any()
    by_autograd = torch.autograd.grad((one.z * towards).sum(), one.wanted[:-1])
    for ours, theirs in zip(vars(one.law(towards)).values(), by_autograd, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-9)


@pytest.mark.parametrize("arch", ["mamba2", "mamba"])
def test_a_scan_s_score_gradient_is_an_advantage_and_a_gain(arch):
    task = wind_tunnels.load_world("bijection:vocab=4,pairs=3")
    subject = Model.of(build(arch, vocabulary=task.vocabulary, length=task.length, width=8))
    found = routing(subject, task.sample(5, 0))
    for one in found.layers:
        assert one.scan and set(one.errors) == {"score", "value", "query", "key", "step"}
        assert max(float(e.max()) for e in one.errors.values()) < 1e-9
        z = (one.weight * one.b).sum(-1, keepdim=True)  # u_i . y_i
        torch.testing.assert_close(one.share.sum(-1), torch.ones_like(z[..., 0]))
        whole = (one.share * (z - one.advantage)) * one.seen
        torch.testing.assert_close(whole, one.autograd.score * one.seen, atol=1e-18, rtol=1e-9)
        assert (one.share * one.advantage).sum(-1).abs().max() < 1e-9 * one.advantage.abs().max()
    with refused(Unavailable, "attention"):
        signals(subject, task.sample(5, 0))
