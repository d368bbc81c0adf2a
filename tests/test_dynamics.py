"""A training is followed snapshot by snapshot: drifts by definition, a record of every run, refusals."""

import json
import math
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from llmgeom.commands.dynamics import RunConfig, perform
from llmgeom.dynamics import processes, study
from llmgeom.dynamics.drift import State, distances, state
from llmgeom.dynamics.gradients import PULLS, over_layers, signals
from llmgeom.dynamics.runs import Run
from llmgeom.dynamics.study import Inputs
from llmgeom.dynamics.trajectories import Trajectory, over_training, sections
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.probes.posterior.grading import grade
from llmgeom.progress import shown
from llmgeom.record import Record
from llmgeom.wind_tunnels import load_world
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.findings import claim, record as record_of
from tests.refusals import refused
from tests.test_sweep import InProcess

pytestmark = pytest.mark.usefixtures("few_draws")

TASK = "bijection:vocab=4,pairs=3"
TINY = Training(
    TASK, arch="gpt2", width=8, layers=1, heads=2, steps=12, batch=8, warmup=1, lr="3e-2", schedule="constant",
    snapshots=4,
)  # fmt: skip
STEPS = (0, 1, 2, 5, 12)


@cache
def snapshot(place: str) -> Model:
    """Loaded once for all tests, which only read it."""
    return Model.load(place)


def u_centred_cka(x, y):
    """From U-centred inner products, k_ij - (r_i + r_j) / (n - 2) + s / ((n - 1)(n - 2)), 0 on the diagonal."""

    def gram(x):
        n, k = len(x), x @ x.T
        np.fill_diagonal(k, 0)
        rows = k.sum(0) / (n - 2)
        k = k + rows.sum() / (n - 1) - rows - rows[:, None]
        np.fill_diagonal(k, 0)
        return k

    a, b = gram(x - x.mean(0)), gram(y - y.mean(0))
    return np.vdot(a, b) / math.sqrt(np.vdot(a, a) * np.vdot(b, b))


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
    with shown(lambda *said: told.append(said)):
        return *perform(asked), told


def curves(states: list[State]) -> SimpleNamespace:
    """The curves of snapshots that are all in memory."""
    found = [distances(state, states[-1]) for state in states]
    return SimpleNamespace(found=found, **{name: np.array([one[name] for one in found]) for name in found[0]})


# ---- the functional -------------------------------------------------------------------------------------------------


def test_identical_snapshots_have_not_drifted(runs):
    subject, task = Model.load(runs["run0"]), load_world(TASK)
    one = state(subject, task.sample(20, 0, "held-out"), task)
    found = curves([one, one, one])
    assert np.abs(found.frame).max() < 1e-12 and np.abs(found.value).max() < 1e-12 and not found.tv.any()
    (drift,) = sections([Trajectory(Run("a", (0, 1, 2), (), TASK), found.found)]).values()
    assert not drift.estimates  # precision ends where it began, and nothing else moves
    assert any("nothing to fall from" in note for note in drift.notes)


def test_drifts_are_what_their_definitions_say_of_the_captures(runs):
    """Frame at queries and values everywhere, from captures by another road, layer by layer and head by head."""
    run, task = Run.of(runs["run0"]), load_world(TASK)
    assert run.steps == STEPS
    batch = task.sample(15, 3, "held-out")
    found = curves([state(run.load(i), batch, task) for i in range(len(STEPS))])

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


def test_precision_is_of_the_queries_that_were_trained(tmp_path):
    made = train(replace(TINY, task="hmm:steps=6,horizon=2", steps=2), tmp_path / "hmm").out
    subject, task = Model.load(str(made)), load_world("hmm:steps=6,horizon=2")
    assert task.trained_queries == 2
    batch = task.sample(20, 0, "held-out")
    found = state(subject, batch, task)
    assert found.kl == pytest.approx(grade(subject, task, 20, 0).own.kl[:, :2].mean())
    assert found.attention[0].shape[0] == 20 * 6  # the frame is of all that is asked


def test_a_pull_is_the_rms_over_layers_over_its_largest_in_training():
    layers = np.array([[3.0, 4.0], [6.0, 8.0], [0.0, 1.0]])
    one = Trajectory(Run("a", (0, 1, 2), ()), [over_layers(dict.fromkeys(PULLS, x)) for x in layers])
    assert one.curve("score_gradient") == pytest.approx([0.5, 1.0, np.sqrt(0.5) / np.sqrt(50)])
    with refused(UserError, "gradient", 0):
        Trajectory(Run("a", (0, 1, 2), ()), [{"score_gradient": 0.0}] * 3).curve("score_gradient")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_record_holds_every_run_and_its_mean(followed, runs):
    out, record, _ = followed
    measured = record.results["drift"]
    assert measured.ticks["run"] == ("run0", "run1", "random0", "random1")
    assert measured.ticks["step"] == tuple(map(str, STEPS))
    task = load_world(TASK)
    each = []
    for name, corrupt in (("run0", 0.0), ("run1", 0.0), ("random0", 1.0), ("random1", 1.0)):
        run = Run.of(runs[name])
        batch = Inputs(TASK, n=12).batch(corrupt)
        each.append(curves([state(snapshot(place), batch, task) for place, _ in run.places]))
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
    h = next(h for h in measured.estimates if h.name == "frame over values")
    by_hand = [crossing(d.frame) / crossing(d.value) for d in each[:2]]
    assert h.value == pytest.approx(stats.gmean(by_hand), rel=1e-3) and h.n == h.clusters == 2
    batch = Inputs(TASK, n=12).batch()
    pulls = [signals(snapshot(place), batch)["score_gradient"][0] for place, _ in Run.of(runs["run1"]).places]
    assert record.results["gradients"].arrays["score_gradient_runs"][1, 2] == pytest.approx(pulls[2] / max(pulls))
    assert Record.load(out).results.keys() == {"drift", "gradients", "value_manifold"}


def crossing(curve: np.ndarray, level: float = 0.05) -> float:
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


def test_a_control_on_the_same_prompts_is_one_number_over_training_with_the_interval_of_the_difference():
    paired = claim(value=0.4, difference=(0.09, 0.31))  # .2 beyond the control's .2
    drawn = claim(value=0.5)
    both, alone = (
        over_training((0, 1), {0: record_of(first), 1: record_of(drawn)})["value_manifold"] for first in (paired, drawn)
    )
    assert both.arrays["metric_00_null"] == pytest.approx(np.array([[0.2, 0.2], [0.05, 0.2]]))
    assert both.arrays["metric_00_interval"] == pytest.approx(np.array([[0.29, 0.51], [0.4, 0.6]]))
    for part, said in (("null", "one number"), ("interval", "the difference")):
        meanings = (measured.quantities[f"metric_00_{part}"].meaning for measured in (both, alone))
        assert [said in meaning for meaning in meanings] == [True, False]


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


def test_a_scan_of_other_weights_of_another_version_or_damaged_is_made_again(runs, tmp_path, monkeypatch):
    """A branch of the hub moved, llmgeom was installed anew, or a disk lost a file: its point stayed in the curve."""
    asked = RunConfig(runs=(runs["run0"],), probes=("value_manifold",), n=12, nulls=2, out=str(tmp_path / "out"))
    perform(asked)

    def change(part: str, name: str, step: int) -> None:
        path = tmp_path / "out" / f"step{step}" / "record.json"
        body = json.loads(path.read_text())
        body[part][name] = "another"
        path.write_text(json.dumps(body))

    change("subject", "weights", 1)
    change("run", "program", 2)
    (tmp_path / "out/step5/arrays.safetensors").write_bytes(b"")
    seen: list[int] = []
    plain = study.run_probes
    monkeypatch.setattr(
        study, "run_probes", lambda *a, facts, **b: seen.append(facts["step"]) or plain(*a, facts=facts, **b)
    )
    perform(asked)
    assert seen == [1, 2, 5]
    change("facts", "spec", 0)
    with refused(UserError, "another run"):
        perform(asked)


def test_a_task_is_trained_and_followed_by_one_command(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(study, "TRAINED", replace(TINY, steps=16))
    asked = RunConfig(task=TASK, seeds=1, quick=True, probes=(), n=12, out=str(tmp_path / "out"))
    _, record = perform(asked)
    facts = [json.loads((tmp_path / f"out/runs/{kind}-seed0/training.json").read_text()) for kind in ("run", "random")]
    assert [f["training"]["corrupt"] for f in facts] == [0.0, 1.0] and facts[0]["step"] == 4
    assert facts[0]["training"]["schedule"] == "constant"
    assert record.facts["runs"] == ["run-seed0", "random-seed0"] and "quick: a quarter of the steps" in record.warnings
    monkeypatch.setattr(processes, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("trained again"))
    perform(asked)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "three"),
        ({"runs": ("a",), "task": "coin"}, "three"),
        ({"model": "a/b"}, "--revisions"),
        ({"task": "coin", "revisions": ("step1",)}, "--revisions"),
        ({"task": "coin", "n": 5}, "--n 5"),
        ({"task": "coin", "domain": "math"}, "--domain math with --task coin"),
        ({"runs": ("a",), "quick": True}, "--quick with no --task"),
        ({"model": "a/b", "revisions": ("step0", "step1"), "seeds": 3}, "--seeds 3 with no --task"),
    ],
)
def test_what_cannot_be_asked_is_refused(given, why):
    with refused(UserError, why):
        RunConfig(**given)


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
    wider = str(train(replace(TINY, width=16, seed=4), tmp_path / "wider").out)
    declined(("wider", "width", "run0", "16, not 8"), runs["run0"], wider)
    shutil.copytree(runs["random1"], tmp_path / "chosen")
    body = json.loads((tmp_path / "chosen/training.json").read_text())
    body["lr"], body["training"]["lr"] = 0.004, TINY.lr  # as of --lr auto: the same flag, another rate
    (tmp_path / "chosen/training.json").write_text(json.dumps(body))
    declined(("chosen", "another lr", "run0", "0.004, not 0.03"), runs["run0"], str(tmp_path / "chosen"))
    half = str(train(replace(TINY, corrupt=0.5, seed=4), tmp_path / "half").out)
    declined(("half", "corrupt", "run0"), runs["run0"], half, runs["random0"])
    declined(("seed",), runs["run0"], runs["run0"])
    with refused(UserError, "--domain math", TASK):
        perform(RunConfig(runs=(runs["run0"],), domain="math", out=str(tmp_path / "out")))
    declined(("random0", "random targets"), runs["random0"])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/training.json").write_text("{}")
    declined(("bad/training.json",), str(tmp_path / "bad"))
