"""The logit lens is what the model would say if it ended there; whole rows of exact answers follow their positions."""

import pytest
import torch

from llmgeom.errors import Unavailable
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.wind_tunnels.models.architectures import build
from llmgeom.wind_tunnels.worlds.bijection import Bijection
from llmgeom.wind_tunnels.worlds.hmm import HMM
from tests.families import FAMILIES, prompts, ragged
from tests.refusals import refused


def tunnel(arch, task):
    shape = {"vocabulary": task.vocabulary, "length": task.length, "features": task.features}
    return build(arch, **shape, width=16, seed=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_lens_says_what_the_model_with_its_later_layers_cut_off_says(name):
    family = FAMILIES[name]
    model = family.model()
    subject = Model.of(model, name=name)
    seen = subject.capture(ragged(), {Site.RESIDUAL, Site.LOG_PROBS, Site.FINAL})
    says = [subject.unembed(residual) for residual in seen.layers(Site.RESIDUAL)]
    assert torch.equal(says[-1].argmax(-1), seen.log_probs.argmax(-1))
    assert (says[-1] - seen.log_probs).abs().max() < 1e-5
    owner, _, layers = family.layers.rpartition(".")
    setattr(model.get_submodule(owner), layers, model.get_submodule(family.layers)[:1])
    with torch.no_grad():
        cut = torch.stack([model(ids).logits[0, -1].log_softmax(-1) for ids in prompts(ragged())])
    assert (says[1] - cut).abs().max() < 1e-5
    assert (says[0] - cut).abs().max() > 1e-2


@pytest.mark.parametrize("arch", ["gpt2", "lstm", "mamba2", "mlp", "flat"])
@pytest.mark.parametrize("task", [Bijection(), HMM(steps=4)], ids=lambda task: task.title)
def test_tunnel_models_have_a_lens_with_and_without_attention(arch, task):
    subject = Model.of(tunnel(arch, task), name=arch)
    batch = task.sample(3, 0)
    seen = subject.capture(batch, {Site.RESIDUAL, Site.FINAL, Site.LOG_PROBS})
    assert (subject.unembed(seen.layers(Site.RESIDUAL)[-1]) - seen.log_probs).abs().max() < 1e-5
    assert seen.final.shape == (len(seen.prompt), 16)


def test_a_model_whose_way_to_its_logits_is_not_known_has_no_lens(monkeypatch):
    model = FAMILIES["llama"].model()

    subject = Model.of(model, name="odd")
    seen = subject.capture(ragged(), {Site.RESIDUAL})
    model.model.norm.register_forward_hook(lambda _m, _a, out: out.roll(1, -1))
    assert subject.unembed(seen.layers(Site.RESIDUAL)[0]).isfinite().all(), "a hook is part of the norm"
    model.register_forward_hook(lambda _m, _a, out: setattr(out, "logits", out.logits.sin()) or out)
    with refused(Unavailable, "odd", "llama", "logits"):
        Model.of(model, name="odd").unembed(seen.layers(Site.RESIDUAL)[0])


def test_exact_answers_stand_in_the_order_of_the_rows():
    task = HMM(steps=4)
    batch = task.sample(3, 0)
    subject = Model.of(tunnel("gpt2", task), name="tunnel")
    seen = subject.capture(batch.take([2, 0]), {Site.ENTROPY})
    for row in range(len(seen.prompt)):
        sequence, query = [2, 0][seen.prompt[row]], task.query.index(int(seen.position[row]))
        assert torch.equal(seen.exact.predictive[row], batch.posterior.predictive[sequence, query])
        assert torch.equal(seen.exact.belief[row], batch.posterior.belief[sequence, query])
    assert seen.exact.outcomes == task.answers.tokens
