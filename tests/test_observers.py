"""Observer models: rules by hand, recovery of simulated observers, and what a design cannot tell apart."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, logit

from llmgeom.batch import Batch, Posterior, Text
from llmgeom.commands.evidence import RunConfig, perform_processes
from llmgeom.errors import UserError
from llmgeom.probes.evidence.observer_fit import (
    BAYESIAN,
    OTHER,
    UNDECIDED,
    Contest,
    advantage,
    attainable,
    called,
    divergence,
    fitted,
    lack_of_fit,
    lack_of_fit_draws,
    losses,
    parameter_intervals,
)
from llmgeom.probes.evidence.observers import FORGETTING, SATURATING, Shown, observers
from llmgeom.probes.evidence.which_observer import BAYES, MISFIT, measure_observers
from llmgeom.prompts import nonce
from llmgeom.prompts.sula import Beta, Sula
from llmgeom.result import BEST_RULE, CALLED, INSEPARABLE
from llmgeom.stats import conjugate
from llmgeom.stats.resampling import Interval
from llmgeom.stats.tests import tail_p
from tests.refusals import refused

SOURCE = Sula(nonce.LABELS)
SPEC = importlib.util.spec_from_file_location("observers", Path(__file__).parents[1] / "benchmarks" / "observers.py")
simulation = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(simulation)


def rule(name, shown):
    (found,) = [observer for observer in observers(shown) if observer.name == name]
    return found


def seen(labels, reliability=None, prior=None):
    """What prompts with these labels show; exact answers of a reliability of .9 unless stated."""
    labels, n = np.asarray(labels), len(labels)
    n1, n2 = ((labels == label).sum(1) for label in (0, 1))
    stated = [np.full(n, np.nan) if x is None else np.array(x) for x in (reliability, prior)]
    exact = conjugate.two_point(n1, n2, 0.9 if reliability is None else stated[0], 0.5 if prior is None else stated[1])
    return Shown(labels, exact, *stated)


# ---- rules by hand --------------------------------------------------------------------------------------------------

LABELS = [[0, 0, 1], [1, -1, -1], [1, 0, -1]]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("Beta(1, 1)", (), [3 / 5, 1 / 3, 1 / 2]),
        ("KT, Beta(1/2, 1/2)", (), [2.5 / 4, 0.5 / 2, 1.5 / 3]),
        ("fitted Beta", (2.0, 1.0), [4 / 6, 2 / 4, 3 / 5]),
        ("fitted reliability", (0.8,), [0.8 * 0.8 + 0.2 * 0.2, 0.2 * 0.8 + 0.8 * 0.2, 0.5]),
        ("logit-linear counter", (0.5, 0.1), [expit(0.6), expit(-0.4), expit(0.1)]),
        ("saturating counter", (2.0, 0.0, 0.1), [0.1 + 0.8 * expit(2), 0.1 + 0.8 * expit(-2), 0.5]),
        ("forgetting", (1.0, 0.0, 0.0, 0.5), [expit(0.25 + 0.5 - 1), expit(-1), expit(-0.5 + 1)]),
        ("primacy", (1.0, 0.0, 0.0, 0.5), [expit(1 + 0.5 - 0.25), expit(-1), expit(-1 + 0.5)]),
        ("forgetting shares", (0.5, 1e-9), [(0.25 + 0.5) / 1.75, 0, 1 / 1.5]),
        ("majority", (0.1,), [0.9, 0.1, 0.5]),
        ("copy-last", (0.1,), [0.1, 0.1, 0.9]),
        ("copy-random", (0.1,), [0.1 + 0.8 * 2 / 3, 0.1, 0.5]),
        ("constant", (0.3,), [0.3] * 3),
    ],
)
def test_rules_by_hand(name, values, expected):
    shown = seen(LABELS)
    assert rule(name, shown).rule(shown, *values) == pytest.approx(expected, abs=1e-8)


def test_a_saturating_counter_is_the_exact_observer_of_one_reliability():
    shown = seen([[0, 0, 0, 0], [0, 0, 1, -1], [1, -1, -1, -1], [1, 1, 0, 1]])
    exact = np.exp(shown.exact[:, 0])
    assert rule(SATURATING, shown).rule(shown, math.log(9), 0.0, 0.1) == pytest.approx(exact, abs=1e-12)


def test_stated_numbers_are_read_as_probabilities_and_used():
    n = 6
    columns = {"seen": ("01",) * n, "k": (2,) * n, "reliability": (3, 6, 9) * 2, "prior": (2, 2, 2, 8, 8, 8)}
    n1 = np.ones(n)
    stated = np.array(columns["reliability"]) / 10, np.array(columns["prior"]) / 10
    import torch

    exact = torch.from_numpy(conjugate.two_point(n1, n1, *stated))[:, None]
    batch = Batch(Text(tuple("abcdef")), tuple("abcdef"), {}, columns=columns, posterior=Posterior(exact))
    shown = Shown.of(batch)
    assert shown.stated and shown.reliability == pytest.approx(stated[0]) and shown.prior == pytest.approx(stated[1])
    # One label each: what is left is the prior, through the reliability.
    by_hand = stated[0] * stated[1] + (1 - stated[0]) * (1 - stated[1])
    weighed = rule("stated reliability, weighed", shown)
    assert weighed.rule(shown, 1.0) == pytest.approx(by_hand)
    assert np.exp(shown.exact[:, 0]) == pytest.approx(by_hand)
    assert "stated reliability, weighed" not in {observer.name for observer in observers(seen(LABELS))}


# ---- fits -----------------------------------------------------------------------------------------------------------


def test_parameters_come_from_the_other_half_of_the_clusters():
    shown = seen([[0, 1], [1, 0], [0, 0], [1, 1]] * 10)
    copy_last = rule("copy-last", shown)
    half = np.arange(40) % 8 < 4
    p = np.where(half, copy_last.rule(shown, 0.1), copy_last.rule(shown, 0.3))
    found = losses(copy_last, shown, p, half)

    def kl(p, q):
        return p * math.log2(p / q) + (1 - p) * math.log2((1 - p) / (1 - q))

    assert found[half] == pytest.approx(np.full(half.sum(), kl(0.9, 0.7)), rel=1e-3)
    assert found[~half] == pytest.approx(np.full((~half).sum(), kl(0.7, 0.9)), rel=1e-3)


def test_the_best_of_a_kind_is_chosen_where_it_is_not_scored():
    scores = np.array([[1.0, 1, 5, 5], [5, 5, 1, 1], [2, 2, 2, 3]])  # two that are not Bayesian, one that is
    half = np.array([True, True, False, False])
    assert advantage(scores, half, [False, False, True]).tolist() == [3, 3, 3, 2]


def test_divergence_is_zero_at_home_and_stays_finite():
    p = np.array([0.0, 0.2, 1.0])
    assert divergence(p, p) == pytest.approx(0)
    assert np.isfinite(divergence(p, 1 - p)).all()
    assert divergence(np.array([0.5]), np.array([0.25]))[0] == pytest.approx(
        0.5 * math.log2(2) + 0.5 * math.log2(2 / 3)
    )


def simulated(design, name, seed=0):
    rng = np.random.default_rng([seed, 77])
    shown, clusters = simulation.drawn_counts(design, rng)
    of, values = simulation.SIMULATED[name]
    return shown, clusters, simulation.answers(rule(of, shown), values, shown, rng)


def test_the_table_is_the_best_function_of_the_counts_and_bayes_fits_a_bayesian():
    shown, _, p = simulated("two-point", "exact")
    n1, n2 = shown.counts
    table = {(a, b): p[(n1 == a) & (n2 == b)].mean() for a, b in zip(n1, n2, strict=True)}
    saturated = divergence(p, np.array([table[key] for key in zip(n1, n2, strict=True)])).mean()
    exact = rule("exact", shown)
    assert lack_of_fit(exact, shown, p) == pytest.approx(divergence(p, np.exp(shown.exact[:, 0])).mean() - saturated)


def test_too_few_prompts_of_equal_evidence_leave_two_probes_out_and_the_answers_stay(tmp_path):
    """At k = 16 nearly every sequence of hmm is its own; at k <= 1 no belief varies enough."""
    for process, ks, missing in (("hmm", (16,), "show the same evidence"), ("beta", (0, 1), "two observations")):
        asked = RunConfig(model="pocket:llama", processes=(process,), ks=ks, n=20, nulls=1, out=str(tmp_path / process))
        (record,) = perform_processes(asked)[1]
        assert any(missing in why for why in record.unmeasured.values()) and "process" in record.results


def test_a_right_observer_is_rejected_in_a_twentieth_and_a_counter_always():
    def misfit_p(name, seed):
        shown, clusters, p = simulated("two-point", name, seed)
        best = Contest(observers(shown), shown, p, clusters).best(bayesian=True)
        return tail_p(lack_of_fit(best, shown, p), lack_of_fit_draws(best, shown, p, 19, seed))

    assert sum(misfit_p("exact", seed) <= 0.05 for seed in range(30)) <= 5  # binomial(30, .05): P(> 5) = .003
    assert all(misfit_p("counter, slope .5", seed) <= 0.05 for seed in range(5))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameter", "value"), [("forgetting", 3, 0.6), ("saturating counter", 0, 0.7)])
def test_intervals_of_parameters_cover_them(name, parameter, value):
    def covered(seed):
        shown, clusters, p = simulated("two-point", name, seed)
        values, spans = parameter_intervals(rule(name, shown), shown, p, clusters)
        assert values == pytest.approx(fitted(rule(name, shown), shown, p))
        return spans[parameter].low < value < spans[parameter].high

    assert sum(covered(seed) for seed in range(20)) >= 16  # binomial(20, .95): P(< 16) = .003


# ---- who is taken for whom ------------------------------------------------------------------------------------------


BAYES_RULES = ("exact", "Bayes, reliability .7", "Beta(1, 1)")
NESTED = {"counter, slope 2.2", "constant", "exact", "Beta(1, 1)"}  # others hold them among their parameters


@pytest.mark.parametrize("name", list(simulation.SIMULATED))
def test_no_counter_is_called_bayesian_and_each_is_taken_for_itself(name):
    found = simulation.row("two-point", name, 4, seed=1)
    assert BAYESIAN not in found["called"]  # with one reliability nothing can be: a saturating counter is as exact
    if name not in NESTED:
        assert found["taken"].get(simulation.SIMULATED[name][0], 0) >= 3
    if name not in (*BAYES_RULES, "constant"):
        assert found["called"] == {OTHER: 4}
    else:
        assert found["called"].get(UNDECIDED, 0) >= 3


def test_stated_reliabilities_part_bayes_from_every_counter():
    assert simulation.row("stated", "exact", 3, seed=1)["called"] == {BAYESIAN: 3}
    for name in ("counter, slope .5", "saturating counter", "forgetting", "Beta(1, 1)", "Bayes, reliability .7"):
        assert simulation.row("stated", name, 3, seed=1)["called"] == {OTHER: 3}


def test_the_call_needs_a_design_that_parts_a_gain_and_a_fit():
    gain, loss = Interval(0.01, 0.02, 0.95, ""), Interval(-0.02, -0.01, 0.95, "")
    assert called(gain, 0.1, 0.5) == BAYESIAN
    assert called(gain, 0.0, 0.5) == UNDECIDED
    assert called(Interval(-0.01, 0.02, 0.95, ""), 0.1, 0.5) == UNDECIDED
    assert called(gain, 0.1, 0.01) == called(loss, 0.1, 0.5) == OTHER


# ---- the probe ------------------------------------------------------------------------------------------------------


def noisy(p, seed=0):
    return expit(logit(np.clip(p, 1e-6, 1 - 1e-6)) + 0.25 * np.random.default_rng(seed).standard_normal(len(p)))


@pytest.fixture(scope="module")
def batch():
    return SOURCE.sample(50, seed=0)


def test_a_counter_with_half_the_slope_is_no_longer_taken_for_bayes(batch):
    shown = Shown.of(batch)
    p = noisy(expit(0.5 * np.subtract(*shown.counts)))
    untrained = [noisy(np.full(len(p), 0.5), i) for i in range(3)]
    result = measure_observers(batch, [p, *untrained], 0)
    found = {h.name: h for h in result.estimates}
    assert BAYES not in found and any("open, this design cannot part" in text for text in result.warnings)
    assert found[MISFIT].low > found[MISFIT].null_high
    assert result.gain[1] < 0
    assert "counter" in result.notes[0] or "primacy" in result.notes[0]
    assert result.notes[0].endswith("; the model is: not Bayesian") and result.facts[CALLED] == "not Bayesian"
    assert result.facts[BEST_RULE] in result.notes[0] and (result.facts[INSEPARABLE],) == result.warnings
    slope = result.ticks["parameter"].index(f"{SATURATING}: slope")
    assert result.parameter.interval[slope, 1] < 0.7 and result.exact_parameter[slope] == pytest.approx(2.197, abs=0.02)


def test_exact_answers_leave_the_claim_open_and_fit(batch):
    exact = np.exp(Shown.of(batch).exact[:, 0])
    untrained = [noisy(np.full(len(exact), 0.5), i) for i in range(3)]
    result = measure_observers(batch, [noisy(exact), *untrained], 0)
    found = {h.name: h for h in result.estimates}
    assert result.attainable < 1e-6 and BAYES not in found
    assert found[MISFIT].p > 0.05 and result.notes[0].endswith("; the model is: open")
    discount = result.ticks["parameter"].index(f"{FORGETTING}: discount")
    assert result.parameter.interval[discount, 0] < 1 < result.parameter.interval[discount, 1]


def test_a_beta_prior_is_open_too():
    batch = Sula(nonce.LABELS[:12], Beta(1, 1)).sample(50, 0)
    rows = np.flatnonzero(np.array(batch.columns["k"]) > 0)
    shown = Shown.of(batch).take(rows)
    assert attainable(observers(shown), shown, np.array(batch.cluster)[rows]) < 1e-4


def test_more_than_two_labels_are_refused(batch):
    import torch

    three = torch.full((len(batch), 1, 3), -math.log(3))
    many = Batch(batch.inputs, batch.cluster, {}, columns=batch.columns, posterior=Posterior(three))
    with refused(UserError, 3):
        measure_observers(many, [np.full(len(batch), 0.5)] * 2, 0)


def test_the_stated_process_parts_bayes_from_counting_in_text(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    asked = RunConfig(
        model="pocket:pythia",
        processes=("stated",),
        ks=(1, 2, 4),
        n=12,
        nulls=2,
        out=str(tmp_path / "run"),
        offline=True,
    )
    _, (record,) = perform_processes(asked)
    found = record.results["sula_observers"]
    assert "stated reliability, weighed" in found.ticks["observer"]
    # The design parts the two: the claim is measured, and no warning says that it is open by design.
    assert found.arrays["attainable"] > 0.01 and BAYES in {h.name for h in found.estimates}
    assert not any("cannot part" in warning for warning in found.warnings)


def test_the_stored_confusion_matrix_repeats():
    """docs/pictures/observers.svg shows it."""
    root = Path(__file__).parents[1]
    rows = json.loads((root / "benchmarks" / "observers.json").read_text())
    counted = {key: row for key, row in rows.items() if key.split(": ")[0] in simulation.COUNTED}
    others = {key: row for key, row in rows.items() if key not in counted}
    assert all(sum(row[of].values()) == 100 for row in counted.values() for of in ("taken", "called"))
    assert {*rows} == {f"{design}: {name}" for design, names in simulation.OF_DESIGN.items() for name in names}
    others_than = ("exact", "Bayes", "Beta", "constant", "forgetting")
    rivals = [key for key in rows if not key.split(": ")[1].startswith(others_than)]
    assert len(rivals) == 30 and all(set(rows[key]["called"]) == {OTHER} for key in rivals)
    wrong = [key for key in counted if key.startswith("stated") and not key.endswith((": exact", ": constant"))]
    assert len(wrong) == 10 and not any(BAYESIAN in rows[key]["called"] for key in wrong)
    # A twentieth of one stored row, computed again: what these five data sets were taken for is among what all were.
    again = simulation.row("two-point", "forgetting", 5)
    stored = rows["two-point: forgetting"]
    assert all(count <= stored["taken"][name] for name, count in again["taken"].items())
    assert again["called"] == {OTHER: 5} and sum(stored["taken"].values()) == 100
    counters = [key for key in counted if key.split(": ")[1] not in ("exact", "Bayes, reliability .7", "Beta(1, 1)")]
    assert len(counters) == 18 and all(rows[key]["called"].get(BAYESIAN, 0) <= 1 for key in counters)
    bayes = [key for key in others if key.split(": ")[1].startswith(("exact", "Bayes"))]
    for key, row in others.items():
        assert (row["called"].get(BAYESIAN, 0) > 0.8 * sum(row["called"].values())) == (key in bayes), key
