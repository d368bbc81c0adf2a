"""Exported activations are those of the model, whoever reads the files; a probe reads at the positions asked for."""

import json

import datasets
import numpy as np
import pandas as pd
import pytest
from datasets import load_dataset
from safetensors.numpy import load_file
from sklearn.linear_model import LogisticRegression

from llmgeom.commands.probe import RunConfig, perform
from llmgeom.errors import UserError
from llmgeom.exports import export
from llmgeom.probes.labels.directions import SavedDirection
from llmgeom.probes.labels.inputs import read_positions
from llmgeom.prompts import files
from llmgeom.prompts.domains import Domain
from tests.refusals import refused


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    pool = Domain("mixed").sample(40, 3)
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    rows = [
        {"text": text, "template": str(i), "long": len(text) > 55, "words": len(text.split()), "w": 1 + i % 3}
        | {"ids": f"own {i}", "residual.2": i, "entropy": -i}
        for i, text in enumerate(pool.text)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def run(prompts, tmp_path_factory):
    """One run at three positions: (folder, record, model)."""
    place = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMGEOM_CACHE", str(place / "cache"))
        patch.setenv("HF_HOME", str(place / "hf"))
        asked = RunConfig(
            model="pocket:pythia", prompts=prompts, target="words", given=("none",), nulls=1,
            positions=("last", "mean", "-3"), out=str(place / "run"),
        )  # fmt: skip
        subject = asked.load()
        yield *perform(asked, subject=subject), subject


def test_the_folder_is_read_by_datasets_pandas_and_safetensors(run, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # else `datasets` counts a download
    out, record, subject = run
    place, said, *renamed = export(str(out), "activations", sites=("residual", "value"))
    assert said == "40 prompts, 9 arrays: residual, value"
    assert renamed == [f"column {name!r} of the prompts is 'prompts.{name}' there" for name in ("ids", "residual.2")]
    batch = files.read(prompts)
    capture = subject.capture(batch, {"residual", "value"})
    tensors = load_file(f"{place}/activations.safetensors")
    frame = pd.read_parquet(f"{place}/train.parquet")
    for rows in (
        load_dataset("parquet", data_dir=place, split="train", cache_dir=str(tmp_path)),
        load_dataset(place, split="train", cache_dir=str(tmp_path)),
    ):
        assert rows["text"][:] == list(batch.text) and rows["words"][:] == list(batch.columns["words"])
        assert rows["ids"][:] == subject.tokens(batch).real
        np.testing.assert_array_equal(np.array(rows["value.1"][:]), capture.layers("value")[1].flatten(1).numpy())
    for layer, x in enumerate(capture.layers("residual")):
        np.testing.assert_array_equal(np.stack(frame[f"residual.{layer}"]), x.numpy())
        np.testing.assert_array_equal(tensors[f"residual.{layer}"], x.numpy())
    assert tensors["prompts.words"].tolist() == list(batch.columns["words"])
    # What a user of scikit-learn writes.
    x, y = np.stack(frame["residual.2"]), frame["long"]
    assert LogisticRegression(max_iter=1000).fit(x, y).score(x, y) > 0.9
    # Columns of the prompts that have a name of the table's own.
    own = [list(frame[f"prompts.{name}"]) for name in ("ids", "residual.2")]
    assert own == [[f"own {i}" for i in range(40)], list(range(40))]
    assert min(frame["entropy"]) > 0 and "prompts.entropy" not in frame
    assert record.source["columns left out"] == "'entropy' is a column that llmgeom computes"
    before = (out / "activations" / "train.parquet").read_bytes()
    export(str(out), "activations", sites=("residual", "value"))
    assert (out / "activations" / "train.parquet").read_bytes() == before


def test_activations_that_cannot_be_exported_are_refused(run):
    out, _, _ = run
    with refused(UserError, "--sites head", "residual"):
        export(str(out), "activations", sites=("head",))
    with refused(UserError, "latex", "--sites"):
        export(str(out), "latex", sites=("value",))


def test_positions_are_places_of_their_own(run, prompts):
    """Each position has a curve; its numbers are those of rows that a capture of all positions has there."""
    out, record, subject = run
    arrays = record.results["label"].arrays
    assert {"residual_score", "residual_mean_score", "residual_-3_score"} <= arrays.keys()
    assert len(record.prompts["held-out prediction"]) == len(record.prompts["text"]) == 40
    everywhere = subject.capture(files.read(prompts), {"residual"}, positions="all")
    saved = SavedDirection.load(out / "direction.safetensors")
    assert saved.layer < len(everywhere.layers("residual")) - 1  # the last residual stream cannot be edited
    x, prompt = everywhere.layers("residual")[saved.layer].double().numpy(), everywhere.prompt.numpy()
    rows = {"last": -1, "-3": -3, "mean": slice(None)}[saved.position]
    own = np.stack([np.atleast_2d(x[prompt == i][rows]).mean(0) for i in range(40)])
    assert (own @ saved.vector).std() == pytest.approx(saved.scale, rel=1e-4)


def test_positions_that_cannot_be_read_are_refused(prompts, tmp_path):
    assert read_positions(("-1", "last", "-2", "mean")) == ("last", -2, "mean")
    for word in ("0", "3", "all", "-x"):
        with refused(UserError, f"--positions {word}", "mean"):
            read_positions((word,))
    asked = RunConfig(model="pocket:pythia", prompts=prompts, target="words", out=str(tmp_path), positions=("-90",))
    with refused(UserError, "-90", "rows 1, 2", "fewer tokens"):
        perform(asked)
