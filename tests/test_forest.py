"""The plot of all claims and the small multiples: where things lie, judged by arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from llmgeom.reports.forest import FIGURE_SPACE, LEAST, MOST, THIN, aligned, forest, scale_of
from llmgeom.reports.multiples import blend, multiples
from llmgeom.reports.outcomes import outcomes
from llmgeom.reports.prompts import complete
from llmgeom.result import Measured, Quantity
from tests.findings import claim, record


def row(**other):
    (one,) = forest(outcomes([record(claim(**other))], ["x"]))
    return one


def per_cent(value):
    return (value - LEAST) / (MOST - LEAST) * 100


ZERO, ONE = per_cent(0.0), per_cent(1.0)


def test_a_row_lies_where_its_numbers_are_in_units_of_the_claimed_effect():
    one = row(value=0.35, spread=0.15)  # centre 0.2, effect 0.3: 0.5 [0, 1]; the control -0.5 to 0
    assert one.place == pytest.approx(per_cent(0.5), abs=0.01) and one.arrow == ""
    assert (one.interval.start, one.interval.width) == pytest.approx((ZERO, ONE - ZERO), abs=0.02)
    assert (one.band.start, one.band.width) == pytest.approx((per_cent(-0.5), ZERO - per_cent(-0.5)), abs=0.02)
    assert (one.claimed.start, one.claimed.start + one.claimed.width) == pytest.approx((ONE, 100), abs=0.02)
    assert one.value == "0.35 [0.20, 0.50]" and one.control == "0.05 to 0.20" and one.word == "open"


def test_the_line_is_the_interval_of_the_difference_where_value_and_control_share_prompts():
    one = row(value=0.35, spread=0.4, paired=True, difference_low=0.09, difference_high=0.21)  # .15 [.09, .21] of .3
    assert one.place == pytest.approx(per_cent(0.5), abs=0.01) and one.band is None
    ends = per_cent(0.3), per_cent(0.7)
    assert (one.interval.start, one.interval.start + one.interval.width) == pytest.approx(ends, abs=0.02)
    assert one.value == "0.35 [-0.05, 0.75]" and one.control == "0.20"


def test_a_claim_that_the_value_is_low_is_turned_so_that_the_claimed_effect_lies_to_the_right():
    assert row(value=-0.1, side="lower").place == pytest.approx(ONE, abs=0.01)


@pytest.mark.parametrize(("value", "arrow"), [(-9.0, "◀"), (9.0, "▶")])
def test_what_is_off_the_scale_is_an_arrow(value, arrow):
    one = row(value=value)
    assert (one.place, one.interval, one.arrow) == (None, None, arrow) and "of the claimed effect" in one.said


def test_the_scale_reaches_a_value_that_lies_a_little_beyond_and_no_further():
    def ends(*values):
        return scale_of(outcomes([record(*(claim(str(i), value=v) for i, v in enumerate(values)))], ["x"]))

    assert ends(0.2) == (LEAST, MOST) == ends(-9.0)  # centre 0.2, effect 0.3
    low, high = ends(0.2 - 0.3 * 2.2, 9.0)
    assert high == MOST and low == -2.5
    (one,) = forest(outcomes([record(claim(value=0.2 - 0.3 * 2.2))], ["x"]))
    assert one.arrow == "" and 0 < one.place < 15 and one.band.start > 0


def test_a_control_that_is_one_number_has_a_band_that_can_be_seen_and_one_off_the_scale_has_none():
    one = row(null_low=0.2, null_high=0.2)
    assert one.band.width == THIN and one.band.start + THIN / 2 == pytest.approx(ZERO, abs=0.02)
    assert row(null_low=8.0, null_high=9.0).band is None


def test_runs_that_gave_the_same_numbers_share_a_row():
    runs = [record(claim(), source=name) for name in ("mixed", "math")]
    (one,) = forest(outcomes(runs, ["mixed", "math"]))
    assert (one.record, one.first, one.rows) == ("mixed, math", "mixed", 1) and "on mixed, math: open" in one.said
    runs[1] = record(claim(value=0.3), source="math")
    assert [one.record for one in forest(outcomes(runs, ["mixed", "math"]))] == ["mixed", "math"]


def test_numbers_of_a_column_end_equally_far_behind_the_decimal_point():
    shown = aligned(["0.5", "-12.25", "0.06 to 0.072", "3", ""])
    assert [text.count(FIGURE_SPACE) for text in shown] == [2, 1, 0, 3, 0]
    assert [text.strip() for text in shown] == ["0.5", "-12.25", "0.06 to 0.072", "3", ""]
    rows = forest(
        outcomes([record(claim("a", value=0.35, spread=0.15), claim("b", value=0.204, spread=0.0151))], ["x"])
    )
    assert [one.cells[0].strip() for one in rows] == ["0.35", "0.204"] and rows[0].cells[0][-1] == FIGURE_SPACE


def test_a_claim_of_no_effect_shades_the_middle():
    one = row(equivalence=True, margin=0.5, margin_low=-0.1, effect=0.3)
    ends = one.claimed.start, one.claimed.start + one.claimed.width
    assert ends == pytest.approx((per_cent(-1), per_cent(1)), abs=0.02)
    one = row(equivalence=True, margin=0.5, margin_low=-1e9, effect=0.3)
    assert one.claimed.start == 0


def test_records_are_rows_of_their_claim():
    runs = [record(claim("a"), claim("b")), record(claim("a", value=0.3), source="math")]
    rows = forest(outcomes(runs, ["mixed", "math"]))
    assert [(one.record, one.rows, bool(one.claim)) for one in rows] == [
        ("mixed", 2, True), ("math", 0, False), ("mixed", 1, True)
    ]  # fmt: skip


def test_the_final_token_is_a_column_and_a_panel():
    scores = np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 1.0]])
    plane = Quantity(("prompt", "component"), "standard units", "plane")
    measured = Measured("Value manifold", "", "", "", "", (), {"scores": plane}, {"scores": scores})
    made = record()
    prompts = {"text": ("a.", "b.", "c,"), "pieces": (("a", "."), ("b", "."), ("c", ",")), "entropy": (1.0, 2.0, 3.0),
               "tokens": (2, 2, 2)}  # fmt: skip
    assert complete(prompts)["final token"] == (".", ".", ",") and complete({"text": ("a",)}) == {"text": ("a",)}

    panels = multiples(replace(made, results={"value_manifold": measured}, prompts=prompts))
    assert [one.title for one in panels] == ["by next-token entropy", "by final token", "by length in tokens"]
    by_entropy, by_token, _ = panels
    assert [dot.prompt for dot in by_entropy.dots] == [0, 1, 2]
    assert by_entropy.dots[0].fill == blend(0) and by_entropy.dots[2].fill == blend(1)
    assert by_token.dots[0].fill == by_token.dots[1].fill != by_token.dots[2].fill
    assert [text for _, text in by_token.key] == ["“.” 2", "“,” 1"]
    xs, ys = [dot.x for dot in by_token.dots], [dot.y for dot in by_token.dots]
    assert xs[0] < xs[1] < xs[2] and (xs[1] - xs[0]) * 2 == pytest.approx(xs[2] - xs[1], abs=0.3)
    assert ys[1] < ys[2] < ys[0]  # PC2 grows upwards
    # An untrained copy's own plane is the last panel, in the model's colours.
    twin = replace(measured, quantities=measured.quantities | {"control_scores": plane},
                   arrays={"scores": scores, "control_scores": scores[::-1]})  # fmt: skip
    *_, control = multiples(replace(made, results={"value_manifold": twin}, prompts=prompts))
    assert control.title == "untrained copy, by entropy"
    assert [dot.fill for dot in control.dots] == [dot.fill for dot in by_entropy.dots]
    assert [dot.x for dot in control.dots] == xs[::-1]


def test_a_record_without_the_plane_has_no_panels():
    assert multiples(record(claim())) == []
