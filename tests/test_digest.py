"""What a run says in the terminal: lines that fit, one row for each claim, and why one is open."""

from dataclasses import replace

import pytest

from llmgeom.reports import table
from llmgeom.reports.digest import digest
from llmgeom.reports.findings import findings
from llmgeom.reports.outcomes import outcomes
from llmgeom.result import WORDS, Lack
from tests.findings import claim, record, text_of


@pytest.mark.parametrize("several", [1, 2, 3, 5])
@pytest.mark.parametrize("claimed", [1, 8, 40])
@pytest.mark.parametrize("width", [60, 100])
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
    whole = [name in text for name in named]
    assert whole[0] and "that go on …" not in text and (all(whole) or claimed == 40 or width == 60)
    assert any("more (--table)" in line for line in shown) == (not all(whole))
    assert any(line.startswith("not measured") for line in shown) and any("warnings (-v)" in line for line in shown)


def claims_of(shown):
    """The text of each claim with its reason: of its row up to the value, and of the lines below that go on with it."""
    head = next(line for line in shown if line.lstrip().startswith("claim "))
    start, end, found = head.index("claim"), head.index("value"), []
    for line in shown[shown.index(head) + 1 :]:
        if line[:start].strip() in WORDS:
            found.append(line[start:end])
        elif line.startswith(" " * start):
            found[-1] += f" {line[start:]}"
    return [" ".join(text.split()) for text in found]


def test_an_open_claim_says_why_in_its_row():
    """The figures are those of the reasons that the rule writes: see llmgeom/claims.py. n counts templates."""
    long = "Claim of many words that go on and on until the end of the line is near and beyond: so."
    made = [
        claim("a", needed=99, clusters=40, counts="prompts", claim=long),
        claim("b", needed=0, noise=1.0, null_spread=2.0),
        claim("c", room=False, why="no room: 1 + 0.1, the effect of interest"),
        claim("d", "holds"),
    ]
    shown = text_of(digest([record(*made)]))
    rows = [line for line in shown if line.startswith(("open", "holds"))]
    name = "PC1-entropy correlation"
    assert claims_of(shown) == [
        f"{long.partition(':')[0]} (needs 99 templates)",
        f"b: {name} (more data will not help)",
        f"c: {name} (no room above the control)",
        f"d: {name}",
    ]
    assert max(map(len, shown)) <= 100 and len({row.index("[") for row in rows}) == 1
    # One training: it said that its interval, which it has not, includes both no effect and the claimed one.
    lacks = (Lack("runs", "training seeds", 1, 5), Lack("runs", "random-target runs (--corrupt 1)", 0, 5))
    few = claim("e", needed=0, lacks=lacks)
    assert claims_of(text_of(digest([record(few)])))[0].endswith("(needs 5 training seeds)")
    # Twelve of two lines do not fit: a name that its metric's can stand for is that, any other goes on.
    many = [replace(made[0], name=f"m{i}") for i in range(11)] + [replace(made[0], name="long metric " * 9)]
    short = text_of(digest([record(*many)]))
    assert [f"m{i}" for i in range(11)] == [line.split()[1] for line in short if line.startswith("open")][:11]
    assert len(short) <= 20 and max(map(len, short)) <= 100 and "…" not in "".join(short)
    assert claims_of(text_of(digest([record(made[0], kind="process")])))[0].endswith("(needs 99 sets of marks)")
    alone = replace(made[0], n=40)  # no prompt shares a template with another
    assert claims_of(text_of(digest([record(alone, kind="file")])))[0].endswith("(needs 99 prompts)")


def test_a_value_whose_interval_holds_its_control_shows_their_difference():
    paired = dict(paired=True, difference_low=0.09, difference_high=0.31, low=0.1, high=0.7)
    shown = text_of(digest([record(claim(verdict="holds", **paired))]))
    assert claims_of(shown) == ["PC1-entropy correlation (differs from its control by 0.20 [0.09, 0.31])"]
    assert next(line for line in shown if line.startswith("holds")).rstrip().endswith("0.40 [0.10, 0.70]      0.20")
    wide = claim(value=0.4, **paired | {"low": 0.0, "difference_low": -0.1, "difference_high": 0.5}, needed=60)
    (sentence,) = findings(outcomes([record(wide)], [""]))
    assert "a difference of 0.20 [-0.10, 0.50]. Open: neither no effect nor the claimed one (0.3)" in sentence
    apart = claim(verdict="holds", **paired | {"low": 0.3})
    assert "differs" not in "".join(text_of(digest([record(apart)])))
    (sentence,) = findings(outcomes([record(apart)], [""]))
    assert "20 untrained copies: 0.20 on the same prompts, a difference of 0.20 [0.09, 0.31]. " in sentence
    (row,) = table([record(apart)])
    assert row["null"] == "0.20: untrained (20 draws); difference 0.20 [0.09, 0.31]"


def test_n_is_named_after_what_is_independent():
    of_prompts = record(claim(n=80, clusters=2, counts="queries"))
    assert "(n = 2 templates)" in findings(outcomes([of_prompts], [""]))[0]
    of_tokens = record(claim(n=80, clusters=80, counts="tokens"))
    assert "(n = 80 tokens)" in findings(outcomes([of_tokens], [""]))[0]
    of_run = record(claim(n=1, clusters=1, counts="training runs"))
    assert "(n = 1 training run)" in findings(outcomes([of_run], [""]))[0]
    one = replace(of_prompts, prompts={"text": ("a", "b"), "template": ("0", "0")})
    assert "on 2 prompts from 1 template: 1 is open." in text_of(digest([one]))[0]


def test_a_hostile_claim_or_reason_moves_no_cursor():
    made = record(claim(claim="x\x1b[2J: so."), unmeasured={"p": "bad\x1b[31m"})
    assert "\x1b" not in "".join(text_of(digest([made]))) and "x\\x1b[2J" in "".join(text_of(digest([made])))


def test_every_word_of_the_table_names_the_control_that_it_was_judged_against():
    """The table of two runs had the values alone: 0.59 ruled out, without the 0.58 of the control."""
    shuffled = claim("b", "open", null="shuffled prompts (20 draws)", control="shuffled prompts", centre=0.31)
    first, second = (record(claim("a", "holds"), shuffled, source=source) for source in ("mixed", "math"))
    both = text_of(digest([first, second]))
    key = "judged against a: untrained; b: shuffled prompts"
    assert key in both and [" ".join(line.split()[-8:]) for line in both if "0.40" in line] == [
        "holds 0.40 (0.20 a) holds 0.40 (0.20 a)", "open 0.40 (0.31 b) open 0.40 (0.31 b)"
    ]  # fmt: skip
    alone = text_of(digest([first]))
    assert key in alone and [line[-14:] for line in alone if "0.40" in line] == ["0.05 to 0.20 a", "0.05 to 0.20 b"]
    many = [replace(first, source={"name": f"set {i}"}) for i in range(5)]
    assert text_of(digest(many[:3]))[-2].split()[-6:] == ["open", "b"] * 3
    assert "judged against: untrained; shuffled prompts" in text_of(digest(many))  # a count of words has no letter
    assert "judged against: untrained" in text_of(digest([record(claim())]))
    at_once = claim(null="1 (both at once)", null_low=1.0, null_high=1.0)
    assert "judged against: both at once" in text_of(digest([record(at_once)]))
    assert "; the control is 1.0" in findings(outcomes([record(at_once)], [""]))[0]
    unjudged = claim(claim="", verdict="", null="", control="")
    assert not any("control:" in line or "judged" in line for line in text_of(digest([record(unjudged)])))
