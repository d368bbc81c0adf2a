"""A metric has to beat every null it is held against, and a claim has to survive the company of the other claims."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats as scipy_stats

from llmgeom import probes
from llmgeom.claims import Claim, Null, declared, digest, entries, estimate, judge
from llmgeom.record import Record
from llmgeom.reports import table
from llmgeom.reports.verdicts import ICONS
from llmgeom.result import Measured
from llmgeom.stats.resampling import Interval
from tests.refusals import refused

EASY, HARD = np.linspace(0.0, 0.1, 20), np.linspace(0.3, 0.6, 20)


def claim(**changes) -> Claim:
    plain = Claim(probe="toy", name="x", unit="fraction", side="upper", effect=0.1, needed="mean")
    return replace(plain, **changes)


def made(value, low, high, nulls, side="upper", **changes):
    found = [Null.of(name, value, draws, side) for name, draws in nulls.items()]
    interval = Interval(low, high, 0.95, "by hand")
    return estimate(claim(side=side, **changes), value, interval, found, n=80, clusters=40)


def measured(*estimates) -> Measured:
    return Measured("t", "m", "c", "n", "f", estimates, {}, {})


def judged(*estimates):
    return judge({"toy": measured(*estimates)})["toy"].estimates


@pytest.mark.parametrize("nulls", [{"easy": EASY, "hard": HARD}, {"hard": HARD, "easy": EASY}])
def test_beating_one_null_of_two_is_not_enough(nulls):
    h = made(0.45, 0.40, 0.50, nulls)
    assert h.verdict == "not above null"
    assert h.null.startswith("hard") and h.null_high == 0.6
    assert h.p == pytest.approx((1 + (HARD >= 0.45).sum()) / 21)
    assert h.p_claim == pytest.approx(0.5)
    assert made(0.45, 0.40, 0.50, {"easy": EASY}).verdict == "above null"


def test_a_value_above_both_is_above_with_the_larger_p():
    h = made(0.9, 0.8, 1.0, {"easy": EASY, "hard": HARD})
    assert h.verdict == "above null" and h.p == pytest.approx(1 / 21)


def test_p_alone_can_withhold_the_verdict():
    """A wide gap to the margin does not help where one null's p is large."""
    chance = Null("chance", 0.0, 0.1, 0.0, 0.3, 1000)
    interval = Interval(0.8, 1.0, 0.95, "by hand")
    h = estimate(claim(), 0.9, interval, [Null.of("easy", 0.9, EASY), chance], n=80, clusters=40)
    assert h.verdict == "undecided" and h.p == 0.3


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.05, 0.20, "below null"), (0.25, 0.50, "not below null"), (0.10, 0.40, "undecided")]
)
def test_a_claim_below_its_null_turns_everything_but_the_numbers(low, high, verdict):
    h = made((low + high) / 2, low, high, {"high": HARD}, side="lower")
    assert h.verdict == verdict
    assert (h.low, h.high, h.null_low, h.null_high, h.margin) == (low, high, 0.3, 0.6, 0.3)


def test_a_null_made_for_the_other_side_is_refused():
    null = Null.of("untrained controls", 0.1, HARD, "upper")
    with refused(ValueError, "x", "lower", "untrained controls"):
        estimate(claim(side="lower"), 0.1, Interval(0.0, 0.2, 0.95, ""), [null], n=80, clusters=40)


def test_one_half_is_a_number_that_nobody_drew():
    interval = Interval(0.6, 0.8, 0.95, "by hand")
    h = estimate(claim(), 0.7, interval, [Null.of("easy", 0.7, EASY), Null.half(0.7, interval, 40)], n=80, clusters=40)
    assert (h.null, h.null_low, h.null_high, h.margin) == ("one half", 0.5, 0.5, 0.5) and h.verdict == "above null"
    t = (0.7 - 0.5) / (0.1 / scipy_stats.t.ppf(0.975, 39))
    assert h.p_claim == pytest.approx(scipy_stats.t.sf(t, 39))
    assert estimate(claim(), 0.7, interval, [Null.of("easy", 0.7, EASY)], n=80, clusters=40).null == "easy (20 draws)"


WORDS = [
    (0.31, 0.60, 0.01, 40, "above null", "the interval of 0.45 [0.31, 0.6] clears 0.3, p = 0.01"),
    (0.31, 0.38, 0.01, 40, "above null", "clears 0.3"),
    (0.31, 0.60, 0.06, 40, "undecided", "needs n >= 1054 units for the declared effect of 0.1, has 40"),
    (0.29, 0.60, 0.01, 40, "undecided", "needs n >= 1054"),
    (0.30, 0.60, 0.01, 40, "undecided", "needs n >= 1054"),
    (0.05, 0.39, 0.01, 40, "not above null", "excludes 0.3 + 0.1, the effect of interest"),
    (-0.9, -0.5, 0.01, 40, "not above null", "excludes 0.3"),
    (0.05, 0.40, 0.60, 40, "undecided", "needs n >= 1054"),
    (0.05, 0.60, 0.60, 1054, "undecided", "1054 units suffice for the declared effect (n >= 1054)"),
]


@pytest.mark.parametrize(("low", "high", "p", "clusters", "word", "why"), WORDS)
def test_verdict_words(low, high, p, clusters, word, why):
    null, asked = Null("chance", 0.2, 0.3, 0.3, p, 1000), claim(needed="correlation")
    h = estimate(asked, 0.45, Interval(low, high, 0.95, ""), [null], n=80, clusters=clusters)
    assert h.verdict == word and why in h.why
    # Everything turned is the same verdict on the other side.
    null = Null("chance", -0.3, -0.2, -0.3, p, 1000, side="lower")
    turned = estimate(
        replace(asked, side="lower"), -0.45, Interval(-high, -low, 0.95, ""), [null], n=80, clusters=clusters
    )
    assert turned.verdict == word.replace("above", "below")
    if "clears" in why:
        assert "stays under -0.3, p = " in turned.why
    if "excludes" in why:
        assert "excludes -0.3 - 0.1, the effect of interest" in turned.why


# A claim's p, and Holm over the file


def test_a_claim_s_p_is_the_largest_of_a_prediction_p_and_a_permutation_p():
    permuted = Null("permuted", 0.0, 0.1, 0.0, 0.0001, 10_000)
    interval = Interval(0.7, 0.9, 0.95, "")
    h = estimate(claim(), 0.8, interval, [Null.of("hard", 0.8, HARD), permuted], n=80, clusters=40)
    t = (0.8 - HARD.mean()) / (HARD.std(ddof=1) * math.sqrt(1 + 1 / 20))
    assert h.p_claim == pytest.approx(scipy_stats.t.sf(t, 19)) and 1e-4 < h.p_claim < 1 / 21
    on_logs = estimate(claim(scale="log"), 0.8, interval, [Null.of("hard", 0.8, HARD), permuted], n=80, clusters=40)
    logs = np.log(HARD)
    t = (math.log(0.8) - logs.mean()) / (logs.std(ddof=1) * math.sqrt(1 + 1 / 20))
    assert on_logs.p_claim == pytest.approx(scipy_stats.t.sf(t, 19))
    alone = estimate(claim(), 0.8, interval, [permuted], n=80, clusters=40)
    assert alone.p_claim == 0.0001


def strong(name, p_claim, **changes):
    """A claim whose interval clears its margin of 0.6 and whose rank p is 1/21."""
    h = made(0.9, 0.8, 1.0, {"hard": HARD}, name=name, claim=f"{name} holds.", source="s", published="p")
    return replace(h, p_claim=p_claim, **changes)


def test_holm_runs_over_the_claims_of_all_probes_and_over_nothing_else():
    a, b, c = strong("a", 0.01), strong("b", 0.02), strong("c", 0.03)
    plain = replace(strong("d", 1e-6), claim="")
    found = judge({"one": measured(a, plain), "two": measured(b, c)})
    (a, d), (b, c) = found["one"].estimates, found["two"].estimates
    # .01 * 3, .02 * 2, .03 * 1, none below the one before
    assert [h.adjusted for h in (a, b, c)] == pytest.approx([0.03, 0.04, 0.04])
    assert {h.verdict for h in (a, b, c)} == {"PASS"}
    assert d == plain and d.verdict == "above null"
    assert a.why == "the interval of 0.9 [0.8, 1] clears 0.6, p = 0.03 by Holm over 3 claims"


def test_the_company_of_other_claims_can_take_a_pass_away():
    assert judged(strong("a", 0.02))[0].verdict == "PASS"
    (a, b, _) = judged(strong("a", 0.02), strong("b", 0.02), strong("c", 0.9))
    assert (a.verdict, a.adjusted) == ("INCONCLUSIVE", pytest.approx(0.06))
    assert b.why.startswith("p = 0.06 by Holm over 3 claims; ")


def test_each_of_interval_rank_p_and_adjusted_p_is_needed_for_a_pass():
    assert judged(strong("a", 0.001))[0].verdict == "PASS"
    assert judged(strong("a", 0.001, low=0.59))[0].verdict == "INCONCLUSIVE"
    assert judged(strong("a", 0.001, p=0.05))[0].verdict == "INCONCLUSIVE"
    assert judged(strong("a", 0.05))[0].verdict == "INCONCLUSIVE"


@pytest.mark.parametrize("p_claim", [1e-6, 0.5])
def test_fail_needs_the_effect_excluded_and_never_comes_from_a_wide_interval(p_claim):
    # margin .6, effect .1: below .7 the effect is excluded
    shown = judged(strong("a", p_claim, value=0.5, low=0.40, high=0.69))[0]
    assert shown.verdict == "FAIL" and "excludes 0.6 + 0.1, the effect of interest, p = " in shown.why
    for high in (0.70, 5.0):
        wide = judged(strong("a", p_claim, value=0.5, low=-4.0, high=high))[0]
        assert wide.verdict == "INCONCLUSIVE"
        assert f"needs n >= {wide.needed} units" in wide.why or "40 units suffice" in wide.why


def test_a_pass_by_less_than_the_effect_of_interest_says_so():
    (small,) = judged(strong("a", 0.001, value=0.65, low=0.62, high=0.69))
    assert small.verdict == "PASS" and small.why.endswith("; an effect of 0.1 is excluded: it is a small one")
    assert "small one" not in judged(strong("a", 0.001))[0].why


def test_a_claim_that_the_value_is_low_fails_above_and_passes_below():
    low = dict(side="lower", claim="it is low.", source="s", published="p")
    assert judged(made(0.1, 0.05, 0.15, {"hard": HARD}, **low))[0].verdict == "PASS"
    (failed,) = judged(made(0.3, 0.21, 0.39, {"hard": HARD}, **low))
    assert failed.verdict == "FAIL" and "excludes 0.3 - 0.1" in failed.why
    assert judged(made(0.3, 0.19, 0.39, {"hard": HARD}, **low))[0].verdict == "INCONCLUSIVE"


def test_judging_twice_changes_nothing():
    once = judge({"toy": measured(strong("a", 0.01), strong("b", 0.04))})
    assert judge(once) == once


def test_twenty_twins_can_pass_seven_claims_though_no_rank_p_could():
    """The smallest rank p of 20 draws is 1/21: seven times it is a third."""
    rng = np.random.default_rng(0)
    found = judged(
        *(
            made(
                1.2,
                1.0,
                1.4,
                {"untrained controls": rng.normal(0.5, 0.05, 20)},
                name=n,
                claim=n,
                source="s",
                published="p",
            )
            for n in "abcdefg"
        )
    )
    assert {h.p for h in found} == {1 / 21} and {h.verdict for h in found} == {"PASS"}
    assert all(h.adjusted >= 1e-6 for h in found)


def equal(value, half, **changes):
    """An equivalence claim with margin .1 around a null whose draws have the median 0.5."""
    interval = Interval(value - half, value + half, 0.95, "")
    given = dict(equivalence=True, margin=0.1, effect=0.0, claim="no effect.", source="s", published="p")
    nulls = [Null.of("untrained controls", value, np.linspace(0.4, 0.6, 21))]
    return estimate(claim(**{**given, **changes}), value, interval, nulls, n=80, clusters=40)


def test_a_claim_of_no_effect_is_two_one_sided_tests():
    passed, failed, wide = (judged(equal(*case))[0] for case in ((0.52, 0.05), (0.75, 0.10), (0.52, 0.12)))
    assert (passed.verdict, failed.verdict, wide.verdict) == ("PASS", "FAIL", "INCONCLUSIVE")
    assert (passed.margin_low, passed.margin) == pytest.approx((0.4, 0.6))
    # The interval with level 1 - 2p has the nearer margin, .6, for its end.
    error = 0.05 / scipy_stats.t.ppf(0.975, 39)
    assert 0.52 + scipy_stats.t.isf(passed.p_claim, 39) * error == pytest.approx(0.6)
    assert "units for the declared effect of 0.1" in wide.why
    assert passed.verdict == "PASS" and equal(0.52, 0.05).verdict == "not above null"
    assert equal(0.75, 0.10).verdict == "above null" and equal(0.25, 0.10).verdict == "below null"


def test_no_more_than_the_null_has_no_lower_end():
    cases = (0.1, 0.05), (0.75, 0.1), (0.52, 0.12)
    far_below, more, wide = (judged(equal(*case, one_sided=True))[0] for case in cases)
    assert (far_below.verdict, more.verdict, wide.verdict) == ("PASS", "FAIL", "INCONCLUSIVE")
    assert "within the range up to 0.6" in far_below.why and "outside the range up to 0.6" in more.why
    # Only the upper end is tested.
    error = 0.05 / scipy_stats.t.ppf(0.975, 39)
    assert equal(0.55, 0.05, one_sided=True).p_claim == pytest.approx(scipy_stats.t.sf(0.05 / error, 39))
    assert "at most 0.1 fraction above" in claim(equivalence=True, margin=0.1, one_sided=True).lines()[1]


def test_no_effect_must_hold_against_every_null():
    nulls = [Null.of("a", 0.5, np.linspace(0.4, 0.6, 21)), Null.of("b", 0.5, np.linspace(0.55, 0.75, 21))]
    given = dict(equivalence=True, margin=0.1, effect=0.0, claim="no effect.", source="s", published="p")
    interval = Interval(0.51, 0.57, 0.95, "")  # within .1 of the medians .5 and .65 lies .55 to .6
    (found,) = judged(estimate(claim(**given), 0.54, interval, nulls, n=80, clusters=40))
    assert (found.margin_low, found.margin) == pytest.approx((0.55, 0.60)) and found.verdict == "INCONCLUSIVE"
    (apart,) = judged(estimate(claim(**given), 0.3, Interval(0.2, 0.54, 0.95, ""), nulls, n=80, clusters=40))
    assert apart.verdict == "FAIL"


# The declarations


GOOD = """
[[metric]]
probe = "toy"
name = "x"
unit = "fraction"
side = "upper"
effect = 0.1
needed = "mean"
"""
CLAIM = 'claim = "It holds."\nnull = "untrained controls"\nsource = "Paper III"\npublished = "30 %"\nscale = "log"\n'


def folder(tmp_path, text, name="one.toml"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_entries_are_read_as_they_are_written_from_every_file(tmp_path):
    folder(tmp_path, GOOD + CLAIM)
    other = GOOD.replace('"x"', '"y"').replace("effect = 0.1", "equivalence = true\nmargin = 0.2") + CLAIM
    found = declared("toy", folder(tmp_path, other, "two.toml"))
    whole = claim(scale="log", claim="It holds.", null="untrained controls", source="Paper III", published="30 %")
    assert found["x"] == whole and found["x"].smallest == 0.1
    assert found["y"] == replace(whole, name="y", effect=0.0, equivalence=True, margin=0.2)
    assert found["y"].smallest == 0.2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD + "tolerance = 1\n", ("one.toml", "entry 1", "toy: x", "tolerance", "side")),
        (GOOD.replace("upper", "above"), ("entry 1", "toy: x", "side", "above", "upper", "lower")),
        (GOOD.replace("mean", "median"), ("needed", "median", "mean", "correlation")),
        (GOOD + 'scale = "logit"\n', ("scale", "logit", "identity", "log", "fisher", "folded")),
        (GOOD.replace("0.1", '"0.1"'), ("effect", "'0.1'")),
        (GOOD.replace("0.1", "true"), ("effect", True)),
        (GOOD.replace("0.1", "-0.1"), ("effect", "margin")),
        (GOOD.replace("0.1", "nan"), ("effect",)),
        (GOOD.replace("effect = 0.1\n", ""), ("effect",)),
        (GOOD + "margin = 0.1\n", ("effect", "margin")),
        (GOOD.replace('unit = "fraction"\n', ""), ("toy: x", "unit")),
        (GOOD.replace('probe = "toy"', 'probe = ""'), ("probe",)),
        (GOOD + 'claim = "It holds."\n', ("null", "source", "published", "scale")),
        (GOOD + "equivalence = true\n", ("margin", "effect")),
        (GOOD.replace("effect = 0.1", "margin = 0.1\nequivalence = true"), ("equivalence", "claim")),
        (GOOD + GOOD, ("one.toml", "entry 2", "toy: x")),
        ('[metric]\nprobe = "toy"\n', ("one.toml",)),
        ("[[claim]]\n", ("one.toml", "claim")),
        ("x =", ("one.toml", "TOML")),
    ],
)
def test_a_malformed_entry_is_named_with_its_file(tmp_path, text, named):
    with refused(ValueError, *named):
        entries(folder(tmp_path, text))


def test_a_probe_without_declarations_is_told_who_has_some(tmp_path):
    with refused(ValueError, "toys", "toy"):
        declared("toys", folder(tmp_path, GOOD))


def test_the_digest_changes_with_a_byte_or_a_name_of_a_file_and_with_nothing_else(tmp_path):
    first = digest(folder(tmp_path, GOOD))
    folder(tmp_path, "not read", "notes.md")
    assert digest(tmp_path) == first and len(first) == 64
    assert digest(folder(tmp_path, GOOD + "#")) != first
    folder(tmp_path, GOOD).joinpath("one.toml").rename(tmp_path / "two.toml")
    assert digest(tmp_path) != first


def test_the_declared_claims_are_the_few_that_the_papers_stand_on():
    every = entries()
    claims = [entry for entry in every if entry.claim]
    # Holm's correction is over the claims of one record: each command has few.
    of_command = Counter("scan" if entry.probe in probes.names() else entry.probe.split("_")[0] for entry in claims)
    grown = {"heads": 1, "blocks": 3, "interchange": 1, "drift": 2, "gradients": 1}
    assert of_command == {"scan": 15, "sula": 4, "ablation": 5, "posterior": 6} | grown
    for entry in claims:
        assert entry.claim[0].isupper() and entry.claim.endswith(".") and len(entry.claim.split()) > 8
        assert "Paper" in entry.source or "derived here" in entry.source
    # Rank correlations without a sign have their own scale.
    assert {entry.scale for entry in every if entry.unit == "|rho|"} == {"folded"}


def test_a_declared_claim_is_read_by_a_person_with_its_rule():
    upper = claim(claim="It holds.", null="untrained controls", source="Paper III", published="30 %")
    assert upper.lines() == [
        "toy: x",
        "    It holds.",
        "    PASS above every null; FAIL where null + 0.1 fraction is excluded",
        "    null: untrained controls",
        "    source: Paper III",
        "    published: 30 %",
    ]
    assert "PASS below every null; FAIL where null - 0.1 fraction" in replace(upper, side="lower").lines()[2]
    assert "within 0.2 fraction" in replace(upper, equivalence=True, margin=0.2).lines()[2]
    assert all(len(line) <= 96 for entry in entries() for line in entry.lines())


def test_the_claims_are_listed_without_loading_torch():
    code = (
        "import sys, llmgeom.cli as c; c.main(['list', 'claims'], standalone_mode=False); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "False"
    for entry in entries():
        assert (f"{entry.probe}: {entry.name}\n    {entry.claim[:40]}" in shown) == bool(entry.claim)


def test_a_judged_claim_carries_its_sentence_into_the_table_and_a_measurement_none():
    results = judge({"toy": measured(strong("a", 0.01), replace(strong("b", 0.01), claim=""))})
    record = Record(results, {"other": "no keys"}, {}, {"name": "m"}, {"name": "math"}, {})
    rows = {row["name"]: row for row in table([record])}
    assert (rows["a"]["claim"], rows["a"]["verdict"]) == ("a holds.", "PASS")
    assert (rows["b"]["claim"], rows["b"]["verdict"]) == ("", "above null")
    assert rows["other"]["claim"] == "" and rows["other"]["why"] == "no keys"
    assert {"PASS", "FAIL", "INCONCLUSIVE"} <= ICONS.keys()
    plain = replace(record, results={"toy": measured(replace(strong("b", 0.01), claim=""))})
    assert all("claim" not in row for row in table([plain]))
