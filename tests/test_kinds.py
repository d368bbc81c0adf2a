"""The attention-kind experiment: cells that differ in one thing, planted effects that are found, runs that go on."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from scipy import stats as scipy_stats

from llmgeom.claims import declared
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from studies import attention_variants as kinds
from studies.attention_contrasts import COLUMNS, KINDS, PER_HEAD, SIGNATURES, analyse, contrasts, effect, effects, table
from studies.attention_variants import SPEC, Material, matched
from studies.training_data import label_targets
from tests.refusals import refused

TINY = replace(SPEC, hidden=16, layers=3, ffn=24, vocabulary=400, batch=4, steps=4, tokenizer_texts=200)
TINY = replace(TINY, pool=120, prompts=24, nulls=1, fillings=1)
FOCUS = "focusing"
SHARE = "values: PC1+PC2 share, by kv head"
BY_NAME = {s.name: s for s in SIGNATURES}


@pytest.fixture(scope="module")
def material():
    return Material(TINY, 2)


def of(kind, window, spec=TINY):
    return replace(spec, window=window, **KINDS[kind])


def test_signatures_are_declared_headlines_with_the_effects_of_their_claims():
    for s in SIGNATURES:
        if s.probe != "kinds":
            assert s.effect == (0.1 if s.estimate.startswith("focusing") else declared(s.probe)[s.estimate].smallest), s
    assert BY_NAME["columns of W_K"].effect == declared("key_orthogonality")["columns of W_K"].smallest
    assert BY_NAME[SHARE].effect == BY_NAME["values: PC1+PC2 share"].effect


# ---- the cells ------------------------------------------------------------------------------------------------------


def test_configs_differ_only_in_what_their_kinds_are():
    def different(a, b):
        one, two = (of(name, 16, SPEC).config().to_dict() for name in (a, b))
        return {key: (one.get(key), two.get(key)) for key in {**one, **two} if one.get(key) != two.get(key)}

    assert different("mha-full", "mha-window") == {"sliding_window": (None, 16)}
    assert different("gqa-full", "gqa-window") == {"sliding_window": (None, 16)}
    grouping = {"num_key_value_heads": (4, 1), "intermediate_size": (256, 304)}
    assert different("mha-full", "gqa-full") == different("mha-window", "gqa-window") == grouping


@pytest.mark.parametrize("spec", [SPEC, TINY, replace(SPEC, hidden=128, ffn=200)])
def test_every_kind_has_the_same_number_of_parameters(spec):
    found = matched(spec)
    # By hand: embedding and output; in each layer queries and output, keys and values, a gated MLP, two norms; a norm.
    h, head = spec.hidden, spec.hidden // spec.heads
    kv = {"mha-full": h, "gqa-full": head}
    for name, ffn in (("mha-full", spec.ffn), ("gqa-full", of("gqa-full", 16, spec).config().intermediate_size)):
        layer = 2 * h * h + 2 * h * kv[name] + 3 * h * ffn + 2 * h
        assert found[name] == 2 * spec.vocabulary * h + spec.layers * layer + h
    assert max(found.values()) <= 1.02 * min(found.values())
    assert found["mha-full"] == found["mha-window"] and found["gqa-full"] == found["gqa-window"]


def test_widths_that_cannot_be_matched_are_refused():
    with refused(UserError, 2, "3 x heads"):
        matched(replace(SPEC, hidden=4, heads=2, ffn=1, vocabulary=8, layers=4))


def test_without_a_window_the_architecture_is_llama_and_a_window_only_hides_what_is_older():
    full, window = (of(name, 5).start() for name in ("gqa-full", "gqa-window"))
    assert all(torch.equal(a, b) for a, b in zip(full.parameters(), window.parameters(), strict=True))
    settings = full.config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    names += ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "hidden_act", "tie_word_embeddings")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{name: settings[name] for name in names})).eval()
    llama.load_state_dict(full.state_dict())
    ids = torch.randint(1, 400, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, two, three = (model.eval()(ids, use_cache=False).logits for model in (llama, full, window))
    assert torch.equal(one, two)
    torch.testing.assert_close(two[:, :5], three[:, :5])
    assert ((two - three)[:, 5:].abs().amax(-1) > 1e-6).all()


def test_the_window_is_active_on_the_prompts(material):
    lengths, window = material.prompts.inputs.lengths, material.window
    assert window == round(float(np.median(lengths)) / 3)
    assert (lengths > window).float().mean() > 0.9
    for name, hidden in (("mha-window", True), ("gqa-window", True), ("mha-full", False)):
        subject = Subject.of(of(name, window).start())
        for rows in subject.capture(material.prompts, {Site.ATTENTION}).layers(Site.ATTENTION):
            older = torch.arange(rows.shape[-1]) < (lengths - window)[:, None]
            weight = rows.masked_fill(~older[:, None], 0).sum(-1)[lengths > window]
            assert (weight == 0).all() if hidden else (weight > 0).all()


def test_prompts_fit_a_training_window_and_come_from_many_templates(material):
    batch = material.prompts
    assert int(batch.inputs.lengths.max()) <= TINY.context
    assert len(batch) == TINY.prompts and max(batch.cluster.count(unit) for unit in batch.cluster) <= 2


# ---- the text -------------------------------------------------------------------------------------------------------


def test_seeds_read_other_parts_of_one_stream_and_know_their_texts():
    whole, fewer = (Material(replace(TINY, split=0.0), seeds) for seeds in (3, 2))
    parts = [whole.training_data(seed) for seed in range(3)]
    size = TINY.steps * TINY.batch
    assert all(part.windows.shape == (size, TINY.context) for part in parts)
    assert torch.equal(parts[1].windows, fewer.training_data(1).windows)
    assert parts[1].ids == fewer.training_data(1).ids
    for part in parts:
        rest = iter(part.ids)
        for row in part.windows.tolist():
            at = 0
            while at < len(row):
                text = [*next(rest), 0]
                assert row[at : at + len(text)] == text[: len(row) - at]
                at += len(text)
        assert next(rest, None) is None


def test_what_is_asked_goes_with_its_windows():
    mixed = Material(replace(TINY, share=0.5, vocabulary=600), 2)
    for part in (mixed.training_data(0), mixed.training_data(1)):
        again = label_targets(part.windows, part.evidence, part.tokenizer, informative=True)
        assert part.targets.named.any() and part.targets.share.any()
        assert all(torch.equal(one, vars(again)[name]) for name, one in vars(part.targets).items())


# ---- what the cells say ---------------------------------------------------------------------------------------------


def planted(grouping=0.0, window=0.0, interaction=0.0, noise=0.01, seeds=5, seed=0):
    """[seed grouped windowed]: a level of its own for each seed, effects, and noise in each cell."""
    rng = np.random.default_rng(seed)
    g, w = np.meshgrid([0, 1], [0, 1], indexing="ij")
    level = rng.normal(0, 3, (seeds, 1, 1))
    return level + grouping * g + window * w + interaction * g * w + rng.normal(0, noise, (seeds, 2, 2))


def test_contrasts_return_what_was_planted():
    found = contrasts(planted(grouping=0.3, window=-0.2, interaction=0.5, noise=0))
    # An interaction is half in each main effect: it is the mean over the other factor.
    np.testing.assert_allclose(found["grouping"], 0.3 + 0.25)
    np.testing.assert_allclose(found["window"], -0.2 + 0.25)
    np.testing.assert_allclose(found["interaction"], 0.5)


def test_an_effect_is_student_s_t_over_seeds():
    change = np.array([0.11, 0.07, 0.13, 0.02, 0.09])
    focus = BY_NAME[FOCUS]
    found = effect(focus, "window", change)
    mean = sum(change) / 5
    error = math.sqrt(sum((x - mean) ** 2 for x in change) / 4) / math.sqrt(5)
    assert found.value == pytest.approx(mean) and found.sd == pytest.approx(error * math.sqrt(5))
    for span, quantile in ((found.interval, 2.776445), (found.inner, 2.131847)):
        assert (span.low, span.high) == pytest.approx((mean - quantile * error, mean + quantile * error), rel=1e-6)
    assert found.p == pytest.approx(scipy_stats.ttest_1samp(change, 0).pvalue)
    above = scipy_stats.ttest_1samp(change, -focus.effect, alternative="greater").pvalue
    below = scipy_stats.ttest_1samp(change, focus.effect, alternative="less").pvalue
    assert found.p_within == pytest.approx(max(above, below))


def words(values):
    return {(e.signature.name, e.factor): e.verdict for e in effects(values)}


def test_planted_effects_are_found_and_nulls_called_what_they_are():
    found = words({FOCUS: planted(window=-0.4), SHARE: planted(grouping=0.5, seed=1)})
    assert found[FOCUS, "window"] == "changed"
    assert found[FOCUS, "grouping"] == found[FOCUS, "interaction"] == "not changed"
    assert found[SHARE, "grouping"] == "different"
    assert found[SHARE, "window"] == found[SHARE, "interaction"] == "equivalent"


def test_a_small_but_certain_change_is_said_to_be_small():
    found = words({FOCUS: planted(window=0.05, noise=0.002), SHARE: planted(window=0.05, noise=0.002)})
    assert found[FOCUS, "window"] == "changed, by less than 0.1"
    assert found[SHARE, "window"] == "equivalent"


@pytest.mark.parametrize("name", [FOCUS, SHARE])
def test_noise_is_undecided_and_the_seeds_asked_for_decide(name):
    few = words({name: planted(noise=0.3)})[name, "grouping"]
    assert few.startswith("undecided (needs ") and int(few.split()[2]) > 5

    def grouping(change):
        return effect(BY_NAME[name], "grouping", change)

    # 90 % power; the noise of a main effect of four cells with sd s is s, and the sd of -1, 0, 1 is 1.
    needed = grouping(0.3 * np.array([-1.0, 0, 1])).needed
    draws = [contrasts(planted(noise=0.3, seeds=needed, seed=seed))["grouping"] for seed in range(1, 101)]
    assert sum(grouping(change).p_within < 0.05 for change in draws) >= 85


def test_p_values_are_adjusted_over_all_effects_of_one_nature():
    values = {s.name: planted(noise=0.2, window=0.3, seed=i) for i, s in enumerate(SIGNATURES)}
    found = effects(values)
    for nature in ("dynamic", "static"):
        names = [s.name for s in SIGNATURES if s.nature == nature]
        raw = [
            float(scipy_stats.ttest_1samp(change, 0).pvalue)
            for name in names
            for change in contrasts(values[name]).values()
        ]
        order, m = sorted(range(len(raw)), key=raw.__getitem__), len(raw)
        adjusted, worst = [0.0] * m, 0.0
        for rank, i in enumerate(order):
            worst = max(worst, raw[i] * (m - rank))
            adjusted[i] = min(1.0, worst)
        assert [e.p for e in found if e.signature.nature == nature] == pytest.approx(adjusted)


def test_a_change_that_width_makes_is_marked():
    share = next(s for s in SIGNATURES if s.width)
    found = words({share.name: planted(grouping=0.5, window=0.5)})
    assert found[share.name, "grouping"] == "different †" and found[share.name, "window"] == "different"


# ---- the run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of two seeds that was interrupted in its third cell and went on: folder, numbers, what it said."""
    out, said = tmp_path_factory.mktemp("kinds"), []
    (out / "models" / "mha-full-0").mkdir(parents=True)  # killed while it was saved

    def stop(text):
        said.append(text)
        if text == "gqa-full-0: measuring":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kinds.run(out, TINY, 2, progress=stop)
    assert sorted(path.name for path in (out / "cells").iterdir()) == ["mha-full-0.json", "mha-window-0.json"]
    said.clear()
    found = kinds.run(out, TINY, 2, progress=said.append)
    return out, found, said


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_stopped(done):
    out, found, said = done
    assert not any(text.startswith(("mha-full-0", "mha-window-0")) for text in said)
    assert "gqa-full-0: training" not in said
    assert len([text for text in said if "nats held out" in text]) == 6
    assert found["seeds"] == [0, 1] and len(found["cells"]) == 8
    assert found == json.loads((out / "kinds.json").read_text())
    by = {(c["spec"]["seed"], c["kind"]): c for c in found["cells"]}
    for seed in (0, 1):
        assert len({by[seed, name]["windows_sha256"] for name in KINDS}) == 1
        assert len({by[seed, name]["curve"][0]["loss"] for name in KINDS}) == 4
    assert by[0, "mha-full"]["windows_sha256"] != by[1, "mha-full"]["windows_sha256"]


def test_without_its_cell_a_model_is_measured_again_and_not_trained_again(done):
    out, found, _ = done
    (out / "cells" / "gqa-window-1.json").unlink()
    said = []
    assert kinds.run(out, TINY, 2, kinds=["mha-full"]) is None
    again = kinds.run(out, TINY, 2, progress=said.append)
    assert said[0] == "gqa-window-1: measuring" and len(said) == 2
    assert again["values"] == found["values"] and again["effects"] == found["effects"]


@pytest.mark.parametrize(("change", "named"), [({"steps": 5}, ("steps", 4, 5)), ({"prompts": 23}, ("prompts", 24, 23))])
def test_cells_of_another_spec_are_refused(done, change, named):
    with refused(UserError, *named, "--out"):
        kinds.run(done[0], replace(TINY, **change), 2)


def test_what_cannot_be_run_is_refused(tmp_path, capsys):
    assert kinds.main(["--out", str(tmp_path), "--cells", "mqa"]) == 1
    assert "unknown kind 'mqa': known are mha-full, mha-window, gqa-full, gqa-window" in capsys.readouterr().err
    assert kinds.main(["--out", str(tmp_path), "--seeds", "1"]) == 1
    assert "--seeds 1: give at least 2" in capsys.readouterr().err


def test_cells_that_did_not_read_the_same_text_are_not_compared(done):
    cells = [dict(c) for c in done[1]["cells"]]
    cells[0]["windows_sha256"] = "0"
    with refused(UserError, "seed 0"):
        analyse(cells)


def test_the_table_says_every_signature_and_what_was_not_measured(done):
    out, found, _ = done
    cells = [{**c, "values": {**c["values"], "kinds": {}}} for c in found["cells"]]
    without = table(analyse(cells))
    assert f"not measured: {SHARE}: kinds gives no '{PER_HEAD}' in 8 cells" in without
    shown = (out / "kinds.md").read_text()
    assert shown == table(found)
    means, changes = shown.split("\n\nChange within a seed")
    for name, rows in found["values"].items():
        begins = f"| {name} ".replace("|rho|", "\\|rho\\|")
        (line,) = [line for line in means.splitlines() if line.startswith(f"{begins}| ")]
        assert [float(cell.split()[0]) for cell in line.split(" | ")[1:]] == pytest.approx(np.mean(rows, 0), abs=6e-4)
        lines = [line for line in changes.splitlines() if line.startswith((f"{begins}(", f"{begins}| "))]
        assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [8, 8, 8]


def test_values_are_those_of_the_stored_models(done, material):
    out, found, _ = done
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "models" / "mha-window-1", dtype=torch.float32)
    subject = Subject.of(model)
    values = subject.capture(material.prompts, {Site.VALUE}).layers(Site.VALUE)[-1].double().numpy()
    shares = []
    for head in range(4):  # scikit-learn's PCA of each head's standardised coordinates
        from sklearn.decomposition import PCA
        from sklearn.preprocessing import StandardScaler

        shares.append(PCA().fit(StandardScaler().fit_transform(values[:, head])).explained_variance_ratio_[:2].sum())
    assert found["values"][SHARE][1][1] == pytest.approx(np.mean(shares), rel=1e-6)


def test_columns_are_those_of_the_probe_where_it_has_a_headline(done):
    own = [c["values"] for c in done[1]["cells"] if c["kind"] == "mha-full"]
    for values in own:
        assert values["kinds"][COLUMNS] == pytest.approx(values["key_orthogonality"]["columns of W_K"])
    # The entropy of models trained for a moment does not vary, so its metrics refuse; nothing else is absent.
    assert done[1]["absent"] and all("entropy" in name for name in done[1]["absent"])
