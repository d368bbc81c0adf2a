"""The studies run from a clone, each at a small size."""

from dataclasses import replace

import pytest

from llmgeom.dynamics import sweep
from studies.calibrate import __main__ as bench, cells, readings
from tests.test_primitives import InProcess


@pytest.fixture
def here(monkeypatch):
    """Trainings of a study run in this process."""
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", InProcess)


def test_calibrate_reads_every_kind_of_model_and_goes_on_where_it_stopped(here, tmp_path, monkeypatch, capsys):
    """Two tasks, hardly trained; the table has an AUC of every metric, and the second run reads what is stored."""
    few = {}
    for name in ("coin neox", "bijection llama"):
        training = replace(cells.CELLS[name].training, width=8, layers=1, steps=8, batch=8, warmup=1)
        few[name] = cells.Cell(training, cells.IDLE)
    monkeypatch.setattr(cells, "CELLS", few)
    monkeypatch.setattr(cells, "SEEDS", 1)
    monkeypatch.setattr(readings, "CONTROLS", 2)
    monkeypatch.setattr(readings, "SIZE", 24)
    monkeypatch.setattr(readings, "DECIDING", 100)
    monkeypatch.setattr(readings, "at_posterior", lambda grade: True)
    bench.main([str(tmp_path / "runs")], tmp_path / "table.json")
    printed, stored = capsys.readouterr().out, (tmp_path / "table.json").read_text()
    assert "belief_readout" in printed and '"stopped"' in stored
    monkeypatch.setattr(readings, "reading", lambda *_: pytest.fail("read twice"))
    bench.main([str(tmp_path / "runs"), "--finished"], tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == stored
