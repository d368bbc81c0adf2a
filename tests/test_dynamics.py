"""What settles first in training: known crossings, drifts by definition, verdicts that can fail, a run that goes on."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy import stats

from llmgeom import claims
from llmgeom.bench import sweep
from llmgeom.cli import main
from llmgeom.commands.dynamics import RunConfig, perform, table
from llmgeom.dynamics import study
from llmgeom.dynamics.attention_gradients import signals
from llmgeom.dynamics.drift import Drifts, drifts, fallen, settled, state
from llmgeom.dynamics.runs import Run, require_distinct, revision_step, rises
from llmgeom.dynamics.study import Inputs, _called
from llmgeom.dynamics.trajectories import Trajectory, over_training, sections
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.probes.posterior.answers import grade
from llmgeom.record import Record
from llmgeom.result import Estimate
from llmgeom.stats.resampling import Interval, geometric_mean
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused
from tests.test_alignment import u_centred_cka
from tests.test_primitives import InProcess
from tests.words import beyond

TASK = "bijection:vocab=4,pairs=3"
TINY = Training(
    TASK, arch="gpt2", width=8, layers=1, heads=2, steps=12, batch=8, warmup=1, lr="3e-2", schedule="constant",
    snapshots=4,
)  # fmt: skip
STEPS = (0, 1, 2, 5, 12)


def less_p(own, other=None):
    """One-sided p by scipy: Student's against 1, Welch's against the others; at least 1e-6."""
    if other is None:
        return np.maximum(stats.ttest_1samp(np.log(own), 0, alternative="less").pvalue, 1e-6)
    return np.maximum(stats.ttest_ind(np.log(own), np.log(other), equal_var=False, alternative="less").pvalue, 1e-6)


@cache
def snapshot(place: str) -> Subject:
    """Loaded once for all tests, which only read it."""
    return Subject.load(place)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    """Two seeds, and two of random targets."""
    root = tmp_path_factory.mktemp("runs")
    made = {f"run{s}": replace(TINY, seed=s) for s in (0, 1)}
    made |= {f"random{s}": replace(TINY, seed=s, corrupt=1.0) for s in (0, 1)}
    return {name: str(train(training, root / name).out) for name, training in made.items()}


@pytest.fixture(scope="module")
def followed(runs, tmp_path_factory):
    """The whole command, with one probe."""
    out = tmp_path_factory.mktemp("dynamics") / "out"
    told: list = []
    asked = RunConfig(runs=tuple(runs.values()), probes=("value_manifold",), n=12, nulls=2, out=str(out))
    return *perform(asked, lambda *said: told.append(said)), told


# ---- when a curve settles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curve", "level", "step", "censored"),
    [
        # Steps 0, 1, 3, 7, 15 are 0, 1, 2, 3, 4 in log2(1 + step), in which a curve is straight.
        ((1.0, 0.8, 0.1, 0.0, 0.0), 0.05, 2**2.5 - 1, False),
        ((2.0, 1.6, 0.2, 0.0, 0.0), 0.05, 2**2.5 - 1, False),
        ((1.0, 0.75, 0.25, 0.0, 0.0), 0.5, 2**1.5 - 1, False),
        ((1.0, 0.5, 0.5, 0.0, 0.0), 0.5, 1, False),  # at the level is not above it
        ((1.0, 0.0, 0.15, 0.0, 0.0), 0.05, 2 ** (2 + 2 / 3) - 1, False),  # it came back: the first dip does not count
        ((1.0, 0.8, 0.6, 0.4, 0.0), 0.05, 2 ** (3 + 0.35 / 0.4) - 1, True),
        ((1.0, 0.8, 0.6, 0.4, 0.2), 0.05, 15, True),
    ],
)
def test_a_curve_settles_where_it_last_crosses(curve, level, step, censored):
    found = settled((0, 1, 3, 7, 15), np.array(curve), level)
    assert found.step == pytest.approx(step) and found.censored is censored


def test_of_the_largest_value_where_that_is_asked_for():
    rising = np.array([0.4, 1.0, 0.6, 0.2, 0.2])
    assert settled((0, 1, 3, 7, 15), rising, 0.5, whole=1.0).step == pytest.approx(2**2.25 - 1)
    assert settled((0, 1, 3, 7, 15), np.minimum(rising, 0.4), 0.5).step == pytest.approx(7)


def test_what_does_not_move_does_not_settle():
    with refused(UserError, "fall"):
        settled((0, 1, 3), np.array([1e-16, 0.0, 0.0]))


def test_log_precision_has_done_95_percent_of_its_fall():
    precision = 2.0 ** -np.array([0.0, 4.0, 8.0, 9.0, 10.0])
    assert fallen(precision) == pytest.approx([1.0, 0.6, 0.2, 0.1, 0.0])
    assert settled((0, 1, 3, 7, 15), fallen(precision)).step == pytest.approx(2**3.5 - 1)
    for never in ([1.0, 0.5, 1.0], [1.0, 0.5, 0.0]):
        with refused(UserError, "fall"):
            fallen(np.array(never))


# ---- the functional -------------------------------------------------------------------------------------------------


def test_identical_snapshots_have_not_drifted(runs):
    subject, task = Subject.load(runs["run0"]), load_task(TASK)
    one = state(subject, task.sample(20, 0, "held-out"), task)
    found = drifts([one, one, one])
    assert np.abs(found.frame).max() < 1e-12 and np.abs(found.value).max() < 1e-12 and not found.tv.any()
    (drift,) = sections([Trajectory(Run("a", (0, 1, 2), (), TASK), found)]).values()
    assert not drift.estimates  # precision ends where it began, and nothing else moves
    assert any("nothing to fall from" in note for note in drift.notes)


def test_drifts_are_what_their_definitions_say_of_the_captures(runs):
    """Frame at queries and values everywhere, from captures by another road, layer by layer and head by head."""
    run, task = Run.of(runs["run0"]), load_task(TASK)
    assert run.steps == STEPS
    batch = task.sample(15, 3, "held-out")
    found = drifts([state(run.load(i), batch, task) for i in range(len(STEPS))])

    def read(i):
        one = snapshot(run.places[i][0])
        attention = one.capture(batch, {Site.ATTENTION}).attention[0]
        return attention.double().numpy(), one.capture(batch, {Site.VALUE}, positions="all").value[0].numpy()

    last_attention, last_value = read(-1)
    assert last_attention.shape == (15 * 3, 2, 5) and last_value.shape == (15 * 5, 2, 4)
    for i in range(len(STEPS)):
        attention, value = read(i)
        for curve, ours, theirs in ((found.frame, attention, last_attention), (found.value, value, last_value)):
            heads = [u_centred_cka(ours[:, h].astype(float), theirs[:, h].astype(float)) for h in (0, 1)]
            assert curve[i] == pytest.approx(1 - np.mean(heads), abs=1e-5)
        apart = [abs(attention[r, h] - last_attention[r, h]).sum() / 2 for r in range(45) for h in (0, 1)]
        assert found.tv[i] == pytest.approx(np.mean(apart), abs=1e-6)
        graded = grade(snapshot(run.places[i][0]), task, 15, 3)
        assert found.precision[i] == pytest.approx(graded.kl)
    assert found.precision[-1] < found.precision[0]


def test_a_fine_tuning_begins_where_its_start_ended(runs, tmp_path):
    made = train(replace(TINY, start=runs["run0"], seed=5), tmp_path / "tuned").out
    task = load_task(TASK)
    batch = task.sample(15, 3, "held-out")
    first, last = state(Run.of(str(made)).load(0), batch, task), state(Run.of(runs["run0"]).load(-1), batch, task)
    assert first.kl == last.kl and np.array_equal(first.attention[0], last.attention[0])
    assert Run.of(str(made)).steps == STEPS


def test_precision_is_of_the_queries_that_were_trained(tmp_path):
    made = train(replace(TINY, task="hmm:steps=6,horizon=2", steps=2), tmp_path / "hmm").out
    subject, task = Subject.load(str(made)), load_task("hmm:steps=6,horizon=2")
    assert task.trained_queries == 2
    batch = task.sample(20, 0, "held-out")
    found = state(subject, batch, task)
    assert found.kl == pytest.approx(grade(subject, task, 20, 0).own.kl[:, :2].mean())
    assert found.attention[0].shape[0] == 20 * 6  # the frame is of all that is asked


def test_a_pull_is_the_rms_over_layers_over_its_largest_in_training():
    layers = np.array([[3.0, 4.0], [6.0, 8.0], [0.0, 1.0]])
    pulls = tuple(SimpleNamespace(score_gradient=x, value_gradient=x, spread=x) for x in layers)
    one = Trajectory(Run("a", (0, 1, 2), ()), None, pulls)
    assert one.gradient("score_gradient") == pytest.approx([0.5, 1.0, np.sqrt(0.5) / np.sqrt(50)])
    assert one.gradient("spread") == pytest.approx([0.5, 1.0, 0.5 / 7])
    still = tuple(SimpleNamespace(score_gradient=np.zeros(2)) for _ in layers)
    with refused(UserError, "gradient", 0):
        Trajectory(Run("a", (0, 1, 2), ()), None, still).gradient("score_gradient")


# ---- ratios and what they are held against --------------------------------------------------------------------------


def test_ratios_are_students_t_and_welchs_of_logarithms():
    rng = np.random.default_rng(1)
    own, other = np.exp(rng.normal(-0.3, 0.4, 6)), np.exp(rng.normal(0.2, 0.9, 5))
    value, low, high = geometric_mean(own)
    ends = stats.t.interval(0.95, 5, loc=np.log(own).mean(), scale=stats.sem(np.log(own)))
    assert (value, low, high) == pytest.approx((stats.gmean(own), *np.exp(ends)))
    claim, span = claims.declared("drift")["frame over values"], Interval(low, high, 0.95, "")
    nulls = [claims.Null.number("1", 1.0)], [replace(claims.Null.of("x", other, "lower"), mean=True)]
    alone, welch = (claims.estimate(claim, value, span, control, n=6, clusters=6) for control in nulls)
    assert alone.p == pytest.approx(less_p(own)) and welch.p == pytest.approx(less_p(own, other))
    shifted = np.log(other) + math.log(1 - 0.2 / stats.gmean(other))  # the declared effect below their mean
    greater = stats.ttest_ind(np.log(own), shifted, equal_var=False, alternative="greater").pvalue
    assert welch.p_excluded == pytest.approx(greater) and welch.centre == pytest.approx(stats.gmean(other))


def course(seed: int, corrupt: float, frame: float, value: float, precision: float, noise: float = 0.1) -> Trajectory:
    """A run whose curves fall to 5 % at about these steps, straight in log(1 + step)."""
    steps = (0, 1, 3, 7, 15, 31, 63, 127, 255, 511)
    rng = np.random.default_rng(seed + 100 * int(corrupt))

    def curve(at: float) -> np.ndarray:
        x = np.log1p(steps) / np.log1p(at * np.exp(noise * rng.normal()))
        return np.maximum(1 - 0.95 * x, 0.01) * (np.array(steps) < steps[-1]) + 0.005 * (np.array(steps) == steps[-1])

    found = Drifts(curve(frame), curve(value), curve(frame), curve(precision))
    pulls = zip(curve(frame), curve(value), strict=True)
    pull = tuple(SimpleNamespace(score_gradient=s * np.ones(2), value_gradient=v * np.ones(2), spread=s * np.ones(2))
                 for s, v in pulls)  # fmt: skip
    run = Run(f"{corrupt}-{seed}", steps, (), TASK, {"corrupt": corrupt, "seed": seed})
    return Trajectory(run, found, pull)


def verdicts(own, null, seeds=5, random=5, noise=0.1) -> dict[str, Estimate]:
    made = [course(s, 0.0, *own, noise) for s in range(seeds)] + [course(s, 1.0, *null, noise) for s in range(random)]
    found = sections(made)
    return {h.name: h for measured in found.values() for h in measured.estimates}


def test_several_runs_are_called_by_how_many_learn_and_how_many_are_controls():
    runs = [course(seed, corrupt, 0.1, 0.1, 0.1).run for corrupt in (0.0, 1.0) for seed in (0, 1, 2)]
    assert (_called(runs), _called(runs[:3])) == ("3 trainings and 3 controls", "3 trainings")


def test_a_frame_that_settles_first_passes_and_one_that_settles_last_fails():
    early = verdicts((15, 120, 120), (100, 100, 20))
    assert {early[n].verdict for n in ("frame over precision", "frame over values", "scores over values")} == {"holds"}
    assert 0.1 < early["frame over values"].value < early["frame over values"].high < 0.25  # 15 of 120 steps
    assert beyond(early["frame over values, half-way"]) == "yes"
    late = verdicts((120, 15, 15), (100, 100, 20))
    assert {late[n].verdict for n in ("frame over precision", "frame over values", "scores over values")} == {
        "opposite"
    }


def test_a_ratio_that_models_with_nothing_to_learn_have_too_does_not_pass():
    found = verdicts((15, 120, 120), (15, 120, 120))
    for name in ("frame over precision", "frame over values", "scores over values"):
        assert found[name].high < 1 and found[name].verdict != "holds"
        assert found[name].p > 0.05  # by Welch's t; against 1 it is far below


def test_each_ratio_is_of_its_own_curves_and_held_against_both_nulls():
    own = [course(s, 0.0, 60, 90, 120, 0.4) for s in range(5)]
    null = [course(s, 1.0, 80, 70, 20, 0.9) for s in range(5)]
    found = {h.name: h for m in sections([*own, *null]).values() for h in m.estimates}
    for name, first, second, level in (
        ("frame over precision", "frame", "precision", 0.05),
        ("frame over values", "frame", "value", 0.05),
        ("frame over precision, half-way", "frame", "precision", 0.5),
        ("frame over values, half-way", "frame", "value", 0.5),
    ):
        ours, theirs = (
            np.array([settled(c.run.steps, getattr(c.drifts, first), level).step for c in group])
            / [settled(c.run.steps, getattr(c.drifts, second), level).step for c in group]
            for group in (own, null)
        )
        assert found[name].value == pytest.approx(stats.gmean(ours))
        assert found[name].p == pytest.approx(max(less_p(ours), less_p(ours, theirs)))
        assert found[name].centre == pytest.approx(1 if less_p(ours) > less_p(ours, theirs) else stats.gmean(theirs))
        assert less_p(ours) != pytest.approx(less_p(ours, theirs))
    for name, level in (("scores over values", 0.05), ("scores over values, half-way", 0.5)):
        each = [[settled(c.run.steps, c.gradient(of), level, 1.0).step for of in PULLS] for c in own]
        assert found[name].value == pytest.approx(stats.gmean([s / v for s, v in each]))
    left = [c.gradient("score_gradient")[-1] / c.gradient("value_gradient")[-1] for c in own]
    assert found["scores over values, what is left"].value == pytest.approx(stats.gmean(left))


PULLS = ("score_gradient", "value_gradient")


@pytest.mark.parametrize(
    ("seeds", "random", "why"),
    [
        (1, 5, "needs 5 training seeds, has 1"),
        (4, 5, "needs 5 training seeds, has 4"),
        (5, 4, r"needs 5 random-target runs \(--corrupt 1\), has 4"),
        (5, 0, r"needs 5 random-target runs \(--corrupt 1\), has 0"),
    ],
)
def test_too_few_runs_decide_nothing(seeds, random, why):
    for own in ((15, 120, 120), (120, 15, 15)):
        for h in verdicts(own, (100, 100, 20), seeds, random).values():
            assert h.verdict == ("open" if h.claim else "")
            assert re.search(why, h.why) or not h.claim
            assert seeds > 1 or (h.low, h.high) == (0, 1e9)


def test_two_curves_that_only_their_end_stops_decide_nothing():
    found = verdicts((400, 5000, 20), (5000, 5000, 20), noise=0.01)
    assert found["frame over values"].verdict == "open"
    assert "in 5 of 5 runs neither settles before the last two snapshots" in found["frame over values"].why
    assert found["frame over precision"].verdict in (
        "ruled out",
        "opposite",
    )  # only one of the two is open, on the side that cannot help


def test_under_the_null_few_ratios_are_called_small():
    """Independent ratios around 1, of as many runs that learn as of random targets: p < .05 in a twentieth."""
    rng = np.random.default_rng(0)
    own, other = np.exp(rng.normal(0, 0.5, (2, 5, 2000)))
    assert np.mean(less_p(own) < 0.05) == pytest.approx(0.05, abs=0.015)
    assert np.mean(less_p(own, other) < 0.05) == pytest.approx(0.05, abs=0.015)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_record_holds_every_run_and_its_mean(followed, runs):
    out, record, _ = followed
    measured = record.results["drift"]
    assert measured.ticks["run"] == ("run0", "run1", "random0", "random1")
    assert measured.ticks["step"] == tuple(map(str, STEPS))
    task = load_task(TASK)
    each = []
    for name, corrupt in (("run0", 0.0), ("run1", 0.0), ("random0", 1.0), ("random1", 1.0)):
        run = Run.of(runs[name])
        batch = Inputs(TASK, n=12).batch(corrupt)
        each.append(drifts([state(snapshot(place), batch, task) for place, _ in run.places]))
        kl = grade(snapshot(run.places[-1][0]), task, 12, 0, corrupt=corrupt).kl
        assert each[-1].precision[-1] == pytest.approx(kl)  # against what is right for those targets
    assert measured.arrays["frame_runs"] == pytest.approx(np.array([d.frame for d in each]), abs=1e-9)
    assert measured.arrays["value"] == pytest.approx((each[0].value + each[1].value) / 2)
    both = np.array([each[2].frame, each[3].frame])
    assert measured.arrays["frame_null"] == pytest.approx(np.stack([both.min(0), both.max(0)], 1))
    low, high = stats.t.interval(
        0.95, 1, loc=measured.arrays["value"][0], scale=stats.sem([d.value[0] for d in each[:2]])
    )
    assert measured.arrays["value_interval"][0] == pytest.approx((low, high))
    h = next(h for h in measured.estimates if h.name == "frame over values, half-way")
    by_hand = [crossing(d.frame) / crossing(d.value) for d in each[:2]]
    assert h.value == pytest.approx(stats.gmean(by_hand), rel=1e-3) and h.n == h.clusters == 2
    batch = Inputs(TASK, n=12).batch()
    pulls = [signals(snapshot(place), batch).score_gradient[0] for place, _ in Run.of(runs["run1"]).places]
    assert record.results["gradients"].arrays["score_gradient_runs"][1, 2] == pytest.approx(pulls[2] / max(pulls))
    assert Record.load(out).results.keys() == {"drift", "gradients", "value_manifold"}


def crossing(curve: np.ndarray, level: float = 0.5) -> float:
    """On a fine grid instead of by arithmetic."""
    x = np.linspace(0, np.log1p(STEPS[-1]), 200_001)
    y = np.interp(x, np.log1p(STEPS), curve)
    return float(np.expm1(x[np.flatnonzero(y > level * curve[0])[-1]]))


def test_every_headline_of_every_snapshot_is_in_its_curve(followed):
    out, record, told = followed
    measured = record.results["value_manifold"]
    each = [Record.load(out / f"step{step}").results["value_manifold"].estimates for step in STEPS]
    curves = {q.meaning: name for name, q in measured.quantities.items() if q.figure}
    assert set(curves) == {h.name for estimates in each for h in estimates} and len(curves) > 2
    for i, step in enumerate(STEPS):
        for h in each[i]:
            name = curves[h.name]
            axis = measured.quantities[name].axes[0]
            at = measured.ticks[axis].index(str(step))
            assert measured.arrays[name][at] == h.value
            assert measured.arrays[f"{name}_interval"][at].tolist() == [h.low, h.high]
            assert measured.arrays[f"{name}_null"][at].tolist() == [h.null_low, h.null_high]
    stages = [said[0] for said in told]
    assert set(stages) == {"snapshots followed", "snapshots scanned"}
    assert [said[1:3] for said in told if said[0] == "snapshots followed"][-1] == (20, 20)
    assert told[-1][:3] == ("snapshots scanned", 5, 5)


def test_a_headline_that_a_snapshot_lacks_is_drawn_without_it(followed):
    out, *_ = followed
    records = {step: Record.load(out / f"step{step}") for step in STEPS}
    measured = records[1].results["value_manifold"]
    less = replace(measured, estimates=measured.estimates[1:])
    found = over_training(STEPS, records | {1: replace(records[1], results={"value_manifold": less})})["value_manifold"]
    assert found.quantities["metric_00"].axes == ("step (not measured at 1)",)
    assert found.ticks["step (not measured at 1)"] == ("0", "2", "5", "12")
    gone = replace(records[1], results={}, unmeasured={"value_manifold": "too few"})
    found = over_training(STEPS, records | {1: gone})["value_manifold"]
    assert found.arrays["metric_00"].shape == (4,) and "step 1: not measured, too few" in found.notes


def test_a_run_that_was_killed_goes_on_and_ends_with_the_same_bytes(followed, runs, tmp_path, monkeypatch):
    out, *_ = followed
    asked = RunConfig(runs=tuple(runs.values()), probes=("value_manifold",), n=12, nulls=2, out=str(tmp_path / "out"))
    seen: list[int] = []
    plain = study.run_probes

    def run_probes(subject, *args, facts, **more):
        seen.append(facts["step"])
        if len(seen) == 3:
            raise KeyboardInterrupt
        return plain(subject, *args, facts=facts, **more)

    monkeypatch.setattr(study, "run_probes", run_probes)
    with pytest.raises(KeyboardInterrupt):
        perform(asked)
    assert (tmp_path / "out/step1/record.json").exists() and not (tmp_path / "out/record.json").exists()
    perform(asked)
    assert seen == [0, 1, 2, 2, 5, 12]  # what was there was read
    for folder in (".", *(f"step{step}" for step in STEPS)):
        one, other = out / folder, tmp_path / "out" / folder
        for name in ("arrays.safetensors", "prompts.jsonl", "report.html"):
            assert not (one / name).exists() or (one / name).read_bytes() == (other / name).read_bytes()
        assert folder != "." or (one / "report.html").exists()
        bodies = [json.loads((place / "record.json").read_text()) for place in (one, other)]
        assert bodies[0] | {"run": None} == bodies[1] | {"run": None}


def test_the_command_prints_when_each_run_settles(runs, tmp_path):
    done = CliRunner().invoke(
        main, ["dynamics", runs["run0"], "--probes", "", "--n", "12", "--out", str(tmp_path / "a"), "-q"]
    )
    assert done.exit_code == 0, done.output
    assert "run0" in done.output and "open" in done.output and "report.html" in done.output
    record = Record.load(tmp_path / "a")
    lines = list(table(record))
    assert all(line in done.output for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("step from which 5 % is left"))
    assert lines[at].split()[7:] == ["frame", "precision", "tv", "value"]
    for name, shown in zip(("frame", "precision", "tv", "value"), lines[at + 1].split()[1:], strict=True):
        found = settled(STEPS, record.results["drift"].arrays[f"{name}_runs"][0])
        assert shown == f"{found.step:.0f}" + "+" * found.censored
    assert record.facts["command"] == f"llmgeom dynamics {runs['run0']} --probes '' --n 12"
    assert any("no random-target runs" in warning for warning in record.warnings)


def test_a_task_is_trained_and_followed_by_one_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(study, "TRAINED", replace(TINY, steps=16))
    asked = RunConfig(task=TASK, seeds=1, quick=True, probes=(), n=12, out=str(tmp_path / "out"))
    _, record = perform(asked)
    facts = [json.loads((tmp_path / f"out/runs/{kind}-seed0/training.json").read_text()) for kind in ("run", "random")]
    assert [f["training"]["corrupt"] for f in facts] == [0.0, 1.0] and facts[0]["step"] == 4
    assert facts[0]["training"]["schedule"] == "constant"
    assert record.facts["runs"] == ["run-seed0", "random-seed0"] and "quick: a quarter of the steps" in record.warnings
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("trained again"))
    perform(asked)


def test_a_model_without_attention_says_why_it_has_no_frame(tmp_path):
    made = train(replace(TINY, arch="lstm"), tmp_path / "lstm").out
    out, record = perform(
        RunConfig(runs=(str(made),), probes=("value_manifold",), n=12, nulls=1, out=str(tmp_path / "o"))
    )
    assert not record.results and set(record.unmeasured) >= {"drift", "gradients"}
    assert "attention" in record.unmeasured["drift"] and "not measured, because" in (out / "report.html").read_text()


def test_a_scan_has_no_frame_and_still_says_what_the_loss_asks_of_it(tmp_path):
    made = train(replace(TINY, arch="mamba2"), tmp_path / "mamba2").out
    _, record = perform(RunConfig(runs=(str(made),), probes=(), n=12, out=str(tmp_path / "o")))
    assert set(record.unmeasured) == {"drift"} and "attention" in record.unmeasured["drift"]
    assert list(record.results) == ["gradients"] and record.results["gradients"].arrays["score_gradient"].max() == 1


def test_revisions_of_a_language_model_are_followed_to_the_last(tmp_path, monkeypatch):
    """Stand-ins for revisions: untrained, half-way between, trained. Precision is then KL(last || model)."""
    load = Subject.load.__func__
    first, last = load(Subject, "pocket:pythia@step0"), load(Subject, "pocket:pythia")
    middle = copy.deepcopy(last.model)
    with torch.no_grad():
        for own, start in zip(middle.parameters(), first.model.parameters(), strict=True):
            own.lerp_(start, 0.3)
    held = {"step0": first, "step8": Subject.of(middle, last.tokenizer, "m"), "step64": last}
    called = []

    def stub(cls, model, revision=None, **options):
        called.append((model, revision, options["offline"]))
        return held[revision]

    monkeypatch.setattr(Subject, "load", classmethod(stub))
    asked = RunConfig(model="a/b", revisions=tuple(held), probes=(), n=10, offline=True, out=str(tmp_path / "o"))
    _, record = perform(asked)
    assert called[:3] == [("a/b", revision, True) for revision in held]
    precision, batch = record.results["drift"].arrays["precision"], Inputs(n=10).batch()
    log_p, log_q = (held[r].capture(batch, {Site.LOG_PROBS}).log_probs.double() for r in ("step64", "step8"))
    by_hand = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item() / np.log(2)
    assert precision[1] == pytest.approx(by_hand, rel=1e-6) and precision[2] == 0
    assert precision[0] > precision[1] > 0 and record.results["drift"].arrays["frame"][1] > 0
    assert {h.verdict for h in record.results["drift"].estimates} <= {"open", ""}
    assert any("log P does not fall" in note for note in record.results["drift"].notes)
    assert asked.command() == "llmgeom dynamics --model a/b --revisions step0,step8,step64 --probes '' --n 10 --offline"
    assert RunConfig(runs=("https://me:secret@h/x",)).command() == "llmgeom dynamics https://…@h/x"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A trainer's output folder: untrained, half-way between, trained."""
    root = tmp_path_factory.mktemp("trainer")
    first, last = Subject.load("pocket:pythia@step0"), Subject.load("pocket:pythia")
    for step, share in ((0, 0.0), (100, 0.5), (1000, 1.0)):
        middle = copy.deepcopy(first.model)
        with torch.no_grad():
            for own, end in zip(middle.parameters(), last.model.parameters(), strict=True):
                own.lerp_(end, share)
        middle.save_pretrained(root / f"checkpoint-{step}")
        last.tokenizer.save_pretrained(root / f"checkpoint-{step}")
    (root / "checkpoint-best").mkdir()
    return root


def test_checkpoints_of_a_trainer_are_followed(checkpoints, tmp_path):
    run = Run.of(str(checkpoints))
    assert run.steps == (0, 100, 1000) and not run.task and not run.random
    _, record = perform(RunConfig(runs=(str(checkpoints),), probes=(), n=10, out=str(tmp_path / "o")))
    assert record.facts["steps"] == [0, 100, 1000]
    frame = record.results["drift"].arrays["frame"]
    assert frame[0] > frame[1] > 0.01 and abs(frame[2]) < 1e-12
    assert not any("rises" in warning for warning in record.warnings)


def test_the_loss_of_a_snapshot_is_that_of_transformers(checkpoints):
    subject = Subject.load(str(checkpoints / "checkpoint-1000"))
    batch = Inputs(n=10).batch()
    total = count = 0
    for text in batch.text:
        ids = torch.tensor([subject.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            total += float(subject.model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert state(subject, batch, None).loss == pytest.approx(total / count, rel=1e-5)


def test_a_checkpoint_with_the_weights_of_another_is_refused_and_a_swapped_one_is_warned_of(checkpoints, tmp_path):
    wrong, swapped = tmp_path / "wrong", tmp_path / "swapped"
    for folder, names in ((wrong, ("0", "1000", "1000")), (swapped, ("0", "1000", "100"))):
        for step, name in zip(("0", "100", "1000"), names, strict=True):
            (folder / f"checkpoint-{step}").parent.mkdir(exist_ok=True)
            (folder / f"checkpoint-{step}").symlink_to(checkpoints / f"checkpoint-{name}")
    with refused(UserError, "checkpoint-100 and"):
        perform(RunConfig(runs=(str(wrong),), probes=(), n=10, out=str(tmp_path / "a")))
    _, record = perform(RunConfig(runs=(str(swapped),), probes=(), n=10, out=str(tmp_path / "b")))
    assert any("rises" in warning and "step 100 to step 1000" in warning for warning in record.warnings)


def test_weights_that_two_names_share_are_refused_by_name():
    require_distinct({"a at step1": "x", "a at step2": "y"})
    with refused(UserError, "a at step1 and a at step9 hold the same weights"):
        require_distinct({"a at step1": "x" * 64, "a at step2": "y" * 64, "a at step9": "x" * 64})


def test_a_rise_of_the_loss_is_named_and_noise_is_not():
    assert rises((0, 1, 10, 100), (11.0, 10.8, 10.9, 3.0)) == []
    assert rises((0, 1, 10, 100), (11.0, 3.0, 10.9, 3.1)) == [(1, 10)]


@pytest.mark.parametrize(
    ("revision", "expected"),
    [
        ("step512", ("step512", 512)),
        ("main=143000", ("main", 143000)),
        ("stage1-step1000-tokens5B", ("stage1-step1000-tokens5B", 1000)),
        ("checkpoint-500", ("checkpoint-500", 500)),
        ("iter_2000", ("iter_2000", 2000)),
        ("v7", ("v7", 7)),
    ],
)
def test_the_step_of_a_revision_is_read_from_its_name(revision, expected):
    assert revision_step(revision) == expected


def test_seeds_of_a_suite_are_replicates(checkpoints, tmp_path, monkeypatch):
    """Two hub models with the same revisions: two runs, with intervals over them."""
    load = Subject.load.__func__
    places = {"step0": "0", "step100": "100", "step1000": "1000"}

    def stub(cls, model, revision=None, **options):
        return load(cls, str(checkpoints / f"checkpoint-{places[revision]}"))

    monkeypatch.setattr(Subject, "load", classmethod(stub))
    asked = RunConfig(runs=("a/seed1", "a/seed2"), revisions=tuple(places), probes=(), n=10, out=str(tmp_path / "o"))
    _, record = perform(asked)
    assert record.results["drift"].ticks["run"] == ("a/seed1", "a/seed2")


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "three"),
        ({"runs": ("a",), "task": "coin"}, "three"),
        ({"model": "a/b"}, "--revisions"),
        ({"task": "coin", "revisions": ("step1",)}, "--revisions"),
        ({"task": "coin", "seeds": 0}, "--seeds 0"),
        ({"task": "coin", "n": 5}, "--n 5"),
    ],
)
def test_what_cannot_be_asked_is_refused(given, why):
    with refused(UserError, why):
        RunConfig(**given)


@pytest.mark.parametrize(
    ("revisions", "why"),
    [
        (("main", "step1", "step2"), "--revisions main"),
        (("step2", "step1", "step3"), "ascending"),
        (("step1", "step2"), "a/b"),
    ],
)
def test_revisions_are_ascending_steps(revisions, why):
    with refused(UserError, why):
        Run.at("a/b", revisions)


def test_snapshots_are_in_the_order_of_their_steps(runs, monkeypatch):
    plain = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *asked: sorted(plain(*asked), reverse=True))  # as a file system may
    run = Run.of(runs["run0"])
    assert run.steps == STEPS
    assert [Path(place).name for place, _ in run.places] == ["step0", "step1", "step2", "step5", "run0"]


def test_runs_that_cannot_be_followed_are_refused(runs, tmp_path):
    def declined(named, *folders):
        with refused(UserError, *named):
            perform(RunConfig(runs=folders, probes=(), out=str(tmp_path / "out")))
        assert not (tmp_path / "out").exists()

    declined(("llmgeom train",), str(tmp_path))
    few = str(train(replace(TINY, snapshots=2, steps=1), tmp_path / "few").out)
    declined(("few", 3, "--snapshots 12"), few)
    for step in ("step0", "step1"):
        (Path(few) / "snapshots" / step).rename(tmp_path / step)
    declined(("few", "snapshot"), few)
    other = str(train(replace(TINY, task="bijection:vocab=5,pairs=3"), tmp_path / "other").out)
    declined(("other", "task", "run0"), runs["run0"], other)
    longer = str(train(replace(TINY, steps=13, seed=4), tmp_path / "longer").out)
    declined(("longer", "run0", "5 to step 13", "5 to step 12"), runs["run0"], longer)
    declined(("seed",), runs["run0"], runs["run0"])
    declined(("random0", "random targets"), runs["random0"])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/training.json").write_text("{}")
    declined(("bad/training.json",), str(tmp_path / "bad"))
    done = CliRunner().invoke(main, ["dynamics", str(tmp_path)], standalone_mode=False)
    assert isinstance(done.exception, UserError)


def test_another_run_s_folder_is_not_written_into(followed, runs):
    out, *_ = followed
    with refused(UserError, "--out"):
        perform(RunConfig(runs=(runs["run0"],), probes=("value_manifold",), n=12, nulls=2, out=str(out)))


def test_a_falling_rate_is_said(runs, tmp_path):
    made = str(train(replace(TINY, schedule="cosine", seed=7), tmp_path / "cosine").out)
    _, record = perform(RunConfig(runs=(made,), probes=(), n=12, out=str(tmp_path / "out")))
    assert any("cosine schedule" in warning and "--schedule constant" in warning for warning in record.warnings)
