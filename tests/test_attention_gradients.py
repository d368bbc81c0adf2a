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
from studies.gradients import routing
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
    assert found.loss == pytest.approx(plain.loss)
    for layer, one in enumerate(plain.layers):
        score = plain.queries * one.autograd.score[one.seen].numpy()
        assert found.score_gradient[layer] == pytest.approx(np.sqrt(np.mean(score**2)))
        value = [plain.queries * one.autograd.value[i, :, :n].flatten() for i, n in enumerate((23, 9, 17, 2))]
        assert found.value_gradient[layer] == pytest.approx(np.sqrt(np.mean(torch.cat(value).numpy() ** 2)))


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
