"""A head or a block replaced does what plain hooks on the model's own modules do, a prompt at a time."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from llmgeom.batch import Batch, Tokens
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit
from llmgeom.model.subject import Subject
from llmgeom.probes.interventions import component_ablation
from llmgeom.probes.interventions.component_ablation import DONORS, AblationEffects, donors
from llmgeom.probes.interventions.component_probe import ComponentAblation, question
from llmgeom.probes.interventions.patching import PromptRun
from llmgeom.probes.interventions.splits import ESTIMATION, EVALUATION, halves
from llmgeom.record import Record
from llmgeom.stats.ridge_probe import folds
from tests.families import FAMILIES, VOCAB, Family, first, hooked

KINDS = ("gpt_neox", "llama")
HEADS = 8


def random_prompts(seed: int = 0, clusters: int = 12, each: int = 1) -> Batch:
    """Prompts of 3 to 10 random tokens; the pads are random too."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (each * clusters, 10), generator=rng)
    lengths = torch.randint(3, 11, (each * clusters,), generator=rng)
    unit = tuple(str(i // each) for i in range(each * clusters))
    return Batch(Tokens(ids, lengths), unit, {"kind": "random", "name": "r"})


BATCH = random_prompts()
HALF = folds(BATCH.cluster, 0, 2)
FIT, HELD = (BATCH.take(np.flatnonzero(one == HALF)) for one in (0, 1))


def examine(subject: Subject, batch: Batch, kind: str, **options) -> Record:
    return question(subject, batch, kind, **options).record(subject)


def ablated(
    subject: Subject, kind: str, positions: str = "query", batch: Batch = BATCH, task=None, batch_tokens: int = 4096
) -> AblationEffects:
    """The effects alone, from captures made here."""
    estimation, evaluation = halves(batch, 0)
    ablation = ComponentAblation(kind, positions, estimation, 0, batch_tokens, task)
    wanted = ablation.needs.sites | {Site.ENTROPY}
    parts = {ESTIMATION: estimation, EVALUATION: evaluation}
    captures = {half: subject.capture(part, wanted, batch_tokens=batch_tokens) for half, part in parts.items()}
    return ablation.effects(subject, captures)


@pytest.fixture(scope="module", params=KINDS)
def family(request) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def subject(family) -> Subject:
    return Subject.of(family.model(), name=family.name)


@pytest.fixture(scope="module")
def llama() -> Subject:
    return Subject.of(FAMILIES["llama"].model(), name="llama")


# ---- an oracle that shares nothing with edits: plain hooks, a prompt at a time ---------------------------------------


def alone(batch: Batch) -> list[torch.Tensor]:
    return [ids[None, :n] for ids, n in zip(batch.inputs.ids, batch.inputs.lengths.tolist(), strict=True)]


@torch.no_grad()
def last_log_probs(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits[0, -1].double().log_softmax(-1)


@torch.no_grad()
def heads_of(family: Family, model, layer: int, ids: torch.Tensor) -> torch.Tensor:
    """[position head head_dim] what arrives at W_O."""
    seen = []
    output = family.part(model, layer, family.output)
    with hooked(output.register_forward_pre_hook(lambda _m, args: seen.append(args[0][0].clone()))):
        model(ids)
    return seen[0].unflatten(-1, (HEADS, -1)).double()


@torch.no_grad()
def writes_of(family: Family, model, layer: int, path: str, ids: torch.Tensor) -> torch.Tensor:
    """[position d_model] what the module adds."""
    seen = []
    with hooked(family.part(model, layer, path).register_forward_hook(lambda _m, _a, out: seen.append(first(out)))):
        model(ids)
    return seen[0].reshape(ids.shape[1], -1).double().clone()


def head_set(family: Family, model, layer: int, head: int, value: torch.Tensor, at: slice):
    def hook(_module, args):
        z = args[0].clone().unflatten(-1, (HEADS, -1))
        z[0, at, head] = value.float()
        return (z.flatten(-2),)

    return family.part(model, layer, family.output).register_forward_pre_hook(hook)


def write_set(family: Family, model, layer: int, path: str, value: torch.Tensor, at: slice):
    def hook(_module, _args, out):
        x = first(out).clone()
        x[0, at] = value.float()
        return (x, *out[1:]) if isinstance(out, tuple) else x

    return family.part(model, layer, path).register_forward_hook(hook)


def kl_of(model, ids: torch.Tensor, *handles) -> float:
    with hooked(*handles):
        q = last_log_probs(model, ids)
    p = last_log_probs(model, ids)
    return float((p.exp() * (p - q)).sum() / np.log(2))


LAST, LATER = slice(-1, None), slice(1, None)


@pytest.mark.parametrize(("positions", "at"), [("query", LAST), ("all", LATER)])
def test_a_head_set_to_0_or_to_its_mean_is_what_hooks_before_w_o_do(family, subject, positions, at):
    model, made = subject.model, ablated(subject, "heads", positions)
    assert list(made.effects) == (["zero", "mean", "resample"] if positions == "query" else ["zero", "mean"])
    for layer, head in ((0, 1), (0, 6), (1, 0), (1, 7)):
        mean = torch.cat([heads_of(family, model, layer, ids)[at, head] for ids in alone(FIT)]).mean(0)
        part = layer * HEADS + head
        assert made.components[part].name == f"L{layer}H{head}"
        for way, value in (("zero", torch.zeros_like(mean)), ("mean", mean)):
            expected = [kl_of(model, ids, head_set(family, model, layer, head, value, at)) for ids in alone(HELD)]
            assert min(expected) > 1e-5
            np.testing.assert_allclose(made.effects[way]["kl"][part], expected, rtol=2e-3, atol=1e-7)


def test_a_resampled_head_is_what_a_hook_does_that_writes_the_donor_s(family, subject):
    model, made = subject.model, ablated(subject, "heads")
    given = donors(HELD.cluster, DONORS, 0)
    for layer, head in ((0, 2), (1, 5)):
        z = [heads_of(family, model, layer, ids)[-1, head] for ids in alone(HELD)]
        expected = [
            np.mean([kl_of(model, ids, head_set(family, model, layer, head, z[j], LAST)) for j in given[:, i]])
            for i, ids in enumerate(alone(HELD))
        ]
        np.testing.assert_allclose(made.effects["resample"]["kl"][layer * HEADS + head], expected, 2e-3, 1e-7)


@pytest.mark.parametrize(("positions", "at"), [("query", LAST), ("all", LATER)])
def test_branches_and_blocks_are_what_hooks_on_the_writers_do(family, subject, positions, at):
    model, made = subject.model, ablated(subject, "blocks", positions)
    assert list(made.effects) == ["zero", "mean"]
    paths = {"attention": (family.attention_write,), "mlp": (family.mlp_write,)}
    paths["block"] = paths["attention"] + paths["mlp"]
    for i, (name, of) in enumerate(paths.items()):
        for layer in (0, 1):
            assert made.components[2 * i + layer].name == f"L{layer} {name}"
            mean = {p: torch.cat([writes_of(family, model, layer, p, x)[at] for x in alone(FIT)]).mean(0) for p in of}
            for way, values in (("zero", {p: torch.zeros(64) for p in of}), ("mean", mean)):
                expected = [
                    kl_of(model, ids, *(write_set(family, model, layer, p, values[p], at) for p in of))
                    for ids in alone(HELD)
                ]
                np.testing.assert_allclose(made.effects[way]["kl"][2 * i + layer], expected, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize(("name", "embedding", "norm"), [
    ("gpt_neox", "gpt_neox.embed_in", "gpt_neox.final_layer_norm"), ("llama", "model.embed_tokens", "model.norm"),
])  # fmt: skip
def test_bypassing_all_that_writes_leaves_the_embedding(name, embedding, norm):
    """Layer 1 writes nothing; without block 0 the logits are those of the final token's own embedding."""
    family = FAMILIES[name]
    model = family.model()
    with torch.no_grad():
        for path in (family.attention_write, family.mlp_write):
            module = family.part(model, 1, path)
            for parameter in (module.dense if path == "attention" else
                              getattr(module, "o_proj", None) or getattr(module, "down_proj", None)
                              or module.dense_4h_to_h).parameters():  # fmt: skip
                parameter.zero_()
        ends = torch.tensor([int(ids[0, -1]) for ids in alone(HELD)])
        x = model.get_submodule(norm)(model.get_submodule(embedding)(ends))
        q = model.get_output_embeddings()(x).double().log_softmax(-1)
        p = torch.stack([last_log_probs(model, ids) for ids in alone(HELD)])
    made = ablated(Subject.of(model, name=name), "blocks").effects["zero"]["kl"]
    expected = (p.exp() * (p - q)).sum(1) / np.log(2)
    np.testing.assert_allclose(made[4], expected.numpy(), rtol=1e-4)
    assert (made[[1, 3, 5]] == 0).all() and (made[[0, 2, 4]] > 0).all()


def test_an_input_that_is_its_own_donor_is_moved_by_exactly_nothing(subject, monkeypatch):
    before = ablated(subject, "heads").effects["resample"]
    assert (before["kl"] > 0).all()
    monkeypatch.setattr(
        component_ablation, "donors", lambda clusters, count, seed: np.tile(np.arange(len(clusters)), (count, 1))
    )
    after = ablated(subject, "heads").effects["resample"]
    assert (after["kl"] == 0).all() and (after["odds"] == 0).all() and (after["error"] == 0).all()


# ---- donors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clusters", [tuple("aabbbcdde"), tuple("abcdef"), tuple("eeeeeabcd")])
def test_a_donor_is_of_another_unit_and_every_unit_gives_to_one(clusters):
    found, names = donors(clusters, DONORS, 5), np.array(clusters)
    assert found.shape == (DONORS, len(clusters))
    pairs = set()
    for draw in found:
        to = {(own, names[donor]) for own, donor in zip(clusters, draw, strict=True)}
        assert all(own != other for own, other in to)
        assert len(to) == len({other for _, other in to}) == len(set(clusters)), "a permutation of units"
        assert not pairs & to, "nobody gives twice to the same"
        pairs |= to
    random.seed(1)
    np.random.seed(1)
    assert (donors(clusters, DONORS, 5) == found).all() and (donors(clusters, DONORS, 6) != found).any()


def test_any_prompt_of_the_other_unit_may_be_the_donor():
    clusters = tuple("aaabbbccc")
    drawn = {int(d) for seed in range(40) for d in donors(clusters, 2, seed)[0]}
    assert drawn == set(range(9))


# ---- the run --------------------------------------------------------------------------------------------------------


def run_of(subject: Subject, places, positions="query") -> PromptRun:
    pair = subject.capture(HELD, {Site.LOG_PROBS}).log_probs.topk(2).indices
    return PromptRun(subject, HELD, places, positions, subject.entropy(HELD), lambda x: x.sum(1), pair, None)


def test_copies_edited_in_different_places_do_not_mix(llama):
    places = (("z", 0), ("mlp_write", 1), ("value", 1))
    run = run_of(llama, places)
    copies = [{}, *({place: lambda x, _: -0.5 * x} for place in places), dict.fromkeys(places, lambda x, _: -0.5 * x)]
    together = run.run(copies)["kl"]
    assert (together[0] == 0).all() and (together[1:] > 0).all()
    for i in range(1, 5):
        np.testing.assert_allclose(together[i], run.run([copies[i]])["kl"][0], rtol=1e-3, atol=1e-8)


def test_later_positions_are_all_but_the_first(llama):
    seen = []
    run = run_of(llama, (("z", 1),), "later")
    edit = Edit("z", run._edit([{("z", 1): lambda x, _: -x}], ("z", 1)), (1,))
    llama.capture(HELD, {Site.Z}, [edit, Edit("z", lambda x, _: seen.append(x) or x, (1,))])
    (x,) = seen
    assert (x[:, 1:] == 0).all() and (x[:, 0] != 0).any(-1).all()


def test_prompts_of_equal_tokens_are_as_many_as_were_given(llama):
    """Texts can differ where their tokens do not, and a mean counts each."""
    half = folds(BATCH.cluster, 0, 2)
    one, other, *_ = np.flatnonzero(half == 0).tolist()
    ids, lengths = BATCH.inputs.ids.clone(), BATCH.inputs.lengths.clone()
    ids[other], lengths[other] = ids[one], lengths[one]
    batch = replace(BATCH, inputs=Tokens(ids, lengths))
    record = examine(llama, batch, "heads", nulls=1)
    made = ablated(llama, "heads", batch=batch)
    found = record.results["heads_mean"].arrays["kl"].ravel()
    np.testing.assert_allclose(found, made.effects["mean"]["kl"].mean(1), rtol=1e-3, atol=1e-7)


def test_a_single_head_has_an_effect_and_no_share_of_others():
    config = transformers.LlamaConfig(
        hidden_size=16, vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16
    )
    model = transformers.LlamaForCausalLM(config).eval()
    record = examine(Subject.of(model, name="one"), BATCH, "heads", nulls=2)
    measured = record.results["heads_zero"]
    assert [h.name for h in measured.estimates] == ["largest head"]
    assert measured.estimates[0].value == pytest.approx(measured.arrays["kl"].item())
    assert "one head" in record.unmeasured["heads_zero: share of the largest head"]


def test_where_attention_writes_nothing_the_mlps_have_all_of_the_effects(llama):
    """A ratio over an effect of 0 is not measured, and says so; all else is."""
    model = FAMILIES["llama"].model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    measured = examine(Subject.of(model, name="mlps"), BATCH, "blocks", nulls=5)
    assert measured.results["blocks_zero"].arrays["mlp"].min() > 0
    by_name = {h.name: h for h in measured.results["blocks_mean"].estimates}
    share = by_name["MLPs' share of the effects"]
    assert (share.value, share.low, share.high) == (1, 1, 1)
    assert (measured.results["blocks_mean"].arrays["attention"] == 0).all()
    reason = measured.unmeasured["blocks_mean: MLPs over attentions"]
    assert "MLPs over attentions" not in by_name and reason == measured.unmeasured["blocks_zero: MLPs over attentions"]
    assert "0 on every prompt" in reason


def test_a_model_of_one_block_that_works_is_measured_block_by_block():
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, vocab_size=VOCAB, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16
        )
    ).eval()
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    record = examine(Subject.of(model, name="one block"), BATCH, "blocks", nulls=5)
    for method in ("zero", "mean"):
        measured = record.results[f"blocks_{method}"]
        assert measured.arrays["block"][0] > 0 and (measured.arrays["block"][1:] == 0).all()
        assert "relative" not in measured.arrays
        over_0 = {name for name in record.unmeasured if name.startswith(f"blocks_{method}: weakest middle block over")}
        assert len(over_0) == 2 and "MLPs over attentions" in {h.name for h in measured.estimates}


def test_donors_do_not_follow_the_names_of_clusters():
    names = [str(i // 2) for i in range(24)]
    renamed = [f"{'zyx'[int(name) % 3]}{name}" for name in names]
    np.testing.assert_array_equal(donors(names, DONORS, 0), donors(renamed, DONORS, 0))
