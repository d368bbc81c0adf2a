"""The notebooks run as committed, a record shows itself in them, and nothing in a record becomes part of a notebook."""

import ast
import json
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import nbformat
import numpy as np
import pytest
from plotly.graph_objects import Figure

from llmgeom.record import Record
from llmgeom.reports import figures, page, panel
from llmgeom.reports.steps import steps_page
from tests.notebooks import FOLDER, INSTALL, PLOTLY, SVG, code_hash, converted, drawn, executed
from tests.pages import HOSTILE, Tree, odd_scatter, shape, synthetic

CPU_SECONDS = {"small": 40, "committed": 120}
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
LAST = {  # the stage at which each bar ends
    "scan": ("measuring value_manifold",) * 2,
    "entropy_axis_ablation": ("measuring ablation_ridge",),
    "tunnel": ("bijection:vocab=6,pairs=8,replacement=True, neox", "measuring", "measuring attention_focus"),
    "dynamics": ("bijection, gpt2", "bijection, gpt2", "snapshots scanned"),
    "your_own": ("urn.py:Urn, gpt2", "measuring value_manifold", "measuring value_manifold"),
    "probe": ("measuring words",),
    "evidence": ("two-point: measuring simplex",),
}
# `make test` runs one notebook, with these in place of the sizes that are committed; `make slow` all as they stand.
SMALL = {
    "probe": {"sample(120": "sample(60", "controls=20": "controls=2"},
}  # fmt: skip
RUNS = (
    *((name, "small") for name in SMALL),
    *(pytest.param((name, "committed"), marks=pytest.mark.slow) for name in NOTEBOOKS),
)


@dataclass(frozen=True)
class Run:
    """A notebook after its last cell: all outputs, where it wrote, and the CPU time of its kernel."""

    name: str
    size: str
    outputs: list[dict]
    folder: Path
    seconds: float

    def shown(self, kind: str) -> list:
        """Everything shown of one MIME type, in order."""
        return [out["data"][kind] for out in self.outputs if kind in out.get("data", {})]


def shrink(notebook: nbformat.NotebookNode, sizes: dict[str, str]) -> None:
    """Replaces the sizes in a notebook's code, each of which must be there."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for large, small in sizes.items():
        assert any(large in cell.source for cell in cells), f"{large} is not in the notebook"
        for cell in cells:
            cell.source = cell.source.replace(large, small)


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def run(request, tmp_path_factory) -> Run:
    name, size = request.param
    folder = tmp_path_factory.mktemp(name)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    if size == "small":
        shrink(notebook, SMALL[name])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    executed(notebook, folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(
        name, size, [out for cell in notebook.cells for out in cell.get("outputs", [])], folder / "runs", seconds
    )


# ---- what is committed ----------------------------------------------------------------------------------------------


def test_the_notebooks_are_these():
    assert sorted(SAVED) == NOTEBOOKS


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


def test_a_script_that_is_no_notebook_is_refused():
    text, install, code = converted("# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1\n\nx\n").cells
    assert (install.cell_type, install.source) == ("code", INSTALL)
    assert (text.cell_type, text.source) == ("markdown", "# A\n\nb")
    assert (code.cell_type, code.source) == ("code", "x = 1\n\nx")
    for wrong in ("import os\n# %%\n", "# %% [raw]\n# a\n", "# %% [markdown]\nno comment\n"):
        with pytest.raises(ValueError, match=r"# %%"):
            converted(wrong)


# ---- run ------------------------------------------------------------------------------------------------------------


def test_it_runs_in_time_and_complains_of_nothing(run):
    assert not [out for out in run.outputs if out.output_type == "error"]
    # tqdm, imported by transformers, says that its own bars would like ipywidgets.
    assert not [out for out in run.outputs if out.get("name") == "stderr" and "TqdmWarning" not in out.text]
    assert 2 < run.seconds < CPU_SECONDS[run.size]


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


def test_the_figures_shown_are_those_of_the_record(run):
    drawn = figures(Record.load(run.folder / SAVED[run.name][0]))
    expected = [json.loads(drawn[probe][quantity].to_json()) for probe, quantity in FIGURES[run.name]]
    shown = [{key: one[key] for key in ("data", "layout")} for one in run.shown(PLOTLY)]
    assert [one for one in shown if one in expected] == expected


def test_progress_reaches_its_end(run):
    told = [text for text in run.shown("text/plain") if re.fullmatch(r".*: \d+ of \d+(, .*)?", text)]
    assert all(stage in text for stage, text in zip(LAST[run.name], told, strict=True))
    for text in told:
        done, total = re.search(r"(\d+) of (\d+)(, .*)?$", text).groups()[:2]
        assert done == total != "0"
    assert sum("<progress value" in html for html in run.shown("text/html")) == len(told)


@pytest.mark.slow
@pytest.mark.parametrize("run", [("entropy_axis_ablation", "committed")], indirect=True)
def test_the_edit_of_one_s_own_agrees_with_what_the_experiment_measured(run):
    plain = run.shown("text/plain")
    assert "0.0" in plain, "an edit that changes nothing"
    ((own, theirs),) = [ast.literal_eval(text) for text in plain if re.fullmatch(r"\([\d.e-]+, [\d.e-]+\)", text)]
    assert own == pytest.approx(theirs, rel=1e-3) and own > 1e-3
    (line,) = run.shown(PLOTLY)[0]["data"]
    assert line["y"][-1] == own and len(line["y"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("run", [("dynamics", "committed")], indirect=True)
def test_the_run_that_learns_settles_half_way_where_its_curves_do(run):
    measured = Record.load(run.folder / "notebook-dynamics").results["drift"]
    (told,) = [out["text"] for out in run.outputs if out.get("name") == "stdout" and out["text"].startswith("frame")]
    for line in told.splitlines():
        name, _, step = line.split()
        curve, steps = measured.arrays[f"{name}_runs"][0], list(map(int, measured.ticks["step"]))
        last = np.flatnonzero(curve > 0.5 * curve[0])[-1]
        assert steps[last] - 1 <= int(step) <= steps[last + 1] + 1
    frame = measured.arrays["frame_runs"]
    assert measured.arrays["precision"][-1] < 0.2
    assert (
        frame[0, -2] < frame[0, 0] / 4 and frame[1, -2] > frame[1, 0] / 2
    )  # the one on random targets has not settled


@pytest.mark.slow
@pytest.mark.parametrize("run", [("your_own", "committed")], indirect=True)
def test_a_probe_of_one_s_own_passes_where_the_model_infers_and_nowhere_else(run):
    (difference,) = [out["text"] for out in run.outputs if out.get("name") == "stdout" and "difference" in out["text"]]
    assert float(difference.split()[-1]) < 1e-12, "the exact answer is Laplace's rule"
    (exchanged,) = [out["text"] for out in run.outputs if out.get("name") == "stdout" and "exchanged" in out["text"]]
    assert float(exchanged.split()[-1]) > 0.95
    trained, untrained = (Record.load(run.folder / name).results["odds_line"] for name in SAVED["your_own"])
    (own,), (other,) = trained.estimates, untrained.estimates
    assert own.verdict == "holds" and own.value < 0.01 and other.verdict != "holds"
    assert own.value == trained.arrays["missed"][-1] < trained.arrays["missed_null"][-1, 0]


# ---- a record shows itself ------------------------------------------------------------------------------------------


def test_hostile_strings_leave_no_element_and_no_attribute_in_what_a_notebook_shows():
    hostile = synthetic(hostile=HOSTILE, name=HOSTILE[0] + HOSTILE[4], source=HOSTILE[1])
    tame = [re.sub(r"[^a-z ]", "x", text) for text in HOSTILE]
    html = hostile._repr_html_()
    assert shape(html) == shape(synthetic(hostile=tame, name="x", source="x")._repr_html_())
    assert "<script" not in html and "&lt;/script&gt;&lt;script&gt;alert(1)" in html
    assert "<img" not in html and not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066\ud800-\udfff]", html)


@pytest.mark.parametrize("record", [synthetic(hostile=HOSTILE), odd_scatter()], ids=["hostile", "odd"])
def test_the_figures_are_those_of_the_page(record):
    data = json.loads(Tree(page([record])).scripts["data"])
    drawn = [figure for found in figures(record).values() for figure in found.values()]
    assert len(drawn) == len(data["figures"]) > 0
    for ours, theirs in zip(drawn, data["figures"], strict=True):
        expected = Figure(theirs.get("data", ours.data), {"template": data["template"], **theirs["layout"]})
        assert ours.to_json() == expected.to_json()
        if "data" not in theirs:  # the page shares out the points among traces; test_page_browser looks at which
            hover = data["records"][0]["hover"]
            points = [point for t in ours.data for point in zip(t.x, t.y, t.hovertext, strict=True)]
            assert sorted(points) == sorted(zip(theirs["x"], theirs["y"], hover, strict=True))
