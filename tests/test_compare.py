"""Differences of two records of the same prompts: value, interval, p, and the units that would decide."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import spearmanr, t

from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.reports import comparison as compare
from llmgeom.result import Quantity, Result
from llmgeom.stats import nested_probe, resampling, tests
from tests.compared import PAIRED, RHO, SHARE, head, record, rows, two
from tests.made import changed
from tests.refusals import refused


def test_a_record_does_not_differ_from_itself(tmp_path):
    one, _ = two(np.random.default_rng(0), estimates=(head("PC1 share", 0.4, 0.02),))
    one.save(tmp_path)
    found = compare.compare([one, Record.load(tmp_path)])
    assert {d.value for d in rows(found).values()} == {0.0} and {d.p for d in rows(found).values()} == {1.0}
    assert {d.verdict for d in rows(found).values()} == {"equivalent"}
    assert (rows(found)[PAIRED].method, rows(found)[PAIRED].low, rows(found)[PAIRED].high) == ("paired", 0.0, 0.0)
    assert rows(found)[SHARE].method == "unpaired" and rows(found)[SHARE].low < 0 < rows(found)[SHARE].high
    assert [s["value"] for s in found.pairs[0].similarities] == pytest.approx([1, 1])
    assert found.pairs[0].record == "a on math (run 2)" and not found.pairs[0].left_out


def test_a_planted_difference_is_found_in_its_direction_and_pairing_is_what_finds_it():
    first, other = two(np.random.default_rng(1), clusters=60, ours=0.9, theirs=0.5)
    d = rows(compare.compare([first, other]))[PAIRED]
    assert (d.verdict, d.method) == ("differs", "paired") and d.high < -0.1
    back = rows(compare.compare([other, first]))[PAIRED]
    assert (back.value, back.low, back.high) == pytest.approx((-d.value, -d.high, -d.low))
    assert (back.ours, back.theirs) == (d.theirs, d.ours)


def test_the_sign_of_a_component_is_a_convention():
    first, other = two(np.random.default_rng(1), ours=0.5, theirs=0.7)
    scores, entropy = other.results["value_manifold"].arrays["scores"], np.array(other.prompts["entropy"])
    turned = record(-scores, entropy, other.prompts["template"], name="b")
    a, b = (rows(compare.compare([first, one]))[PAIRED] for one in (other, turned))
    assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high)) and a.value > 0


def test_the_paired_interval_is_the_jackknife_of_the_difference_over_units():
    first, other = two(np.random.default_rng(2), clusters=8)
    d = rows(compare.compare([first, other]))[PAIRED]
    unit = np.array(first.prompts["template"])

    def rho(r, kept):
        place, entropy = r.results["value_manifold"].arrays["scores"][:, 0], np.array(r.prompts["entropy"])
        whole = spearmanr(place, entropy).statistic
        return math.copysign(1, whole) * spearmanr(place[kept], entropy[kept]).statistic

    without = np.array([rho(other, unit != u) - rho(first, unit != u) for u in dict.fromkeys(unit)])
    error = math.sqrt(7 / 8 * np.square(without - without.mean()).sum())
    whole = rho(other, unit != "") - rho(first, unit != "")
    assert (d.value, d.error, d.clusters) == pytest.approx((whole, error, 8))
    assert (d.low, d.high) == pytest.approx((whole - t.ppf(0.975, 7) * error, whole + t.ppf(0.975, 7) * error))
    assert d.p == pytest.approx(2 * t.sf(abs(whole) / error, 7))  # a single row: Holm changes nothing
    assert d.p_less == pytest.approx(t.sf((0.3 - abs(whole)) / error, 7))
    assert d.p_within == pytest.approx(t.sf((0.1 - abs(whole)) / error, 7))


@pytest.mark.parametrize(("ours", "theirs", "truth"), [(0.6, 0.6, 0.0), (0.8, 0.3, 0.287 - 0.786)])
def test_the_paired_interval_of_a_rank_correlation_covers(ours, theirs, truth):
    """Truth: Spearman's rho of a normal pair, 6 / pi asin(r / 2). 120 records: 89 % is 3 standard errors below 95 %."""
    assert truth == pytest.approx(6 / np.pi * (math.asin(theirs / 2) - math.asin(ours / 2)), abs=1e-3)
    rng, hits, beyond = np.random.default_rng(3), 0, []
    for _ in range(120):
        pair = (one.results["value_manifold"].estimates[0] for one in two(rng, 16, ours, theirs))
        d = compare.difference("value_manifold", *pair)
        hits += d.low <= truth <= d.high
        beyond.append(d.p < 0.05)
    assert 0.89 <= hits / 120 <= 0.995
    assert np.mean(beyond) <= 0.1 if truth == 0 else np.mean(beyond) >= 0.6


def test_the_paired_interval_of_an_accuracy_covers_and_agrees_with_the_paired_bootstrap():
    """Two models answer 40 clusters of 2 prompts; each cluster is as hard for one as for the other. Truth: .1."""
    rng, hits, alone = np.random.default_rng(4), [], []
    cluster = np.repeat(np.arange(40), 2)
    for i in range(200):
        hard = rng.beta(4, 4, 40)[cluster]
        right = [(rng.random(80) < 0.8 * hard + gain).astype(float) for gain in (0.05, 0.15)]
        spans = [resampling.jackknife(np.mean, x, cluster) for x in right]
        hs = [head("accuracy", x.mean(), low=span.low, high=span.high, clusters=40, deletions=span.deletions)
              for x, span in zip(right, spans, strict=True)]  # fmt: skip
        d, unpaired = (compare.difference("answers", *pair) for pair in (hs, [replace(h, deletions=None) for h in hs]))
        hits.append(d.low <= 0.1 <= d.high)
        alone.append(unpaired.error)
        if i == 0:
            by_cluster = np.subtract(*(x.reshape(40, 2).mean(1) for x in right[::-1]))
            draws = by_cluster[rng.integers(0, 40, (20_000, 40))].mean(1)
            assert d.error == pytest.approx(draws.std() * math.sqrt(40 / 39), rel=0.02) and d.error < unpaired.error
    assert np.mean(hits) >= 0.92


@pytest.mark.slow
def test_the_paired_interval_of_two_held_out_scores_covers():
    """AUROC of a strong and a weak direction in 90 rows of 45 clusters; the estimand is the mean over the samples."""
    rng, cluster, places = np.random.default_rng(5), np.repeat(np.arange(45), 2), []
    for _ in range(200):
        label = (rng.random(45) < 0.5)[cluster].astype(np.float64)
        shared = rng.normal(size=(90, 6)) + 0.5 * rng.normal(size=(45, 6))[cluster]
        fold = nested_probe.stratified_folds("binary", label, cluster, 0)
        hs = []
        for strength in (0.6, 1.0):
            x = 0.8 * shared + 0.6 * rng.normal(size=(90, 6))
            x[:, 0] += strength * label
            own = nested_probe.held_out(nested_probe.Design("binary", label[:, None], fold), [lambda x=x: x])
            span = nested_probe.interval(own.value, nested_probe.deletions(own, [lambda x=x: x], cluster), cluster)
            hs.append(head("AUROC", own.value, low=span.low, high=span.high, clusters=45, deletions=span.deletions))
        d = compare.difference("label", *hs)
        assert d.method == "paired"
        places.append((d.value, d.low, d.high))
    value, low, high = np.array(places).T
    covered = np.mean((low <= value.mean()) & (value.mean() <= high))
    assert covered >= 0.92, covered


def test_unpaired_adds_the_variances_of_the_stored_intervals_and_believes_the_longer_half():
    a, b = head("PC1 share", 0.4, 0.06, clusters=40), head("PC1 share", 0.5, clusters=30, low=0.5, high=0.58)
    (first, _), (_, other) = (two(np.random.default_rng(4), estimates=(h,)) for h in (a, b))
    d = rows(compare.compare([first, other]))[SHARE]
    error = math.hypot(0.06 / t.ppf(0.975, 39), 0.08 / t.ppf(0.975, 29))
    assert (d.method, d.clusters, d.error, d.value) == ("unpaired", 30, pytest.approx(error), pytest.approx(0.1))
    assert d.high - d.value == pytest.approx(t.ppf(0.975, 29) * error) == d.value - d.low
    notes = compare.compare([first, other]).notes
    assert any(note.startswith("unpaired: ") and "conservative" in note for note in notes)


def test_a_difference_of_bounded_numbers_ends_where_they_do():
    """The interval of a difference of two |rho| was -3.4 to 3.6; p comes from the error, and stays."""
    wide = [head("order", value, half=2.5, effect=0.3) for value in (0.4, 0.5)]
    free, bounded = (
        compare.difference("x", *(changed(h, range=ends) for h in wide)) for ends in ((-math.inf, math.inf), (0.0, 1.0))
    )
    assert free.high > 3 and (bounded.low, bounded.high) == (-1.0, 1.0)
    assert replace(bounded, low=free.low, high=free.high) == free


def test_numbers_over_other_rows_or_without_deletions_are_not_paired():
    """One run read 58 of the 60 prompts (a tokenizer left two too short): its clusters left out are other rows."""
    first, other = two(np.random.default_rng(5))
    measured = other.results["value_manifold"]
    scores, entropy = measured.arrays["scores"][:-2], np.array(other.prompts["entropy"])[:-2]
    fewer = tests.correlation_interval(scores[:, 0], entropy, other.prompts["template"][:-2]).deletions
    for deletions, method in ((measured.estimates[0].deletions, "paired"), (fewer, "unpaired"), (None, "unpaired")):
        changed = replace(measured, estimates=(replace(measured.estimates[0], deletions=deletions),))
        changed = replace(other, results={"value_manifold": changed})
        assert rows(compare.compare([first, changed]))[PAIRED].method == method


def test_a_difference_of_held_out_scores_takes_both_ways_of_leaving_out():
    """AUROC of two probes over 25 groups: error is the geometric mean of two jackknives of the difference."""
    rng = np.random.default_rng(0)
    a, b = (resampling.Deletions("same", 0.7 + rng.normal(size=(2, 25)) / 100, 25.0) for _ in range(2))
    hs = [head("AUROC", v, clusters=80, deletions=d) for v, d in ((0.7, a), (0.75, b))]
    d = compare.difference("label", *hs)
    errors = [math.sqrt(24 / 25 * np.square(way - way.mean()).sum()) for way in b.without - a.without]
    assert (d.method, d.clusters, d.error) == ("paired", 80, pytest.approx(math.sqrt(errors[0] * errors[1])))
    assert d.high - d.low == pytest.approx(2 * t.ppf(0.975, 24) * d.error)


def curved(record, scores, *, groups="same"):
    """The record with a curve of three layers over 10 groups, and an estimate of the same groups."""
    without = scores[:, None, None] + np.random.default_rng(ord(record.subject["name"])).normal(size=(3, 1, 10)) / 50
    quantities = {"score": Quantity(("layer",), "AUROC", "score"),
                  "score_without": Quantity(("layer", "way", "group"), "AUROC", "")}  # fmt: skip
    measured = Result(
        title="", meaning="", computed="", null="", failure_modes="",
        estimates=(head("AUROC", 0.7, deletions=resampling.Deletions(groups, without[0], 10.0)),),
        quantities=quantities, arrays={"score": scores, "score_without": without},
    )  # fmt: skip
    return replace(record, results={"label": measured}), without


def test_curves_of_the_same_groups_are_compared_at_every_layer():
    first, other = two(np.random.default_rng(5))
    (first, ours), (other, theirs) = curved(first, np.array([0.5, 0.6, 0.7])), curved(other, np.array([0.5, 0.9, 0.6]))
    (c,) = compare.compare([first, other]).pairs[0].curves
    error = np.sqrt(9 / 10 * np.square((x := (theirs - ours)[:, 0]) - x.mean(1, keepdims=True)).sum(1))
    np.testing.assert_allclose(c["value"], [0, 0.3, -0.1], atol=1e-12)
    np.testing.assert_allclose(np.subtract(c["high"], c["low"]) / 2, t.ppf(0.975, 9) * error)
    assert "largest at layer 1" in "\n".join(compare.compare([first, other]).lines())
    elsewhere, _ = curved(other, np.array([0.5, 0.9, 0.6]), groups="others")
    assert compare.compare([first, elsewhere]).pairs[0].curves == ()


def test_p_is_corrected_for_every_row_of_every_pair():
    rng = np.random.default_rng(6)
    first, _ = two(rng, estimates=(head("PC1 share", 0.4), head("PC1+PC2 share", 0.6)))
    others = [two(rng, estimates=(head("PC1 share", v), head("PC1+PC2 share", v + 0.3)))[1] for v in (0.5, 0.7)]
    found = compare.compare([first, *others])
    every = [d for pair in found.pairs for d in pair.differences]
    raw = [2 * t.sf(abs(d.value) / d.error, d.clusters - 1) for d in every]
    less = [t.sf((d.effect - abs(d.value)) / d.error, d.clusters - 1) for d in every]
    assert [pair.record for pair in found.pairs] == ["b (run 2)", "b (run 3)"]
    assert [[d.theirs for d in pair.differences[1:]] for pair in found.pairs] == [[0.5, 0.8], [0.7, 1.0]]
    assert len(every) == 6
    np.testing.assert_allclose([d.p for d in every], tests.holm(raw))
    np.testing.assert_allclose([d.p_less for d in every], tests.holm(less))


def test_the_number_of_units_asked_for_decides_with_the_power_that_is_said():
    """Normal units: at n = needed a true effect is found in 90 % of 400 draws."""
    rng = np.random.default_rng(7)

    def judged(each):
        n, effect, value = len(each), 0.3, each.mean()
        error = each.std(ddof=1) / n**0.5
        low, high = value - t.ppf(0.975, n - 1) * error, value + t.ppf(0.975, n - 1) * error
        p = 2 * t.sf(abs(value) / error, n - 1)
        interval = resampling.Interval(low, high, 0.95, "")
        within, less = (tests.equivalence_p(value, interval, -end, end, n) for end in (effect / 3, effect))
        found = (0, value, value, low, high, error, "paired", n, effect, p, within, less)
        return next(compare._judged([compare.Difference("probe", "metric", "bits", *found)]))

    needed = judged(rng.normal(0, 0.9, 100_000)).needed
    assert 90 < needed < 110
    found = [judged(rng.normal(0.3, 0.9, needed)).p < 0.05 for _ in range(400)]
    assert 0.86 < np.mean(found) < 0.95
    few, enough = (judged(m + np.linspace(-1.5, 1.5, n)) for m, n in ((0.1, 20), (0.5, 400)))
    assert (few.verdict, few.why) == ("undecided", f"needs n >= {few.needed} clusters for 0.3 bits, has 20")
    assert enough.verdict == "differs" and 20 < enough.needed < 400


@pytest.mark.parametrize(
    ("value", "error", "word"),
    [
        (0.094, 0.008, "differs, less than the effect"),  # focusing .444 -> .538: excludes 0, so it is not equivalent
        (0.02, 0.005, "differs, less than the effect"),  # within every margin, and not 0
        (0.5, 0.05, "differs"),
        (0.31, 0.02, "differs"),
        (0.01, 0.02, "equivalent"),
        (0.09, 0.05, "undecided"),  # less than the effect, but 0 and the margin of .1 are both possible
        (0.02, 0.2, "undecided"),
    ],
)
def test_a_difference_that_excludes_zero_is_never_equivalent(value, error, word):
    half, n = t.ppf(0.975, 199) * error, 200
    interval = resampling.Interval(value - half, value + half, 0.95, "")
    within, less = (tests.equivalence_p(value, interval, -end, end, n) for end in (0.1, 0.3))
    p = 2 * t.sf(value / error, n - 1)
    span = (0.0, value, value, interval.low, interval.high, error, "paired", n, 0.3, p, within, less)
    assert next(compare._judged([compare.Difference("probe", "metric", "", *span)])).verdict == word


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        (("ablate --model a --mode steer", "ablate --model b"), "(b: defaults; a: --mode steer)"),
        (("ablate --positions all --layers 3", "ablate --layers 4 --positions all"), "(b: --layers 4; a: --layers 3)"),
        (("ablate --positions query", "ablate --positions all"), "(b: --positions all; a: --positions query)"),
        (("scan --model b --chat", "scan --model a --chat --dtype bfloat16"), "(b: --dtype bfloat16; a: defaults)"),
        (("scan --model a --domain math --device cuda", "scan --model b --prompts-from runs/a --probes all"), ""),
        (("ablate --mode 'steer", "ablate"), ""),  # no shell would read it
    ],
)
def test_runs_with_other_settings_are_a_caution_where_the_words_are_read(commands, said):
    """Two edits of one model, or of two, were compared as if the models alone differed."""
    pair = two(np.random.default_rng(3))
    pair = [
        replace(one, facts={**one.facts, "command": f"llmgeom {command}"}, subject={**one.subject, "name": name})
        for one, command, name in zip(pair, commands, "ab", strict=True)
    ]
    found = compare.compare(pair)
    noted = [note for note in found.pairs[0].notes if "different settings" in note]
    assert len(noted) == bool(said) and (not said or said in noted[0])
    short = " ".join(found.brief())
    assert not said or (said in short and short.index(said) < short.index("difference [95 %]"))


def test_what_cannot_be_compared_is_a_sentence():
    first, other = two(np.random.default_rng(10), estimates=(head("PC1 share", 0.4), head("old", 0.4, effect=0.0)))
    more = {**first.results, "attention_focus": first.results["value_manifold"]}
    still = replace(other.results["value_manifold"], arrays={"scores": np.ones((60, 2))})
    still = replace(still, estimates=other.results["value_manifold"].estimates[2:])
    found = compare.compare([
        replace(first, results=more),
        replace(other, results={"value_manifold": still}, unmeasured={"attention_focus": "it has no attention"}),
    ])  # fmt: skip
    *others, cka_why, rsa_why = found.pairs[0].left_out
    assert others == [
        "attention_focus: not measured in b: it has no attention",
        f"value_manifold: {RHO}: not measured in b",
        "value_manifold: PC1 share: not measured in b",
        "value_manifold: old: declares no effect of interest to compare with",
    ]
    assert cka_why.startswith("value_manifold: CKA: not measured") and "are equal" in cka_why
    assert rsa_why.startswith("value_manifold: RSA: not measured") and "are equal" in rsa_why


def test_the_largest_difference_of_a_probe_is_a_finding_and_every_word_is_counted():
    first, other = two(np.random.default_rng(5), estimates=(head("PC1 share", 0.1), head("PC2 share", 0.1)))
    theirs = other.results["value_manifold"]
    far = (*theirs.estimates[:1], head("PC1 share", 0.7), head("PC2 share", 0.9))
    other = replace(other, results={"value_manifold": replace(theirs, estimates=far)})
    first, other = (replace(record, source={**record.source, "kind": "domain"}) for record in (first, other))
    (pair,) = compare.compare([first, other]).pairs
    words = [d.verdict for d in pair.differences]
    assert f"on the same 60 prompts: of {len(words)} numbers" in pair.counted and words.count("differs") == 2
    assert all(f"{words.count(word)} " in pair.counted for word in {*words})
    most = max((d for d in pair.differences if d.verdict == "differs"), key=lambda d: abs(d.value / d.effect))
    assert len(pair.findings) == 1 and f"value manifold, {most.metric}: {most.theirs:.3g} in" in pair.findings[0]
    assert most.metric == "PC2 share" and "(n = 30 templates)." in pair.findings[0]


def test_two_revisions_are_named_and_those_with_equal_weights_are_refused():
    """Branches of a published suite hold the weights of another step (86 of 154 of one model)."""
    first, other = two(np.random.default_rng(0))
    step = {"name": "suite", "revision": "step1", "weights": "a" * 64}
    first, same = (replace(r, subject={**r.subject, **step}) for r in (first, other))
    other = replace(same, subject={**same.subject, "revision": "step2", "weights": "b" * 64})
    assert compare.compare([first, other]).pairs[0].record == "step2"
    with refused(UserError, "step1", "step2", "a" * 12):
        compare.compare([first, replace(other, subject={**other.subject, "weights": "a" * 64})])
    assert compare.compare([first, same]).pairs[0].record == "suite on math (run 2)"
