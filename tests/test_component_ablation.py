"""Ablation of heads and blocks: as plain hooks on the model's own modules, and what stands out is what was planted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from scipy import stats as scipy_stats

from llmgeom.batch import Batch, Tokens
from llmgeom.commands.ablate import RunConfig, prepare
from llmgeom.model import intervention
from llmgeom.model.capture import Site
from llmgeom.model.intervention import Intervention, two_stages
from llmgeom.model.model import Model
from llmgeom.probes.interventions import component_ablation
from llmgeom.probes.interventions.component_ablation import DONORS, METHODS, ComponentProbe, donors, question
from llmgeom.probes.interventions.component_results import (
    BRANCH,
    EVIDENCE,
    LARGEST,
    MLP_NORM,
    MLP_SHARE,
    OVER_LAST,
    OVER_MEDIAN,
    SECOND,
    SHARE,
    WEAKEST,
    block_fractions,
    head_fractions,
)
from llmgeom.probes.interventions.halves import ESTIMATION, EVALUATION, halves
from llmgeom.probes.shared.nulls import cross_selected
from llmgeom.prompts import text as in_text
from llmgeom.record import Record
from llmgeom.result import SENTENCE
from llmgeom.run import Run
from llmgeom.stats.ridge_probe import folds
from llmgeom.wind_tunnels import load_world
from tests.families import FAMILIES, VOCAB, Family, first, hooked
from tests.test_axis_ablation import runner_of

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


def examine(subject: Model, batch: Batch, kind: str, **options) -> Record:
    return Run(question(subject, batch, kind, **{"positions": "query", **options})).record()  # direct effects


def ablated(
    subject: Model, kind: str, positions: str = "query", batch: Batch = BATCH, task=None, batch_tokens: int = 4096
) -> dict[str, dict[str, np.ndarray]]:
    """Method -> outcome -> [component prompt], from captures made here."""
    parts = dict(zip((ESTIMATION, EVALUATION), halves(batch, 0), strict=True))
    made = {}
    for method in METHODS[kind]:
        if method != "resample" or task is not None or positions == "query":
            probe = ComponentProbe(kind, method, positions, 0, batch_tokens, task)
            sites = probe.NEEDS.sites | {Site.ENTROPY}
            captures = {half: subject.capture(part, sites, batch_tokens=batch_tokens) for half, part in parts.items()}
            made[method] = probe.effects(subject, captures)
    return made


@pytest.fixture(scope="module", params=KINDS)
def family(request) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def subject(family) -> Model:
    return Model.of(family.model(), name=family.name)


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
    assert list(made) == (["zero", "mean", "resample"] if positions == "query" else ["zero", "mean"])
    for layer, head in ((0, 1), (0, 6), (1, 0), (1, 7)):
        mean = torch.cat([heads_of(family, model, layer, ids)[at, head] for ids in alone(FIT)]).mean(0)
        part = layer * HEADS + head
        for way, value in (("zero", torch.zeros_like(mean)), ("mean", mean)):
            expected = [kl_of(model, ids, head_set(family, model, layer, head, value, at)) for ids in alone(HELD)]
            assert min(expected) > 1e-5
            np.testing.assert_allclose(made[way]["kl"][part], expected, rtol=2e-3, atol=1e-7)


def test_a_resampled_head_is_what_a_hook_does_that_writes_the_donor_s(family, subject):
    model, made = subject.model, ablated(subject, "heads")
    given = donors(HELD.cluster, DONORS, 0)
    for layer, head in ((0, 2), (1, 5)):
        z = [heads_of(family, model, layer, ids)[-1, head] for ids in alone(HELD)]
        expected = [
            np.mean([kl_of(model, ids, head_set(family, model, layer, head, z[j], LAST)) for j in given[:, i]])
            for i, ids in enumerate(alone(HELD))
        ]
        np.testing.assert_allclose(made["resample"]["kl"][layer * HEADS + head], expected, 2e-3, 1e-7)


@pytest.mark.parametrize(("positions", "at"), [("query", LAST), ("all", LATER)])
def test_branches_and_blocks_are_what_hooks_on_the_writers_do(family, subject, positions, at):
    model, made = subject.model, ablated(subject, "blocks", positions)
    assert list(made) == ["zero", "mean"]
    paths = {"attention": (family.attn_out,), "mlp": (family.mlp_out,)}
    paths["block"] = paths["attention"] + paths["mlp"]
    for i, of in enumerate(paths.values()):
        for layer in (0, 1):
            mean = {p: torch.cat([writes_of(family, model, layer, p, x)[at] for x in alone(FIT)]).mean(0) for p in of}
            for way, values in (("zero", {p: torch.zeros(64) for p in of}), ("mean", mean)):
                expected = [
                    kl_of(model, ids, *(write_set(family, model, layer, p, values[p], at) for p in of))
                    for ids in alone(HELD)
                ]
                np.testing.assert_allclose(made[way]["kl"][2 * i + layer], expected, rtol=2e-3, atol=1e-7)


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
    assert (donors(clusters, DONORS, 5) == found).all() and (donors(clusters, DONORS, 6) != found).any()


# ---- the run --------------------------------------------------------------------------------------------------------


def test_copies_edited_in_different_places_do_not_mix(llama):
    places = (("z", 0), ("mlp_out", 1), ("value", 1))
    runner = runner_of(llama, batch=HELD)
    moves = [{}, *({place: lambda x, _: -0.5 * x} for place in places), dict.fromkeys(places, lambda x, _: -0.5 * x)]
    copies = [Intervention("x", move) for move in moves]
    together = runner.run(copies)["x/kl"]
    assert (together[0] == 0).all() and (together[1:] > 0).all()
    for i in range(1, 5):
        np.testing.assert_allclose(together[i], runner.run([copies[i]])["x/kl"][0], rtol=1e-3, atol=1e-8)


def test_a_single_head_has_an_effect_and_no_share_of_others():
    config = transformers.LlamaConfig(
        hidden_size=16, vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16
    )
    model = transformers.LlamaForCausalLM(config).eval()
    record = examine(Model.of(model, name="one"), BATCH, "heads", nulls=2)
    measured = record.results["heads_zero"]
    assert [h.name for h in measured.estimates] == ["largest head"]
    assert measured.estimates[0].value == pytest.approx(measured.arrays["kl"].item())
    assert "one head" in record.unmeasured["heads_zero: share of the largest head"]


def test_where_attn_outs_nothing_the_mlps_have_all_of_the_effects(llama):
    """A ratio over an effect of 0 is not measured, and says so; all else is."""
    model = FAMILIES["llama"].model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    measured = examine(Model.of(model, name="mlps"), BATCH, "blocks", nulls=5)
    assert measured.results["blocks_zero"].arrays["mlp"].min() > 0
    by_name = {h.name: h for h in measured.results["blocks_mean"].estimates}
    share = by_name["MLPs' share of the effects"]
    assert (share.value, share.low, share.high) == (1, 1, 1)
    assert (measured.results["blocks_mean"].arrays["attention"] == 0).all()
    reason = measured.unmeasured["blocks_mean: MLPs over attentions"]
    assert "MLPs over attentions" not in by_name and reason == measured.unmeasured["blocks_zero: MLPs over attentions"]
    assert "0 on every prompt" in reason


# ---- two stages ------------------------------------------------------------------------------------------------------


def test_the_kl_of_gradients_is_the_kl_of_a_small_edit(family, subject):
    """1/2 d'Fd with F from many answers, of an edit at positions of ragged prompts in two layers at once."""
    runner = runner_of(subject, "all", HELD)
    step = 0.02 * torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    both = {(point, layer): lambda x, _: step.expand_as(x) for point, layer in (("attn_out", 0), ("mlp_out", 1))}
    edits = [Intervention("x", both), Intervention("x", {("z", 1): lambda x, _: -0.02 * x}, slice(8, 16))]
    exact, rough = runner.run(edits)["x/kl"], runner.approximate_kl(edits, 0, draws=800)
    assert exact.min() > 1e-8
    np.testing.assert_allclose(rough.mean(1), exact.mean(1), rtol=0.1)
    assert np.corrcoef(rough[0], exact[0])[0, 1] > 0.98


class Drawn:
    """A runner of known effects of both signs, whose gradients are off by a factor and a scatter."""

    def __init__(self, seed: int, scatter: float) -> None:
        rng = np.random.default_rng(seed)
        self.kl = np.exp(1.5 * rng.standard_normal((270, 1)) + 0.3 * rng.standard_normal((270, 30)))
        self.rough = 0.3 * self.kl * np.exp(scatter * rng.standard_normal((270, 1)))
        self.ran = []

    def measure(self, edits, stage=""):
        self.ran += [int(edit.name) for edit in edits]
        return {"kl": self.kl[self.ran]}


def test_what_two_stages_leave_out_is_known_to_its_error():
    """Of 300 models with 270 heads, gradients off by a factor of .3 and by half: the total, within 2 standard errors,
    and the largest head."""
    groups, covered, found, errors = [[Intervention(str(i), {})] for i in range(270)], [], [], []
    for seed in range(300):
        runner = Drawn(seed, 0.5)
        made = two_stages(runner, groups, "kl", lambda runner=runner: runner.rough, seed=seed)
        assert len(runner.ran) <= 48 and (made["kl"][runner.ran] == runner.kl[runner.ran]).all()
        each, total = np.abs(runner.kl.mean(1)), np.abs(runner.kl.mean(1)).sum()
        covered.append(abs(np.abs(made["kl"].mean(1)).sum() - total) < 2 * made["total_error"][0])
        found.append(made["edited"][each.argmax()] > 0)
        errors.append(made["total_error"][0] / total)
    assert 0.88 < np.mean(covered) < 0.99 and np.mean(found) > 0.99 and np.median(errors) < 0.09


def test_of_many_heads_the_largest_by_gradients_and_a_sample_are_edited(llama, monkeypatch):
    whole = examine(llama, BATCH, "heads", nulls=2).results["heads_zero"]
    monkeypatch.setattr(intervention, "EVERY", 8)
    monkeypatch.setattr(component_ablation, "EDITED", 6)
    part = examine(llama, BATCH, "heads", nulls=2, exact=False).results["heads_zero"]
    edited = part.arrays["edited"] == 1
    assert 7 < edited.sum() <= 12
    assert part.notes[-1].startswith("edited: the 6 heads of 16 that are largest by gradients")
    np.testing.assert_allclose(part.arrays["kl"][edited], whole.arrays["kl"][edited], rtol=1e-4)
    outside = whole.arrays["kl"][~edited]
    assert (part.arrays["interval"][~edited][:, 0] < outside).all()
    assert (outside < part.arrays["interval"][~edited][:, 1]).all()
    share, known = (next(h for h in m.estimates if h.name == SHARE) for m in (part, whole))
    assert share.low < known.value < share.high


# ---- answers known beforehand ---------------------------------------------------------------------------------------


def outcome(record: Record, probe: str) -> dict:
    return {h.name: h for h in record.results[probe].estimates}


@pytest.mark.parametrize("name", KINDS)
def test_of_one_head_that_is_heard_every_way_finds_it_and_exactly_nothing_else(name):
    family, layer, head = FAMILIES[name], 1, 3
    model = family.model()
    with torch.no_grad():
        for one in (0, 1):
            weight = family.part(model, one, family.output).weight.unflatten(1, (HEADS, -1))
            weight[:, [h for h in range(HEADS) if (one, h) != (layer, head)]] = 0
    record = examine(Model.of(model, name=name), random_prompts(clusters=14), "heads", nulls=3)
    assert not record.unmeasured
    for way in METHODS["heads"]:
        measured, found = record.results[f"heads_{way}"], outcome(record, f"heads_{way}")
        kl = measured.arrays["kl"]
        assert kl.shape == (2, HEADS) and kl[layer, head] > 0.01 and np.count_nonzero(kl) == 1
        assert found[SHARE].value == 1 and found[SECOND].value == 0
        assert measured.arrays["above_half"] == 1 and measured.arrays["equal"] == 1 / 16
        assert found[LARGEST].value == pytest.approx(kl[layer, head]) and found[LARGEST].n == 7
        assert found[SHARE].null_high < 0.3, "in an untrained model all heads are heard"
        assert any(note.endswith("L1H3, L1H3") for note in measured.notes) and not measured.warnings
    assert record.results["heads_mean"].facts[SENTENCE].startswith("L1H3 has the largest effect of 16 heads")


def test_where_nothing_reaches_the_output_there_is_no_share(family):
    model = family.model()
    with torch.no_grad():
        for layer in (0, 1):
            for parameter in family.part(model, layer, family.output).parameters():
                parameter.zero_()
    record = examine(Model.of(model, name=family.name), BATCH, "heads", nulls=1)
    assert not record.results and set(record.unmeasured) == {f"heads_{way}" for way in METHODS["heads"]}
    assert all("is a share of 0" in why for why in record.unmeasured.values())


def test_a_middle_block_that_writes_nothing_is_the_weakest():
    family = FAMILIES["llama"]
    family = replace(family, settings=family.settings | {"num_hidden_layers": 4})
    model = family.model()
    with torch.no_grad():
        for path in ("self_attn.o_proj", "mlp.down_proj"):
            family.layer(model, 2).get_submodule(path).weight.zero_()
    record = examine(Model.of(model, name="llama"), random_prompts(clusters=14), "blocks", nulls=3)
    for way in METHODS["blocks"]:
        measured, found = record.results[f"blocks_{way}"], outcome(record, f"blocks_{way}")
        more = {MLP_SHARE, MLP_NORM} if way == "mean" else set()
        assert set(found) == {BRANCH, WEAKEST, OVER_MEDIAN, OVER_LAST} | more
        assert all(measured.arrays[name][2] == 0 for name in ("attention", "mlp", "block", "relative"))
        assert (measured.arrays["block"][[0, 1, 3]] > 0.05).all()
        assert found[WEAKEST].value == found[OVER_MEDIAN].value == found[OVER_LAST].value == 0
        assert any(note.endswith("on the other: 2, 2") for note in measured.notes)


# ---- what stands out, found apart -----------------------------------------------------------------------------------


def test_the_largest_is_found_on_one_half_and_taken_on_the_other():
    each = np.array([[5.0, 5, 1, 1], [2, 2, 9, 9], [3, 3, 4, 4]])
    half = np.array([0, 0, 1, 1])
    value, which = cross_selected(each, half, 0)
    # Part 0 is largest on half 0 and tells of half 1; part 1 is largest on half 1 and tells of half 0.
    assert value.tolist() == [2, 2, 1, 1] and which == (0, 1)
    assert cross_selected(each, half, 1)[0].tolist() == [3, 3, 4, 4]
    assert cross_selected(each, half, -1)[0].tolist() == [5, 5, 9, 9]
    assert cross_selected(each, half, 0, 1)[0].tolist() == [2.5, 2.5, 2.5, 2.5]


def test_fractions_of_heads_and_blocks_by_hand():
    kl = np.array([[8.0, 8], [4, 4], [2, 2], [1, 1]])
    half = np.array([0, 1])
    effects = {"kl": kl, "evidence": -kl, "half": half, "layers": 1}
    over = {name: a.sum() / b.sum() for name, (a, b) in head_fractions(effects).items()}
    assert over == {LARGEST: 8, SHARE: 8 / 15, SECOND: 0.5, EVIDENCE: -1}
    for block, weakest, median in (([9.0, 2, 4, 7, 1], 2, 4), ([9.0, 2, 4, 1], 2, 3), ([5.0, 3, 1], 3, 3)):
        layers = len(block)
        stacked = np.repeat(np.array([[1.0] * layers, [3.0] * layers, block]).reshape(-1, 1), 2, 1)
        effects = {"kl": stacked, "evidence": stacked, "half": half}
        over = {name: a.sum() / b.sum() for name, (a, b) in block_fractions(effects).items()}
        beside = {OVER_MEDIAN: weakest / median, OVER_LAST: weakest / block[-1]}
        assert over == {BRANCH: 3, WEAKEST: weakest, EVIDENCE: max(block)} | beside
        assert median == np.median(block)


def test_intervals_delete_whole_units(llama):
    batch = random_prompts(clusters=12, each=2)
    record = examine(llama, batch, "heads", nulls=1)
    made = ablated(llama, "heads", batch=batch)
    clusters = np.array(halves(batch, 0)[1].cluster)
    names = np.unique(clusters)
    quantile = scipy_stats.t.ppf(0.975, len(names) - 1)
    assert len(clusters) == 2 * len(names)
    for way in METHODS["heads"]:
        kl = made[way]["kl"]
        above, below = head_fractions(made[way])[SHARE]
        logs = np.log([above[clusters != name].sum() / below[clusters != name].sum() for name in names])
        error = np.sqrt((len(names) - 1) * np.square(logs - logs.mean()).mean())
        h = outcome(record, f"heads_{way}")[SHARE]
        ends = np.exp(np.log(h.value) + np.array([-1, 1]) * quantile * error)
        assert (h.low, h.high) == pytest.approx(ends) and (h.n, h.clusters) == (len(clusters), len(names))
        # The jackknife of a mean over units of one size is Student's interval of the units' means.
        means = np.array([kl[:, clusters == name].mean(1) for name in names])
        half_width = quantile * means.std(0, ddof=1) / np.sqrt(len(names))
        arrays = record.results[f"heads_{way}"].arrays
        np.testing.assert_allclose(arrays["interval"][..., 1].ravel(), means.mean(0) + half_width)
        np.testing.assert_allclose(arrays["interval"][..., 0].ravel(), means.mean(0) - half_width)
        assert arrays["above_half"] == sum(one > max(means.mean(0)) / 2 for one in means.mean(0)) > 1


# ---- the run --------------------------------------------------------------------------------------------------------


def test_the_null_is_a_re_initialised_model_through_the_same_pipeline(llama):
    record = examine(llama, BATCH, "heads", nulls=1, seed=3)
    alone = examine(llama.untrained(4), BATCH, "heads", nulls=1, seed=3)
    for way in METHODS["heads"]:
        for name, h in outcome(record, f"heads_{way}").items():
            assert h.null_low == h.null_high == outcome(alone, f"heads_{way}")[name].value
            assert h.null == "untrained controls (1 draw)"
    assert "only 1 draw of each control, too few to know how much they vary: take 8 or more" in record.warnings
    blocks, other = (examine(who, BATCH, "blocks", nulls=1, seed=3) for who in (llama, llama.untrained(4)))
    for name in ("attention", "mlp", "block", "relative"):
        null = blocks.results["blocks_mean"].arrays[f"{name}_null"]
        np.testing.assert_array_equal(null, np.repeat(other.results["blocks_mean"].arrays[name][:, None], 2, 1))


# ---- the command ----------------------------------------------------------------------------------------------------


def test_on_label_sequences_the_exact_answer_is_lost_too(pythia):
    batch = in_text.sample(load_world("two-point", text=True), 24, 0, pythia.tokenizer, ks=(1, 2))
    held = batch.take(np.flatnonzero(folds(batch.cluster, 0, 2) == 1))
    record = examine(pythia, batch, "blocks", nulls=1)
    assert {EVIDENCE, BRANCH} < set(outcome(record, "blocks_zero"))
    pair = [[pythia.tokenizer(f" {w}")["input_ids"][0] for w in two] for two in
            zip(held.columns["first"], held.columns["second"], strict=True)]  # fmt: skip
    exact, layer = held.posterior.predictive[:, -1].double(), pythia.model.gpt_neox.layers[2]

    def wipe(_module, _args, out):
        x = first(out).clone()
        x[:, -1] = 0
        return (x, *out[1:]) if isinstance(out, tuple) else x

    missed = {True: [], False: []}
    for wiped in missed:
        for text, two, e in zip(held.text, pair, exact, strict=True):
            ids = torch.tensor([pythia.tokenizer(text)["input_ids"]])
            handles = [m.register_forward_hook(wipe) for m in (layer.attention, layer.mlp)] if wiped else []
            with hooked(*handles):
                log_q = last_log_probs(pythia.model, ids)[two].log_softmax(0)
            missed[wiped].append(float(e.exp() @ (e - log_q)) / np.log(2))
    rise = np.mean(missed[True]) - np.mean(missed[False])
    assert abs(rise) > 1e-3
    assert record.results["blocks_zero"].arrays["evidence"][2] == pytest.approx(rise, rel=1e-3)


def test_a_request_ends_in_a_record_and_a_page_with_a_map(tmp_path):
    asked = RunConfig(offline=True, device="cpu", limit=40, n=20, nulls=1, what="heads", positions="all",
                    out=str(tmp_path / "run"))  # fmt: skip
    out, record = prepare(asked).perform()
    assert Record.load(out).facts["command"] == (
        "llmgeom ablate --model pocket:pythia --device cpu --offline --what heads --positions all "
        "--control-models 1 --n 20 --limit 40"
    )
    assert set(record.results) == {"heads_zero", "heads_mean"} and not record.unmeasured
    assert record.results["heads_mean"].arrays["kl"].shape == (4, 4)
    assert record.facts["estimated on"] + record.facts["prompts"] == 20 and record.facts["nulls"] == 1
    assert "(1 draw)" in outcome(record, "heads_mean")[SHARE].null
    text = (out / "report.html").read_text()
    assert "Heads, one at a time: set to the mean" in text and "Heat map of 4 layers by 4 heads" in text
    assert "ablated at every position but the first" in text
