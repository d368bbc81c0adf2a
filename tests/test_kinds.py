"""The attention-kind experiment: cells that differ in one thing, planted effects that are found, runs that go on."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats as scipy_stats

from studies import attention_variants as kinds
from studies.attention_contrasts import KINDS, PER_HEAD, SIGNATURES, analyse, contrasts, effect, effects, table
from studies.attention_variants import SPEC

TINY = replace(SPEC, hidden=16, layers=3, ffn=24, vocabulary=400, batch=4, steps=4, tokenizer_texts=200)
TINY = replace(TINY, pool=120, prompts=24, nulls=1, fillings=1)
FOCUS = "focusing"
SHARE = "values: PC1+PC2 share, by kv head"
BY_NAME = {s.name: s for s in SIGNATURES}


def of(kind, window, spec=TINY):
    return replace(spec, window=window, **KINDS[kind])


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
