"""The sentences of a run, judged on records that were built to have each kind of finding."""

from dataclasses import replace

import pytest

from llmgeom.claims import judge_estimates
from llmgeom.record import Record
from llmgeom.reports import page
from llmgeom.reports.digest import digest
from llmgeom.reports.findings import findings
from llmgeom.reports.table import rows
from llmgeom.result import SENTENCE, WORDS
from tests.findings import claim, record, said, text_of

BY_PROCESS = {"text": ("a", "b"), "template": ("0", "1"), "domain": ("recall", "bijection")}

TERM = "PC1-entropy correlation (Agarwal et al. 2025, Paper III)"
ALLOWS = {"equivalence": "within", "hurdle": 0.5, "least": -0.1}


@pytest.mark.parametrize(
    ("made", "value", "shown"),
    [
        (claim(verdict="holds", value=0.8), "0.80 [0.70, 0.90]", "It lies above every control, and 0.3 beyond is not"),
        (claim(verdict="small", value=0.3), "0.30 [0.20, 0.40]", "above every control, by less than the 0.3 claimed."),
        (claim(verdict="small", value=0.3, room=False), "0.30", "which leave no room for the 0.3 claimed."),
        (claim(verdict="opposite", value=-0.5), "-0.50 [-0.60, -0.40]", "of the claim: it lies below every control."),
        (claim(verdict="opposite", value=0.9, side="lower"), "0.90", "of the claim: it lies above every control."),
        (claim(verdict="ruled out", value=0.19, effect=0.1), "0.19", "An excess of 0.1 is ruled out."),
        (claim(verdict="ruled out", value=0.1, room=False), "0.10", "It lies below this control: the claim is ruled"),
        (claim(verdict="ruled out", value=0.9, **ALLOWS), "0.90", "Beyond the 0.3 that the claim allows."),
        (claim(verdict="holds", value=0.2, **ALLOWS), "0.20", "Within the 0.3 that the claim allows."),
        (claim(), "0.40 [0.30, 0.50]", "Open: needs 120 templates: for the claimed effect of 0.3, has 70."),
        (claim(available=90), "0.40", "Open: no n here decides, of 90 templates in all: 120 are needed."),
        (claim(p_excluded=8e-6), "0.40", "Open: the claimed effect is excluded, a smaller one open: of 0.2 + 0.3, p"),
    ],
)
def test_a_finding_says_what_was_measured_before_what_it_shows(made, value, shown):
    """Term and paper, the value with its interval, n, the control; then the word, of which each has its own."""
    (sentence,) = said(record(made))[1]
    assert sentence.startswith(f"{TERM}: |ρ| of PC1 and entropy is {value}") and "(n = 70 templates)" in sentence
    control = sentence.index("; 20 untrained copies: 0.05 to 0.20. ")
    assert sentence.index(value) < control < sentence.index(shown), sentence
    assert sentence.endswith(".") and "  " not in sentence


def test_what_a_probe_read_stands_before_what_an_edit_of_its_direction_did():
    """The record of the edit carries the probe's claim: readable and used are the first two sentences."""
    bag = {"null": "bag of tokens", "draws_of": 0, "source": "here"}
    read = claim("AUROC", "ruled out", 0.65, unit="AUROC", claim="It is readable: beyond all.", **bag)
    used = claim("KL of the edit", "holds", 0.8, unit="bits", claim="It is used: more than equal edits.", source="")
    axis = {"label": "narrative", "place": "residual 3", "read": {"claim": read.plain(), "score": 0.71}}
    first, second = said(replace(record(used), facts={"axis": axis}))[1]
    assert first.startswith("Label “narrative”. It is readable: ") and "bag of tokens: 0.05 to 0.20" in first
    assert "0.65 [0.55, 0.75]" in first and first.endswith("At the direction's place, residual 3: 0.71.")
    assert second.startswith("It is used: ")
    assert len(said(replace(record(used), facts={"axis": {"mode": "steer"}}))[1]) == 1  # the entropy axis


def test_the_largest_effect_over_margin_stands_first_and_open_claims_last():
    made = [claim(f"metric {i}", "opposite" if v < 0.2 else "holds", v, claim=f"C{i}: so.") for i, v in
            enumerate((0.6, -3.0, 0.5, 1.4))]  # fmt: skip
    found = said(record(*made, claim("far", "open", 9.0, claim="C9: so.")), most=5)[1]
    assert [text[:2] for text in found] == ["C1", "C3", "C0", "C2", "C9"]


def test_a_number_of_the_weights_alone_is_counted_once_and_is_of_no_set_of_prompts():
    weights = claim("columns of W_K", "opposite", -0.5, counts="kv heads", claim="Key orthogonality: so.")
    both = [record(weights, claim()), record(weights, claim(value=0.45), source="math")]
    sentence, found = said(*both)
    assert sentence == (
        "3 tests of 2 claims of Agarwal et al. 2025 (Paper III) on 2 sets of prompts: 1 shows the opposite; 2 are open."
    )
    assert " on m" not in found[0] and " on math (n = 70 templates)" in found[1]


def test_the_sentence_counts_every_word_and_names_the_papers():
    words = ["ruled out"] * 5 + ["opposite"] + ["open"] * 2 + ["holds"] * 2 + ["small"]
    made = [claim(f"metric {i}", word, source=f"Paper {'I' * (1 + i % 3)}, Table 1") for i, word in enumerate(words)]
    assert said(record(*made))[0] == (
        "11 claims of Agarwal et al. 2025 (Papers I, II and III) on 2 prompts: 2 hold; 1 shows a smaller effect "
        "than claimed; 5 rule the claimed effect out; 1 shows the opposite; 2 are open."
    )
    assert said(record(claim(source="derived here")))[0] == "1 claim on 2 prompts: 1 is open."


def test_the_common_scale_has_the_control_at_0_and_the_claimed_effect_at_1():
    def at(value, **other):
        (one,) = rows([record(claim(**other))])
        return one.scaled(value)

    assert at(0.2) == 0 and at(0.5) == pytest.approx(1)
    assert at(0.2, side="lower") == 0 and at(-0.1, side="lower") == pytest.approx(1)
    two_sided = {"equivalence": "within", "hurdle": 0.5, "least": -0.1}
    assert at(0.2, **two_sided) == pytest.approx(0) and at(0.5, **two_sided) == pytest.approx(1)
    assert at(-0.1, **two_sided) == pytest.approx(-1)
    assert at(0.5, equivalence="at most", hurdle=0.5, least=-1e9) == pytest.approx(1)
    with pytest.raises(ValueError, match="effect"):
        at(0.2, effect=0.0)


def test_a_probe_s_own_sentence_stands_before_all_claims():
    asked = record(claim(verdict="holds"))
    (probe, measured), *_ = asked.results.items()
    told = "It weighs evidence 2.5 times too much."
    asked = replace(asked, results={probe: replace(measured, facts={SENTENCE: told})})
    assert said(asked)[1][0] == told
    assert told not in said(asked, replace(asked, source={"name": "another"}))[1]  # of several, which is meant?
    whole = replace(asked, source={"name": "profile", "kind": "processes"})
    assert said(whole, asked)[1][0] == told


LACKS = ("train longer: in 4 of 5 runs neither settles", "needs 5 training seeds: has 1")


def test_a_claim_that_lacks_something_is_open_whatever_its_p_and_a_record_keeps_what(tmp_path):
    strong = claim(value=0.9, p=1e-9, p_excluded=0.9, lacks=LACKS)
    (free,), (bound,) = judge_estimates([replace(strong, lacks=())]), judge_estimates([strong])
    assert free.verdict == "holds" and bound.verdict == "open" and bound.adjusted == free.adjusted
    assert bound.why == "; ".join(LACKS)
    record(bound, free).save(tmp_path / "run")
    again = Record.load(tmp_path / "run").results["value_manifold"].estimates
    assert [h.lacks for h in again] == [LACKS, ()] and again == (bound, free)


# ---- the terminal


@pytest.mark.parametrize(("several", "claimed", "width"), [(1, 1, 80), (1, 40, 100), (2, 8, 80), (5, 40, 80)])
def test_a_run_ends_in_at_most_21_lines_of_the_width_and_cuts_no_name(several, claimed, width):
    """Of 100 characters; a narrower terminal has as many more lines, and says that there are more claims."""
    named = [f"Claim {i} of many words that go on and on" for i in range(claimed)]
    made = [claim(f"metric {i}", WORDS[i % 5], claim=f"{name}: so.") for i, name in enumerate(named)]
    runs = [
        replace(record(*made, source=f"set{i}", unmeasured={"p": "why " * 50}), warnings=("x", "w" * 1999, "v" * 1999))
        for i in range(several)
    ]
    shown = text_of(digest(runs, width))
    assert len(shown) <= 20 * 100 // width  # the last line is the page's path
    assert max(map(len, shown)) <= width
    text = " ".join(" ".join(shown).split())
    whole = [f"Claim {i} of" in text for i in range(claimed)]
    assert whole[0] and any("more (--table)" in line for line in shown) == (not all(whole))
    assert any(line.startswith("not measured") for line in shown) and any("warnings (-v)" in line for line in shown)


def test_n_is_named_after_what_is_independent():
    of_prompts = record(claim(n=80, clusters=2, counts="queries"))
    assert "(n = 2 templates)" in findings(rows([of_prompts]))[0]
    of_tokens = record(claim(n=80, clusters=80, counts="tokens"))
    assert "(n = 80 tokens)" in findings(rows([of_tokens]))[0]
    of_run = record(claim(n=1, clusters=1, counts="training runs"))
    assert "(n = 1 training run)" in findings(rows([of_run]))[0]
    one = replace(of_prompts, prompts={"text": ("a", "b"), "template": ("0", "0")})
    assert "on 2 prompts from 1 template: 1 is open." in text_of(digest([one]))[0]


def test_a_hostile_claim_or_reason_moves_no_cursor():
    made = record(claim(claim="x\x1b[2J: so."), unmeasured={"p": "bad\x1b[31m"})
    assert "\x1b" not in "".join(text_of(digest([made]))) and "x\\x1b[2J" in "".join(text_of(digest([made])))


def test_a_run_of_processes_opens_with_their_profile_and_counts_them():
    """The pooled claim comes first though another effect is larger; the title does not list eight names."""
    small = claim("binds", "holds", 0.6, claim="The model binds: pooled.")
    large = claim(verdict="holds", value=0.9)
    profile = replace(record(small, probe="profile", source="profile", kind="processes"), prompts={})
    parts = [record(large, source=name, kind="process") for name in ("recall", "bijection")]
    sentence, shown = said(profile, *parts)
    assert "on 2 processes" in sentence and shown[0].startswith("The model binds")
    html = page([profile, *parts])
    assert "pocket:pythia on evidence in text: 2 processes" in html
    assert "2 processes, 2 prompts each, from 2 sets of marks" in html
    assert html.index('<section id="profile">') < html.index('<section id="value_manifold">')
    assert "<legend>processes</legend>" in page([replace(one, prompts=BY_PROCESS) for one in parts])
    alone = page(parts[:1])
    assert "pocket:pythia on evidence in text: recall" in alone and "2 prompts from 2 sets of marks" in alone
