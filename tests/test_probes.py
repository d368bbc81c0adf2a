"""Every probe is whole: what it needs, a result with words and a figure, and a name that is known."""

import json
import sys
from dataclasses import is_dataclass
from pathlib import Path

from click.testing import CliRunner
from safetensors.numpy import load_file

from llmgeom import probes
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.probes import known, names
from llmgeom.result import Result
from tests.refusals import refused

PROBES = Path(__file__).parent.parent / "probes"


def test_every_probe_has_needs_a_result_and_texts():
    for name, module in known().items():
        assert (module.NEEDS.sites or module.NEEDS.observers) and callable(module.measure)
        for text in (module.Result.TITLE, *module.Result.prose().values()):
            assert len(text) > 5, (name, text)
        classes = [value for value in vars(module).values() if isinstance(value, type) and is_dataclass(value)]
        results = [value for value in classes if issubclass(value, Result)]
        assert any(quantity.figure for result in results for quantity in result.quantities().values())


def test_every_probe_has_a_test_file_of_its_own():
    for name in names():
        assert (Path(__file__).parent / f"test_{name}.py").exists(), name


def test_an_unknown_probe_gets_a_suggestion():
    with refused(UserError, "value_manifolds", "value_manifold", "attention_focus"):
        known(["value_manifolds"])
    assert names() == tuple(sorted(path.stem for path in PROBES.glob("*.py") if path.stem != "__init__"))


NEW = '''"""How long are the values?"""

from dataclasses import dataclass

import numpy as np

from llmgeom.model.capture import Site
from llmgeom.probe import Needs
from llmgeom.result import Figure, quantity
from llmgeom.result import Result as Base


def examine(subject, captures):
    return {"parameters": np.array(float(subject.facts["parameters"]))}


NEEDS = Needs(sites=frozenset({Site.VALUE}), controls={'untrained'}, examine=examine)


@dataclass(frozen=True, kw_only=True)
class Result(Base):
    """Lengths."""

    TITLE = "Lengths of values"

    length: np.ndarray = quantity("layer", "units", "mean length", Figure("curve"))
    parameters: float = quantity("", "parameters", "of the model")
    estimates: tuple = ()
    warnings: tuple = ()


def measure(view):
    lengths = [float(x.double().flatten(1).norm(dim=1).mean()) for x in view.capture.layers(Site.VALUE)]
    return Result(length=np.array(lengths), parameters=float(view.observations["parameters"]))
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

    assert ["value_length", "How long are the values?"] in [
        line.split(maxsplit=1) for line in llmgeom("list", "probes").splitlines()
    ]
    scan = [
        "scan",
        "--offline",
        "--domain",
        "math",
        "--limit",
        "60",
        "--n",
        "20",
        "--control-models",
        "2",
        "--out",
        str(out),
    ]
    plan = json.loads(llmgeom(*scan, "--dry-run", "--json", "--probes", "value_length"))
    assert plan["sources"]["math"]["edits"] == ["value_length"]
    assert json.loads(llmgeom(*scan, "--json", "--probes", "value_length"))["status"] == "ok"
    page = (out / "report.html").read_text()
    assert "Lengths of values" in page and "Prose of Failure modes." in page and "mean length" in page
    llmgeom("export", str(out), "safetensors", "--out", str(tmp_path / "arrays.safetensors"))
    assert any("value_length" in key for key in load_file(tmp_path / "arrays.safetensors"))
    monkeypatch.delitem(sys.modules, "llmgeom.probes.value_length")
