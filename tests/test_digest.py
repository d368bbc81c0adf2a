"""What a run says in the terminal: lines that fit, one row for each claim, and why one is open."""

from dataclasses import replace

import pytest

from llmgeom.reports.digest import digest
from llmgeom.reports.findings import findings
from llmgeom.reports.table import rows
from llmgeom.result import WORDS
from tests.findings import claim, record, text_of
from tests.made import changed


@pytest.mark.parametrize("several", [1, 2, 3, 5])
@pytest.mark.parametrize("claimed", [1, 8, 40])
@pytest.mark.parametrize("width", [80, 100])
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


def test_an_open_claim_says_why_in_its_row_and_a_verdict_is_a_piece_of_its_own():
    made = [claim("a", needed=99, clusters=40), claim("c", room=False), claim("d", "holds")]
    lines = digest([record(*made)], width=300)
    assert [word for line in lines for word, _ in line if word] == ["open", "open", "holds"]
    text = " ".join(" ".join(text_of(lines)).split())
    assert "(needs 99 templates)" in text and "(no room above the control)" in text and "d: PC1-entropy" in text
    two = digest([record(*made), record(*made, source="math")])
    assert [word for line in two for word, _ in line if word] == ["open"] * 4 + ["holds"] * 2


def test_a_value_whose_interval_holds_its_control_shows_their_difference():
    paired = dict(difference=(0.09, 0.31), low=0.1, high=0.7)
    shown = " ".join(" ".join(text_of(digest([record(claim(verdict="holds", **paired))], width=300))).split())
    assert "(differs from its control by 0.20 [0.09, 0.31])" in shown and "0.40 [0.10, 0.70]" in shown
    apart = record(claim(verdict="holds", **paired | {"low": 0.3}))
    assert "differs" not in "".join(text_of(digest([apart])))
    (sentence,) = findings(rows([apart]))
    assert "20 untrained copies: 0.20 on the same prompts, a difference of 0.20 [0.09, 0.31]. " in sentence
    (row,) = rows([apart])
    assert row.null == "0.20: untrained (20 draws); difference 0.20 [0.09, 0.31]"


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


def test_every_word_of_the_table_names_the_control_that_it_was_judged_against():
    """The table of two runs had the values alone: 0.59 ruled out, without the 0.58 of the control."""
    shuffled = claim("b", "open", null="shuffled prompts", centre=0.31)
    first, second = (record(claim("a", "holds"), shuffled, source=source) for source in ("mixed", "math"))
    both = text_of(digest([first, second]))
    key = "judged against a: untrained; b: shuffled prompts"
    assert key in both and [" ".join(line.split()[-8:]) for line in both if "0.40" in line] == [
        "holds 0.40 (0.20 a) holds 0.40 (0.20 a)", "open 0.40 (0.31 b) open 0.40 (0.31 b)"
    ]  # fmt: skip
    alone = text_of(digest([first]))
    assert key in alone and [line.rstrip()[-14:] for line in alone if "0.40" in line] == [
        "0.05 to 0.20 a", "0.05 to 0.20 b"
    ]  # fmt: skip
    many = text_of(digest([replace(first, source={"name": f"set {i}"}) for i in range(5)]))
    assert any("5 holds" in line for line in many) and any("5 open" in line for line in many)
    assert "judged against: untrained" in text_of(digest([record(claim())]))
    unjudged = changed(claim(claim="", verdict=""), null="")
    assert not any("control:" in line or "judged" in line for line in text_of(digest([record(unjudged)])))
