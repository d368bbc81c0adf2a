"""Commands that ask one question: what a dry run counts is what the run passes, and a repeated run passes nothing."""

from dataclasses import replace

import numpy as np
import pytest

from llmgeom.commands import ablate, evidence, grade
from llmgeom.commands.dry_run import price
from llmgeom.model import running
from llmgeom.model.forward import probe_batch
from llmgeom.model.model import Model
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

TASK = Training("recall:pairs=2,queries=2,keys=4,values=6", width=16, layers=2, heads=2, steps=2, snapshots=2)
SULA = {"model": "pocket:pythia", "process": "two-point", "ks": (1, 2), "n": 8, "controls": 2}
CASES = {
    "grade": (grade, {"n": 12, "nulls": 2}),
    "heads of a task": (ablate, {"what": "heads", "n": 20, "nulls": 2}),
    "label sequences": (evidence, {"model": "pocket:pythia", "ks": (1, 2), "n": 10, "nulls": 1}),
    "axis": (ablate, {**SULA, "layers": "1,3"}),
}


@pytest.fixture(scope="module")
def tunnel(tmp_path_factory) -> str:
    return str(train(TASK, tmp_path_factory.mktemp("tunnel") / "recall").out)


def prepared(command, asked):
    """The job of a command; of `evidence` that of its one world."""
    job = command.prepare(asked)
    return job[1][0] if isinstance(job, tuple) else job


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_counts_what_is_passed_and_a_repeated_run_passes_nothing(case, tunnel, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    command, options = CASES[case]
    asked = command.RunConfig(**({"model": tunnel} | options), offline=True, device="cpu", out=str(tmp_path / "first"))
    job = prepared(command, asked)
    (row,) = price(job.settings, job.located, [job.ask], job.folder)["sources"].values()
    subject, passed, inner = asked.load(), [], running.one_pass
    checks = 3 * int(probe_batch(subject.facts).tokens.lengths.sum())

    def counted(reader, work, members):
        lengths, depth = work.tokens.lengths, len(reader.blocks)
        start = work.resume.start if work.resume else 0
        left = lengths if work.resume is None else work.resume.left(lengths)
        passed.append(int(left[members].sum()) * (depth - start) / depth)
        return inner(reader, work, members)

    monkeypatch.setattr(running, "one_pass", counted)
    _, first = job.perform(subject=subject)
    ran = sum(passed) + checks
    # Of edits no passes are counted that see whether passes may resume; here these are of three sequences of ten.
    assert first.results and (0.7 * ran < row["tokens"] < 1.1 * ran if row["edited"] else row["tokens"] == ran)
    passed.clear()
    monkeypatch.setattr(Model, "untrained", None)
    _, again = prepared(command, replace(asked, out=str(tmp_path / "again"))).perform(subject=subject)
    assert passed == [] and again.unmeasured == first.unmeasured
    assert all(np.array_equal(again.arrays[name], x) for name, x in first.arrays.items())
