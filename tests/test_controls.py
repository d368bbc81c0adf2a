"""Untrained controls: the family's own initialisation, decided by the seed alone, in memory that is used again."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers

from llmgeom.model import controls
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.wind_tunnels.models import ARCHITECTURES
from llmgeom.wind_tunnels.models.architectures import build
from tests.families import FAMILIES, ragged
from tests.test_store import same

TUNNELS = sorted(set(ARCHITECTURES))


def modernbert():
    """Its output embedding is tied, has a bias, and a rule of its own by which it is drawn."""
    sizes = {"vocab_size": 120, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    ids = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    config = transformers.ModernBertDecoderConfig(num_hidden_layers=2, **sizes, **ids)
    return transformers.AutoModelForCausalLM.from_config(config)


def models():
    for name, family in FAMILIES.items():
        yield pytest.param(lambda family=family: family.model(), id=name)
    yield pytest.param(modernbert, id="modernbert-decoder")
    for name in TUNNELS:
        sizes = {"vocabulary": 40, "length": 12, "width": 64, "heads": 4}
        yield pytest.param(lambda name=name, sizes=sizes: build(name, **sizes), id=f"tunnel-{name}")


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("make", [*models()])
def test_every_parameter_is_distributed_as_the_family_initialises_it(make):
    """Judged by transformers' own constructor of the same config: constants are equal, and of what is drawn mean and
    standard deviation agree within the error of both samples."""
    like = make()
    for parameter in like.parameters():
        parameter.data.fill_(7.0)  # nothing of the trained model may be seen
    theirs, ours = controls.initial(like, 0), controls.untrained(like, 0)
    first, second = theirs.state_dict(), controls.initial(like, 1).state_dict()
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}
    for name, x in ours.state_dict().items():
        y = first[name]
        assert x.dtype == y.dtype and x.shape == y.shape
        if not y.is_floating_point() or torch.equal(y, second[name]):
            assert torch.equal(x, y), f"{name} is not random"
            continue
        assert not torch.equal(x, y)
        # Of n independent numbers: sd / sqrt(n) of the mean, sd / sqrt(2 n) of the sd (normal; less where uniform).
        n, sd = y.numel(), float(y.std())
        assert abs(float(x.mean() - y.mean())) < 5 * sd * math.sqrt(2 / n), name
        assert abs(float(x.std()) - sd) < 5 * sd * math.sqrt(1 / n), name
    buffers = dict(ours.named_buffers())
    for name, buffer in theirs.named_buffers():  # rotary frequencies and masks are no part of the state
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_the_seed_alone_decides(name):
    like = FAMILIES[name].model()
    first = controls.untrained(like, 3)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = controls.untrained(FAMILIES[name].model(1), 3)
    assert equal(first, again) and not equal(first, controls.untrained(like, 4))
    assert torch.equal(before, torch.get_rng_state()), "the global generator goes on as if nothing was drawn"
    assert controls.redraw(again, 5) and equal(again, controls.untrained(like, 5)), "what lay there before is gone"
    tied = like.get_input_embeddings().weight is like.get_output_embeddings().weight
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tied


def test_drawing_takes_no_stack_trace(monkeypatch):
    """torch.manual_seed takes one at every call until CUDA starts, and a scan draws thousands of modules."""
    like = FAMILIES["llama"].model()
    monkeypatch.setattr("traceback.format_stack", lambda *_: pytest.fail("a stack trace"))
    assert controls.redraw(controls.untrained(like, 0), 1)


def test_equal_modules_of_two_layers_are_drawn_apart():
    layers = controls.untrained(FAMILIES["llama"].model(), 0).model.layers
    assert not torch.equal(layers[0].self_attn.q_proj.weight, layers[1].self_attn.q_proj.weight)


def test_controls_of_a_run_share_their_memory_and_the_model_keeps_its_weights():
    subject = Subject.of(FAMILIES["llama"].model(), name="tiny")
    weights = copy.deepcopy(subject.model.state_dict())
    places = []
    for seed in (1, 2, 3):
        with subject.control(seed) as control:
            assert same(control.capture(ragged(), Site), subject.untrained(seed).capture(ragged(), Site))
            assert control.facts["untrained"] == seed
            places.append([parameter.data_ptr() for parameter in control.model.parameters()])
    assert places[0] == places[1] == places[2]
    with subject.control(4) as control, subject.control(5) as other:  # two at a time are two
        assert equal(control.model, subject.untrained(4).model) and equal(other.model, subject.untrained(5).model)
    assert all(torch.equal(x, weights[name]) for name, x in subject.model.state_dict().items())


def test_a_control_is_drawn_in_the_precision_of_its_model():
    like = FAMILIES["llama"].model().to(torch.bfloat16)
    control = controls.untrained(like, 0)
    assert {parameter.dtype for parameter in control.parameters()} == {torch.bfloat16}
    assert control.model.rotary_emb.inv_freq.dtype == torch.float32, "a rounded frequency is another position"
    weight = control.model.embed_tokens.weight.detach().float()
    assert abs(float(weight.std()) / like.config.initializer_range - 1) < 5 / math.sqrt(2 * weight.numel())


class Forgetful(transformers.LlamaForCausalLM):
    """Has a parameter that only its constructor sets."""

    def __init__(self, config):
        super().__init__(config)
        self.gain = torch.nn.Parameter(torch.randn(3))


def test_a_parameter_that_only_the_constructor_sets_is_set_by_it(monkeypatch):
    config = FAMILIES["llama"].config()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda config, **_: Forgetful(config))
    control = controls.untrained(Forgetful(config), 2)
    assert control.gain.isfinite().all() and equal(control, controls.initial(control, 2))


def test_a_control_does_not_depend_on_those_before_it(monkeypatch):
    """Where a family needs its constructor, a control that is drawn anew in the same memory is another."""
    config = FAMILIES["llama"].config()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda config, **_: Forgetful(config))
    assert not controls.redraw(controls.untrained(Forgetful(config), 2), 3)
    monkeypatch.undo()
    plain = controls.untrained(transformers.LlamaForCausalLM(config), 2)
    assert controls.redraw(plain, 3) and equal(plain, controls.untrained(plain, 3))


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_an_output_embedding_that_is_the_input_embedding_is_drawn_once(name):
    """The input embedding's row of the padding is 0; drawn again as an output embedding, in Phi with its bias, it would
    not be."""
    config = FAMILIES[name].config()
    config.tie_word_embeddings = True
    control = controls.untrained(transformers.AutoModelForCausalLM.from_config(config), 0)
    for seed in (0, 1):
        assert controls.redraw(control, seed)
        weight = control.model.embed_tokens.weight
        assert control.lm_head.weight is weight and weight[1:].any()
        assert not weight[config.pad_token_id].any()
