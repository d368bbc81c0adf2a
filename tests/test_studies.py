"""The studies run from a clone, each at a small size."""

from dataclasses import replace

import pytest

from llmgeom.dynamics import processes
from studies import reproduce, sticky_chain
from studies.calibrate import __main__ as bench, cells, readings
from tests.test_sweep import InProcess


@pytest.fixture
def here(monkeypatch):
    """Trainings of a study run in this process."""
    monkeypatch.setattr(processes, "ProcessPoolExecutor", InProcess)


@pytest.mark.slow
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


@pytest.mark.slow
def test_reproduce_paper1_prints_every_sentence_beside_what_was_printed(here, tmp_path, monkeypatch, capsys):
    few = {
        task: replace(cell, width=8, layers=1, heads=1, steps=6, batch=8, warmup=1, parameters=0, lr="1e-2")
        for task, cell in reproduce.QUICK.items()
    }
    monkeypatch.setattr(reproduce, "QUICK", few)
    monkeypatch.setattr(reproduce, "SEEDS", 2)
    monkeypatch.setattr(reproduce, "GRADED", 40)
    reproduce.main(["paper1", "--quick", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    (printed,) = [line for line in lines if "an MLP has 1.85 bits" in line]
    # Position decides nothing in what an MLP sees: its error is about a uniform answer's, whatever the training.
    assert 0.8 < float(printed.split("bits")[1].split("[")[0]) < 1.3
    assert len([line for line in lines if "[" in line]) == 2 * len(reproduce.PRINTED)


def test_reproduce_paper2_trains_every_schedule(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sticky_chain, "SHAPES", {True: {"length": 60, "steps": 40}})
    reproduce.main(["paper2", "--quick", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert sum("times as fast (n = 5 seeds)" in line for line in lines) == 2
    assert [line for line in lines if line.startswith("values in closed form")]


@pytest.mark.slow
def test_reproduce_paper3_measures_every_number_twice(capsys):
    reproduce.main(["paper3", "--quick", "--model", "pocket:llama"])
    out = capsys.readouterr().out
    assert out.count("n = ") == 2 * len(reproduce.ROWS) and "not measured" not in out
