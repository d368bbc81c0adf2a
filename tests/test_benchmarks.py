"""The benchmark of a card runs where there is none, and puts its table where a document has a place for it."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from llmgeom.errors import UserError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        spec.loader.exec_module(module)
    return module


def test_shapes_are_those_of_the_models(gpu):
    """Against the parameter counts that their authors give."""
    counts = {"pythia-410m": 405.3e6, "phi-2": 2.78e9, "llama-3.2-1b": 1.236e9, "llama-3.2-3b": 3.213e9}
    counts["mistral-7b"] = 7.242e9
    from transformers import AutoModelForCausalLM

    for shape, count in counts.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(gpu.sizes.SHAPES[shape][0]())
        assert model.num_parameters() == pytest.approx(count, rel=2e-3), shape


@pytest.mark.slow
def test_a_tiny_shape_is_measured_and_its_table_is_written(gpu, tmp_path):
    row: dict[str, float] = {}
    gpu.measure(row, "tiny", "cpu", 1, math.inf, ["scan"], "--n", "25", "--limit", "110", "--control-models", "1")
    assert all(value > 0 for name, value in row.items() if "GiB" not in name)
    assert row["scan: first page, s"] <= row["scan, s"]
    text = gpu.table({"tiny": row}, {"eager, steps a second": 3.0}, "a CPU", {"mistral-7b": "out of memory"})
    document = tmp_path / "page.md"
    document.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    gpu.write(document, text)
    written = document.read_text()
    assert text in written and "\nnot run: no GPU\n" not in written and "- mistral-7b, not run: out" in written
    gpu.write(document, text)
    assert document.read_text() == written, "a second table takes the place of the first"
    document.write_text("no place")
    with pytest.raises(UserError):
        gpu.write(document, text)


def test_a_shape_that_fails_leaves_the_rows_of_the_others(gpu, monkeypatch, tmp_path, capsys):
    def measure(row, shape, *_):
        row["load, s"] = 1.0
        if shape == "phi-2":
            raise torch.OutOfMemoryError("CUDA out of memory")
        row["scan, s"] = 2.0

    document = tmp_path / "page.md"
    document.write_text(f"{gpu.BEGIN}\n{gpu.END}\n")
    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "steps", lambda *_: {"eager": "not run: no time"})
    monkeypatch.setattr(gpu, "ROWS", tmp_path / "rows.json")
    argv = ["gpu.py", "--device", "cpu", "--shapes", "tiny,phi-2", "--write", str(document), "--keep"]
    monkeypatch.setattr("sys.argv", argv)
    gpu.main()
    written = document.read_text()
    assert "| tiny | 1 | 2 |" in written and "| phi-2 | 1 | – |" in written
    assert "- phi-2, not run: CUDA out of memory" in written
    assert "- training, eager: not run: no time" in written
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert kept["rows"] == {"tiny": {"load, s": 1.0, "scan, s": 2.0}, "phi-2": {"load, s": 1.0}}
    assert kept["card"] == "a CPU"
