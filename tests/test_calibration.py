"""The calibration: what its table makes of readings, and what a page says of a value."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from llmgeom import validity as placing
from llmgeom.bench import report
from llmgeom.bench.cells import CELLS, CONTROLS, KINDS, NEGATIVES
from llmgeom.bench.readings import entropy_query
from llmgeom.bench.table import ELSEWHERE, calibration
from llmgeom.claims import Null, declared, digest, estimate
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.probes.interventions import component_probe, interchange_probe
from llmgeom.record import Record
from llmgeom.reports import page, table
from llmgeom.stats.resampling import Interval
from llmgeom.validity import Calibration, Signature, null_units, placed
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.models.architectures import build
from tests.calibrated import fabricated
from tests.refusals import refused

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
    assert made.partial == "a part of the bench: 5 of 15 cells"
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
    shipped = placing.shipped().signatures
    of = {(one.probe, one.name): one.numbers["areas"] for one in shipped if one.word in ("no", "reversed")}
    untrained = {key: areas["untrained"]["value"] for key, areas in of.items()}
    keys = {name: value for (probe, name), value in untrained.items() if probe == "key_orthogonality"}
    branches = {name: value for (probe, name), value in untrained.items() if probe.startswith("blocks_")}
    values = [name for probe, name in of if probe == "value_manifold"]
    rest = {key for key in of if key[0] in ("attention_focus", "posterior_calibration")}
    assert len(of) == 16 == len(keys) + 5 + len(values) + len(rest), "blocks_zero and blocks_mean share a name"
    assert rest == {("attention_focus", "weight on the first token"), ("posterior_calibration", "leaked probability")}
    assert len(keys) == 2 and max(keys.values()) == pytest.approx(0.11, abs=0.005)
    assert branches.pop("MLPs over attentions, by norm") == pytest.approx(0.52, abs=0.005)
    assert min(untrained[key] for key in of if key[0].startswith("blocks_")) == pytest.approx(0.15, abs=0.005)
    assert max(branches.values()) == pytest.approx(0.25, abs=0.005)


def test_two_metrics_come_nearest_and_two_of_the_papers_do_not():
    """What docs/calibration.md says of the shipped table."""
    shipped = placing.shipped()
    assert sum(shipped.bench["models"].values()) == 285 and len(shipped.bench["tasks"]) == 11
    assert {one.probe for one in shipped.signatures if one.word == "yes"} == {"posterior"}, "circular"
    frame, skill = (
        shipped.find(*key).numbers["areas"]
        for key in (("interchange", "frame at the embedding"), ("belief_readout", "skill over position"))
    )
    for areas, least, doubtful in ((frame, 0.81, "wrong prior"), (skill, 0.84, "bag of values")):
        assert min(one["value"] for one in areas.values()) == pytest.approx(least, abs=0.005)
        assert {kind for kind, one in areas.items() if one["low"] <= 0.5} == {doubtful} and areas.keys() == {*NEGATIVES}
    for probe, name, kind, expected in (
        ("interchange", "frame at the embedding", "wrong prior", (0.91, 0.44, 0.99)),
        ("belief_readout", "skill over position", "bag of values", (0.84, 0.31, 0.98)),
        ("value_manifold", "|rho| of PC1 and entropy", "stopped", (0.44, 0.25, 0.66)),
        ("attention_focus", "focusing", "bag of values", (0.35, 0.11, 0.71)),
    ):
        one = shipped.find(probe, name)
        found = one.numbers["areas"][kind]
        assert one.word == "undecided"
        assert (found["value"], found["low"], found["high"]) == pytest.approx(expected, abs=0.005)


def test_the_table_is_read_back(made, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(made.to_dict()))
    again = Calibration.read(path)
    assert json.dumps(again.to_dict(), sort_keys=True) == json.dumps(made.to_dict(), sort_keys=True)
    for broken, why in (("{", "table.json"), ('{"version": 7}', 7), ('{"version": 3}', "signatures")):
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


def a_record(kind="task", width=8, n=50, claims=None, nulls=6):
    subject = {"name": "m", "d_model": width, "layers": 1}
    facts = {"claims_hash": digest() if claims is None else claims, "nulls": nulls}
    return Record({}, {}, {"text": ("x",) * n}, subject, {"kind": kind, "name": "coin", "n": n}, facts)


def test_a_value_is_placed_only_where_the_bench_was(made, monkeypatch):
    monkeypatch.setattr(placing, "shipped", lambda: made)
    inside = placed(line(0.6), "value_manifold", a_record())
    assert inside.startswith("+17.6 null units; bench: trained +")
    assert "tells them apart (AUC against no inference: 1.00, " in inside
    for record, why in (
        (a_record("domain"), "no task of the bench's kind"),
        (a_record(width=1024), "width 1024, the bench has 8 to 8"),
        (a_record(n=20), "n 20, the bench has 50 to 50"),
        (a_record(nulls=20), "draws of each control 20, the bench has 6 to 6"),
        (a_record(claims="0" * 64), "the shipped calibration was made with other claims"),
    ):
        said = placed(line(0.6), "value_manifold", record)
        assert said == f"+17.6 null units; not calibrated here: {why}"
        assert "AUC" not in said
    assert placed(line(0.6), "attention_focus", a_record()) == "+17.6 null units; not calibrated"
    monkeypatch.setattr(placing, "shipped", lambda: None)
    assert placed(line(0.6), "value_manifold", a_record()) == "+17.6 null units; not calibrated"


@pytest.mark.parametrize("n", [50, 100])
def test_edits_of_half_of_the_sequences_are_placed_by_how_many_were_drawn(made, n):
    """The bench draws 50, of which `patch` and `ablate` measure 25: a run that draws 50 is alike, one of 100 is not."""
    task = load_task("coin:flips=4")
    sizes = {"vocabulary": task.vocabulary, "length": task.length, "features": 0, "width": 8, "layers": 1, "heads": 2}
    subject, drawn = Subject.of(build("neox", **sizes), name="m"), {"nulls": CONTROLS, "seed": 0}
    blocks = component_probe.question(subject, task.sample(n, 0), "blocks", task=task, positions="all", **drawn)
    for record in (blocks.record(subject), interchange_probe.question(subject, task, n=n, **drawn).record(subject)):
        assert record.results and len(record.prompts["text"]) == n / 2
        (probe, *_) = record.results
        assert made.outside(record, probe) == ("" if n == 50 else f"n {n}, the bench has 50 to 50")


def test_what_the_bench_reads_at_one_query_is_not_placed_where_sequences_end_in_several(made):
    """`scan` draws the query of each sequence; the bench reads probes that follow entropy where all end in one."""
    several, one = (
        replace(a_record(), prompts={"text": ("x",) * 50, "asked_at": at}) for at in ((2, 5) * 25, (5,) * 50)
    )
    assert made.outside(several, "value_manifold") == "the sequences end in several queries, those of the bench in one"
    assert made.outside(one, "value_manifold") == "" == made.outside(several, "attention_focus")
    task = load_task("coin:flips=12")
    drawn, at_one = (task.truncated(50, 0, at=at).columns["asked_at"] for at in (None, entropy_query(task)))
    assert len(set(drawn)) > 1 == len(set(at_one))
    assert made.bench["at_one_query"] == placing.shipped().bench["at_one_query"] == ["value_manifold"]


def test_the_unit_of_a_value_depends_on_how_many_draws_its_control_has():
    """Why a run with other draws is not placed: three standard deviations above the null, in units of its band."""
    rng, claim = np.random.default_rng(0), replace(declared("value_manifold")["PC1 share"], scale="identity")

    def units(draws: int) -> float:
        nulls = [Null.of("untrained", rng.normal(0.5, 0.01, draws)) for _ in range(200)]
        given = {"n": 50, "clusters": 50}
        found = [estimate(claim, 0.53, Interval(0.52, 0.54, 0.95, ""), [null], **given) for null in nulls]
        return float(np.median([null_units(h) for h in found]))

    assert units(1000) == pytest.approx(3, abs=0.1) and units(6) > 1.3 * units(20)


def test_a_signature_that_does_not_discriminate_is_said_not_to(made, monkeypatch):
    dull = Signature("value_manifold", "PC1 share", "no", 0.5, 0.4, 0.6, (-1.0, 2.0), (-1.5, 2.5))
    monkeypatch.setattr(placing, "shipped", lambda: replace(made, signatures=(dull,)))
    said = placed(line(0.15), "value_manifold", a_record())
    assert said == (
        "+0.0 null units; bench: trained -1.0 to +2.0, no inference -1.5 to +2.5; does NOT tell them apart "
        "(AUC 0.50, 0.40 to 0.60); a part of the bench: 5 of 15 cells"
    )


def test_the_interval_beside_a_word_is_the_one_that_decides_it():
    """The word is decided against any kind: that of the least area may have so few tasks that its interval excludes
    nothing. The oracle reads the text of a page and the printed table."""
    table = placing.shipped()
    printed = {line[0]: line for line in (report._line(row) for row in table.signatures if row.area is not None)}
    for row in table.signatures:
        if row.word in ("no", "reversed"):
            width, depth, n = table.width[0], table.depth[0], table.n[0]
            facts = {"claims_hash": table.bench["claims_hash"], "nulls": CONTROLS}
            source = {"kind": "task", "name": "coin", "n": n}
            record = Record({}, {}, {"text": ("x",) * n}, {"d_model": width, "layers": depth}, source, facts)
            said = placed(replace(line(0.6), name=row.name), row.probe, record)
            kind, area, low, high = re.search(r"against ([a-z ]+): ([.\d]+), ([.\d]+) to ([.\d]+)\)", said).groups()
            assert float(high) < {"no": 0.75, "reversed": 0.5}[row.word] + 0.005, said
            assert printed[f"{row.probe}: {row.name}"][1:4] == (area, f"{low} to {high}", kind)


def test_the_page_and_json_say_it(made):
    record = report.record(report.Printed(made), 0.0, "spec")
    rows = table([record])
    assert all("calibration" in row for row in rows)
    assert 'class="calibration"' in page([record])
