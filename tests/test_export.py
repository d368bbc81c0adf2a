"""What is exported holds the record's own numbers, whatever its strings are; the rest is refused in a sentence."""

import json
import re
import sys
import tomllib
from itertools import islice
from pathlib import Path

import numpy as np
import pandas
import pytest
from click.testing import CliRunner
from safetensors import safe_open

from llmgeom import optional as extras
from llmgeom.cli import main
from llmgeom.commands import doctor
from llmgeom.errors import UserError
from llmgeom.exports import export, latex
from llmgeom.exports.tables import tables
from llmgeom.record import Record
from llmgeom.result import Figure, Quantity, Result
from tests.refusals import refused
from tests.test_result import head

HOSTILE = "50% & $x_1^2 #{~\\end{tabular}}~<b>|é−ρ²—漢\u202e`code`\n*"


def measured(**changes) -> Result:
    parts = {
        "curve": (Quantity(("layer",), "bits", "curve", Figure("curve", band="band")), np.array([1.5, 2.5])),
        "band": (Quantity(("layer", "bound"), "bits", "band"), np.array([[0.0, 1.0], [2.0, 3.0]])),
        "heads": (Quantity(("layer", "head"), "bits", "heads"), np.arange(6, dtype=np.float32).reshape(2, 3)),
        "points": (Quantity(("prompt", "component"), "", "points"), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])),
        "each": (Quantity(("prompt",), "", "each"), np.array([7.0, 8.0, 9.0])),
        "whole": (Quantity((), "", "whole"), np.array(2.5)),
    }
    claim = head(name="holds", verdict="holds", claim=f"It holds {HOSTILE}.", value=-1.5, low=-2.5, high=-0.5)
    given = {
        "estimates": (head(name=HOSTILE, null=f"shuffled {HOSTILE}"), claim, head(name="none", null="")),
        "quantities": {name: q for name, (q, _) in parts.items()},
        "arrays": {name: array for name, (_, array) in parts.items()},
        "warnings": (f"look out {HOSTILE}",),
        "ticks": {"layer": (3, 7)},
    }
    return Result("Toy", **given | changes)


@pytest.fixture
def run(tmp_path):
    record = Record(
        results={"toy": measured()},
        unmeasured={"other": f"no keys {HOSTILE}"},
        prompts={
            "text": (HOSTILE, "b", "c"),
            "entropy": (1.5, 2, 0.25),
            "template": ("t1", "t2", "t2"),
            "tags": (["x"], [], ["y"]),
        },
        subject={"name": f"my_model {HOSTILE}", "weights": "abc", "dtype": "float32", "revision": "step1"},
        source={"name": "math & more", "seed": 0},
        facts={"command": "llmgeom scan --domain math", "llmgeom": "0.0.7"},
        warnings=("few draws",),
    )
    record.save(tmp_path / "run")
    return tmp_path / "run"


# ---- the formats ----------------------------------------------------------------------------------------------------


def test_parquet_holds_prompts_layers_and_headlines(run):
    from pyarrow import parquet

    place, *said = export(str(run), "parquet")
    assert place == str(run / "parquet") and len(said) == 3
    prompts, layers, estimates = (
        parquet.read_table(run / "parquet" / f"{name}.parquet") for name in ("prompts", "layers", "metrics")
    )
    assert prompts["text"].to_pylist() == [HOSTILE, "b", "c"]
    assert prompts["entropy"].to_pylist() == [1.5, 2.0, 0.25]  # an int among floats is a number still
    assert [json.loads(tags) for tags in prompts["tags"].to_pylist()] == [["x"], [], ["y"]]
    assert prompts["toy.points.1"].to_pylist() == [2.0, 4.0, 6.0] and prompts["toy.each"].to_pylist() == [7, 8, 9]
    rows = {(r["quantity"], r["layer"], r["at"]): r["value"] for r in layers.to_pylist()}
    assert rows["curve", 7, ""] == 2.5 and rows["band", 7, "low"] == 2 and rows["band", 3, "high"] == 1
    assert rows["heads", 7, "1"] == 4 and len(rows) == 2 + 4 + 6
    assert {(r["axis"], r["unit"]) for r in layers.to_pylist() if r["quantity"] == "heads"} == {("head", "bits")}
    assert sorted(estimates["value"].to_pylist()) == sorted(h.value for h in measured().estimates)
    assert json.loads(prompts.schema.metadata[b"llmgeom"])["subject"]["weights"] == "abc"


def test_csv_holds_the_cells_of_parquet_and_its_prompts_can_be_read_again(run):
    from llmgeom.prompts import files

    export(str(run), "parquet")
    place, *said = export(str(run), "csv")
    assert place == str(run / "csv") and said[0].startswith("prompts.csv: 3 rows")
    for name in ("prompts", "layers", "metrics"):
        stored = pandas.read_parquet(run / "parquet" / f"{name}.parquet")
        table = pandas.read_csv(run / "csv" / f"{name}.csv", keep_default_na=False, na_values=[""])
        assert list(table) == list(stored) and len(table) == len(stored) > 0
        for title in table:
            expected = stored[title].replace("", None)  # an empty text and a missing cell are one in CSV
            absent = expected.isna()
            assert table[title].isna().tolist() == absent.tolist()
            assert table[title][~absent].tolist() == expected[~absent].tolist(), title
    again = files.read(str(run / "csv/prompts.csv"))
    assert again.text == (HOSTILE, "b", "c") and again.cluster == ("t1", "t2", "t2")


def test_an_array_of_other_prompts_is_not_put_beside_these():
    points = (Quantity(("prompt", "component"), "", "p"), np.zeros((4, 2)))
    other = measured(quantities={"points": points[0]}, arrays={"points": points[1]})
    record = Record({"toy": other}, {}, {"text": ("a", "b", "c")}, {"name": "m"}, {}, {})
    assert set(tables(record)["prompts"]) == {"text"}


def test_every_number_of_a_prompt_and_of_a_layer_has_its_place():
    """An answer that ends in a dot, a column of the user's with a name of ours, and layers as the second axis."""
    parts = {
        "log_prob": (Quantity(("prompt", "answer"), "bits", "p"), np.array([[1.0, 2.0], [3.0, 4.0]])),
        "controls": (Quantity(("control", "layer"), "score", "c"), np.array([[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])),
    }
    toy = measured(
        quantities={name: q for name, (q, _) in parts.items()},
        arrays={name: array for name, (_, array) in parts.items()},
        ticks={"layer": (3, 7), "answer": ("yes", "yes."), "control": ("a", "b", "c")},
    )
    prompts = {"text": ("a", "b"), "toy.log_prob.yes": ("mine", "too")}
    every = tables(Record({"toy": toy}, {}, prompts, {"name": "m"}, {}, {}))
    assert every["prompts"] == {
        "text": ["a", "b"],
        "toy.log_prob.yes": ["mine", "too"],
        "measured.toy.log_prob.yes": [1.0, 3.0],
        "toy.log_prob.yes.": [2.0, 4.0],
    }
    rows = zip(*(every["layers"][name] for name in ("layer", "axis", "at", "value")), strict=True)
    assert list(rows) == [
        (3, "control", "a", 5.0), (3, "control", "b", 7.0), (3, "control", "c", 9.0),
        (7, "control", "a", 6.0), (7, "control", "b", 8.0), (7, "control", "c", 10.0),
    ]  # fmt: skip


def test_safetensors_holds_every_array_and_says_what_it_is(run):
    export(str(run), "safetensors")
    with safe_open(run / "record.safetensors", "numpy") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        told = json.loads(file.metadata()["llmgeom"])
    record = Record.load(run)
    for name, array in record.results["toy"].arrays.items():
        np.testing.assert_array_equal(held[f"toy.{name}"], array)
        assert held[f"toy.{name}"].dtype == array.dtype
        assert told["quantities"][f"toy.{name}"]["axes"] == list(record.results["toy"].quantities[name].axes)
    assert held["prompts.entropy"].tolist() == [1.5, 2.0, 0.25] and "prompts.text" not in held
    assert told["quantities"]["toy.heads"]["ticks"] == {"layer": [3, 7]}
    assert [row["verdict"] for row in told["metrics"]] == ["holds", None, None]
    assert told["record"]["facts"]["command"] == "llmgeom scan --domain math"
    before = (run / "record.safetensors").read_bytes()
    export(str(run), "safetensors")
    assert (run / "record.safetensors").read_bytes() == before


def cells(source: str) -> list[list[str]]:
    lines_ = [line for line in source.splitlines() if line.endswith(r" \\")]
    return [re.split(r"(?<!\\)&", line.removesuffix(r"\\")) for line in lines_]


def test_latex_closes_what_it_opens_whatever_the_names_are(run):
    export(str(run), "latex")
    source = (run / "verdicts.tex").read_text()
    bare = re.sub(r"(?m)^%.*$", "", source)
    assert bare.isascii() and not re.search(r"(?<!\\)[%#]", bare)
    assert source.count(r"\begin{table}") == 2  # the claim, and the measurements
    assert {len(row) for row in cells(source)} == {7}
    assert len(cells(source)) == 2 + 3
    holds = next(row for row in cells(source) if row[0].strip() == "holds")
    assert [cell.strip() for cell in holds[1:3]] == ["$-1.5$~bits", "$[-2.5,\\,-0.5]$"]
    assert holds[-1].strip() == "holds" and "^{1}" in holds[3]
    none = next(row for row in cells(source) if row[0].strip() == "none")
    assert none[3].strip() == "--" and none[4].strip() == "--"
    # Named below the claims, by the number beside them.
    assert source.count(f"$^{{1}}$ {latex.escaped('untrained')}.") == 1
    assert "Not measured: other (no keys 50\\%" in source


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_b", r"a\_b"),
        ("100%", r"100\%"),
        ("x\\y", r"x\textbackslash{}y"),
        ("é−²", "e$-$$^2$"),
        ("漢", "U+6F22"),
        ("--control-models 5", "-{}-control-models 5"),
        ("[x]", "{[}x]"),
        ("low-rank", "low-rank"),
    ],
)
def test_text_is_escaped_once(text, expected):
    assert latex.escaped(text) == expected


def test_powers_of_ten_in_a_table_keep_their_sign():
    found = [latex._math(number) for number in ("1.2e-05", "-3e+12", "0.5")]
    assert found == [r"1.2\times10^{-5}", r"-3\times10^{12}", "0.5"]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "package", "sentence"),
    [("parquet", "pyarrow", "pip install pyarrow"), ("svg", "kaleido", "pip install 'llmgeom[images]'")],
)
def test_a_package_that_is_not_there_is_one_sentence_with_the_command(run, monkeypatch, form, package, sentence):
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(main, ["export", str(run), form], prog_name="llmgeom")
    assert result.exit_code == 1 and sentence in result.stderr, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert sorted(p.name for p in run.iterdir()) == ["arrays.safetensors", "prompts.jsonl", "record.json"]


def test_images_without_a_browser_are_one_sentence(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    with refused(UserError, "Chromium"):
        export(str(run), "png")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nowhere"))
    with refused(UserError, "BROWSER_PATH"):
        export(str(run), "png")
    for name in ("chromium", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert extras.browser() is None  # the one that was named is not there, and no other is taken in its place
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "mine"))
    assert extras.browser() == str(tmp_path / "mine")
    monkeypatch.delenv("BROWSER_PATH")
    assert extras.browser() == str(tmp_path / "chromium")


@pytest.mark.browser
@pytest.mark.parametrize(("form", "magic"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("pdf", b"%PDF")])
def test_images_are_drawn_by_the_browser(run, form, magic):
    place, said = export(str(run), form)
    assert said == "1 images"
    assert (run / "figures" / f"toy.curve.{form}").read_bytes().startswith(magic)
    assert place == str(run / "figures")


def test_out_is_a_place_that_is_made(run, tmp_path):
    assert export(str(run), "latex", str(tmp_path / "deep" / "er" / "x.tex"))[0].endswith("x.tex")
    (tmp_path / "file").write_text("")
    with refused(UserError, "written"):
        export(str(run), "latex", str(tmp_path / "file" / "x.tex"))


# ---- doctor and completion ------------------------------------------------------------------------------------------


def test_doctor_asks_for_the_versions_that_the_package_asks_for(monkeypatch):
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    asked = dict(one.split(">=") for one in project["dependencies"] if ">=" in one)
    assert {name: asked[name] for name in doctor.NEEDED} == {k: "{}.{}".format(*v) for k, v in doctor.NEEDED.items()}
    monkeypatch.setattr(doctor, "NEEDED", {"torch": (2, 11)})
    for found, mark in (("2.11.0+cu128", "ok"), ("2.10.2", "BAD"), ("2.9rc12", "BAD"), ("3.0", "ok")):
        monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name, found=found: found)
        assert [m for m, said in islice(doctor.findings(), 2)][1] == mark


def test_doctor_goes_on_where_torch_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor.hub, "locate", lambda name: doctor.hub.Located(name, name, None, "hub"))
    monkeypatch.setattr(doctor, "NEEDED", {"nowhere-to-be-had": (1, 0)})
    monkeypatch.setattr(doctor, "installed", lambda package: False)
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not there: to import it is an ImportError
    found = list(doctor.findings())
    assert ("BAD", "nowhere-to-be-had is not installed; pip install nowhere-to-be-had") in found and len(found) > 5
