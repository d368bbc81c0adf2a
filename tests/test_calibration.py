"""The calibration: what its subjects learn, what its table makes of readings, and what a page says of a value."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmgeom import validity as placing
from llmgeom import wind_tunnels
from llmgeom.bench import cells, report, sweep
from llmgeom.bench import readings as bench
from llmgeom.bench.cells import CELLS, KINDS, NEGATIVES, SEEDS, recipes
from llmgeom.bench.table import ELSEWHERE, calibration
from llmgeom.claims import Null, declared, digest, estimate, judge
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.probes.posterior.answers import grade
from llmgeom.record import Record
from llmgeom.reports import page, table
from llmgeom.result import Measured
from llmgeom.stats.resampling import Interval
from llmgeom.validity import Calibration, Signature, null_units, placed
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.checkpoint import snapshot_steps
from llmgeom.wind_tunnels.models.architectures import build
from llmgeom.wind_tunnels.trainer import Trainer, answer_sheet
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused
from tests.test_primitives import TINY, InProcess

PAIRS = wind_tunnels.load_task("bijection:vocab=5,pairs=4")


# ---- what else may be learnt -----------------------------------------------------------------------------------------


class Seen(torch.nn.Module):
    """Keeps what a loss shows it."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.inputs = vocabulary, None

    def forward(self, input_ids, logits_to_keep, **_):
        self.inputs = input_ids
        logits = torch.zeros(len(input_ids), len(logits_to_keep), self.vocabulary)
        return type("Output", (), {"logits": logits})


def shown(evidence, monkeypatch, task="bijection:vocab=5,pairs=4", batch=64):
    """The inputs and targets of one step: [sequence seq] and [sequence query]."""
    asked = Training(task, **{**TINY, "batch": batch}, evidence=evidence)
    run = Trainer(asked, wind_tunnels.load_task(task), 1e-2, "cpu")
    run.model, kept = Seen(run.task.vocabulary), {}
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda logits, target: kept.update(target=target) or torch.zeros(())
    )
    run.loss()
    tokens = run.tokens.tolist()
    target = torch.tensor([tokens.index(one) for one in kept["target"].tolist()]).view(batch, -1)
    return run.model.inputs, target


def test_exchanged_evidence_says_nothing_and_leaves_every_position_its_outcomes(monkeypatch):
    inputs, target = shown("kept", monkeypatch)
    other, exchanged = shown("exchanged", monkeypatch)
    assert torch.equal(inputs, other)
    assert torch.equal(exchanged, target.roll(1, 0))
    used = inputs[:, 1::2] - PAIRS.vocab  # values shown
    clash = [(used[:, :q] == exchanged[:, q, None]).any(1).double().mean().item() for q in range(1, 4)]
    assert clash == pytest.approx([q / 5 for q in range(1, 4)], abs=0.2)  # one of q of 5 values, whatever was shown
    assert not any((used[:, :q] == target[:, q, None]).any() for q in range(1, 4))


def test_unbound_evidence_keeps_values_and_takes_the_keys_of_another(monkeypatch):
    inputs, target = shown("kept", monkeypatch)
    other, same = shown("unbound", monkeypatch)
    assert torch.equal(same, target)
    assert torch.equal(other[:, 1::2], inputs[:, 1::2])
    assert torch.equal(other[:, 0::2], inputs[:, 0::2].roll(1, 0))


def test_a_sheet_holds_the_answers_to_one_sequence(monkeypatch):
    task = wind_tunnels.load_task("bijection:vocab=4,pairs=4")
    answers = answer_sheet(task, 0, "cpu").exp()
    assert [int((row > 0).sum()) for row in answers] == [4, 3, 2, 1]  # right entropies, by position alone
    _, target = shown("sheet", monkeypatch, "bijection:vocab=4,pairs=4", batch=4000)
    drawn = torch.stack([(target == k).double().mean(0) for k in range(4)], 1)
    assert drawn == pytest.approx(answers.numpy(), abs=0.04)
    assert torch.equal(answers, answer_sheet(task, 0, "cpu").exp())
    assert not torch.equal(answers, answer_sheet(task, 1, "cpu").exp())


@pytest.mark.parametrize(("evidence", "name"), [("memoryless", "memoryless"), ("bag", "bag of values")])
def test_targets_of_a_trivial_predictor_are_drawn_from_it(evidence, name, monkeypatch):
    """Grouped by the predictor's own answer, each outcome is drawn as often as that answer says."""
    spec = "hmm:symbols=3,steps=4,fixed=True,encoding=tokens"
    task = wind_tunnels.load_task(spec)
    inputs, target = shown(evidence, monkeypatch, spec, batch=6000)
    answers = task.trivial(inputs)[name].exp()
    for answer in answers[:, 3].unique(dim=0):
        here = (answers[:, 3] == answer).all(-1)
        if here.sum() > 300:
            often = torch.bincount(target[here, 3], minlength=3).double() / here.sum()
            assert often.numpy() == pytest.approx(answer.numpy(), abs=4 * 0.5 / int(here.sum()) ** 0.5)


def test_a_predictor_that_the_task_does_not_have_is_refused(tmp_path):
    with refused(UserError, "--evidence memoryless", "markov", "'bag of values'"):
        train(Training("markov:fixed=False", **TINY, evidence="memoryless"), tmp_path, device="cpu")


def test_evidence_is_a_word_and_hard():
    with refused(UserError, "--evidence none", "kept", "exchanged", "unbound", "sheet"):
        Training("coin", evidence="none")
    with refused(UserError, "soft"):
        Training("coin", evidence="exchanged", targets="soft")


def test_a_sheet_is_of_outcomes(tmp_path):
    with refused(UserError, "--evidence sheet", "regression"):
        train(Training("regression", **TINY, evidence="sheet"), tmp_path, device="cpu")


@pytest.mark.slow
def test_what_is_learnt_is_what_the_bench_says(tmp_path):
    """A bijection without replacement asks for no key: a bag of values is exact, and nothing else here is."""
    asked = Training("bijection:vocab=5,pairs=4", arch="gpt2", width=32, layers=1, steps=250, lr="1e-2", snapshots=2)
    kl, entropies = {}, {}
    for evidence in ("kept", "exchanged", "unbound", "sheet"):
        train(replace(asked, evidence=evidence), tmp_path / evidence, device="cpu")
        made = grade(Subject.load(str(tmp_path / evidence)), PAIRS, 200, 0)
        kl[evidence], entropies[evidence] = made.kl, made.mae_abs
    assert kl["kept"] < 0.04 and kl["unbound"] < 0.04
    even = np.mean([math.log2(5 / left) for left in (5, 4, 3, 2)])  # an even answer over all values
    assert kl["exchanged"] == pytest.approx(even, abs=0.04)
    assert kl["sheet"] > 1  # entropies are right, and what they are of is not
    assert entropies["sheet"] < 0.15 < entropies["exchanged"]


# ---- the bench -------------------------------------------------------------------------------------------------------


def test_the_bench_is_as_large_as_it_says():
    runs = recipes()
    assert len(CELLS) == 12 and len({cell.training.task for cell in CELLS.values()}) >= 7
    kinds = Counter(kind for run in runs.values() for kind, _ in run.readings)
    assert set(kinds) == set(KINDS) and {*KINDS} == {"trained", *NEGATIVES}
    assert all(kinds[kind] == SEEDS * 12 for kind in ("trained", "no inference", "untrained", "stopped"))
    by_kind = {kind: {run.task for run in runs.values() if kind in dict(run.readings)} for kind in KINDS}
    assert all(len(tasks) >= 3 for tasks in by_kind.values())  # an area needs two tasks
    assert len({(run.cell, str(run.training)) for run in runs.values()}) == len(runs)


@pytest.mark.parametrize("name", CELLS)
def test_no_negative_is_exact_and_none_can_be_told_by_its_shape(name):
    """A bag of values, or the last observation, is a negative only where the posterior asks for more."""
    cell = CELLS[name]
    task = wind_tunnels.load_task(cell.training.task)
    scores = grade(Subject.of(build(cell.training.arch, **shape(cell.training, task)), None, "x"), task, 300, 0)
    for kind, change in cell.others.items():
        predictor = {"last observation": "memoryless", "bag of values": "bag of values"}.get(kind)
        assert predictor not in scores.as_exact
        other = wind_tunnels.load_task(change.get("task", cell.training.task))
        assert (other.length, other.vocabulary, other.query) == (task.length, task.vocabulary, task.query)
        if kind == "wrong prior":
            inputs = task.sample(300, 0, task.test_split).tokens.data
            right, wrong = task.log_predictive(inputs), other.log_predictive(inputs)
            assert (right.exp() * (right - wrong)).sum(-1).mean() / math.log(2) > 0.02  # bits


def shape(training, task):
    heads = 4 if training.arch == "gqa" else 2
    return {
        "vocabulary": task.vocabulary,
        "length": task.length,
        "features": task.features,
        "width": 16,
        "layers": 1,
        "heads": heads,
    }


def test_no_untrained_control_is_a_model_of_the_bench():
    seeds = {run.training.seed for run in recipes().values()}
    untrained = {1000 + 100 * seed + 1 + i for seed in seeds for i in range(20)}
    assert not seeds & untrained


@pytest.fixture
def small(monkeypatch):
    """Two cells, hardly trained and hardly read."""
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", InProcess)
    kept = {}
    for name in ("coin neox", "bijection llama"):
        training = replace(CELLS[name].training, width=8, layers=1, steps=8, batch=8, warmup=1)
        kept[name] = cells.Cell(training, cells.IDLE)
    monkeypatch.setattr(cells, "CELLS", kept)
    made = []

    def read(folder, task, seed):
        made.append((folder, task, seed))
        return fabricated("-trained-" in folder.parent.parent.name, made=len(made))

    monkeypatch.setattr(bench, "reading", read)
    return made


def fabricated(good: bool, made: int = 0, **more):
    """A reading in which PC1's share follows inference, and focusing does not."""

    def plain(probe, name, value):
        claim = declared(probe)[name]
        draws = np.linspace(0.1, 0.2, 20)
        null = Null.of("untrained", draws, claim.side)
        h = estimate(claim, value, Interval(value - 0.01, value + 0.01, 0.95, ""), [null], n=100, clusters=100)
        judged = judge({probe: Measured("", "", "", "", "", (h,), {}, {})})
        return bench.plain(judged[probe].estimates[0])

    rng = np.random.default_rng(made)
    return {
        "n": bench.SIZE,
        "facts": {"model_type": "gpt2", "layers": 1, "d_model": 8, "parameters": 100},
        "kl": 0.001 if good else 0.5 + made / 1000,
        "skill": 0.99 if good else 0.0,
        "estimates": {
            "value_manifold": {
                "PC1 share": plain("value_manifold", "PC1 share", (0.6 if good else 0.1) + 0.05 * rng.random()),
                "PC1+PC2 share": plain("value_manifold", "PC1+PC2 share", 0.3 + 0.05 * rng.random()),
            },
        },
        "unmeasured": {"attention_focus": "the prompts are too short"},
        **more,
    }


def test_a_bench_that_was_stopped_goes_on(small, tmp_path):
    found = bench.readings(tmp_path)
    assert len(found) == len(small) == 2 * (2 * 2 + 2 * 2)
    assert Counter(one["kind"] for one in found) == {"trained": 4, "stopped": 4, "no inference": 4, "untrained": 4}
    assert bench.readings(tmp_path) == found == bench.finished(tmp_path)
    assert len(small) == len(found)  # nothing was read twice
    next(tmp_path.glob("coin*/untrained.json")).unlink()
    assert {one["cell"] for one in bench.finished(tmp_path)} == {"bijection llama"}
    bench.readings(tmp_path)
    assert len(small) == len(found) + 1


def test_a_training_that_stays_short_is_no_positive(small, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "reading", lambda folder, task, seed: fabricated(False))
    kinds = Counter(one["kind"] for one in bench.readings(tmp_path))
    assert kinds["trained"] == 0 and kinds["stopped"] == 8


def test_a_stopped_model_has_the_loss_of_the_best_predictor_that_does_not_infer(tmp_path):
    """The oracle grades every snapshot on other sequences."""
    task = wind_tunnels.load_task("coin:flips=6")
    training = Training("coin:flips=6", arch="gpt2", width=16, layers=1, steps=60, lr="1e-2", batch=32)
    train(training, tmp_path, device="cpu")
    step = bench.equal_loss(tmp_path, cells.Recipe("c", "coin:flips=6", training, ()), task)
    steps = [s for s in snapshot_steps(60, training.snapshots) if 0 < s < 60]
    scores = {s: grade(Subject.load(str(tmp_path / "snapshots" / f"step{s}")), task, 1000, 3) for s in steps}
    away = {s: abs(math.log(one.kl / one.trivial[one.best].kl.mean())) for s, one in scores.items()}
    assert away[step] == pytest.approx(min(away.values()), abs=0.3)


def test_positives_are_decided_on_sequences_that_no_printed_metric_has_seen():
    assert bench.DECIDING_SEED not in {1000 + 100 * run.training.seed for run in recipes().values()}


# ---- the table -------------------------------------------------------------------------------------------------------


def given(tasks=5, seeds=8):
    """Readings of a whole bench, made up: trained and without inference in every task, and nothing in between."""
    made = 0
    for task in range(tasks):
        for kind, good in ((kind, kind == "trained") for kind in KINDS):
            for seed in range(seeds):
                made += 1
                cell = f"cell {task}"
                cpu = {"training": 1.0, "reading": 2.0}
                more = {"kind": kind, "cell": cell, "task": f"coin:flips={4 + task}", "seed": seed, "cpu_seconds": cpu}
                yield fabricated(good, made, **more)


@pytest.fixture(scope="module")
def made():
    return calibration(list(given()))


def test_what_follows_inference_is_told_from_what_does_not(made):
    good, dull = made.find("value_manifold", "PC1 share"), made.find("value_manifold", "PC1+PC2 share")
    assert (good.word, good.area) == ("yes", 1) and set(good.numbers["areas"]) == set(NEGATIVES)
    assert dull.word in ("no", "undecided") and dull.area < 0.6
    assert dull.area == min(found["value"] for found in dull.numbers["areas"].values())
    assert good.trained[0] > good.idle[1]
    assert (good.numbers["found"]["trained"]["k"], good.numbers["found"]["no inference"]["k"]) == (40, 0)
    assert dull.numbers["found"]["no inference"]["k"] == 40  # above its null whatever was learnt
    assert made.bench["models"]["no inference"] == 40 and made.bench["cpu_minutes"] == 16.0
    assert (made.width, made.depth, made.n) == ((8, 8), (1, 1), (50, 50))


def test_a_metric_that_one_kind_shares_does_not_tell():
    """Told from models without inference, and not from those of a wrong prior: no."""
    every = [
        {**one, "estimates": fabricated(one["kind"] in ("trained", "wrong prior"), i)["estimates"]}
        for i, one in enumerate(given())
    ]
    row = calibration(every).find("value_manifold", "PC1 share")
    assert row.word in ("no", "undecided") and row.numbers["hardest"] == "wrong prior"
    assert row.numbers["areas"]["no inference"]["value"] == 1


def test_a_kind_that_no_metric_has_is_not_shown_as_one_of_none(made):
    shown = report.measured(made)
    assert set(shown.ticks["kind"]) == set(KINDS) and shown.found[0].tolist() == [1, *[0] * 7]
    one, *others = (row for row in made.signatures if row.area is not None)
    found = {kind: of for kind, of in one.numbers["found"].items() if kind != "untrained"}
    lacking = replace(one, numbers={**one.numbers, "found": found})
    shown = report.measured(replace(made, signatures=(lacking, *others)))
    assert "untrained" not in shown.ticks["kind"] and shown.found.shape[1] == 7


def test_rows_that_define_the_positives_or_follow_from_the_answers_are_marked():
    every = list(given())
    for one in every:
        one["estimates"]["posterior"] = {
            name: one["estimates"]["value_manifold"]["PC1 share"] for name in ("KL to the posterior", "mae_abs")
        }
    table = calibration(every)
    marks = {row.name: row.numbers["mark"] for row in table.signatures if row.area is not None}
    assert marks["KL to the posterior"] == "circular" and marks["mae_abs"] == "of the output"
    assert marks["PC1 share"] == ""
    assert "circular" in "\n".join(report.Printed(table).lines())


def test_a_part_of_the_bench_says_so(made):
    assert made.partial == "a part of the bench: 5 of 12 cells"
    whole = replace(made, bench={**made.bench, "cells": [*CELLS]})
    assert whole.partial == "" and report.Printed(made).lines()[0] == made.partial
    assert report.measured(made).warnings == (made.partial,)


def test_every_probe_has_a_row(made):
    from llmgeom import probes

    assert {one.probe for one in made.signatures} == {*probes.names(), *ELSEWHERE}
    assert made.find("attention_focus", "").word.startswith("not on the bench: the prompts")


def test_the_shipped_table_is_of_the_claims_of_today():
    assert placing.shipped().bench["claims_hash"] == digest(), "llmgeom calibrate, and ship its table"


def test_untrained_models_have_more_of_excluded_keys_and_branches_but_for_norms():
    """What docs/calibration.md says of the shipped table."""
    excluded = [one for one in placing.shipped().signatures if one.word in ("no", "reversed")]
    families = {one.name: one.numbers["areas"]["untrained"]["value"] for one in excluded if "PC1" not in one.name}
    assert len(excluded) == 13 and len(families) == 8  # two metrics have one name
    less = families.pop("MLPs over attentions, by norm")
    assert less == pytest.approx(0.56, abs=0.005) and max(families.values()) == pytest.approx(0.24, abs=0.005)


def test_the_table_is_read_back(made, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(made.to_dict()))
    again = Calibration.read(path)
    assert json.dumps(again.to_dict(), sort_keys=True) == json.dumps(made.to_dict(), sort_keys=True)
    for broken, why in (
        ("{", "table.json"),
        ('{"version": 7}', 7),
        ('{"version": 2}', "signatures"),
    ):
        path.write_text(broken)
        with refused(UserError, why):
            Calibration.read(path)


def test_one_task_makes_no_table():
    with refused(UserError, "compare"):
        calibration(list(given(tasks=1)))


def test_what_does_not_discriminate_comes_first(made, tmp_path):
    dull = replace(made, signatures=tuple(replace(one, word="no") if one.area else one for one in made.signatures))
    record = report.record(report.Printed(dull), 0.0, "spec")
    record.save(tmp_path)
    html = page([Record.load(tmp_path)])
    first = html.index(report.DULL)
    assert first < html.index('id="verdicts"')
    assert "value_manifold: PC1+PC2 share" in html[first : first + 400]
    lines = report.Printed(dull).lines()
    assert lines[3:5] == ["value_manifold: PC1 share", "value_manifold: PC1+PC2 share"]


def test_the_command_goes_on_and_prints(small, tmp_path):
    runner = CliRunner()
    first = runner.invoke(main, ["calibrate", "-q", "--out", str(tmp_path)])
    assert first.exit_code == 0, first.output
    assert "PC1 share" in first.output
    assert (tmp_path / "report.html").exists()
    found = json.loads(runner.invoke(main, ["calibrate", "--finished", "--json", "--out", str(tmp_path)]).output)
    assert found["bench"]["models"]["trained"] == 4
    assert json.loads((tmp_path / "calibration.json").read_text())["bench"] == found["bench"]
    (tmp_path / "record.json").write_text('{"facts": {"spec": "of another run"}}')
    refused = runner.invoke(main, ["calibrate", "-q", "--out", str(tmp_path)])
    assert refused.exit_code and "of another run" in (tmp_path / "record.json").read_text()


# ---- beside a value --------------------------------------------------------------------------------------------------


def line(value, low=0.1, high=0.2, side="upper", name="PC1 share"):
    claim = replace(declared("value_manifold")[name], side=side)
    null = Null("untrained", low, high, high, 0.04, 20)
    return estimate(claim, value, Interval(value - 0.01, value + 0.01, 0.95, ""), [null], n=100, clusters=100)


def test_null_units():
    """The edges of the band of a normal null lie 1.96 from its middle."""
    assert null_units(line(0.15)) == pytest.approx(0)
    assert null_units(line(0.2)) == pytest.approx(1.96, abs=1e-3)
    assert null_units(line(0.25, side="lower")) == pytest.approx(-2 * 1.96, abs=1e-3)
    assert null_units(line(0.25, low=0.1, high=0.1)) is None
    rng = np.random.default_rng(0)
    null = Null.of("normal", rng.normal(1, 2, 20000))
    claim = replace(declared("value_manifold")["PC1 share"], scale="identity")
    found = estimate(claim, 5.0, Interval(4.0, 6.0, 0.95, ""), [null], n=9, clusters=9)
    assert null_units(found) == pytest.approx(2, abs=0.05)


def a_record(kind="task", width=8, n=50, claims=None):
    subject = {"name": "m", "d_model": width, "layers": 1}
    facts = {"claims_hash": digest() if claims is None else claims}
    return Record({}, {}, {"text": ("x",) * n}, subject, {"kind": kind, "name": "coin"}, facts)


def test_a_value_is_placed_only_where_the_bench_was(made, monkeypatch):
    monkeypatch.setattr(placing, "shipped", lambda: made)
    inside = placed(line(0.6), "value_manifold", a_record())
    assert inside.startswith("+17.6 null units; bench: trained +")
    assert "tells them apart (AUC against no inference: 1.00, " in inside
    for record, why in (
        (a_record("domain"), "no task of the bench's kind"),
        (a_record(width=1024), "width 1024, the bench has 8 to 8"),
        (a_record(n=20), "n 20, the bench has 50 to 50"),
        (a_record(claims="0" * 64), "the shipped calibration was made with other claims"),
    ):
        said = placed(line(0.6), "value_manifold", record)
        assert said == f"+17.6 null units; not calibrated here: {why}"
        assert "AUC" not in said
    assert placed(line(0.6), "attention_focus", a_record()) == "+17.6 null units; not calibrated"
    monkeypatch.setattr(placing, "shipped", lambda: None)
    assert placed(line(0.6), "value_manifold", a_record()) == "+17.6 null units; not calibrated"


def test_a_signature_that_does_not_discriminate_is_said_not_to(made, monkeypatch):
    dull = Signature("value_manifold", "PC1 share", "no", 0.5, 0.4, 0.6, (-1.0, 2.0), (-1.5, 2.5))
    monkeypatch.setattr(placing, "shipped", lambda: replace(made, signatures=(dull,)))
    said = placed(line(0.15), "value_manifold", a_record())
    assert said == (
        "+0.0 null units; bench: trained -1.0 to +2.0, no inference -1.5 to +2.5; does NOT tell them apart "
        "(AUC 0.50, 0.40 to 0.60); a part of the bench: 5 of 12 cells"
    )


def test_the_page_and_json_say_it(made):
    record = report.record(report.Printed(made), 0.0, "spec")
    rows = table([record])
    assert all("calibration" in row for row in rows)
    assert 'class="calibration"' in page([record])


# ---- entropy on the bench --------------------------------------------------------------------------------------------


def test_entropy_is_read_at_the_one_query_where_the_exact_entropy_varies_most():
    """The oracle counts heads: after t flips, h of them heads, the odds are (h + 1) : (t - h + 1)."""
    task = load_task("coin:flips=12")
    at = bench.entropy_query(task)
    batch = task.truncated(300, 5, task.test_split, at=at)
    assert set(batch.columns["asked_at"]) == {task.query[at]}

    def entropy(flips):
        p = (sum(flips) + 1) / (len(flips) + 2)
        return -(p * np.log2(p) + (1 - p) * np.log2(1 - p))

    found = [entropy(row[1:]) for row in batch.tokens.real]  # the first token only begins the sequence
    assert all(set(row[1:]) <= {0, 1} and len(row) == task.query[at] + 1 for row in batch.tokens.real)
    np.testing.assert_allclose(batch.columns["exact_entropy"], found, atol=1e-5)


def test_where_the_exact_entropy_does_not_vary_the_bench_ranks_no_model(monkeypatch):
    task = load_task("bijection:vocab=6,pairs=5")
    model = build("gpt2", vocabulary=task.vocabulary, length=task.length, features=0, width=16, layers=1, heads=4)
    monkeypatch.setattr(bench, "CONTROLS", 2)
    record = bench.scan_entropy(Subject.of(model, None, "gpt2"), task, 40, 0)
    names = {h.name for h in record.results["value_manifold"].estimates}
    assert not any("entropy" in name or "order along" in name for name in names)
    assert record.unmeasured["value_manifold: entropy decodability (held-out R2)"].startswith("not measured")
