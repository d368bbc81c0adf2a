"""What stands out among heads and blocks is found on units that do not tell of it; the answers known are found."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy import stats as scipy_stats

from llmgeom.claims import declared as declared_metrics
from llmgeom.cli import main
from llmgeom.commands.ablate import RunConfig, prepare
from llmgeom.errors import Unavailable, UserError
from llmgeom.model.subject import Subject
from llmgeom.probes.interventions.component_ablation import METHODS
from llmgeom.probes.interventions.component_results import (
    BRANCH,
    EVIDENCE,
    HALVED,
    LARGEST,
    MLP_EVIDENCE,
    MLP_NORM,
    MLP_SHARE,
    OVER_LAST,
    OVER_MEDIAN,
    SECOND,
    SHARE,
    WEAKEST,
    block_fractions,
    cross_selected,
    estimates,
    head_fractions,
)
from llmgeom.prompts.sula import Sula, available
from llmgeom.record import Record
from llmgeom.stats.ridge_probe import folds
from tests.families import FAMILIES, Family, first, hooked
from tests.refusals import refused
from tests.test_component_ablation import BATCH, HEADS, KINDS, ablated, examine, last_log_probs, random_prompts


def of_layers(name: str, layers: int) -> Family:
    family = FAMILIES[name]
    return replace(family, settings=family.settings | {"num_hidden_layers": layers})


@pytest.fixture(scope="module", params=KINDS)
def family(request) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def subject(family) -> Subject:
    return Subject.of(family.model(), name=family.name)


@pytest.fixture(scope="module")
def llama() -> Subject:
    return Subject.of(FAMILIES["llama"].model(), name="llama")


def outcome(record: Record, probe: str) -> dict:
    return {h.name: h for h in record.results[probe].estimates}


# ---- answers known beforehand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_of_one_head_that_is_heard_every_way_finds_it_and_exactly_nothing_else(name):
    family, layer, head = FAMILIES[name], 1, 3
    model = family.model()
    with torch.no_grad():
        for one in (0, 1):
            weight = family.part(model, one, family.output).weight.unflatten(1, (HEADS, -1))
            weight[:, [h for h in range(HEADS) if (one, h) != (layer, head)]] = 0
    record = examine(Subject.of(model, name=name), random_prompts(clusters=14), "heads", nulls=3)
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


def test_where_nothing_reaches_the_output_there_is_no_share(family):
    model = family.model()
    with torch.no_grad():
        for layer in (0, 1):
            for parameter in family.part(model, layer, family.output).parameters():
                parameter.zero_()
    record = examine(Subject.of(model, name=family.name), BATCH, "heads", nulls=1)
    assert not record.results and set(record.unmeasured) == {f"heads_{way}" for way in METHODS["heads"]}
    assert all("is a share of 0" in why for why in record.unmeasured.values())


def test_a_middle_block_that_writes_nothing_is_the_weakest():
    family = of_layers("llama", 4)
    model = family.model()
    with torch.no_grad():
        for path in ("self_attn.o_proj", "mlp.down_proj"):
            family.layer(model, 2).get_submodule(path).weight.zero_()
    record = examine(Subject.of(model, name="llama"), random_prompts(clusters=14), "blocks", nulls=3)
    for way in METHODS["blocks"]:
        measured, found = record.results[f"blocks_{way}"], outcome(record, f"blocks_{way}")
        assert set(found) == {BRANCH, WEAKEST, OVER_MEDIAN, OVER_LAST} | (
            {MLP_SHARE, MLP_NORM} if way == "mean" else set()
        )
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


def test_what_chance_adds_to_a_maximum_is_not_in_it():
    rng, half = np.random.default_rng(0), np.arange(20) % 2
    apart, naive = [], []
    for _ in range(400):
        each = 1 + rng.standard_normal((16, 20))
        largest, every = head_fractions({"kl": each}, half)[SHARE]
        apart.append(largest.sum() / every.sum())
        naive.append(each.mean(1).max() / each.mean(1).sum())
    assert np.mean(apart) == pytest.approx(1 / 16, abs=0.002) and np.mean(naive) > 1.3 / 16


def test_fractions_of_heads_and_blocks_by_hand():
    kl = np.array([[8.0, 8], [4, 4], [2, 2], [1, 1]])
    half = np.array([0, 1])
    over = {name: a.sum() / b.sum() for name, (a, b) in head_fractions({"kl": kl, "evidence": -kl}, half).items()}
    assert over == {LARGEST: 8, SHARE: 8 / 15, SECOND: 0.5, EVIDENCE: -1}
    for block, weakest, median in (([9.0, 2, 4, 7, 1], 2, 4), ([9.0, 2, 4, 1], 2, 3), ([5.0, 3, 1], 3, 3)):
        layers = len(block)
        stacked = np.repeat(np.array([[1.0] * layers, [3.0] * layers, block]).reshape(-1, 1), 2, 1)
        effects = {"kl": stacked, "evidence": stacked}
        over = {name: a.sum() / b.sum() for name, (a, b) in block_fractions(effects, half).items()}
        beside = {OVER_MEDIAN: weakest / median, OVER_LAST: weakest / block[-1]}
        assert over == {BRANCH: 3, WEAKEST: weakest, EVIDENCE: max(block)} | beside
        assert median == np.median(block)


def test_intervals_delete_whole_units(llama):
    batch = random_prompts(clusters=12, each=2)
    record = examine(llama, batch, "heads", nulls=1)
    made = ablated(llama, "heads", batch=batch)
    names, half = np.unique(made.clusters), folds(made.clusters, 0, 2)
    quantile = scipy_stats.t.ppf(0.975, len(names) - 1)
    assert len(made.clusters) == 2 * len(names)
    for way in METHODS["heads"]:
        kl = made.effects[way]["kl"]
        above, below = head_fractions({"kl": kl}, half)[SHARE]
        logs = np.log([above[made.clusters != name].sum() / below[made.clusters != name].sum() for name in names])
        error = np.sqrt((len(names) - 1) * np.square(logs - logs.mean()).mean())
        h = outcome(record, f"heads_{way}")[SHARE]
        ends = np.exp(np.log(h.value) + np.array([-1, 1]) * quantile * error)
        assert (h.low, h.high) == pytest.approx(ends) and (h.n, h.clusters) == (len(made.clusters), len(names))
        # The jackknife of a mean over units of one size is Student's interval of the units' means.
        means = np.array([kl[:, made.clusters == name].mean(1) for name in names])
        half_width = quantile * means.std(0, ddof=1) / np.sqrt(len(names))
        arrays = record.results[f"heads_{way}"].arrays
        np.testing.assert_allclose(arrays["interval"][..., 1].ravel(), means.mean(0) + half_width)
        np.testing.assert_allclose(arrays["interval"][..., 0].ravel(), means.mean(0) - half_width)
        assert arrays["above_half"] == sum(one > max(means.mean(0)) / 2 for one in means.mean(0)) > 1


def test_a_share_of_few_prompts_is_at_most_the_whole():
    largest = np.array([100.0, 1, 1, 1, 1, 1])
    fractions = {SHARE: (largest, largest + 1.5)}
    (h,) = estimates("heads", fractions, [fractions], np.arange(6))
    assert 0 < h.low < h.value < h.high == 1


def test_without_a_middle_only_the_branches_are_compared(subject):
    record = examine(subject, BATCH, "blocks", nulls=2)
    for way in METHODS["blocks"]:
        assert set(outcome(record, f"blocks_{way}")) == {BRANCH} | ({MLP_SHARE, MLP_NORM} if way == "mean" else set())
        measured = record.results[f"blocks_{way}"]
        assert measured.notes[:2] == ("ablated at the final token", "2 layers: none is in the middle")
        attention, mlp = measured.arrays["attention"], measured.arrays["mlp"]
        h = outcome(record, f"blocks_{way}")[BRANCH]
        assert h.value == pytest.approx(mlp.sum() / attention.sum()) and h.low < h.value < h.high
        block = measured.arrays["block"]
        np.testing.assert_allclose(measured.arrays["relative"], block / block.mean(), err_msg="of two, the median")


# ---- the run --------------------------------------------------------------------------------------------------------


def test_the_null_is_a_re_initialised_model_through_the_same_pipeline(llama):
    record = examine(llama, BATCH, "heads", nulls=1, seed=3)
    alone = examine(llama.untrained(4), BATCH, "heads", nulls=1, seed=3)
    for way in METHODS["heads"]:
        for name, h in outcome(record, f"heads_{way}").items():
            assert h.null_low == h.null_high == outcome(alone, f"heads_{way}")[name].value
            assert h.null == "untrained controls (1 draw)"
    assert "only 1 draw of each control, too few to know how much they vary: take 20 or more" in record.warnings
    blocks, other = (examine(who, BATCH, "blocks", nulls=1, seed=3) for who in (llama, llama.untrained(4)))
    for name in ("attention", "mlp", "block", "relative"):
        null = blocks.results["blocks_mean"].arrays[f"{name}_null"]
        np.testing.assert_array_equal(null, np.repeat(other.results["blocks_mean"].arrays[name][:, None], 2, 1))


def test_the_plan_of_batches_and_the_global_generators_change_nothing(llama, monkeypatch):
    first_run = ablated(llama, "heads").effects
    torch.manual_seed(5)
    np.random.seed(5)
    again = ablated(llama, "heads").effects
    monkeypatch.setattr("llmgeom.probes.interventions.patching.ROWS_PER_PASS", 60)
    other = ablated(llama, "heads", batch_tokens=90).effects
    for way, effects in first_run.items():
        assert (again[way]["kl"] == effects["kl"]).all()
        np.testing.assert_allclose(other[way]["kl"], effects["kl"], rtol=1e-3, atol=1e-8)


def test_two_halves_that_disagree_are_told(llama):
    record = examine(llama, random_prompts(clusters=14), "heads", nulls=1)
    told = [m.warnings for m in record.results.values() if len({*m.notes[1].split(": ")[1].split(", ")}) == 2]
    assert told and all("the two halves of the clusters select different largest heads" in w[0] for w in told)


def test_a_largest_head_that_does_next_to_nothing_is_told(llama):
    record = examine(llama.untrained(0), BATCH, "heads", nulls=1)
    assert all("less than 0.01: shares of so small" in m.warnings[-1] for m in record.results.values())


def test_writes_that_are_not_known_are_refused(llama):
    blind = replace(llama, facts={**llama.facts, "self_check": {"writes": "unavailable: post-norm"}})
    with refused(Unavailable, "post-norm"):
        examine(blind, BATCH, "blocks", nulls=1)


def test_a_batch_with_positions_of_its_own_is_refused(llama):
    query = torch.ones(BATCH.inputs.ids.shape, dtype=torch.bool)
    with refused(UserError, "positions"):
        examine(llama, replace(BATCH, query=query), "heads", nulls=1)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pythia() -> Subject:
    return Subject.load("pocket:pythia", device="cpu", offline=True)


def test_on_label_sequences_the_exact_answer_is_lost_too(pythia):
    batch = Sula(available(pythia.tokenizer), ks=(1, 2)).sample(12, 0)
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
    asked = RunConfig(offline=True, device="cpu", limit=60, n=20, nulls=1, what="heads", positions="all",
                    out=str(tmp_path / "run"))  # fmt: skip
    out, record = prepare(asked).perform()
    assert Record.load(out).facts["command"] == (
        "llmgeom ablate --device cpu --offline --what heads --positions all --nulls 1 --n 20 --limit 60"
    )
    assert set(record.results) == {"heads_zero", "heads_mean"} and not record.unmeasured
    assert record.results["heads_mean"].arrays["kl"].shape == (4, 4)
    assert record.facts["estimated on"] + record.facts["prompts"] == 20 and record.facts["nulls"] == 1
    assert "(1 draw)" in outcome(record, "heads_mean")[SHARE].null
    text = (out / "report.html").read_text()
    assert "Heads, one at a time: set to the mean" in text and "Heat map of 4 layers by 4 heads" in text
    assert "ablated at every position but the first" in text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"what": "head"}, "--what head"),
        ({"what": "heads", "mode": "steer"}, "--mode steer with --what heads"),
        ({"what": "blocks", "directions": ("pc1",)}, "--direction pc1 with --what blocks"),
        ({"what": "heads", "layers": "each"}, "--layers each with --what heads"),
        ({"what": "heads", "controls": 20}, "--controls 20 with --what heads"),
        ({"nulls": 5}, "--nulls 5 with --what axis"),
        ({"also": ("runs/seed1",)}, "--also runs/seed1 with --what axis"),
        ({"what": "heads", "nulls": 0}, "--nulls 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_loaded(wrong, says, monkeypatch):
    monkeypatch.setattr(RunConfig, "load", lambda *_: pytest.fail("loaded"))
    with refused(UserError, says):
        prepare(RunConfig(**wrong)).perform()


def test_the_door_refuses_in_one_sentence():
    shown = CliRunner().invoke(main, ["ablate", "--what", "heads", "--mode", "keep-only", "-q"], prog_name="llmgeom")
    assert shown.exit_code == 1 and shown.stderr.startswith(
        "llmgeom: --mode keep-only with --what heads: it is not read"
    )
    assert len(shown.stderr.strip().splitlines()) == 1


def test_every_headline_of_the_parts_is_declared(subject):
    names = {h.name for kind in METHODS for m in examine(subject, BATCH, kind, nulls=1).results.values()
             for h in m.estimates}  # fmt: skip
    declared = {*declared_metrics("heads"), *declared_metrics("blocks")}
    assert names <= declared and declared - names == {WEAKEST, OVER_LAST, OVER_MEDIAN, EVIDENCE, HALVED, MLP_EVIDENCE}
