"""Every probe is whole: what it needs, a result with words and a figure, and a name that is known."""

import json
import sys
from pathlib import Path

from click.testing import CliRunner
from safetensors.numpy import load_file

from llmgeom import probes
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.probes import known, names
from tests.refusals import refused

PROBES = Path(__file__).parent.parent / "probes"


def test_an_unknown_probe_gets_a_suggestion():
    with refused(UserError, "value_manifolds", "value_manifold", "attention_focus"):
        known(["value_manifolds"])
    assert names() == tuple(sorted(path.stem for path in PROBES.glob("*.py") if path.stem != "__init__"))


NEW = '''"""How long are the values?"""

import numpy as np

from llmgeom.model.capture import Site
from llmgeom.probe import Needs
from llmgeom.result import Result, labelled, line


def examine(subject, captures):
    return {"parameters": np.array(float(subject.facts["parameters"]))}


NEEDS = Needs(sites=frozenset({Site.VALUE}), controls={'untrained'}, examine=examine)


def measure(view):
    lengths = [float(x.double().flatten(1).norm(dim=1).mean()) for x in view.capture.layers(Site.VALUE)]
    parameters = labelled(view.observations["parameters"], "", "parameters", "of the model")
    arrays = {**line("length", lengths, "layer", "units", "mean length"), "parameters": parameters}
    return Result.of("Lengths of values", arrays, __name__)
'''


SECTIONS = ("Meaning", "Computed", "Null", "Failure modes")
PROSE = "# Lengths of values\n\n" + "\n".join(f"## {name}\n\nProse of {name}.\n" for name in SECTIONS)


def test_a_file_that_is_there_is_listed_priced_run_drawn_and_exported(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    folder, out = tmp_path / "probes", tmp_path / "run"
    (folder / "texts").mkdir(parents=True)
    (folder / "value_length.py").write_text(NEW)
    (folder / "texts" / "value_length.md").write_text(PROSE)
    monkeypatch.setattr(probes, "__path__", [*probes.__path__, str(folder)])

    def llmgeom(*words: str) -> str:
        done = CliRunner().invoke(main, [*words], prog_name="llmgeom")
        assert done.exit_code == 0, done.output
        return done.stdout

    listed = [line.split(maxsplit=1) for line in llmgeom("list", "probes").splitlines()]
    assert ["value_length", "How long are the values?"] in listed
    flags = ["--offline", "--domain", "math", "--limit", "60", "--n", "20", "--control-models", "2"]
    scan = ["scan", *flags, "--out", str(out)]
    plan = json.loads(llmgeom(*scan, "--dry-run", "--json", "--probes", "value_length"))
    assert plan["sources"]["math"]["edits"] == ["value_length"]
    assert json.loads(llmgeom(*scan, "--json", "--probes", "value_length"))["status"] == "ok"
    page = (out / "report.html").read_text()
    assert "Lengths of values" in page and "Prose of Failure modes." in page and "mean length" in page
    llmgeom("export", str(out), "safetensors", "--out", str(tmp_path / "arrays.safetensors"))
    assert any("value_length" in key for key in load_file(tmp_path / "arrays.safetensors"))
    monkeypatch.delitem(sys.modules, "llmgeom.probes.value_length")
