"""The matrices of a head, judged by what the model computes with them."""

import copy

import pytest
import torch
import transformers

from llmgeom.errors import Unavailable, UserError
from llmgeom.model import weights
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.wind_tunnels.models.architectures import build
from tests.families import FAMILIES, apart, first, hooked, prompts, ragged
from tests.refusals import refused

TOLERANCE = 1e-5


class Case:
    """A subject, what attention was given and gave back in each layer (by hooks), and the capture of that prompt."""

    def __init__(self, family) -> None:
        self.family = family
        self.subject = Model.of(family.model(), name=family.name)
        self.heads, self.kv_heads = self.subject.facts["heads"], self.subject.facts["kv_heads"]
        batch = ragged(lengths=(23,))
        self.capture: Capture = self.subject.capture(batch, {*Site}, positions="all")
        self.given, self.returned = [], []

        def hook(_module, args, kwargs, out):
            self.given.append((args[0] if args else kwargs["hidden_states"])[0])
            self.returned.append(first(out)[0])

        model = self.subject.model
        handles = [
            family.part(model, layer, family.attention).register_forward_hook(hook, with_kwargs=True)
            for layer in range(len(self.subject.blocks))
        ]
        with torch.no_grad(), hooked(*handles):
            model(prompts(batch)[0])


@pytest.fixture(scope="module", params=FAMILIES)
def case(request) -> Case:
    return Case(FAMILIES[request.param])


def test_x_times_w_v_is_the_captured_value(case):
    for layer, x in enumerate(case.given):
        for head in range(case.kv_heads):
            w, b = weights.input_weights(case.subject, layer, "value", head)
            assert apart(x @ w + b, case.capture.value[layer][:, head]) < TOLERANCE


@pytest.mark.parametrize("what", ["key", "query"])
def test_x_times_w_k_or_w_q_is_what_was_captured_where_the_rotary_angle_is_zero(case, what):
    """At position 0 the rotary angle is 0; GPT-2 and OPT rotate nothing, and agree everywhere."""
    positions = slice(None) if case.family.name in ("gpt2", "opt") else slice(1)
    heads = range(case.kv_heads if what == "key" else case.heads)
    scale = 1 if what == "key" else case.family.query_scale  # OPT's own
    for layer, x in enumerate(case.given):
        pairs = [weights.input_weights(case.subject, layer, what, h) for h in heads]
        made = torch.stack([x @ w + b for w, b in pairs], 1) * scale
        difference = apart(made[positions], case.capture[Site(what), layer][positions])
        assert difference > 0.1 if case.family.key_norm else difference < TOLERANCE


def test_z_times_w_o_summed_over_heads_is_what_attention_returns(case):
    for layer, returned in enumerate(case.returned):
        total = sum(
            case.capture.z[layer][:, head] @ weights.output_weight(case.subject, layer, head)
            for head in range(case.heads)
        )
        bias = weights.output_projection(case.subject, layer).bias
        assert apart(total if bias is None else total + bias.detach(), returned) < TOLERANCE


def llama() -> Model:
    return Model.of(FAMILIES["llama"].model(), name="tiny")


@pytest.mark.parametrize(
    ("read", "layer", "head", "message"),
    [
        (weights.query_weight, 2, 0, "layer 2"),
        (weights.query_weight, 0, 8, "head 8"),
        (weights.output_weight, 0, -1, "head -1"),
        (weights.key_weight, 0, 2, "kv_head 2"),
        (weights.value_weight, 0, 5, "kv_head 5"),
    ],
)
def test_a_head_that_is_not_there_is_refused(read, layer, head, message):
    with refused(UserError, message):
        read(llama(), layer, head)


def test_offloaded_weights_are_unavailable():
    subject = llama()
    attention = subject.blocks[1].attention
    attention.v_proj, attention.o_proj = attention.v_proj.to("meta"), attention.o_proj.to("meta")
    weights.value_weight(subject, 0, 0)
    for read in (weights.value_weight, weights.output_weight):
        with refused(Unavailable, "layer 1", "tiny", "--device-map"):
            read(subject, 1, 0)


def test_an_unknown_layout_is_unavailable():
    """GPT-BigCode fuses one key and one value to many queries, in a module of GPT-2's name."""
    config = transformers.GPTBigCodeConfig(
        vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1
    )
    subject = Model.of(transformers.GPTBigCodeForCausalLM(config), name="tiny")
    with refused(Unavailable, "tiny", "gpt_bigcode", "value weights"):
        weights.value_weight(subject, 0, 0)


def test_a_model_without_attention_has_no_attention_weights():
    subject = Model.of(build("lstm", vocabulary=8, length=4, width=8, layers=1), name="tiny")
    for read in (weights.query_weight, weights.key_weight, weights.value_bias, weights.output_weight):
        with refused(Unavailable, "tiny", "lstm"):
            read(subject, 0, 0)


def test_a_projection_of_another_width_is_not_taken_for_a_known_one():
    """Gated attention (Qwen3-Next) makes queries and gates in one q_proj: cutting it as usual would mix the two."""
    subject = llama()
    attention = subject.blocks[0].attention
    attention.q_proj = torch.nn.Linear(64, 2 * 64, bias=False)
    with refused(Unavailable, "llama", "query weights"):
        weights.query_weight(subject, 0, 0)


def test_a_matrix_is_small_and_the_model_s_own_is_out_of_reach(case):
    before = copy.deepcopy(case.subject.model.state_dict())
    matrices = (weights.query_weight, weights.key_weight, weights.value_weight, weights.output_weight)
    for read in (*matrices, weights.value_bias):
        w = read(case.subject, 1, 0)
        assert not w.requires_grad and w.untyped_storage().nbytes() == w.numel() * w.itemsize
        w.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in case.subject.model.state_dict().items())
