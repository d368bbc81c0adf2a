"""One suite that every family passes: what is captured is what the family's own code computed."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import UnsupportedModel
from llmgeom.model import attention as attention_module
from llmgeom.model.batching import plan_batches
from llmgeom.model.capture import ROWS, Capture, Site
from llmgeom.model.model import Model
from tests.families import FAMILIES, LENGTHS, Family, apart, hooked, outputs, prompts, ragged
from tests.refusals import refused

TOLERANCE = 1e-5  # of the rms, float32


@dataclass
class Case:
    """A family's tiny model, the same weights under eager attention, and what we capture of four ragged prompts."""

    family: Family
    model: Any
    eager: Any
    subject: Model
    batch: Batch

    @cached_property
    def final(self) -> Capture:
        return self.subject.capture(self.batch, Site)

    @cached_property
    def whole(self) -> Capture:
        return self.subject.capture(self.batch, Site, positions="all")

    @property
    def layers(self) -> range:
        return range(len(self.subject.blocks))

    def of_prompt(self, site: Site, layer: int, prompt: int) -> Tensor:
        """The rows of one prompt at all its positions, in order."""
        return self.whole.tensors[site, layer][self.whole.prompt == prompt]

    @cached_property
    def attentions(self) -> list[tuple[Tensor, ...]]:
        """Per prompt, run alone: the eager softmax matrices [head seq seq] of every layer."""
        with torch.no_grad():
            runs = [self.eager(ids, output_attentions=True).attentions for ids in prompts(self.batch)]
        return [tuple(layer[0] for layer in run) for run in runs]

    def outputs(self, *paths: str) -> list[list[Tensor]]:
        """Per prompt, run alone: outputs of the modules at `paths`, layer by layer and path by path."""
        modules = [self.family.part(self.model, i, path) for i in self.layers for path in paths]
        return [outputs(self.model, modules, ids) for ids in prompts(self.batch)]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request) -> Case:
    family = FAMILIES[request.param]
    model, eager = family.model(), family.model(eager=True)
    eager.load_state_dict(model.state_dict())
    return Case(family, model, eager, Model.of(model, name=family.name), ragged())


def test_the_models_of_this_suite_attend_sharply(case):
    """Flat rows are right under a wrong scale and nearly right under a wrong mask."""
    share = [
        torch.special.entr(rows).sum(-1).mean() / math.log(length)
        for run, length in zip(case.attentions, LENGTHS, strict=True)
        for rows in (layer[:, -1] for layer in run)
    ]
    assert float(torch.stack(share).mean()) < 0.5


def test_every_position_s_attention_row_equals_eager_attention(case):
    for prompt, length in enumerate(LENGTHS):
        for layer in case.layers:
            captured = case.of_prompt(Site.ATTENTION, layer, prompt).transpose(0, 1)
            assert (captured[:, :, :length] - case.attentions[prompt][layer]).abs().max() < TOLERANCE
            assert (captured[:, :, length:] == 0).all()


def test_row_summaries_are_those_of_the_eager_rows(case):
    for prompt in range(len(LENGTHS)):
        for layer in case.layers:
            rows = case.attentions[prompt][layer].transpose(0, 1).double()
            entropy = -(rows * rows.clamp_min(1e-300).log()).sum(-1)
            assert (case.of_prompt(Site.ATTENTION_ENTROPY, layer, prompt) - entropy).abs().max() < TOLERANCE
            assert (case.of_prompt(Site.ATTENTION_FIRST, layer, prompt) - rows[..., 0]).abs().max() < TOLERANCE
            rest = rows[..., 1:] / rows[..., 1:].sum(-1, keepdim=True).clamp_min(1e-300)
            entropy = -(rest * rest.clamp_min(1e-300).log()).sum(-1)
            assert (case.of_prompt(Site.ATTENTION_REST, layer, prompt) - entropy).abs().max() < TOLERANCE


def test_keys_and_values_equal_the_kv_cache(case):
    for prompt, ids in enumerate(prompts(case.batch)):
        with torch.no_grad():
            cache = case.model(ids, use_cache=True).past_key_values
        for layer in case.layers:
            for site, cached in ((Site.KEY, cache.layers[layer].keys), (Site.VALUE, cache.layers[layer].values)):
                cached = cached[0].transpose(0, 1)  # a layer with a window caches only its last positions
                assert apart(case.of_prompt(site, layer, prompt)[-len(cached) :], cached) < TOLERANCE


def test_queries_and_keys_give_the_rows(case):
    """Captured q and k under the family's own scale and cap are eager's rows (here one that no window cuts)."""
    for layer in case.layers:
        attention = case.family.part(case.model, layer, case.family.attention)
        q, k = case.of_prompt(Site.QUERY, layer, 0)[6], case.of_prompt(Site.KEY, layer, 0)[:7]
        k = k.repeat_interleave(len(q) // k.shape[1], dim=1)
        scores = torch.einsum("hd,khd->hk", q, k) * (attention.scaling / case.family.query_scale)
        cap = getattr(attention, "attn_logit_softcapping", None)
        scores = scores if cap is None else cap * (scores / cap).tanh()
        sinks = getattr(attention, "sinks", torch.empty(0)).detach()  # GPT-OSS: a learned weight on nothing
        rows = torch.cat([scores, sinks.view(len(q), -1)], dim=1).softmax(-1)[:, :7]
        assert (rows - case.attentions[0][layer][:, 6, :7]).abs().max() < TOLERANCE


def test_writes_are_what_is_added_to_the_residual_stream(case):
    paths = ("", case.family.attn_out, case.family.mlp_out)
    for prompt, outs in enumerate(case.outputs(*paths)):
        stream = outs[::3]
        for layer in case.layers:
            _, attention, mlp = outs[3 * layer : 3 * layer + 3]
            before = case.of_prompt(Site.RESIDUAL, layer, prompt)
            after = case.of_prompt(Site.RESIDUAL, layer + 1, prompt)
            assert apart(after, stream[layer]) < TOLERANCE
            assert apart(case.of_prompt(Site.ATTN_OUT, layer, prompt), attention) < TOLERANCE
            assert apart(case.of_prompt(Site.MLP_OUT, layer, prompt), mlp) < TOLERANCE
            assert apart(before + attention + mlp, after) < TOLERANCE


def test_z_times_w_o_is_what_attention_returns(case):
    for prompt, returned in enumerate(case.outputs(case.family.attention)):
        for layer in case.layers:
            z = case.of_prompt(Site.Z, layer, prompt).flatten(1)
            with torch.no_grad():
                assert apart(case.family.part(case.model, layer, case.family.output)(z), returned[layer]) < TOLERANCE


def test_logits_are_bit_equal_with_and_without_capture(case):
    tokens = case.batch.inputs
    order = torch.tensor(plan_batches(LENGTHS)[0])
    rows = (torch.arange(len(order)), tokens.lengths[order] - 1)
    keep = case.model.get_output_embeddings().register_forward_pre_hook(lambda _m, a: (a[0][rows][:, None],))
    with torch.no_grad(), hooked(keep):
        plain = case.model(tokens.ids[order], use_cache=False).logits[:, 0].log_softmax(-1)
    assert torch.equal(case.final.log_probs[order], plain)
    assert torch.equal(case.subject.capture(case.batch, {Site.LOG_PROBS}).log_probs, case.final.log_probs)


def test_log_probs_and_entropy_are_those_of_the_full_forward(case):
    for row, ids in enumerate(prompts(case.batch)):
        with torch.no_grad():
            log_probs = case.model(ids).logits[0, -1].log_softmax(-1)
        assert (case.final.log_probs[row] - log_probs).abs().max() < TOLERANCE
        entropy = torch.distributions.Categorical(logits=log_probs).entropy()
        assert abs(float(case.final.entropy[row]) - float(entropy) / math.log(2)) < TOLERANCE
        bits = case.subject.entropy(case.batch)[row]
        assert bits == pytest.approx(float(entropy) / math.log(2), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("order", "batch_tokens"),
    [((0, 1, 2, 3), 23), ((2, 3, 0, 1), 46), ((3,), 4096)],
    ids=["alone", "pairs, permuted", "only the shortest"],
)
def test_order_and_packing_do_not_matter(case, order, batch_tokens):
    again = case.subject.capture(case.batch.take(order), Site, batch_tokens=batch_tokens)
    assert again.prompt.tolist() == list(range(len(order)))
    assert again.position.tolist() == [LENGTHS[i] - 1 for i in order]
    assert set(again.tensors) == set(case.final.tensors)
    for (site, layer), tensor in again.tensors.items():
        all_four = case.final.tensors[site, layer]
        expected = all_four[list(order)]
        if site == Site.ATTENTION:
            expected = expected[..., : tensor.shape[-1]]
        # Weights and nats have a unit of their own; a site without activity has no rms.
        scale = torch.ones(()) if site in ROWS else all_four
        assert apart(tensor, expected, of=scale) < TOLERANCE, (site, layer)


def test_all_positions_agree_with_the_queried_ones_at_the_end(case):
    ends = case.whole.position == case.whole.lengths[case.whole.prompt] - 1
    assert case.whole.prompt.bincount().tolist() == list(LENGTHS)
    for key, tensor in case.final.tensors.items():
        assert apart(case.whole.tensors[key][ends], tensor) < TOLERANCE, key


def test_queried_positions_are_the_rows_kept_in_order(llama):
    batch, whole = ragged(), llama.capture(ragged(), Site, positions="all")
    query = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.bool)
    query[0, [3, 20]] = query[2, 0] = True  # and nothing of the other two
    query[3, 5] = True  # beyond the end of its prompt: not a position
    capture = llama.capture(Batch(batch.inputs, batch.cluster, {}, query=query), Site, batch_tokens=23)
    assert list(zip(capture.prompt.tolist(), capture.position.tolist(), strict=True)) == [(0, 3), (0, 20), (2, 0)]
    starts = torch.tensor((0, *LENGTHS)).cumsum(0)
    same = [int(starts[prompt]) + position for prompt, position in ((0, 3), (0, 20), (2, 0))]
    for key, tensor in capture.tensors.items():
        expected = whole.tensors[key][same]
        expected = expected[..., : tensor.shape[-1]] if key[0] == Site.ATTENTION else expected
        assert apart(tensor, expected, of=whole.tensors[key]) < TOLERANCE, key


def test_short_prompts_beside_long_ones_are_read_as_alone_under_longrope():
    """Above its border LongRoPE turns every prompt of a batch by other angles: Phi-3 128k, here with border 16."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0], "factor": 4.0}
    border = {"original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | border | factors
    family = FAMILIES["phi3"]
    model = replace(family, settings=family.settings | border | {"rope_parameters": rope}).model()
    batch = ragged(lengths=(23, 9, 17, 2, 16))
    seen = Model.of(model).capture(batch, {Site.LOG_PROBS}).log_probs
    with torch.no_grad():
        alone = torch.stack([model(ids).logits[0, -1].log_softmax(-1) for ids in prompts(batch)])
    assert (seen - alone).abs().max() < TOLERANCE


def test_check_passes_with_tiny_numbers(case):
    report = case.subject.check()
    assert set(report) == {"logits", "states", "rows", "residual"}
    assert report["logits"] == report["states"] == 0
    assert max(report.values()) < TOLERANCE


def test_check_passes_in_bfloat16_where_a_coordinate_is_far_larger_than_the_others(case):
    """As in real models: rounding is a share of a number, and more than .05 of the rms for the largest."""
    model = case.family.model()
    for layer in case.layers:
        attention = case.family.part(model, layer, case.family.attention)

        def enlarged(_module, _args, out, attention=attention, last=case.subject.facts["kv_heads"] - 1):
            case.family.values(out, attention)[..., last, 0] *= 100  # a view of what is returned
            return out

        case.family.part(model, layer, case.family.projection).register_forward_hook(enlarged)
    report = Model.of(model.to(torch.bfloat16)).check()
    assert report["logits"] == 0 and report["rows"] < 0.025


def test_check_finds_a_wrong_scale(case, monkeypatch):
    right = attention_module.attention_rows
    monkeypatch.setattr(
        attention_module, "attention_rows", lambda *a, scaling, **kw: right(*a, scaling=1.1 * scaling, **kw)
    )
    with refused(UnsupportedModel, "check"):
        case.subject.check()


def test_check_finds_a_mask_that_transformers_no_longer_makes(case, monkeypatch):
    """Without our mask function every mask is dropped in silence; a window shows it, plain causality survives it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name in (attention_module.FUSED, attention_module.PLAIN):
        monkeypatch.delitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name)
    if case.family.window:
        with refused(UnsupportedModel, "check"):
            case.subject.check()
    else:
        assert max(case.subject.check().values()) < TOLERANCE
