"""Records of the same prompts are compared by what they hold; nothing is compared that does not compare."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.spatial.distance import pdist
from scipy.stats import kstest, spearmanr, t

from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.reports import comparison as compare
from llmgeom.reports.similarity import permuted
from llmgeom.result import Estimate, Measured, Quantity
from llmgeom.stats import nested_probe, resampling, tests
from llmgeom.stats.similarity import cka, rsa
from tests.refusals import names, refused

RHO = "|rho| of PC1 and entropy"
PAIRED, SHARE = ("value_manifold", RHO), ("value_manifold", "PC1 share")


def head(name, value, half=0.1, clusters=30, **other) -> Estimate:
    given = dict(unit="fraction", low=value - half, high=value + half, method="jackknife", null_low=0.0, null_high=0.1)
    given |= dict(null="none", p=0.01, n=2 * clusters, clusters=clusters, effect=0.3)
    return Estimate(name=name, value=value, **(given | other))


def record(scores, entropy, unit, *, name="a", estimates=(), subject=(), **changes) -> Record:
    """A record of a value manifold whose first metric is what its scores and entropies give."""
    value, span = abs(tests.spearman(scores[:, 0], entropy)), tests.correlation_interval(scores[:, 0], entropy, unit)
    rho = head(RHO, value, unit="|rho|", clusters=len(set(unit)), deletions=span.deletions)
    measured = Measured(
        title="", meaning="", computed="", null="", failure_modes="",
        estimates=(rho, *estimates),
        quantities={"scores": Quantity(("prompt", "component"), "", "")},
        arrays={"scores": scores},
    )  # fmt: skip
    parts = {
        "results": {"value_manifold": measured},
        "unmeasured": {},
        "prompts": {
            "text": tuple(f"prompt {i}" for i in range(len(unit))),
            "template": tuple(map(str, unit)),
            "entropy": tuple(round(float(h), 6) for h in entropy),
            "tokens": (9,) * len(unit),
        },
        "subject": {"name": name, "heads": 4, "kv_heads": 4, "head_dim": 8, "d_model": 32, **dict(subject)},
        "source": {"name": "math"},
        "facts": {"claims_hash": "c" * 64, "nulls": 20, "seed": 0},
    }
    return Record(**{**parts, **changes})


def two(rng, clusters=30, ours=0.6, theirs=0.6, alike=0.8, **changes) -> tuple[Record, Record]:
    """Two models on the same prompts, two a unit: a score that follows each one's own entropy, with noise that the
    models share in part, and that the prompts of a unit share in part."""
    unit = np.repeat(np.arange(clusters), 2)

    def drawn(columns=1):
        return np.sqrt(0.5) * (rng.normal(size=(clusters, columns))[unit] + rng.normal(size=(2 * clusters, columns)))

    def both():
        shared = drawn()
        return [np.sqrt(alike) * shared + np.sqrt(1 - alike) * drawn() for _ in range(2)]

    made = []
    for name, rho, entropy, noise in zip("ab", (ours, theirs), both(), both(), strict=True):
        place = rho * entropy + np.sqrt(1 - rho**2) * noise
        made.append(record(np.hstack([place, drawn()]), entropy[:, 0], unit, name=name, **changes))
    return tuple(made)


def rows(comparison) -> dict:
    return {(d.probe, d.metric): d for pair in comparison.pairs for d in pair.differences}


# ---- differences ----------------------------------------------------------------------------------------------------


def test_a_record_does_not_differ_from_itself(tmp_path):
    one, _ = two(np.random.default_rng(0), estimates=(head("PC1 share", 0.4, 0.02),))
    one.save(tmp_path)
    found = compare.compare([one, Record.load(tmp_path)])
    assert {d.value for d in rows(found).values()} == {0.0} and {d.p for d in rows(found).values()} == {1.0}
    assert {d.verdict for d in rows(found).values()} == {"equivalent"}
    assert (rows(found)[PAIRED].method, rows(found)[PAIRED].low, rows(found)[PAIRED].high) == ("paired", 0.0, 0.0)
    assert rows(found)[SHARE].method == "unpaired" and rows(found)[SHARE].low < 0 < rows(found)[SHARE].high
    assert [s.value for s in found.pairs[0].similarities] == pytest.approx([1, 1])
    assert found.pairs[0].record == "a (run 2)" and not found.pairs[0].left_out


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


def test_a_difference_without_error_is_not_certain_beyond_what_is_known_of_tails():
    first, other = (two(np.random.default_rng(1), estimates=(head("PC1 share", v, 0),))[0] for v in (0.1, 0.9))
    d = rows(compare.compare([first, other]))[SHARE]
    assert (d.error, d.p, d.p_within, d.verdict) == (0, 2e-6, 1.0, "differs")


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
    assert d.p_within == pytest.approx(t.sf((0.3 - abs(whole)) / error, 7))


@pytest.mark.parametrize(("ours", "theirs", "truth"), [(0.6, 0.6, 0.0), (0.8, 0.3, 0.287 - 0.786)])
def test_the_paired_interval_of_a_rank_correlation_covers(ours, theirs, truth):
    """Truth: Spearman's rho of a normal pair, 6 / pi asin(r / 2). 120 records: 89 % is 3 standard errors below 95 %."""
    assert truth == pytest.approx(6 / np.pi * (math.asin(theirs / 2) - math.asin(ours / 2)), abs=1e-3)
    rng, hits, beyond = np.random.default_rng(3), 0, []
    for _ in range(120):
        d = compare._difference(*_arguments(*two(rng, 16, ours, theirs)))
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
        d, unpaired = (compare._difference("answers", *pair) for pair in (hs, [replace(h, deletions=None) for h in hs]))
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
            own = nested_probe.held_out("binary", label[:, None], [lambda x=x: x], fold)
            span = nested_probe.interval(own.value, nested_probe.deletions(own, [lambda x=x: x], cluster), cluster)
            hs.append(head("AUROC", own.value, low=span.low, high=span.high, clusters=45, deletions=span.deletions))
        d = compare._difference("label", *hs)
        assert d.method == "paired"
        places.append((d.value, d.low, d.high))
    value, low, high = np.array(places).T
    covered = np.mean((low <= value.mean()) & (value.mean() <= high))
    assert covered >= 0.92, covered


def _arguments(first, other):
    return "value_manifold", *(r.results["value_manifold"].estimates[0] for r in (first, other))


def test_unpaired_adds_the_variances_of_the_stored_intervals_and_believes_the_longer_half():
    a, b = head("PC1 share", 0.4, 0.06, clusters=40), head("PC1 share", 0.5, clusters=30, low=0.5, high=0.58)
    (first, _), (_, other) = (two(np.random.default_rng(4), estimates=(h,)) for h in (a, b))
    d = rows(compare.compare([first, other]))[SHARE]
    error = math.hypot(0.06 / t.ppf(0.975, 39), 0.08 / t.ppf(0.975, 29))
    assert (d.method, d.clusters, d.error, d.value) == ("unpaired", 30, pytest.approx(error), pytest.approx(0.1))
    assert d.high - d.value == pytest.approx(t.ppf(0.975, 29) * error) == d.value - d.low
    assert any(
        note.startswith("unpaired: ") and "conservative" in note for note in compare.compare([first, other]).notes
    )


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
    a, b = (resampling.Deletions("same", 0.7 + rng.normal(size=(2, 25)) / 100) for _ in range(2))
    hs = [head("AUROC", v, clusters=80, deletions=d) for v, d in ((0.7, a), (0.75, b))]
    d = compare._difference("label", *hs)
    errors = [math.sqrt(24 / 25 * np.square(way - way.mean()).sum()) for way in b.without - a.without]
    assert (d.method, d.clusters, d.error) == ("paired", 80, pytest.approx(math.sqrt(errors[0] * errors[1])))
    assert d.high - d.low == pytest.approx(2 * t.ppf(0.975, 24) * d.error)


def curved(record, scores, *, groups="same"):
    """The record with a curve of three layers over 10 groups, and an estimate of the same groups."""
    without = scores[:, None, None] + np.random.default_rng(ord(record.subject["name"])).normal(size=(3, 1, 10)) / 50
    quantities = {"score": Quantity(("layer",), "AUROC", "score"),
                  "score_without": Quantity(("layer", "way", "group"), "AUROC", "")}  # fmt: skip
    measured = Measured(
        title="", meaning="", computed="", null="", failure_modes="",
        estimates=(head("AUROC", 0.7, deletions=resampling.Deletions(groups, without[0])),),
        quantities=quantities, arrays={"score": scores, "score_without": without},
    )  # fmt: skip
    return replace(record, results={"label": measured}), without


def test_curves_of_the_same_groups_are_compared_at_every_layer():
    first, other = two(np.random.default_rng(5))
    (first, ours), (other, theirs) = curved(first, np.array([0.5, 0.6, 0.7])), curved(other, np.array([0.5, 0.9, 0.6]))
    (c,) = compare.compare([first, other]).pairs[0].curves
    error = np.sqrt(9 / 10 * np.square((x := (theirs - ours)[:, 0]) - x.mean(1, keepdims=True)).sum(1))
    np.testing.assert_allclose(c.value, [0, 0.3, -0.1], atol=1e-12)
    np.testing.assert_allclose(np.subtract(c.high, c.low) / 2, t.ppf(0.975, 9) * error)
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
    within = [t.sf((d.effect - abs(d.value)) / d.error, d.clusters - 1) for d in every]
    assert [pair.record for pair in found.pairs] == ["b (run 2)", "b (run 3)"]
    assert [[d.theirs for d in pair.differences[1:]] for pair in found.pairs] == [[0.5, 0.8], [0.7, 1.0]]
    assert len(every) == 6
    np.testing.assert_allclose([d.p for d in every], tests.holm(raw))
    np.testing.assert_allclose([d.p_within for d in every], tests.holm(within))


def test_the_number_of_units_asked_for_decides_with_the_power_that_is_said():
    """Normal units: at n = needed a true effect is found, and none is called equivalent, in 90 % of 400 draws each."""
    rng = np.random.default_rng(7)

    def judged(each):
        n, effect, value = len(each), 0.3, each.mean()
        error = each.std(ddof=1) / n**0.5
        low, high = value - t.ppf(0.975, n - 1) * error, value + t.ppf(0.975, n - 1) * error
        p = 2 * t.sf(abs(value) / error, n - 1)
        within = tests.equivalence_p(value, resampling.Interval(low, high, 0.95, ""), -effect, effect, n)
        found = (0, value, value, low, high, error, "paired", n, effect, p, within)
        return next(compare._judged([compare.Difference("probe", "metric", "bits", *found)]))

    needed = judged(rng.normal(0, 0.9, 100_000)).needed
    assert 90 < needed < 110
    found = [judged(rng.normal(0.3, 0.9, needed)).p < 0.05 for _ in range(400)]
    none = [judged(rng.normal(0, 0.9, needed)).verdict == "equivalent" for _ in range(400)]
    assert 0.86 < np.mean(found) < 0.95 and 0.86 < np.mean(none) < 0.95
    few, enough, small = (judged(m + np.linspace(-1.5, 1.5, n)) for m, n in ((0.1, 20), (0.5, 400), (0.1, 4000)))
    assert (few.verdict, few.why) == ("undecided", f"needs n >= {few.needed} clusters for 0.3 bits, has 20")
    assert enough.verdict == "differs" and 20 < enough.needed < 400
    assert small.verdict == "equivalent" and small.p < 0.05
    edge = judged(0.16 + np.linspace(-1.5, 1.5, 96))
    assert edge.verdict == "undecided" and edge.needed <= 96
    assert edge.why == f"96 clusters suffice for 0.3 bits (n >= {edge.needed}); less is not excluded"


def test_more_rows_ask_for_more_units():
    one, many = ([head(f"h{i}", 0.4, 0.3) for i in range(n)] for n in (1, 20))
    needed = [rows(compare.compare(list(two(np.random.default_rng(8), estimates=h))))[("value_manifold", "h0")].needed
              for h in (one, many)]  # fmt: skip
    assert needed[1] > 1.4 * needed[0]


def test_other_numbers_of_coordinates_are_a_caution():
    wide = {"kv_heads": 1, "head_dim": 8}
    first, other = two(np.random.default_rng(9), estimates=(head("PC1 share", 0.4),))
    (note,) = compare.compare([first, replace(other, subject={**other.subject, **wide})]).pairs[0].notes
    assert note.startswith("kv_heads is 1 against 4: shares of components")
    assert compare.compare([first, other]).pairs[0].notes == ()


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
        "value_manifold: old: declares no effect of interest to compare with; scan again",
    ]
    assert cka_why.startswith("value_manifold: CKA: not measured") and "alike" in cka_why
    assert rsa_why.startswith("value_manifold: RSA: not measured") and "alike" in rsa_why


# ---- what does not compare ------------------------------------------------------------------------------------------


def test_fewer_than_two_runs_are_refused():
    with refused(UserError, 1, "RUN"):
        compare.compare(two(np.random.default_rng(0))[:1])


@pytest.mark.parametrize(
    ("field", "change", "named"),
    [
        (
            "prompts",
            {"text": ("another", *(f"prompt {i}" for i in range(1, 60)))},
            ("60 of math", "59 texts are in both"),
        ),
        ("prompts", {"text": ("prompt 1", "prompt 0", *(f"prompt {i}" for i in range(2, 60)))}, ("another order",)),
        ("prompts", {"template": tuple(map(str, range(60)))}, ("60 clusters", 30)),
        ("prompts", {"template": tuple(str(i // 2 + 1) for i in range(60))}, ("30 clusters in both",)),
        ("facts", {"target": "wrong"}, ("target", "wrong", "right", "--target right")),
        ("facts", {"given": "length"}, ("given", "length", "none", "--given none")),
        ("prompts", {"right": ("1",) * 60}, ("60 prompts", "label right")),
        ("facts", {"claims_hash": "d" * 64}, ("another list of claims",)),
        ("facts", {"nulls": 5}, ("5 draws", 20, "--prompts-from RUN", "--nulls 20")),
        ("facts", {"seed": 7}, ("seed is 7", 0, "--prompts-from RUN", "--seed 0")),
    ],
)
def test_records_that_do_not_compare_are_refused_by_the_field_that_differs(field, change, named):
    first, other = (
        replace(r, facts={**r.facts, "target": "right", "given": "none"}, prompts={**r.prompts, "right": ("0",) * 60})
        for r in two(np.random.default_rng(0))
    )
    other = replace(other, **{field: {**getattr(other, field), **change}})
    with refused(UserError, "run 1", *named) as error:
        compare.compare([first, first, other])
    assert not re.search("[0-9a-f]{12}", str(error.value))


def test_the_first_field_that_differs_is_named_and_token_hashes_do_not_matter():
    first, other = two(np.random.default_rng(0))
    other = replace(other, facts={**other.facts, "prompts_hash": "another tokenizer's", "nulls": 1, "seed": 1})
    with refused(UserError, 1, 20):
        compare.compare([first, other])
    compare.compare([first, replace(other, facts={**first.facts, "prompts_hash": "another tokenizer's"})])


def test_a_refusal_names_folders_commands_and_the_flags_that_make_the_run_comparable():
    first, other = two(np.random.default_rng(0))
    first = replace(first, facts={**first.facts, "command": "llmgeom scan --nulls 20"}, source={"name": "mine.txt"})
    changed = {"command": "llmgeom scan", "nulls": 5}
    other = replace(other, facts={**other.facts, **changed}, prompts={**other.prompts, "text": ("x",) * 60})
    with refused(UserError, "runs/a", "runs/b", "--prompts-from runs/a --nulls 20", "60 of mine.txt"):
        compare.compare([first, other], ["runs/a", "runs/b"])
    label = replace(other, facts={**other.facts, "command": "llmgeom probe --target t"})
    with refused(UserError, "`llmgeom probe`, not of `llmgeom scan`", "one command"):
        compare.compare([first, label], ["runs/a", "runs/b"])
    with refused(UserError, "llmgeom probe", "--prompts runs/b/prompts.jsonl"):
        compare.compare([label, replace(label, prompts=first.prompts)], ["runs/b", "runs/c"])
    task = replace(first, source={"name": "bijection", "kind": "task"})
    with refused(UserError, "the same --task"):
        compare.compare([task, other], ["runs/a", "runs/b"])


def test_a_page_with_differences_is_not_replaced_by_one_without(tmp_path):
    first, other = two(np.random.default_rng(0))
    a, b, c = (str(tmp_path / name) for name in "abc")
    first.save(a)
    other.save(b)
    replace(other, prompts={**other.prompts, "template": tuple(map(str, range(60)))}).save(c)

    def report(*words):
        return CliRunner().invoke(main, ["report", *words], prog_name="llmgeom", catch_exceptions=False)

    assert report(a, b).output.endswith(f"page: {a}/compared.html\n")
    page = (tmp_path / "a" / "compared.html").read_bytes()
    done = report(a, c)
    assert done.exit_code == 0 and done.output.endswith(f"page: {a}/together.html\n")
    assert done.output.startswith(f"drawn together, without differences: {c} cannot be compared with {a}")
    assert (tmp_path / "a" / "compared.html").read_bytes() == page
    several = tmp_path / "several"
    for name in ("math", "mixed"):
        replace(other, source={"name": name}).save(several / name)
    replace(other, prompts={**other.prompts, "text": ("x",) * 60}).save(several / "mixed")
    assert f"give one of each, e.g. {several}/m" in report(str(several), a).output
    refusal = report(a, c, "--json")
    assert refusal.exit_code == 1 and names(refusal.stderr, a)


# ---- similarities ---------------------------------------------------------------------------------------------------


def hsic(k, l):  # noqa: E741
    """The unbiased estimator as Song et al. print it."""
    n, one = len(k), np.ones(len(k))
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
    cross = (
        np.trace(k @ l) + (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ k @ l @ one)
    )
    return cross / (n * (n - 3))


@pytest.mark.parametrize(("n", "wide", "wider"), [(4, 1, 2), (30, 2, 9), (12, 20, 5)])
def test_cka_is_the_ratio_of_unbiased_hsics(n, wide, wider):
    rng = np.random.default_rng(n)
    x = rng.normal(3, 1, (n, wide))
    y = x @ rng.normal(size=(wide, wider)) + rng.normal(size=(n, wider))
    k, l = x @ x.T, y @ y.T  # noqa: E741
    expected = hsic(k, l) / math.sqrt(hsic(k, k) * hsic(l, l))
    assert cka(x, y) == pytest.approx(expected, abs=1e-10)


def test_debiased_cka_tends_to_the_feature_form_and_is_0_on_average_where_there_is_no_relation():
    def biased(x, y):
        x, y = x - x.mean(0), y - y.mean(0)
        cross, own, theirs = (np.linalg.norm(a.T @ b) for a, b in ((y, x), (x, x), (y, y)))
        return cross**2 / (own * theirs)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, 3))
    y = x + rng.normal(size=(1500, 3))
    assert cka(x, y) == pytest.approx(biased(x, y), abs=0.003)
    pairs = [rng.normal(size=(2, 20, 15)) for _ in range(300)]
    assert np.mean([biased(*pair) for pair in pairs]) > 0.35
    assert abs(np.mean([cka(*pair) for pair in pairs])) < 0.02


@pytest.mark.parametrize("similarity", [cka, rsa])
def test_a_similarity_sees_neither_rotation_nor_scale_nor_place_and_sees_a_stretch(similarity):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(25, 4)) * (1, 2, 3, 4)
    turned = 7 * x @ np.linalg.qr(rng.normal(size=(4, 4)))[0] + 5
    assert similarity(x, turned) == pytest.approx(1)
    assert similarity(x, x * (8, 1, 1, 0.1)) < 0.9
    y = rng.normal(size=(25, 2)) + x[:, :2]
    assert similarity(turned, y) == pytest.approx(similarity(x, y))


def test_rsa_is_spearman_s_rho_of_the_distances():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(30, 2)), rng.integers(0, 3, (30, 5)).astype(float)  # with ties
    y[:, 0] += x[:, 0]
    assert rsa(x, y) == pytest.approx(spearmanr(pdist(x), pdist(y)).statistic)
    y = np.round(y)
    assert rsa(x, y) == pytest.approx(spearmanr(pdist(x), pdist(y)).statistic)


@pytest.mark.parametrize(("measure", "similarity"), [("CKA", cka), ("RSA", rsa)])
def test_p_is_uniform_where_clustered_records_are_unrelated(measure, similarity):
    """10 units of 4 rows that lie close together in both: to permute rows would call nearly all of these related."""
    rng, unit = np.random.default_rng(3), np.repeat(np.arange(10), 4)
    p, of_rows = [], []
    for _ in range(150):
        a, b = (rng.normal(size=(10, 2))[unit] + 0.2 * rng.normal(size=(40, 2)) for _ in range(2))
        p.append(tests.tail_p(similarity(a, b), permuted(measure, a, b, unit.tolist(), 99, int(rng.integers(2**31)))))
        of_rows.append(tests.tail_p(similarity(a, b), permuted(measure, a, b, range(40), 19, 0)))
    assert kstest(np.array(p) - rng.random(150) / 100, "uniform").pvalue > 0.01
    assert kstest(np.array(of_rows) - rng.random(150) / 20, "uniform").pvalue < 1e-6


def test_related_records_beat_the_null_and_say_of_what_they_are_related():
    first, other = two(np.random.default_rng(4), ours=0.95, theirs=0.95, alike=0.95)
    ours, theirs = compare.compare([first, other]).pairs[0].similarities
    assert (ours.measure, theirs.measure) == ("CKA", "RSA") and ours.of == "CKA of the first 2 components"
    for s in (ours, theirs):
        assert s.p == 1 / 2000 and s.null_high < s.low < s.value < s.high < 1 and (s.n, s.clusters) == (60, 30)
    x, y = (r.results["value_manifold"].arrays["scores"] for r in (first, other))
    unit = np.array(first.prompts["template"])
    without = np.array([rsa(x[unit != u], y[unit != u]) for u in dict.fromkeys(unit)])
    assert theirs.value == pytest.approx(spearmanr(pdist(x), pdist(y)).statistic)
    half = t.ppf(0.975, 29) * np.arctanh(without).std() * math.sqrt(29)  # Fisher's scale
    assert (theirs.low, theirs.high) == pytest.approx(
        tuple(np.tanh(np.arctanh(theirs.value) + half * np.array([-1, 1])))
    )
    again = compare.compare([first, other]).pairs[0].similarities
    assert again == (ours, theirs)


def test_the_fullest_places_that_both_hold_are_compared_whatever_their_width():
    rng = np.random.default_rng(5)
    first, other = two(rng)

    def fuller(r, columns):
        m = r.results["value_manifold"]
        wide = {"wide": Quantity(("prompt", "axis"), "", ""), "by_layer": Quantity(("layer", "axis"), "", "")}
        arrays = {**m.arrays, "wide": rng.normal(size=(60, columns)), "by_layer": np.ones((60, 99))}
        return replace(r, results={"value_manifold": replace(m, quantities={**m.quantities, **wide}, arrays=arrays)})

    (s, _) = compare.compare([fuller(first, 7), fuller(other, 4)]).pairs[0].similarities
    assert (s.array, s.components, s.of) == ("wide", (7, 4), "CKA of the first 7 and 4 components")
    (s, _) = compare.compare([fuller(first, 7), other]).pairs[0].similarities
    assert (s.array, s.components) == ("scores", (2, 2))


def test_the_largest_difference_of_a_probe_is_a_finding_and_every_word_is_counted():
    first, other = two(np.random.default_rng(5), estimates=(head("PC1 share", 0.1), head("PC2 share", 0.1)))
    theirs = other.results["value_manifold"]
    far = (*theirs.estimates[:1], head("PC1 share", 0.7), head("PC2 share", 0.9))
    other = replace(other, results={"value_manifold": replace(theirs, estimates=far)})
    (pair,) = compare.compare([first, other]).pairs
    words = [d.verdict for d in pair.differences]
    assert f"on the same 60 prompts: of {len(words)} numbers" in pair.counted and words.count("differs") == 2
    assert all(f"{words.count(word)} " in pair.counted for word in {*words})
    most = max((d for d in pair.differences if d.verdict == "differs"), key=lambda d: abs(d.value / d.effect))
    assert len(pair.findings) == 1 and f"value manifold, {most.metric}: {most.theirs:.3g} in" in pair.findings[0]
    assert most.metric == "PC2 share" and f"(n = {most.clusters})." in pair.findings[0]


def test_two_revisions_are_named_and_those_with_equal_weights_are_refused():
    """Branches of a published suite hold the weights of another step (86 of 154 of one model)."""
    first, other = two(np.random.default_rng(0))
    step = {"name": "suite", "revision": "step1", "weights": "a" * 64}
    first, same = (replace(r, subject={**r.subject, **step}) for r in (first, other))
    other = replace(same, subject={**same.subject, "revision": "step2", "weights": "b" * 64})
    assert compare.compare([first, other]).pairs[0].record == "suite @ step2"
    with refused(UserError, "step1", "step2", "a" * 12):
        compare.compare([first, replace(other, subject={**other.subject, "weights": "a" * 64})])
    assert compare.compare([first, same]).pairs[0].record == "suite (run 2)"


# ---- output ---------------------------------------------------------------------------------------------------------


def test_a_comparison_is_plain_data_and_safe_lines():
    hostile = {"name": "\x1b[31mevil\n"}
    first, other = two(np.random.default_rng(7), estimates=(head("PC1 share", 0.4, 0.5),), subject=hostile)
    first = replace(first, source={"name": "math", "stratified": {"n": 60}})
    found = compare.compare([first, other])
    body = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert body["pairs"][0]["differences"][0]["metric"] == RHO and body["prompts"] == 60
    text = "\n".join(found.lines())
    assert "\x1b" not in text and "\\x1b[31mevil\\n (run 2) less \\x1b[31mevil\\n (run 1)" in text
    undecided = rows(found)[SHARE]
    assert f"undecided (needs n >= {undecided.needed} clusters)" in text and undecided.needed > 30
    assert "CKA of the first 2 components" in text
    assert sum("the prompts were spread evenly over the entropy of" in note for note in found.notes) == 1
    short = compare.compared(found)
    assert len(short) < 20 and max(map(len, short)) <= 100 and "\x1b" not in "\n".join(short)
    verdicts = [d.verdict for d in found.pairs[0].differences]
    shown = [line.split()[0] for line in short if line.split()[:1] and line.split()[0] in verdicts]
    order = ("differs", "equivalent", "undecided")
    assert sorted(verdicts) == sorted(shown) and shown == sorted(shown, key=order.index)


def test_a_long_comparison_names_what_differs_and_counts_the_rest():
    (pair,) = compare.compare(two(np.random.default_rng(7), estimates=(head("PC1 share", 0.4, 0.5),))).pairs
    (row, *_) = pair.differences
    many = tuple(replace(row, metric=f"number {i}", verdict="differs" if i == 29 else "undecided") for i in range(30))
    lines = compare.compared(compare.Comparison(60, 30, "", (replace(pair, differences=many),), ()))
    assert len(lines) < 20 and "and 20 more (--table)" in lines
    (first,) = (line for line in lines if line.startswith("differs"))
    assert "number 29" in first and lines.index(first) == lines.index(next(x for x in lines if "number 0" in x)) - 1


def test_it_loads_no_model_library():
    code = "import llmgeom.reports.comparison, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_two_scans_of_the_same_prompts_by_two_models(tmp_path):
    """One model's domain, and another model of another kind, width and depth with --prompts-from."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from llmgeom.commands.scans.perform import perform
    from llmgeom.commands.scans.plan import prepare
    from llmgeom.commands.scans.request import RunConfig
    from llmgeom.model import hub

    tokenizer = AutoTokenizer.from_pretrained(hub.locate("pocket:pythia").path)
    for name, kv_heads, hidden, layers in (("mha", 4, 32, 3), ("mqa", 1, 16, 4)):
        torch.manual_seed(hidden)
        config = LlamaConfig(
            hidden_size=hidden, vocab_size=len(tokenizer), max_position_embeddings=256, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=kv_heads, intermediate_size=32, initializer_range=0.3,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    probes, first, second = ("attention_focus", "value_manifold"), tmp_path / "first", tmp_path / "second"
    for name, out, asked in (
        ("mha", first, {"domains": ("math",), "n": 30, "limit": 60}),
        ("mqa", second, {"prompts_from": str(first)}),
    ):
        request = RunConfig(model=str(tmp_path / name), nulls=1, out=str(out), probes=probes, **asked)
        list(perform(prepare(request)))
    records = [Record.load(folder) for folder in (first, second)]
    assert records[0].prompts["text"] == records[1].prompts["text"]
    found = compare.compare(records)
    methods = {metric: d.method for (_, metric), d in rows(found).items()}
    assert {name for name, method in methods.items() if method == "unpaired"} <= {
        "intrinsic dimension (TwoNN) over Gaussian",
        "order along the curve",  # both have intervals by points, which no cluster's absence gives
    }
    assert {f"attention write: {RHO}", RHO, "order along the curve", "PC1+PC2 share", "focusing"} <= methods.keys()
    assert len(methods) >= 16
    assert [(s.array, s.measure) for s in found.pairs[0].similarities] == [
        (array, measure) for measure in ("CKA", "RSA") for array in ("scores", "attention_write_scores")
    ]
    assert found.pairs[0].notes[0].startswith("d_model is 16 against 32, kv_heads is 1 against 4, head_dim is 4")
