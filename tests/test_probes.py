"""Every probe is whole: what it needs, a result with words and a figure, and a name that is known."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path

from llmgeom.errors import UserError
from llmgeom.probes import known, names
from llmgeom.result import Result
from tests.refusals import refused

PROBES = Path(__file__).parent.parent / "probes"


def test_every_probe_has_needs_a_result_and_texts():
    for name, module in known().items():
        assert module.NEEDS.sites and callable(module.measure)
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
