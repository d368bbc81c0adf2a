"""A run without --nulls ends where no likely further draw of a control changes a word."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from llmgeom import claims, probes
from llmgeom.captures import Run
from llmgeom.claims import judge, settled
from llmgeom.commands.scans.estimate import estimate
from llmgeom.commands.scans.perform import perform
from llmgeom.commands.scans.plan import prepare
from llmgeom.commands.scans.request import RunConfig
from llmgeom.commands.scans.samples import sampled
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.probe import FunctionProbe, Needs
from llmgeom.progress import shown
from llmgeom.reports.comparable import check
from llmgeom.reports.digest import digest
from llmgeom.reports.page import page
from llmgeom.result import Estimate, Lack, Measured, Result
from llmgeom.run import Answers, run_probes
from llmgeom.stats.controls import LIKELY, Comparison, Null
from llmgeom.stats.resampling import Interval
from studies.verdict_rates import RULE, World

PROBES = ("attention_focus",)  # against untrained models, shuffled prompts, and the model without context
SPAN = Interval(0.8, 1.2, 0.95, "")


def comparison(*nulls: Null, rule=RULE) -> Comparison:
    return Comparison(rule, 1.0, SPAN, nulls, 40)


def compared(draws, clusters: int = 40, **changes) -> Estimate:
    made = claims.estimate(RULE, 1.0, SPAN, [Null.of("untrained", np.asarray(draws))], n=clusters, clusters=clusters)
    return replace(made, **changes)


def toy(*estimates: Estimate) -> dict[str, Measured]:
    return judge({"toy": Measured("", "", "", "", "", estimates, {}, {})})


# ---- what further draws are likely to be -----------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "total"), [(5, 20), (10, 20), (19, 20)])
def test_the_ends_of_what_is_likely_hold_as_many_futures_as_they_say(m, total):
    rng, trials = np.random.default_rng(0), 3000
    inside = {"mean": 0, "spread": 0}
    for _ in range(trials):
        every = rng.normal(3.0, 0.7, total)
        ends = [np.array(x.nulls[0].sample[m:]) for x in comparison(Null.of("u", every[:m])).completions(total)]
        assert all(len(end) == total - m for end in ends)
        means, spreads = [end.mean() for end in ends], [end.std() for end in ends]
        inside["mean"] += min(means) <= every[m:].mean() <= max(means)
        inside["spread"] += min(spreads) <= every[m:].std() <= max(spreads)
    error = 4 * (LIKELY * (1 - LIKELY) / trials) ** 0.5
    assert abs(inside["mean"] / trials - LIKELY) < error
    if total - m > 1:
        assert abs(inside["spread"] / trials - LIKELY) < error


def test_draws_are_completed_on_the_scale_of_the_claim():
    drawn = np.exp(np.random.default_rng(0).normal(0, 0.5, 5))
    logs = [
        np.log(x.nulls[0].sample)
        for x in comparison(Null.of("u", drawn), rule=replace(RULE, scale="log")).completions(20)
    ]
    plain = [np.array(x.nulls[0].sample) for x in comparison(Null.of("u", np.log(drawn))).completions(20)]
    np.testing.assert_allclose(logs, plain, rtol=1e-9)


def test_a_complete_control_and_a_number_stay_as_they_are():
    nulls = (Null.of("shuffled", np.arange(20.0)), Null.half())
    assert [x.nulls for x in comparison(*nulls).completions(20)] == [nulls]
    two = comparison(Null.of("a", np.arange(5.0)), Null.of("b", np.arange(6.0)))
    assert len(list(two.completions(20))) == 16, "every end of one with every end of the other"


def test_a_rank_p_of_few_draws_cannot_be_completed():
    assert not list(comparison(Null("permuted", 0, 1, 0.5, 0.2, 5)).completions(20))
    assert len(list(comparison(Null("permuted", 0, 1, 0.5, 0.2, 10_000)).completions(20))) == 1


def test_one_draw_has_no_spread_from_which_further_ones_could_be_predicted():
    assert not list(comparison(Null.of("untrained", np.array([0.3]))).completions(20))
    assert not list(comparison(Null.of("a", np.arange(5.0)), Null.of("b", np.array([0.3]))).completions(20))
    assert [x.nulls[0].sample for x in comparison(Null.of("untrained", np.array([0.3]))).completions(1)] == [(0.3,)]


# ---- when words are settled ------------------------------------------------------------------------------------------


def test_a_word_that_rests_on_the_prompts_is_settled_and_one_that_rests_on_the_draws_is_not():
    near = [0.0, 0.01, -0.01, 0.005, -0.005]
    assert settled(toy(compared(near)), 20)
    assert not settled(toy(compared([0.0, 0.9, -0.9, 0.5, -0.5])), 20)
    assert not settled(toy(compared(near), compared([0.0, 0.9, -0.9, 0.5, -0.5])), 20), "all claims of a record"
    assert settled(toy(compared([0.0, 0.9, -0.9, 0.5, -0.5], claim="")), 20), "no claim rests on them"


def test_a_word_must_be_the_same_after_holm_s_correction():
    """Alone the claim holds at every end; with seven settled others it is open at one end."""
    claim = compared(0.2 * np.linspace(-1, 1, 5))
    others = [compared(1 + 1e-6 * np.arange(5)) for _ in range(7)]
    assert settled(toy(claim), 20) and settled(toy(*others), 20)
    ends = [toy(_again(claim, end), *others)["toy"].estimates[0].verdict for end in range(4)]
    assert sorted(ends) == ["holds", "holds", "holds", "open"]
    eight = toy(claim, *others)
    assert eight["toy"].estimates[0].verdict == "holds" and not settled(eight, 20)


def test_a_claim_that_lacks_something_counts_in_the_correction_of_the_others():
    """It is open whatever its p, and so is settled by itself; the eight together are not, as above."""
    claim = compared(0.2 * np.linspace(-1, 1, 5))
    lacking = [
        replace(compared(1 + 1e-6 * np.arange(5)), lacks=(Lack("runs", "training seeds", 3, 5),)) for _ in range(7)
    ]
    assert settled(toy(claim), 20) and settled(toy(*lacking), 20)
    assert not settled(toy(claim, *lacking), 20)


def _again(h: Estimate, end: int) -> Estimate:
    """The estimate with its controls completed at one of the four ends."""
    likely = list(h.compared.completions(20))[end]
    return claims.estimate(RULE, likely.value, likely.interval, likely.nulls, n=40, clusters=40)


def test_the_n_of_an_open_claim_is_that_of_a_run_with_every_draw():
    """Of a mean that is within a margin of its control: five draws and 20 of the same mean and spread."""
    rule = replace(RULE, equivalence=True, effect=0.0, margin=0.6)
    span = Interval(-0.8, 1.0, 0.95, "")

    def judged(number: int, draws: int) -> Estimate:
        x = np.linspace(-1, 1, number)
        null = Null.of("untrained", 0.3 * x / x.std(ddof=1))
        made = claims.estimate(rule, 0.1, span, [null], n=40, clusters=40)
        return judge({"toy": Measured("", "", "", "", "", (made,), {}, {})}, draws)["toy"].estimates[0]

    five, planned, twenty = judged(5, 0), judged(5, 20), judged(20, 0)
    assert {h.verdict for h in (five, planned, twenty)} == {"open"}
    assert planned.needed == twenty.needed != five.needed
    assert (planned.draws, planned.planned) == (5, 20) and planned.null_spread == five.null_spread, "what was drawn"


def test_more_draws_may_not_help_either_and_the_sentence_is_about_those():
    """A mean of draws that differ so much that 20 do not fix it either: its error is s / sqrt(20)."""
    rule = replace(RULE, equivalence=True, effect=0.0, margin=0.05)
    x = np.linspace(-1, 1, 5)
    made = claims.estimate(rule, 0.0, SPAN, [Null.of("u", x / x.std(ddof=1))], n=40, clusters=40)
    (h,) = judge({"toy": Measured("", "", "", "", "", (made,), {}, {})}, 20)["toy"].estimates
    assert "20 draws fix the mean of the control only to within 0.22" in h.why


def test_a_control_that_few_models_have_is_open_for_its_draws_and_not_for_its_clusters():
    """Three of five untrained models had the weights that a probe examines."""
    (h,) = judge({"toy": Measured("", "", "", "", "", (compared([0.0, 0.3, 0.6]),), {}, {})}, 20)["toy"].estimates
    assert (h.verdict, h.draws) == ("open", 3) and "a control of 3 draws decides nothing" in h.why


def test_a_claim_against_one_draw_is_open_and_not_settled():
    """Of five untrained models one had the weights that a probe examines. Of 20 more may, and these decide."""
    few, more = compared([0.0]), compared([0.0, 0.01, -0.01, 0.005, -0.005])
    assert [toy(h)["toy"].estimates[0].verdict for h in (few, more)] == ["open", "holds"]
    assert not settled(toy(few), 20) and settled(toy(few, replace(more, claim="")), 1)


def test_what_cannot_be_compared_again_is_not_settled():
    h = compared([0.0, 0.01, -0.01, 0.005, -0.005])
    assert not settled(toy(replace(h, compared=None)), 20)
    other = replace(h, p=1.5 * h.p)
    assert toy(other)["toy"].estimates[0].verdict == toy(h)["toy"].estimates[0].verdict
    assert not settled(toy(other), 20), "its p does not come from its draws"


def test_words_hardly_change_and_error_rates_not_at_all():
    """The rule of studies/sequential_controls.py; brute force: the other draws are there."""
    rng, world = np.random.default_rng(1), World(75, claims=1, spread=0.2)
    ended = changed = 0
    for effect in np.repeat([0.0, 1.0], 150):
        seen = world.seen(float(effect), rng)
        early = toy(seen.estimate("x", 5))
        if settled(early, 20):
            ended += 1
            changed += toy(seen.estimate("x"))["toy"].estimates[0].verdict != early["toy"].estimates[0].verdict
    assert ended > 120 and changed <= 3


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A decision that a test imposes is not stored for others."""
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))


def asked(out: Path, nulls: int | None = None, **more) -> RunConfig:
    small = {"model": "pocket:pythia", "domains": ("math",), "n": 12, "limit": 40, "device": "cpu"}
    return RunConfig(**small, nulls=nulls, probes=PROBES, out=str(out), **more)


@pytest.fixture(scope="module")
def drawn():
    plan = prepare(asked(Path("unused")), write=False)
    subject = plan.request.load(plan.located)
    batch, *_ = sampled(plan, subject, "math")
    return subject, batch, probes.known(PROBES)


def run(drawn, controls, store=None, **options):
    subject, batch, measured = drawn
    return run_probes(subject, batch, measured, controls=controls, store=store, **options)


def same_numbers(record, other) -> None:
    for name, array in other.arrays.items():
        np.testing.assert_array_equal(record.arrays[name], array)
    for name, measured in other.results.items():
        for h, theirs in zip(record.results[name].estimates, measured.estimates, strict=True):
            numbers = (h.value, h.low, h.high, h.null, h.null_low, h.null_high, h.p, h.p_excluded, h.p_opposite)
            assert numbers == tuple(
                getattr(theirs, f)
                for f in ("value", "low", "high", "null", "null_low", "null_high", "p", "p_excluded", "p_opposite")
            )


def test_a_run_that_ends_at_five_draws_is_the_run_with_five(drawn, monkeypatch):
    monkeypatch.setattr(claims, "settled", lambda *_: True)
    stages = []
    with shown(lambda *stage: stages.append(stage)):
        record = run(drawn, None)
    five = run(drawn, 5)
    assert stages[-1][:3] == ("measuring attention_focus", 1, 1), "progress reaches its end"
    assert [stage[:3] for stage in stages].count(("measuring attention_focus", 0, 1)) == 0, "a look is not the end"
    same_numbers(record, five)
    assert (record.facts["nulls"], record.facts["most_nulls"]) == (5, 20)
    draws = {(h.draws, h.planned) for m in record.results.values() for h in m.estimates if h.claim}
    assert (5, 20) in draws <= {(0, 20), (5, 20)}, "what was drawn, and for how many the n that decides is computed"
    assert not any("draws of each control" in text for text in record.warnings)


def test_a_run_that_is_never_settled_is_the_run_with_all(drawn, monkeypatch):
    monkeypatch.setattr(claims, "settled", lambda *_: False)
    record, twenty = run(drawn, None), run(drawn, 20)
    assert record.results.keys() == twenty.results.keys() and record.warnings == twenty.warnings
    same_numbers(record, twenty)
    words = [[(h.verdict, h.why) for m in x.results.values() for h in m.estimates] for x in (record, twenty)]
    assert words[0] == words[1]
    assert {**record.facts, "most_nulls": None} == {**twenty.facts, "most_nulls": None}


def test_the_second_look_has_ten_of_each_control(drawn, monkeypatch):
    looks, shuffles, whole = [], [], Run.shuffles

    def shuffled(self, captured, number):
        shuffles.append((len(captured), number))
        return whole(self, captured, number)

    monkeypatch.setattr(Run, "shuffles", shuffled)
    monkeypatch.setattr(claims, "settled", lambda *_: looks.append(0) or len(looks) == 2)
    record = run(drawn, None)
    nulls = {h.null for m in record.results.values() for h in m.estimates if "draws" in h.null}
    assert nulls == {"untrained (10 draws)", "shuffled prompts (10 draws)"} and record.facts["nulls"] == 10
    assert shuffles == [(0, 5), (5, 10)]


@pytest.mark.parametrize("ends", [1, 2, 3])
def test_a_repeated_run_loads_its_results_and_decisions(drawn, monkeypatch, tmp_path, ends):
    looks = []
    monkeypatch.setattr(claims, "settled", lambda *_: looks.append(0) or len(looks) == ends)
    record = run(drawn, None, str(tmp_path))
    monkeypatch.setattr(claims, "settled", lambda *_: pytest.fail("looked at again"))
    monkeypatch.setattr(Answers, "_measure", lambda self, *_: pytest.fail("measured again") if self.pending else {})
    monkeypatch.setattr(Subject, "untrained", lambda *_: pytest.fail("drawn again"))
    again = run(drawn, None, str(tmp_path))
    same_numbers(again, record)
    assert (again.facts, again.warnings) == (record.facts, record.warnings)


def test_a_run_that_is_stopped_after_a_look_goes_on_from_there(drawn, monkeypatch, tmp_path):
    looks = []

    def look(*_):
        looks.append(0)
        if len(looks) == 2:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(claims, "settled", look)
    with pytest.raises(KeyboardInterrupt):
        run(drawn, None, str(tmp_path))
    again = run(drawn, None, str(tmp_path))
    assert len(looks) == 3, "the first look is not taken again"
    whole = run(drawn, 20, str(tmp_path / "other"))
    same_numbers(again, whole)


def test_the_weights_are_back_after_an_early_end(monkeypatch):
    subject = Subject.load("pocket:pythia", device="cpu")
    before = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    plan = prepare(asked(Path("unused")), write=False)
    batch, *_ = sampled(plan, subject, "math")
    seen = []
    monkeypatch.setattr(claims, "settled", lambda *_: seen.append(subject.model.state_dict()) or True)
    run_probes(subject, batch, probes.known(PROBES), controls=None)
    assert len(seen) == 1
    assert all((tensor == before[name]).all() for name, tensor in subject.model.state_dict().items())


def test_nulls_draw_every_control(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "settled", lambda *_: pytest.fail("looked at"))
    (_, record), *_ = perform(prepare(asked(tmp_path / "fixed", nulls=6)))
    assert record.facts["nulls"] == 6 and "most_nulls" not in record.facts


def test_a_plan_says_the_least_and_the_most(tmp_path):
    costs = {
        nulls: estimate(prepare(asked(tmp_path / str(nulls), nulls=nulls), write=False)) for nulls in (None, 5, 20)
    }
    rows = {nulls: cost["sources"]["math"] for nulls, cost in costs.items()}
    assert rows[None]["least_tokens"] == rows[5]["tokens"] < rows[None]["tokens"] == rows[20]["tokens"]
    assert "least_tokens" not in rows[20] and costs[None]["least_minutes"] < costs[None]["minutes"]


def test_runs_that_ended_at_other_draws_can_be_compared_and_the_page_says_how_many(drawn, monkeypatch):
    monkeypatch.setattr(claims, "settled", lambda *_: True)
    early, whole, fewer = run(drawn, None), run(drawn, 20), run(drawn, 6)
    check("a", early, "b", whole, placed=False)
    with pytest.raises(UserError, match="6 draws of each control, not up to 20"):
        check("a", early, "b", fewer, placed=False)
    with pytest.raises(UserError, match="it has up to 20 draws of each control, not 6"):
        check("a", fewer, "b", early, placed=False)  # it has five
    assert "5 of 20 draws of each control" in page([early])
    assert "20 draws of each control" in page([whole]) and " of 20 draws" not in page([whole])
    said = "5 of 20 draws of each control: no likely further draw changes a verdict"
    terminal = [" ".join(printed(record)) for record in (early, whole)]
    assert said in terminal[0] and "of 20 draws" not in terminal[1]

    numbers = {
        name: replace(m, estimates=tuple(replace(h, claim="", verdict="", why="") for h in m.estimates))
        for name, m in early.results.items()
    }
    no_claim = replace(early, results=numbers)
    for said in (page([no_claim]), " ".join(printed(no_claim)), " ".join(section(no_claim))):
        assert "5 of 20 draws of each control: no claim rests on them" in said


def test_a_claim_that_claims_estimate_did_not_make_draws_all_and_the_run_says_so(drawn, tmp_path):
    """The probe of a user, once as documented and once with an Estimate of its own; repeated, the sentence stays."""
    near, said = np.array([0.0, 0.01, -0.01, 0.005, -0.005]), "draws of each control: a run ends earlier only if"

    @dataclass(frozen=True)
    class Own(Result):
        TITLE, MEANING, COMPUTED, NULL, FAILURE_MODES = "Own", "", "", "", ""

    def record_of(finish, controls=None):
        draws = [*near, *near, *near, *near]
        needs = Needs(sites={"residual"}, shuffled=False, no_context=False)
        own = FunctionProbe(needs, lambda data: Own(estimates=(finish(compared(draws[: len(data.untrained)])),)))
        subject, batch, _ = drawn
        return run_probes(subject, batch, {"own": own}, controls=controls, store=str(tmp_path))

    def itself(h: Estimate) -> Estimate:
        return Estimate(**h.plain())

    documented, alone, again, fixed = (record_of(*how) for how in ((lambda h: h,), (itself,), (itself,), (itself, 20)))
    assert [record.facts["nulls"] for record in (documented, alone, again, fixed)] == [5, 20, 20, 20]
    for printer in (
        lambda record: page([record]),
        lambda record: " ".join(printed(record)),
        lambda record: " ".join(section(record)),
    ):
        assert [said in printer(record) for record in (documented, alone, again, fixed)] == [False, True, True, False]
    assert f"did not make {compared(near).name}" in " ".join(printed(alone))


def printed(record) -> list[str]:
    """The lines of a terminal."""
    return ["".join(text for _, text in line) for line in digest([record])]
