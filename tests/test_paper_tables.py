"""The tables of Paper III and of the predictions: both forms of every row; finished runs are read, others are kept."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.commands import paper_runs
from llmgeom.commands.reproduce import RunConfig, perform
from llmgeom.dynamics.resume import FINISHED
from llmgeom.errors import UserError
from llmgeom.papers.paper3 import ABLATE, MATH, MIXED, SULA, SULA_PUBLISHED, LanguageModel
from llmgeom.papers.published_numbers import table
from llmgeom.papers.tables import Audit, Predictions, Table, audit, lines, predictions
from llmgeom.papers.verdicts import Row
from llmgeom.record import Record
from tests.findings import claim
from tests.refusals import refused


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every run of paper3 on one model, as small as can be."""
    out = tmp_path_factory.mktemp("audit") / "run"
    run = paper_runs.ModelRuns(n=20, limit=90, nulls=2, controls=2, offline=True, device="cpu", out=str(out))
    with pytest.MonkeyPatch.context() as patch:
        for module, n in ((paper_runs.evidence, 15), (paper_runs.ablate, 8)):
            patch.setattr(module, "RunConfig", partial(module.RunConfig, n=n))
        return run, paper_runs.records(run, published=True)


def audited(records) -> Audit:
    return Audit("pocket:pythia", tuple(audit(table("paper3"), LanguageModel("pocket:pythia", records))))


@pytest.mark.slow
def test_an_audit_has_both_numbers_of_every_row(runs):
    run, records = runs
    assert set(records) == {MIXED, MATH, SULA, SULA_PUBLISHED, ABLATE}
    assert all((Path(run.out) / name / "record.json").exists() for name in records)
    found = audited(records)
    assert len(found.contents) == 17
    for row in found.contents:
        assert row.as_published and row.estimate, (row.entry.id, row.why)
        assert row.estimate in records[row.entry.sound[0]].results[row.entry.sound[1]].estimates
    assert "misread" in found.contents[0].as_published.name
    text = " ".join("\n".join(lines([found])).split())
    assert all(row.entry.id in text and row.entry.why in text for row in found.contents)
    assert len(found.section().estimates) == 2 * 17 and not any(h.claim for h in found.section().estimates)


@pytest.mark.slow
def test_where_the_layout_cannot_be_misread_the_next_definition_is_taken(runs):
    _, records = runs
    values = records[MIXED].results["published_values"]
    plain = replace(values, estimates=tuple(h for h in values.estimates if "misread" not in h.name))
    others = records | {MIXED: replace(records[MIXED], results=records[MIXED].results | {"published_values": plain})}
    row = audited(others).contents[0]
    assert row.as_published.name == "PC1 share, not standardised" and row.estimate and row.why == row.estimate.why
    gone = replace(records[MIXED], results={}, unmeasured={"published_values": "there are no values"})
    lacking = audited(others | {MIXED: gone})
    first = lacking.contents[0]
    assert first.as_published is None and first.estimate is None
    assert "there are no values" in first.why and "'PC1 share'" in first.why
    assert "not measured" in "\n".join(lines([lacking]))


@pytest.mark.slow
def test_predictions_are_corrected_for_their_own_number(runs):
    _, records = runs
    entries = [entry for paper in ("paper3", "paper2", "paper1") for entry in table(paper)]
    rows = predictions(entries, LanguageModel("pocket:pythia", records))
    claimed = [row.estimate for row in rows if row.estimate and row.estimate.claim]
    assert len(rows) == 22 and len(claimed) == 11
    corrected = [
        h.why for h in claimed if "Holm" in h.why
    ]  # a claim without room for its effect is open whatever its p
    assert len(corrected) > 5 and all("Holm over 11 claims" in why for why in corrected)
    absent = [row for row in rows if row.estimate is None]
    assert [row.entry.id for row in absent] == [row.entry.id for row in rows if row.entry.needs]
    text = " ".join("\n".join(lines([Predictions("m", tuple(rows))])).split())
    assert all(f"{row.entry.prediction}. NOT TESTED: needs {row.entry.needs}" in text for row in absent)


def test_a_prediction_that_is_no_claim_has_words_and_not_a_lone_colon():
    entry = next(entry for entry in table("paper3") if entry.prediction and not entry.needs)
    number = replace(claim("keys", 0.5), claim="", verdict="", why="")
    rows = tuple(predictions([entry], SimpleNamespace(find=lambda place: (number, ""))))
    found = Predictions("m", rows)
    assert lines([found])[-1] == f"1 {entry.prediction}. keys, control: untrained (20 draws). measured, and no claim."
    assert found.note(found.contents[0]) == f"{entry.prediction}: measured, and no claim"


@pytest.mark.slow
@pytest.mark.parametrize("command", [["reproduce", "paper3", "--only", "audit"], ["reproduce", "predictions"]])
def test_the_command_prints_the_table_saves_a_page_and_repeats_itself(runs, command, monkeypatch, tmp_path):
    _, records = runs

    def performed(run, published, located=None):
        assert published == ("audit" in command) and run.nulls == 2 and run.model == "pocket:pythia"
        return records

    monkeypatch.setattr(paper_runs, "records", performed)
    words = [*command, "--model", "pocket:pythia", "--nulls", "2", "--quiet", "--offline", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, words, prog_name="llmgeom")
    assert done.exit_code == 0, done.output
    assert "pocket:pythia" in done.stdout and str(tmp_path / "report.html") in done.stdout
    command = Record.load(tmp_path).facts["command"].split()
    assert command[:3] == ["llmgeom", *words[:2]] and {"--nulls", "2", "--offline"} <= set(command)
    told = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert len(told["rows"]) > 15 and {row["subject"] for row in told["rows"]} == {"pocket:pythia"}
    assert told["report"] == str(tmp_path / "report.html")


@pytest.mark.parametrize(("kind", "line", "place"), [(Table, 0, 2), (Audit, 0, 2), (Audit, 1, 2), (Predictions, 0, 1)])
def test_a_control_on_the_same_prompts_is_one_number_with_the_interval_of_the_difference(kind, line, place):
    """Value .4, control .2: the band that the record holds, .09 to .31, is that of no control."""
    (entry, *_) = (entry for entry in table("paper3") if entry.small and entry.small.compare == "claim")
    paired = claim(paired=True, difference_low=0.09, difference_high=0.31, null_low=0.09, null_high=0.31)
    table_of = kind("m", ())
    rows = [Row(entry, h, "", entry.small, as_published=h) for h in (paired, claim(), claim(null_low=0.2))]
    assert [table_of.cells(row)[line][place] for row in rows] == ["0.20", "0.05 to 0.20", "0.20"]
    named = "control: untrained (20 draws)"
    assert f"{named}, difference 0.20 [0.09, 0.31]. " in table_of.why(rows[0]) and f"{named}. " in table_of.why(rows[1])


@pytest.mark.parametrize(("kind", "place"), [(Table, 3), (Audit, 3), (Predictions, 2)])
def test_n_counts_what_is_independent(kind, place):
    """75 prompts of 12 templates stood as "75 prompts"."""
    (entry, *_) = (entry for entry in table("paper3") if entry.small and entry.small.compare == "claim")
    metrics = [claim(n=75, clusters=12), claim(n=75, clusters=75), claim(n=1, clusters=1, counts="training runs")]
    rows = [Row(entry, h, "", entry.small, as_published=h) for h in metrics]
    assert [kind("m", ()).cells(row)[0][place] for row in rows] == ["12 clusters", "75 prompts", "1 training run"]


@pytest.mark.parametrize(
    ("kind", "unit", "counts"),
    [(Table, "of the way", "training runs"), (Audit, "|cos|", "prompts"), (Predictions, "bits", "pairs of labels")],
)
def test_the_tables_of_papers_fit_in_100_columns(kind, unit, counts):
    """That of the predictions was 190 wide. A long name goes on in the next line; the control is named below."""
    wide = claim("|rho| of PC1 and entropy, given length and final token", "ruled out", value=-0.4, n=75, unit=unit,
                 counts=counts, null_low=-0.2, null_high=-0.05)  # fmt: skip
    entries = [entry for paper in ("paper3", "paper2", "paper1") for entry in table(paper) if entry.prediction]
    rows = tuple(Row(entry, wide, "because", entry.small, as_published=wide) for entry in entries)
    shown = lines([kind("pocket:llama-evidence", rows)])
    assert max(map(len, shown)) <= 100 and any("ruled out" in line and "-0.40 [" in line for line in shown)
    assert " ".join(" ".join(shown).split()).count("control: untrained (20 draws)") >= len(rows)


def test_what_cannot_be_asked_is_refused_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(paper_runs.ModelRuns, "load", lambda *_: pytest.fail("loaded"))
    for given in ({"controls": 0}, {"nulls": 0}, {"n": 3}):
        with pytest.raises(UserError):
            paper_runs.records(paper_runs.ModelRuns(**given, out=str(tmp_path / "run")), published=True)


@pytest.mark.slow
def test_another_run_is_not_written_over_and_an_interrupted_one_goes_on(runs, tmp_path, monkeypatch):
    run, records = runs

    def loaded(*_):
        raise RuntimeError("loaded")

    monkeypatch.setattr(paper_runs.ModelRuns, "load", loaded)
    asked = RunConfig(paper="paper3", models=("pocket:pythia",), out=str(tmp_path / "other"))
    records[SULA].save(tmp_path / "other")
    before = (tmp_path / "other/record.json").read_bytes()
    with refused(UserError, "--out"):
        perform(asked)
    assert (tmp_path / "other/record.json").read_bytes() == before
    begun = tmp_path / "begun"  # the scans and their page are there, and were not marked as finished
    records[MIXED].save(begun / MIXED)
    (begun / "report.html").write_text("the scans")
    with pytest.raises(RuntimeError, match="loaded"):
        paper_runs.records(replace(run, out=str(begun)), published=True)


@pytest.mark.slow
def test_paper_three_finds_its_metrics_in_the_runs(runs):
    _, records = runs
    source = LanguageModel("pocket:pythia", records)
    measured = 0
    for entry in table("paper3"):
        if entry.small is None:
            continue
        try:
            h = source.measured(entry, entry.small)
        except UserError as refusal:
            assert len(str(refusal)) > 20
            continue
        places = entry.as_published if entry.small.measure == "as_published" else [entry.sound]
        place = next(p for p in places if p[1] in records[p[0]].results)
        assert h in records[place[0]].results[place[1]].estimates and h.name == place[2]
        measured += 1
    assert measured >= 20


@pytest.mark.slow
def test_runs_of_a_model_that_are_finished_are_read(runs, tmp_path, monkeypatch):
    """Four of five were finished when it was killed: the fifth alone is run, and then none."""
    run, records = runs
    marks = {name: (Path(run.out) / name / FINISHED).read_text() for name in records}
    assert len(set(marks.values())) == 1
    run = replace(run, out=str(tmp_path))
    for name, record in records.items():
        record.save(tmp_path / name)
        if name != ABLATE:
            (tmp_path / name / FINISHED).write_text(marks[name])
    subjects = []

    def ablated(subject):
        subjects.append(subject)
        return tmp_path, records[ABLATE]

    monkeypatch.setattr(paper_runs.ablate, "prepare", lambda config: SimpleNamespace(perform=ablated))
    monkeypatch.setattr(paper_runs, "perform", _never)
    monkeypatch.setattr(paper_runs.evidence, "prepare", _never)
    monkeypatch.setattr(paper_runs, "prepare", lambda config: None)
    monkeypatch.setattr(paper_runs.ModelRuns, "load", lambda *_: "the model")
    found = paper_runs.records(run, published=True)
    assert subjects == ["the model"] and {*found} == {*records}
    monkeypatch.setattr(paper_runs.ModelRuns, "load", _never)
    again = paper_runs.records(run, published=True)
    assert len(subjects) == 1
    assert [h for r in again.values() for m in r.results.values() for h in m.estimates] == [
        h for r in found.values() for m in r.results.values() for h in m.estimates
    ]
    (tmp_path / SULA / FINISHED).write_text("another")
    with pytest.raises(AssertionError, match="done again"):
        paper_runs.records(run, published=True)


def _never(*_, **__):
    raise AssertionError("done again")
