"""What TransformerLens is made to say is what transformers computed; and where it cannot, it is said aloud."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import Unavailable, UnsupportedModel
from llmgeom.model.capture import Capture, Site
from llmgeom.model.edits import Edit
from llmgeom.model.model import Model
from tests.families import FAMILIES, VOCAB, WIDE, Family, apart, first, hooked, outputs, prompts, ragged
from tests.refusals import refused

# The models of this file are float64: sharp attention amplifies rounding, and this leaves only mistakes to be seen.
TOLERANCE = 1e-5  # of the rms


WINDOW, HEADS = 5, 8


def of_head(projected: Tensor, attention) -> Tensor:
    """BLOOM: for each head its query, key and value."""
    return projected.unflatten(-1, (-1, 3, attention.head_dim))[..., 2, :]


_usual = {"layers": "transformer.h", "attention": "attn", "attn_out": "attn", "output": "out_proj"}


_gpt = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}


CASES = {
    "gptj": Family(
        "gptj", _gpt | {"n_embd": 64, "n_layer": 3, "n_head": HEADS, "n_positions": 64, "rotary_dim": 4}, **_usual
    ),
    "gpt_neo": Family(
        "gpt_neo",
        WIDE
        | {"num_layers": 4, "num_heads": HEADS, "window_size": WINDOW, "attention_types": [[["global", "local"], 2]]},
        **_usual | {"attention": "attn.attention", "attn_out": "attn.attention"},
        sharpen=1.5,
    ),
    "bloom": Family(
        "bloom",
        _gpt | {"hidden_size": 64, "n_layer": 3, "n_head": HEADS},
        attn_out="self_attention.dense",
        mlp_out="mlp.dense_4h_to_h",
        values=of_head,
        layers="transformer.h",
        attention="self_attention",
        projection="query_key_value",
        output="dense",
        sharpen=3.0,
    ),
}


AS_CONSUMED = {"gpt_neo", "bloom"}


@dataclass
class Case:
    """A tiny model that no backend has touched, another of the same weights that the bridge read, and what it said."""

    id: str
    family: Family
    model: Any
    subject: Model
    batch: Batch

    @cached_property
    def whole(self) -> Capture:
        wanted = set(Site) if self.id in AS_CONSUMED else set(Site) - {Site.KEY, Site.QUERY}
        return self.subject.capture(self.batch, wanted, positions="all")

    @property
    def depth(self) -> int:
        return self.model.config.num_hidden_layers

    def modules(self, path: str) -> list[Any]:
        return [self.family.part(self.model, i, path) for i in range(self.depth)]

    def rows(self, site: Site, prompt: int) -> list[Tensor]:
        """Layer by layer, the rows of one prompt in order of position."""
        return [x[self.whole.prompt == prompt] for x in self.whole.layers(site)]

    def agree(self, site: Site, expected: list[list[Tensor]]) -> None:
        """`expected` by prompt and layer."""
        for prompt, layers in enumerate(expected):
            for mine, theirs in zip(self.rows(site, prompt), layers, strict=True):
                assert apart(mine, theirs) < TOLERANCE


@pytest.fixture(scope="module", params=CASES)
def case(request) -> Case:
    family = CASES[request.param]
    subject = Model.of(family.model().double(), name=request.param, backend="tl")
    return Case(request.param, family, family.model().double(), subject, ragged())


@torch.no_grad()
def attentions(case: Case) -> list[list[Tensor]]:
    """By prompt and layer, softmax rows of transformers' eager attention [head seq seq], each prompt alone."""
    eager = case.family.model(eager=True).double()
    return [[x[0] for x in eager(ids, output_attentions=True).attentions] for ids in prompts(case.batch)]


@torch.no_grad()
def cached(case: Case) -> list[Any]:
    return [case.model(ids, use_cache=True).past_key_values.layers for ids in prompts(case.batch)]


def test_values_are_what_the_model_projects_and_caches(case):
    modules, attention = case.modules(case.family.projection), case.modules(case.family.attention)
    runs = [zip(outputs(case.model, modules, ids), attention, strict=True) for ids in prompts(case.batch)]
    case.agree(Site.VALUE, [[case.family.values(out, module) for out, module in run] for run in runs])
    case.agree(Site.VALUE, [[x.values[0].transpose(0, 1) for x in layers] for layers in cached(case)])


def test_keys_are_what_the_model_caches_or_are_refused(case):
    if case.id in AS_CONSUMED:
        case.agree(Site.KEY, [[x.keys[0].transpose(0, 1) for x in layers] for layers in cached(case)])
        return
    for site in (Site.KEY, Site.QUERY):
        with refused(Unavailable, site.value, "rotary"):
            case.subject.capture(case.batch, {site})


def test_rows_are_those_of_eager_attention(case):
    width = case.whole.attention.shape[-1]  # what lies beyond a prompt has weight 0
    wide = [[torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in run] for run in attentions(case)]
    case.agree(Site.ATTENTION, [[x.transpose(0, 1) for x in layers] for layers in wide])


def test_z_is_the_input_of_the_output_projection(case):
    expected = []
    for ids in prompts(case.batch):
        seen: list[Tensor] = []
        modules = case.modules(case.family.output)
        hooks = [m.register_forward_pre_hook(lambda _m, a, seen=seen: seen.append(a[0])) for m in modules]
        with hooked(*hooks), torch.no_grad():
            case.model(ids)
        expected.append([x[0].unflatten(-1, (HEADS, -1)) for x in seen])
    case.agree(Site.Z, expected)


def test_writes_and_residual_are_the_outputs_of_their_modules(case):
    for site, path in ((Site.ATTN_OUT, case.family.attn_out), (Site.MLP_OUT, case.family.mlp_out)):
        modules = case.modules(path)
        case.agree(site, [outputs(case.model, modules, ids) for ids in prompts(case.batch)])
    layers = [case.family.layer(case.model, i) for i in range(case.depth)]
    with torch.no_grad():
        embedded = [case.model(ids, output_hidden_states=True).hidden_states[0][0] for ids in prompts(case.batch)]
    runs = [outputs(case.model, layers, ids) for ids in prompts(case.batch)]
    case.agree(Site.RESIDUAL, [[x, *run] for x, run in zip(embedded, runs, strict=True)])


def test_log_probabilities_and_entropy_are_the_models(case):
    with torch.no_grad():
        expected = [[case.model(ids).logits[0].log_softmax(-1)] for ids in prompts(case.batch)]
    case.agree(Site.LOG_PROBS, expected)
    case.agree(Site.ENTROPY, [[-(x[0].exp() * x[0]).sum(-1)] for x in expected])


def test_the_self_check_passes(case):
    report = case.subject.check()
    assert max(report["logits"], report["rows"], report["residual"]) < 1e-5 and "writes" not in report


def bend(x: Tensor) -> Tensor:
    """Not linear, and another thing for each head and coordinate: an edit in the wrong layout would show."""
    ramp = torch.arange(x[0, 0].numel(), dtype=x.dtype).view(x.shape[2:])
    return 0.3 * x + torch.sin(x + ramp)


def hook(case: Case, point: str, layer: int):
    """The same change made by a plain hook on the untouched model."""
    if point == "z":
        module = case.family.part(case.model, layer, case.family.output)
        return module.register_forward_pre_hook(
            lambda _m, a: (bend(a[0].unflatten(-1, (HEADS, -1))).flatten(-2), *a[1:])
        )
    if point == "value":
        attention = case.family.part(case.model, layer, case.family.attention)

        def change(_m, _a, out):
            out = out.clone()
            values = case.family.values(out, attention)
            values.copy_(bend(values))
            return out

        return case.family.part(case.model, layer, case.family.projection).register_forward_hook(change)
    path = case.family.attn_out if point == "attn_out" else case.family.mlp_out
    return case.family.part(case.model, layer, path).register_forward_hook(
        lambda _m, _a, out: (bend(out[0]), *out[1:]) if isinstance(out, tuple) else bend(first(out))
    )


@pytest.mark.parametrize("point", ["value", "z", "attn_out", "mlp_out"])
def test_an_edit_does_what_a_plain_hook_does(case, point):
    edit = Edit(point, lambda x, where: bend(x), layers=(1,))
    seen = case.subject.capture(case.batch, {Site.LOG_PROBS, Site.RESIDUAL}, [edit])
    untouched = case.subject.capture(case.batch, {Site.LOG_PROBS}).log_probs
    with hooked(hook(case, point, 1)), torch.no_grad():
        expected = torch.stack([case.model(ids).logits[0, -1].log_softmax(-1) for ids in prompts(case.batch)])
    assert apart(seen.log_probs, expected) < TOLERANCE
    assert apart(untouched, expected) > 1e-2


@pytest.mark.parametrize("point", ["query", "key", "scores", "attention"])
def test_an_edit_that_the_bridge_cannot_make_is_refused_by_its_name(case, point):
    with refused(Unavailable, point, "residual, value, z", "leave --backend tl out"):
        case.subject.edit(point, 0).capture(ragged(), {Site.LOG_PROBS})


@pytest.mark.parametrize("name", ["gpt_neox", "mistral", "gpt2"])
def test_both_backends_say_the_same(name):
    model, batch = FAMILIES[name].model().double(), ragged()
    ours, lens = Model.of(model, name=name), Model.of(model, name=name, backend="tl")
    assert {k: ours.facts[k] for k in ("kv_heads", "head_dim", "window")} == {
        k: lens.facts[k] for k in ("kv_heads", "head_dim", "window")
    }
    sites = set(Site) - ({Site.KEY, Site.QUERY} if name == "gpt_neox" else set())
    for edits in (
        [],
        [Edit("value", lambda x, where: bend(x), layers=(0,)), Edit("z", lambda x, where: bend(x), layers=(1,))],
        [Edit("attn_out", lambda x, where: bend(x)), Edit("mlp_out", lambda x, where: -x, positions="query")],
    ):
        a, b = (s.capture(batch, sites, edits, positions="all") for s in (ours, lens))
        assert a.tensors.keys() == b.tensors.keys()
        assert max(apart(b.tensors[key], a.tensors[key]) for key in a.tensors) < TOLERANCE
    with refused(Unavailable, "rotary") if name == "gpt_neox" else hooked():
        lens.capture(batch, {Site.QUERY})


def test_a_bridge_that_reads_otherwise_is_refused():
    """TransformerLens 4.3 takes Falcon-40B's fused rows for [all queries, all keys, all values]."""
    shape = {"num_hidden_layers": 3, "num_attention_heads": HEADS, "new_decoder_architecture": True, "num_kv_heads": 2}
    model = Family("falcon", WIDE | shape).model()
    with refused(UnsupportedModel, "TransformerLens"):
        Model.of(model, name="falcon", backend="tl").check()


def test_load_through_the_bridge(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(tmp_path)
    CASES["bloom"].model().save_pretrained(tmp_path)
    subject = Model.load(str(tmp_path), backend="tl", device="cpu")
    assert subject.facts["dtype"] == "float32"
    assert subject.forward.backend == "tl" and subject.facts["self_check"]["logits"] < 1e-4
    with refused(Unavailable, "--backend tl reads it"):
        Model.load(str(tmp_path), device="cpu").capture("3 4", "key")


@torch.no_grad()
@pytest.mark.parametrize("name", ["mpt", "opt"])
def test_keys_of_a_model_without_rotary_embedding_are_given(name):
    """MPT adds ALiBi to its scores, OPT has learned positions: what is projected is what attention consumes. (OPT
    scales its queries first.)"""
    shape = {"d_model": 64, "n_heads": 8, "n_layers": 2, "max_seq_len": 64, "vocab_size": VOCAB}
    mpt = Family("mpt", shape, layers="transformer.blocks", attention="attn", projection="Wqkv")
    family = mpt if name == "mpt" else FAMILIES["opt"]
    model, sites = family.model().double(), ("query", "key") if name == "mpt" else ("key",)
    seen = Model.of(model, name=name, backend="tl").capture(ragged(), sites, positions="all")
    projection = family.layer(model, 1).get_submodule("attn.Wqkv" if name == "mpt" else "self_attn.k_proj")
    for prompt, ids in enumerate(prompts(ragged())):
        (projected,) = outputs(model, [projection], ids)
        for site, wanted in zip(sites, projected.split(64, -1), strict=False):
            assert apart(seen[site, 1][seen.prompt == prompt].flatten(1), wanted) < TOLERANCE


@pytest.mark.parametrize("case", sorted(AS_CONSUMED), indirect=True)
def test_rows_are_the_softmax_of_queries_and_keys(case):
    """GPT-Neo: q.k, local in every second layer. BLOOM: q.k / sqrt(d) + slope j."""
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    width = case.whole.attention.shape[-1]
    for prompt in range(len(case.batch)):
        triples = zip(*(case.rows(s, prompt) for s in (Site.QUERY, Site.KEY, Site.ATTENTION)), strict=True)
        for layer, (q, k, rows) in enumerate(triples):
            scores = torch.einsum("ihd,jhd->hij", q, k)
            j = torch.arange(len(q))
            distance = j[:, None] - j
            reach = WINDOW if case.id == "gpt_neo" and layer % 2 else width
            if case.id != "gpt_neo":
                scores = scores / 8**0.5 + slopes[:, None, None] * j
            scores[:, (distance < 0) | (distance >= reach)] = -math.inf
            expected = torch.nn.functional.pad(scores.softmax(-1).transpose(0, 1), (0, width - len(q)))
            assert apart(rows, expected) < TOLERANCE
            assert (rows[expected == 0] == 0).all()


def test_the_given_model_is_left_as_it_came(case):
    given, fresh = case.subject.model, case.model
    assert list(given.state_dict()) == list(fresh.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(given.parameters(), fresh.parameters(), strict=True))
    assert given.config._attn_implementation == fresh.config._attn_implementation
    ids = prompts(case.batch)[0]
    with torch.no_grad():
        assert torch.equal(given(ids).logits, fresh(ids).logits)


def test_a_twin_is_read_by_the_same_backend(case):
    control = case.subject.untrained(seed=3)
    again = case.subject.untrained(seed=3)
    assert control.forward.backend == "tl" and control.weight_hash == again.weight_hash != case.subject.weight_hash
    control.check()
