"""The sentences of a run, judged on records that were built to have each kind of finding."""

from dataclasses import replace

import numpy as np
import pytest

from llmgeom.claims import declared, entries, estimate, judge_estimates, word
from llmgeom.exports import latex
from llmgeom.record import Record
from llmgeom.reports import page
from llmgeom.reports.digest import digest
from llmgeom.reports.outcomes import claims, heads, outcomes
from llmgeom.reports.verdicts import lines
from llmgeom.result import SENTENCE, STRONGEST, Lack, Measured
from llmgeom.stats.controls import Null
from llmgeom.stats.resampling import Interval
from tests.findings import claim, record, said, text_of

SEEDS = Lack("runs", "training seeds", 1, 5)
BY_PROCESS = {"text": ("a", "b"), "template": ("0", "1"), "domain": ("recall", "bijection")}


@pytest.mark.parametrize(
    ("made", "starts", "holds"),
    [
        (claim(verdict="holds", value=0.8), "Values are ordered by uncertainty: this holds.", ["0.80 [0.70, 0.90]"]),
        (
            claim(verdict="small", value=0.3, spread=0.05),
            "Values are ordered by uncertainty, but by less than claimed.",
            ["0.3 "],
        ),
        (claim(verdict="opposite", value=-0.5), "The opposite of “Values are ordered", ["lower than the control"]),
        (
            claim(verdict="opposite", value=0.9, side="lower"),
            "The opposite of “Values are ordered",
            ["higher than the control"],
        ),
        (
            claim(verdict="ruled out", value=0.19, effect=0.1, spread=0.05),
            "“Values are ordered by uncertainty” looks true",
            ["but the control is as large", "0.05 to 0.20"],
        ),
        (
            claim(verdict="ruled out", value=0.0, spread=0.05),
            "“Values are ordered by uncertainty” is ruled out at the claimed size",
            ["an effect of 0.3 is excluded"],
        ),
        (
            claim(verdict="ruled out", value=0.9, equivalence=True, margin=0.3, margin_low=-0.3),
            "“Values are ordered by uncertainty” is ruled out: ",
            ["the claim allows a difference of 0.3"],
        ),
        (
            claim(),
            "“Values are ordered by uncertainty” is open",
            ["120 templates would find the claimed effect in 9 of 10 runs; this run has 70"],
        ),
        (claim(needed=60), "“Values are ordered by uncertainty” is open", ["neither no effect nor the claimed 0.3"]),
        (claim(needed=60, spread=0.25), "“Values are", ["includes both no effect and the claimed 0.3"]),
    ],
)
def test_a_finding_of_each_kind_says_what_was_found_with_value_interval_and_control(made, starts, holds):
    (sentence,) = said(record(made))[1]
    assert sentence.startswith(starts)
    assert all(
        part in sentence for part in [*holds, "20 untrained copies give 0.05 to 0.20", "|ρ|", "(n = 70 templates)"]
    )
    assert "is is" not in sentence and "  " not in sentence and sentence.endswith(".")


def test_an_effect_that_the_final_token_explains_is_one_finding_with_what_is_left():
    fixed = claim("|rho| of PC1 and entropy, given length and final token", "ruled out", 0.01, claim="It remains: so.")
    sentence, found = said(record(claim(verdict="holds", value=0.8), fixed))
    assert sentence == "1 of the 2 claims holds on these 2 prompts. 1 test rules out an effect of the claimed size."
    assert len(found) == 1 and found[0].endswith(
        "With length and final token held fixed 0.01 [-0.09, 0.11] is left, and an effect of the claimed size is "
        "excluded."
    )
    # The rule reads names of metrics and no list: it does not join what shares no words.
    assert len(said(record(claim(), replace(fixed, name="order along the curve")))[1]) == 2


def test_what_a_probe_read_stands_before_what_an_edit_of_its_direction_did():
    """The record of the edit carries the probe's claim: readable and used are the first two sentences."""
    read = claim(
        "AUROC",
        "ruled out",
        0.65,
        unit="AUROC",
        null="bag of tokens",
        control="",
        control_draws=0,
        claim="It is readable: beyond all.",
    )
    used = claim("KL of the edit", "holds", 0.8, unit="bits", claim="It is used: more than equal edits.")
    axis = {"label": "narrative", "place": "residual 3", "read": {"claim": read.plain(), "score": 0.71}}
    first, second = said(replace(record(used), facts={"axis": axis}))[1]
    assert first.startswith("Label “narrative”. “It is readable” ") and "bag of tokens gives 0.05 to 0.20" in first
    assert "0.65 [0.55, 0.75]" in first and first.endswith("At the direction's place, residual 3: 0.71.")
    assert second.startswith("It is used: this holds.")
    assert len(said(replace(record(used), facts={"axis": {"mode": "steer"}}))[1]) == 1  # the entropy axis


def test_what_was_not_measured_is_said_with_the_reason_when_there_is_room():
    lacking = {"belief_clusters": "no two prompts share a token"}
    expected = "Not measured: belief clusters, because no two prompts share a token."
    sentence, found = said(record(unmeasured=lacking))
    assert sentence == "This run tests no claim; 1 probe could not be measured." and found == [expected]
    assert said(record(claim(), unmeasured=lacking))[1][1:] == [expected]


def test_the_largest_effect_over_margin_stands_first_whatever_its_sign():
    made = [claim(f"metric {i}", "opposite" if v < 0.2 else "holds", v, claim=f"C{i}: so.") for i, v in
            enumerate((0.6, -3.0, 0.5, 1.4))]  # fmt: skip
    found = said(record(*made), most=3)[1]
    assert [text.split("C")[1][0] for text in found] == ["1", "3", "0"]


def test_an_open_claim_stands_after_what_is_decided_and_an_effect_that_the_control_has_before_one_that_is_not_there():
    made = [claim("far, but open", "open", 9.0, claim="C0: so."),
            claim("nothing", "ruled out", 0.18, spread=0.05, claim="C1: so."),
            claim("as in the control", "ruled out", 0.9, null_high=1.0, centre=0.9, claim="C2: so.")]  # fmt: skip
    found = said(record(*made))[1]
    assert ["C2" in found[0], "C1" in found[1], "C0" in found[2]] == [True] * 3, found
    assert "looks true, but the control is as large" in found[0]


def test_a_claim_that_the_value_is_low_does_not_look_true_because_it_is_large():
    made = claim(verdict="ruled out", value=0.9, null_high=1.0, centre=0.9, side="lower")
    assert "is ruled out at the claimed size" in said(record(made))[1][0]


def test_a_metric_is_called_by_the_noun_that_its_declaration_gives():
    noun = next(entry.noun for entry in entries() if entry.name == "frame over precision")
    (found,) = said(record(claim("frame over precision", "opposite", 9.0, unit="ratio of steps", noun=noun)))[1]
    assert "the step at which attention settles, over that of the answers, is 9.0" in found


def test_a_number_that_every_run_shares_is_not_of_one_run():
    same = said(
        record(claim(verdict="opposite", value=-0.5)), record(claim(verdict="opposite", value=-0.5), source="math")
    )
    assert (
        " on m" not in same[1][0] and " on m" in said(record(claim()), record(claim(value=0.45), source="math"))[1][0]
    )


def test_a_claim_of_no_effect_that_holds_says_what_it_allows():
    (found,) = said(record(claim(verdict="holds", value=0.2, equivalence=True, margin=0.5, margin_low=-0.1)))[1]
    assert found.endswith("20 untrained copies give 0.05 to 0.20, and the claim allows a difference of 0.3.")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ruled out"] * 5 + ["opposite"] + ["open"] * 2, "None of the 8 claims holds on these 2 prompts. "
         "5 tests rule out an effect of the claimed size; 1 shows the opposite; 2 are open."),
        (["holds", "small", "open"], "1 of the 3 claims holds on these 2 prompts. "
         "1 test shows a small effect; 1 is open."),
        (["holds", "holds"], "Both claims hold on these 2 prompts."),
        (["holds"] * 3, "All 3 claims hold on these 2 prompts."),
        (["open", "small"], "Neither of the 2 claims holds on these 2 prompts. "
         "1 test shows a small effect; 1 is open."),
        (["open"], "The one claim is open on these 2 prompts."),
    ],
)  # fmt: skip
def test_the_sentence_counts_every_word(words, expected):
    made = [claim(f"metric {i}", word) for i, word in enumerate(words)]
    assert said(record(*made))[0] == expected


def test_two_runs_are_counted_by_test_and_a_claim_holds_where_all_of_its_tests_do():
    runs = [record(claim("a", "holds"), claim("b", "ruled out", 0.0)),
            record(claim("a", "open", 0.41), claim("b", "ruled out", 0.1), source="math")]  # fmt: skip
    sentence, found = said(*runs)
    assert sentence == (
        "Neither of the 2 claims holds on every set of prompts. Of 4 tests, 1 shows the claimed effect; 2 rule out an "
        "effect of the claimed size; 1 is open."
    )
    assert " on mixed (n = 70 templates); " in found[0] and found[0].endswith("Elsewhere: open on math.")


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["holds", "holds"], "holds on every set of prompts. Both tests show the claimed effect."),
     (["holds", "open"], "does not hold on every set of prompts. Of 2 tests, 1 shows the claimed effect; 1 is open."),
     (["open", "open"], "holds on no set of prompts. Both tests are open.")],
)  # fmt: skip
def test_one_claim_of_several_runs_is_no_plural(words, expected):
    """ "None of the 1 claims holds", and "All 1 claims hold"."""
    runs = [record(claim("a", word), source=source) for word, source in zip(words, ("mixed", "math"), strict=True)]
    assert said(*runs)[0] == f"The one claim {expected}"


@pytest.mark.parametrize(
    ("other", "where"),
    [({"source": "math"}, "on any set of prompts"), ({"model": "pocket:phi"}, "in any model"),
     ({"source": "math", "model": "pocket:phi"}, "in any run"), ({}, "in any run")],
)  # fmt: skip
def test_several_runs_are_called_what_they_differ_in(other, where):
    first, second = (record(claim("a", "open"), claim("b", "open"), **of) for of in ({}, other))
    assert said(first, second)[0].startswith(f"Neither of the 2 claims holds {where}.")


def test_a_check_of_the_instrument_is_the_last_finding_and_probes_are_told_apart_by_what_differs_in_their_names():
    made = record(claim(verdict="holds", value=9.0), probe="ablation_control")
    used = [replace(made, results={f"ablation_{way}": Measured("", "", "", "", "", (claim(),), {}, {})})
            for way in ("pc1", "ridge")]  # fmt: skip
    whole = replace(made, results=dict(used[0].results | used[1].results | made.results))
    found = said(whole)[1]
    words = "Values are ordered by uncertainty"
    assert found[0].startswith(f"“{words} (along PC1)”")
    assert found[1].startswith(f"“{words} (along the ridge direction)”")
    assert found[2].startswith("control: Values are ordered by uncertainty: this holds.")
    checked = " The check of the instrument holds."
    assert said(whole)[0] == f"Neither of the 2 claims holds on these 2 prompts. Both tests are open.{checked}"
    assert said(made)[0] == f"No claim about the model is tested on these 2 prompts.{checked}"


def test_an_unknown_word_is_refused():
    made = record(claim(verdict="perhaps"))
    with pytest.raises(ValueError, match="perhaps"):
        said(made)


def test_the_common_scale_has_the_control_at_0_and_the_claimed_effect_at_1():
    def at(value, **other):
        (one,) = outcomes([record(claim(**other))], ["x"])
        return one.scaled(value)

    assert at(0.2) == 0 and at(0.5) == pytest.approx(1)
    assert at(0.2, side="lower") == 0 and at(-0.1, side="lower") == pytest.approx(1)
    two_sided = {"equivalence": True, "margin": 0.5, "margin_low": -0.1, "effect": 0.3}
    assert at(0.2, **two_sided) == pytest.approx(0) and at(0.5, **two_sided) == pytest.approx(1)
    assert at(-0.1, **two_sided) == pytest.approx(-1)
    assert at(0.5, equivalence=True, margin=0.5, margin_low=-1e9, effect=0.3) == pytest.approx(1)
    with pytest.raises(ValueError, match="effect"):
        at(0.2, effect=0.0)


def test_claims_that_share_their_words_are_told_apart():
    every = outcomes([record(claim("a"), claim("b"))], ["x"])
    assert set(heads(claims(every)).values()) == {
        "a: Values are ordered by uncertainty", "b: Values are ordered by uncertainty"
    }  # fmt: skip


def test_every_declared_claim_has_a_head_of_one_line():
    for entry in entries():
        if entry.claim:
            (one,) = outcomes([record(claim(entry.name, claim=entry.claim))], ["x"])
            assert 5 < len(one.head) <= 120 and one.head[0].isupper(), one.head


def test_a_probe_s_own_sentence_stands_before_all_claims():
    asked = record(claim(verdict="holds"))
    (probe, measured), *_ = asked.results.items()
    told = "It weighs evidence 2.5 times too much."
    asked = replace(asked, results={probe: replace(measured, facts={SENTENCE: told})})
    assert said(asked)[1][0] == told
    assert told not in said(asked, replace(asked, source={"name": "another"}))[1]  # of several, which is meant?
    whole = replace(asked, source={"name": "profile", "kind": "processes"})
    assert said(whole, asked)[1][0] == told


def test_a_run_that_measured_little_says_so_first():
    """ "The one claim is reversed" stood over a run in which three of four probes could not be measured."""
    lacks = dict.fromkeys(("a", "b"), "4 templates; 5 are needed") | {"c": "no tokens", "value_manifold: x": "why"}
    sentence, _ = said(record(claim(verdict="opposite"), unmeasured=lacks))
    assert sentence == (
        "3 of 4 probes could not be measured, 2 because 4 templates; 5 are needed. "
        "The one claim that was measured shows the opposite on these 2 prompts."
    )
    alike = said(record(claim(), claim("b"), unmeasured=dict.fromkeys("ab", "too few")))[0]
    assert alike.startswith("2 of 3 probes could not be measured: too few. Neither of the 2 claims holds")
    assert said(record(claim(), unmeasured={"a": "why"}))[0] == "The one claim is open on these 2 prompts."


@pytest.mark.parametrize(
    ("numbers", "expected", "brief"),
    [
        (
            {"draws": 2},
            "A control of 2 draws decides nothing; at least 5 are needed (--nulls).",
            "too few draws of the control",
        ),
        (
            {"lacks": (SEEDS, Lack("runs", "random-target runs", 2, 5))},
            "5 training seeds are needed, and this run has 1; 5 random-target runs are needed, and this run has 2.",
            "needs 5 training seeds",
        ),
        (
            {"lacks": (Lack("steps", "runs", 1, 5), SEEDS)},
            "In 4 of 5 runs neither settles before the last two snapshots: train longer; 5 training seeds are needed, "
            "and this run has 1.",
            "train longer",
        ),
        (
            {"lacks": (Lack("most", "runs", 4, 5),)},
            "In 1 of 5 runs only the second curve does not settle before the last two snapshots, so that a longer run "
            "may give a smaller ratio: train longer.",
            "train longer",
        ),
        (
            {"lacks": (Lack("between", "runs", 3, 5),)},
            "In 2 of 5 runs both settle between the same two snapshots, so that their order is unseen: take more "
            "snapshots.",
            "take more snapshots",
        ),
        (
            {"lacks": (Lack("control", "untrained models"),)},
            "Untrained models lies in the printed range too: that number cannot decide, whatever n is.",
            "the control is in the printed range",
        ),
        (
            {"needed": 0, "noise": 1.0, "null_spread": 2.0},
            "More data will not help: the control's own draws vary by 0.6 |ρ| (one standard deviation).",
            "more data will not help",
        ),
        (
            {"needed": 0, "noise": 1.0, "null_spread": 2.0, "averaged": True, "draws": 24},
            "More data will not help: 24 draws fix the mean of the control only to within 0.61 |ρ|.",
            "more data will not help",
        ),
        (
            {"room": False, "why": "no room: this metric cannot reach 0.5, the control plus the claimed effect"},
            "No room: this metric cannot reach 0.5, the control plus the claimed effect.",
            "no room above the control",
        ),
        ({}, "120 templates would find the claimed effect in 9 of 10 runs; this run has 70.", "needs 120 templates"),
        (
            {"low": 0.1, "high": 0.6, "needed": 0},
            "The interval includes both no effect and the claimed 0.3.",
            "no effect and the claimed one are both possible",
        ),
        (
            {"low": 0.3, "high": 0.6, "needed": 0},
            "With the correction for several claims, neither no effect nor the claimed 0.3 is excluded.",
            "no effect and the claimed one are both possible",
        ),
    ],
)
def test_an_open_claim_says_what_would_settle_it(numbers, expected, brief):
    made = record(claim(**numbers))
    _, (sentence,) = said(made)
    assert sentence.endswith(expected), sentence
    assert f"({brief})" in " ".join(" ".join(text_of(digest([made], width=300))).split())


def test_a_claim_that_lacks_something_is_open_whatever_its_p_and_a_record_keeps_what(tmp_path):
    lacks = (Lack("steps", "runs", 1, 5), SEEDS)
    strong = claim(value=0.9, p=1e-9, p_excluded=0.9, lacks=lacks)
    (free,), (bound,) = judge_estimates([replace(strong, lacks=())]), judge_estimates([strong])
    assert free.verdict == "holds" and bound.verdict == "open" and bound.adjusted == free.adjusted
    assert bound.why == (
        "in 4 of 5 runs neither settles before the last two snapshots: train longer; needs 5 training seeds, has 1"
    )
    record(bound, free).save(tmp_path / "run")
    again = Record.load(tmp_path / "run").results["value_manifold"].estimates
    assert [h.lacks for h in again] == [lacks, ()] and again == (bound, free)


def test_an_open_claim_of_no_effect_says_what_it_allows():
    bounds = {"equivalence": True, "margin": 0.3, "margin_low": -0.3, "needed": 0}
    (sentence,) = said(record(claim(**bounds)))[1]
    assert sentence.endswith("The claim allows a difference of 0.3, and the interval reaches beyond it.")
    (sentence,) = said(record(claim(value=0.1, **bounds)))[1]
    assert sentence.endswith("and the interval, corrected for several claims, reaches beyond it.")


def test_a_value_without_an_interval_has_no_invented_one():
    h = claim(
        low=0.0,
        high=1e9,
        value=0.930243,
        null_low=1.0,
        null_high=1.0,
        null="1, both at once",
        control="1, both at once",
        control_draws=0,
        unit="ratio of steps",
    )
    _, (sentence,) = said(record(h))
    assert "is 0.93 (no interval) (n = 70 templates); the control is 1." in sentence and "1e+09" not in sentence
    (row,) = lines([record(h)])
    assert (row.value, row.interval) == ("0.93", "no interval")
    assert "[0, 1e+09]" not in word(h, 1)[1] and "0.93, which has no interval," in word(h, 1)[1]
    written = "\n".join((page([record(h)]), *latex.table(record(h))))
    assert "no interval" in written and "1e+09" not in written and "10^{9}" not in written


@pytest.mark.parametrize(
    ("name", "draws", "expected"),
    [("same size", 1, "; 1 edit of the same size gives 0.05 to"),
     ("untrained", 1, "; 1 untrained copy gives 0.05 to"),
     ("untrained, own entropy", 1, "; 1 untrained copy, with its own entropy, gives 0.05 to"),
     ("mine", 1, "; 1 draw of “mine” gives 0.05 to"),
     ("same size", 12, "; 12 edits of the same size give "),
     ("2 models (3 draws)", 0, "; 2 models (3 draws) gives "),
     ("mine (3 draws)", 4, "; 4 draws of “mine (3 draws)” give "),
     ("without context", 0, "; the same weights without context give "),
     ("without contexts", 0, "; without contexts gives ")],
)  # fmt: skip
def test_a_control_is_called_by_its_name_and_number_which_no_text_is_read_for(name, draws, expected):
    """Whatever a name looks like; the number of a claim that claims.estimate made is that of its draws."""
    h = claim(null=f"{name} ({draws} draw{'s' * (draws > 1)})" if draws else name, control=name, control_draws=draws)
    assert expected in said(record(h))[1][0]
    null = Null.of(name, np.linspace(0.05, 0.2, draws)) if draws else Null.number(name, 0.1)
    made = estimate(
        declared("value_manifold")["|rho| of PC1 and entropy"],
        0.4,
        Interval(0.3, 0.5, 0.95, ""),
        [null],
        n=75,
        clusters=70,
    )
    assert (made.control, made.control_draws, made.null) == (name, draws, h.null)


def test_a_control_of_several_trainings_says_so_after_its_name():
    three = claim(null="untrained (20 draws), the hardest of 3 trainings", control="untrained", control_draws=20)
    assert "; 20 untrained copies, the hardest of 3 trainings give 0.05 to" in said(record(three))[1][0]


def test_a_control_whose_ends_look_alike_is_one_number():
    _, (sentence,) = said(record(claim(null_low=0.201, null_high=0.202)))
    assert "20 untrained copies give 0.20." in sentence
    exact = claim(
        null="the exact answer",
        control_draws=0,
        control="",
        null_low=0.2,
        null_high=0.2,
        verdict="ruled out",
        equivalence=True,
    )
    assert "the exact answer gives 0.20, and" in said(record(exact))[1][0]


def test_what_was_not_measured_for_one_reason_is_one_sentence():
    reason = "not measured: the entropy does not vary"
    lacks = record(claim(), unmeasured={"a_probe: one": reason, "a_probe: two": reason, "other": "it has no tokens"})
    assert said(lacks, most=9)[1][1:] == [
        "Not measured: a probe (2 numbers), because the entropy does not vary.",
        "Not measured: other, because it has no tokens.",
    ]
    assert any("a probe (2 numbers), other" in "".join(text for _, text in line) for line in digest([lacks]))


def test_claims_that_all_end_alike_are_counted_as_all():
    assert said(record(claim(), claim(name="b", claim="B.")))[0].endswith("Both tests are open.")
    three = [claim(name=name, claim=f"{name}.") for name in "abc"]
    assert said(record(*three), record(*three, source="math"))[0].endswith("All 6 tests are open.")


def test_a_run_of_processes_opens_with_their_profile_and_counts_them():
    """The pooled claim comes first though another effect is larger; the title does not list eight names."""
    small = claim("binds", "holds", 0.6, claim="The model binds: pooled.")
    large = claim(verdict="holds", value=0.9)
    profile = replace(record(small, probe="profile", source="profile", kind="processes"), prompts={})
    parts = [record(large, source=name, kind="process") for name in ("recall", "bijection")]
    sentence, shown = said(profile, *parts)
    assert "in every process" in sentence and shown[0].startswith("The model binds")
    html = page([profile, *parts])
    assert "pocket:pythia on evidence in text: 2 processes" in html
    assert "2 processes, 2 prompts each, from 2 sets of marks" in html
    assert html.index('<section id="profile">') < html.index('<section id="value_manifold">')
    assert "<legend>processes</legend>" in page([replace(one, prompts=BY_PROCESS) for one in parts])
    alone = page(parts[:1])
    assert "pocket:pythia on evidence in text: recall" in alone and "2 prompts from 2 sets of marks" in alone


def test_a_control_whose_draws_are_all_alike_is_named():
    """Five shuffles of sequences in which order says nothing give one number; the sentence called it "the control"."""
    alike = claim(verdict="ruled out", value=0.55, null_low=0.55, null_high=0.55, centre=0.55, null="shuffled prompts")
    alike = replace(alike, control="shuffled prompts", control_draws=5, null="shuffled prompts (5 draws)")
    assert said(record(alike))[1][0].endswith("; 5 shuffles of the words give 0.55.")
    number = replace(alike, control="2 bits", control_draws=0, null="2 bits")
    assert said(record(number))[1][0].endswith("; the control is 0.55.")


def test_a_run_without_claims_says_which_head_is_the_largest():
    """The page of `ablate --what heads` gave the largest effect and not the head: it stood in a note of a fold."""
    made = record(claim("largest head", claim="", verdict=""))
    (measured,) = made.results.values()
    ways = {
        "zero": ("set to 0", "L0H5"),
        "mean": ("set to the mean", "L0H5"),
        "resample": ("resampled", "L0H5 or L1H2"),
    }
    results = {
        way: replace(measured, title=f"Heads, one at a time: {by}", facts={STRONGEST: head})
        for way, (by, head) in ways.items()
    }
    made = replace(made, results=results)
    (sentence,) = said(made)[1]
    heads = "L0H5 when set to 0 or set to the mean; L0H5 or L1H2 when resampled"
    assert sentence == f"The head with the largest effect: {heads} (LiHj: layer i, head j, from 0)."
    assert sentence in " ".join(text_of(digest([made]))) and sentence in page([made])
