"""A model spread over places, some of it on disk, gives the captures that it gives in one place."""

import gc
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

from llmgeom import probes
from llmgeom.model import hub
from llmgeom.model.capture import Site
from llmgeom.model.loading import OFFLOADED
from llmgeom.model.model import Model
from llmgeom.model.passes import identity
from llmgeom.run import run_probes
from tests.families import FAMILIES, ragged
from tests.test_store import same

WHOLE = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "disk"}
SPREAD = {"llama": WHOLE | {"model.rotary_emb": "cpu", "lm_head": "disk"}}
SPREAD["gpt_neox"] = {
    "gpt_neox.embed_in": "disk",
    "gpt_neox.layers.0": "cpu",
    "gpt_neox.layers.1": "disk",
    "gpt_neox.final_layer_norm": "cpu",
    "gpt_neox.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.fixture(scope="module", params=SPREAD)
def folder(request, tmp_path_factory) -> Path:
    """A tiny model on disk, with a tokenizer, and its places."""
    path, pythia = tmp_path_factory.mktemp(request.param), Path(hub.locate("pocket:pythia").path)
    FAMILIES[request.param].model().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pythia / name, path)
    return path


def load(folder: Path, spread: dict | None) -> Model:
    return Model.load(str(folder), device_map=spread, device="cpu")


def spread_of(folder: Path) -> dict:
    return SPREAD[transformers.AutoConfig.from_pretrained(folder).model_type]


def test_what_is_partly_on_disk_is_captured_as_ever(folder, tmp_path):
    whole, spread = load(folder, None), load(folder, spread_of(folder))
    assert spread.facts["device"] == "cpu+disk" and whole.facts["device"] == "cpu"
    assert spread.weight_hash == OFFLOADED and spread.facts["weights"] == identity(spread) == identity(whole)
    assert spread.facts["self_check"]["logits"] == 0
    for positions in ("query", "all"):
        kept = spread.capture(ragged(), Site, positions=positions, store=str(tmp_path))
        assert same(kept, whole.capture(ragged(), Site, positions=positions))
    assert same(spread.capture(ragged(), Site, store=str(tmp_path)), whole.capture(ragged(), Site))


def test_its_twin_is_spread_alike_and_is_the_twin(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    whole, spread = load(folder, None), load(folder, spread_of(folder))
    control = spread.untrained(3)
    assert control.model.hf_device_map == spread.model.hf_device_map and control.weight_hash == OFFLOADED
    assert same(control.capture(ragged(), Site), whole.untrained(3).capture(ragged(), Site))
    (made,) = tmp_path.iterdir()
    assert any(made.iterdir())
    del control
    gc.collect()
    assert not any(tmp_path.iterdir()), "nothing is left on the disk"


def test_a_run_of_it_finds_what_a_run_in_one_place_finds(folder, tmp_path):
    known, batch = probes.known(("value_manifold",)), ragged(lengths=(9, 7, 12, 6) * 6)
    found = [
        run_probes(load(folder, spread), batch, known, controls=1, store=str(tmp_path / str(i))).results
        for i, spread in enumerate((None, spread_of(folder)))
    ]
    assert found[0]["value_manifold"].estimates == found[1]["value_manifold"].estimates


def test_offloaded_models_of_one_shape_are_not_taken_for_each_other(folder, tmp_path):
    """Their weights are not in memory to be told apart by."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    FAMILIES[transformers.AutoConfig.from_pretrained(folder).model_type].model(1).save_pretrained(other)
    made = [
        load(path, spread_of(folder)).capture(ragged(), {Site.VALUE}, store=str(tmp_path / "cache"))
        for path in (folder, other)
    ]
    assert not torch.equal(made[0].value, made[1].value)
