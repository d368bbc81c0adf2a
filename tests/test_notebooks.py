"""The notebooks run as committed, a record shows itself in them, and nothing in a record becomes part of a notebook."""

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from plotly.graph_objects import Figure

from llmgeom.record import Record
from llmgeom.reports import figures, page, panel
from llmgeom.reports.steps import steps_page
from tests.notebooks import FOLDER, INSTALL, PLOTLY, SVG, code_hash, converted, drawn, executed
from tests.pages import HOSTILE, shape, synthetic

NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.py"))
SAVED = {
    "scan": ("notebook-scan", "notebook-scan-step0"),
    "entropy_axis_ablation": ("notebook-ablation",),
    "tunnel": ("notebook-tunnel", "notebook-tunnel/scan"),
    "dynamics": ("notebook-dynamics",),
    "your_own": ("notebook-own", "notebook-own/untrained"),
    "probe": ("notebook-probe",),
    "evidence": ("notebook-evidence",),
}
FIGURES = {
    "scan": (("value_manifold", "scores"), ("value_manifold", "pc12"), ("attention_focus", "normalised")),
    "entropy_axis_ablation": (("ablation_pc1", "kl"), ("ablation_control", "odds")),
    "tunnel": (("posterior", "kl"), ("posterior", "entropy")),
    "dynamics": (("drift", "frame"), ("drift", "value"), ("drift", "precision"), ("gradients", "score_gradient")),
    "your_own": (("odds_line", "missed"),),
    "probe": (("narrative", "residual_score"), ("narrative", "confound_score")),
    "evidence": (("process", "divergence"), ("sula_belief", "along"), ("process", "accuracy")),
}


@dataclass(frozen=True)
class Run:
    """A notebook after its last cell: all outputs, and where it wrote."""

    name: str
    outputs: list[dict]
    folder: Path

    def shown(self, kind: str) -> list:
        """Everything shown of one MIME type, in order."""
        return [out["data"][kind] for out in self.outputs if kind in out.get("data", {})]


@pytest.fixture(scope="module", params=NOTEBOOKS)
def run(request, tmp_path_factory) -> Run:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    executed(notebook, folder)
    return Run(name, [out for cell in notebook.cells for out in cell.get("outputs", [])], folder / "runs")


# ---- what is committed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_is_the_script_with_the_outputs_of_its_code(name):
    script, notebook = ((FOLDER / f"{name}.{kind}").read_text(encoding="utf-8") for kind in ("py", "ipynb"))
    expected, stored = converted(script), nbformat.reads(notebook, as_version=4)
    nbformat.validate(stored)
    sources = [[(cell.cell_type, cell.source, cell.id) for cell in one.cells] for one in (expected, stored)]
    assert sources[0] == sources[1] and stored.metadata.code == code_hash(expected), f"run: make notebooks ({name})"
    install, *code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert install.source == INSTALL and not install.outputs
    assert [cell.execution_count for cell in code] == list(range(2, len(code) + 2))
    # Judged apart from the converter: the code cells, one after the other, are the script.
    assert ast.dump(ast.parse("\n".join(cell.source for cell in code))) == ast.dump(ast.parse(script))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_stored_notebook_shows_its_figures_to_readers_that_run_no_script(name):
    path = FOLDER / f"{name}.ipynb"
    _, first, *more = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    outputs = [out for cell in (first, *more) for out in cell.outputs]
    bundles = [out.data for out in outputs if PLOTLY in out.get("data", {})]
    assert len(bundles) >= len(FIGURES[name]) and PLOTLY in first.outputs[-1].data, "a figure in the second code cell"
    for bundle in bundles:
        assert sorted(bundle) == sorted((PLOTLY, SVG))
        assert bundle[SVG].startswith("<svg") and "<script" not in bundle[SVG]
        for axis in ("xaxis", "yaxis"):
            (word, *_) = re.findall(r"\w+", bundle[PLOTLY]["layout"][axis]["title"]["text"])
            assert word in bundle[SVG]
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    assert path.stat().st_size < 300_000 and not re.search(r"/(root|home|tmp|work|Users)/", path.read_text("utf-8"))


@pytest.mark.browser
def test_a_figure_is_stored_as_its_json_and_a_picture_of_it():
    figure = Figure({"y": [1, 3, 2], "name": "three"}, {"xaxis": {"title": {"text": "layer"}}})
    spec = json.loads(figure.to_json())
    stored = drawn({PLOTLY: spec, "text/html": "<script>"})
    assert stored.pop(SVG).count(">layer</text>") == 1 and stored == {PLOTLY: spec}
    assert drawn({"text/plain": "1"}) == {"text/plain": "1"}


# ---- run ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_runs_and_complains_of_nothing(run):
    assert not [out for out in run.outputs if out.output_type == "error"]
    # tqdm, imported by transformers, says that its own bars would like ipywidgets.
    assert not [out for out in run.outputs if out.get("name") == "stderr" and "TqdmWarning" not in out.text]


@pytest.mark.slow
def test_the_records_shown_are_the_records_saved(run):
    records = [Record.load(run.folder / folder) for folder in SAVED[run.name]]
    shown = [html for html in run.shown("text/html") if 'class="verdicts"' in html]
    assert shown == [panel(record) for record in records]
    for record, html in zip(records, shown, strict=True):
        estimates = [h for measured in record.results.values() for h in measured.estimates]
        assert len(estimates) > 3 and html.count('data-label="verdict"') == len(estimates)
        chips = re.findall(r'<td data-label="verdict"><span class="chip [a-z-]+">([a-z ]+)</span>', html)
        assert sorted(chips) == sorted(h.verdict for h in estimates if h.claim)
        assert html.count("not measured, because") == len(record.unmeasured)
    drawn = page(records)
    if run.name == "dynamics":
        steps = records[0].facts["steps"]
        drawn = steps_page(records[0], {s: Record.load(run.folder / SAVED[run.name][0] / f"step{s}") for s in steps})
    assert (run.folder / SAVED[run.name][0] / "report.html").read_text(encoding="utf-8") == drawn


@pytest.mark.slow
def test_the_figures_shown_are_those_of_the_record(run):
    drawn = figures(Record.load(run.folder / SAVED[run.name][0]))
    expected = [json.loads(drawn[probe][quantity].to_json()) for probe, quantity in FIGURES[run.name]]
    shown = [{key: one[key] for key in ("data", "layout")} for one in run.shown(PLOTLY)]
    assert [one for one in shown if one in expected] == expected


# ---- a record shows itself ------------------------------------------------------------------------------------------


def test_hostile_strings_leave_no_element_and_no_attribute_in_what_a_notebook_shows():
    hostile = synthetic(hostile=HOSTILE, name=HOSTILE[0] + HOSTILE[4], source=HOSTILE[1])
    tame = [re.sub(r"[^a-z ]", "x", text) for text in HOSTILE]
    html = hostile._repr_html_()
    assert shape(html) == shape(synthetic(hostile=tame, name="x", source="x")._repr_html_())
    assert "<script" not in html and "&lt;/script&gt;&lt;script&gt;alert(1)" in html
    assert "<img" not in html and not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066\ud800-\udfff]", html)
