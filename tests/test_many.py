"""More prompts than memory holds: what is left on disk is measured a layer at a time, and nulls run on a sample."""

import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmgeom import plan as scanning
from llmgeom.batch import Batch, Tokens
from llmgeom.model import running
from llmgeom.model.capture import LazyTensors, Site
from llmgeom.model.model import Model
from llmgeom.probe import Needs
from llmgeom.probes import attention_focus, value_manifold
from llmgeom.record import Record
from llmgeom.run import run_probes
from tests.families import VOCAB
from tests.test_scan import seen

pytestmark = pytest.mark.usefixtures("few_draws")


N, FEW = 70, 40


def prompts(n: int = N, length: int = 14, seed: int = 3) -> Batch:
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, length + 1, (n,), generator=drawn)
    ids = torch.randint(3, VOCAB, (n, length), generator=drawn)
    return Batch(Tokens(ids, lengths), tuple(f"t{i // 2}" for i in range(n)), {"name": "random"})


def measured(model: Model, batch: Batch, probes: dict, store: Path | None = None, **options) -> Record:
    options = {"controls": 2, "seed": 5, "batch_tokens": 64, "store": None if store is None else str(store)} | options
    return run_probes(model, batch, probes, **options)


def heads(record: Record, probe: str) -> dict:
    return {h.name: h for h in record.results[probe].estimates}


PROBES = {"attention_focus": attention_focus, "value_manifold": value_manifold}


def test_what_is_measured_from_disk_is_what_is_measured_in_memory(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(scanning, "MOST_PROMPTS", FEW)
    in_memory = measured(llama, prompts(), PROBES)
    monkeypatch.setattr(running, "IN_MEMORY", 0)
    on_disk = measured(llama, prompts(), PROBES, tmp_path)
    for probe, found in on_disk.results.items():
        other = in_memory.results[probe]
        for name, array in found.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name])
        assert (found.estimates, found.warnings) == (other.estimates, other.warnings)
    assert (on_disk.prompts, on_disk.warnings) == (in_memory.prompts, in_memory.warnings)
    assert on_disk.facts == in_memory.facts


@pytest.mark.parametrize("positions", ["query", "all"])
def test_some_prompts_of_a_capture_are_their_rows(llama, tmp_path, monkeypatch, positions):
    batch, chosen = prompts(), torch.tensor([2, 3, 40, 69])
    options = {"positions": positions, "batch_tokens": 64, "store": str(tmp_path)}
    whole = llama.capture(batch, Site, **options)
    monkeypatch.setattr(running, "IN_MEMORY", 0)
    left = llama.capture(batch, Site, **options)
    alone = llama.capture(batch.take(chosen), Site, positions=positions)
    for part in (whole.take(chosen), left.take(chosen), left.take(torch.arange(1, 70)).take(chosen - 1)):
        for name in ("prompt", "position", "lengths"):
            assert torch.equal(getattr(part, name), getattr(alone, name))
        assert part.batch.cluster == alone.batch.cluster
        for key, tensor in whole.tensors.items():
            assert torch.equal(part.tensors[key], tensor[torch.isin(whole.prompt, chosen)])
            assert part.tensors[key].shape[0] == alone.tensors[key].shape[0]
    assert isinstance(left.take(chosen).tensors, LazyTensors), "still on disk"


def test_one_layer_is_in_memory_at_a_time(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "IN_MEMORY", 0)
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "results"))  # else the results of the tests above are loaded
    read, alive = LazyTensors.__getitem__, []

    def counted(self, key):
        assert sum(tensor() is not None for tensor in alive) <= 1, "the last one, which its reader is about to let go"
        found = read(self, key)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(LazyTensors, "__getitem__", counted)
    measured(llama, prompts(), PROBES, tmp_path, controls=2)
    assert len(alive) > 50


def test_nulls_run_on_a_stated_sample_and_means_are_of_all(llama, monkeypatch):
    every = measured(llama, prompts(), {"attention_focus": attention_focus})
    monkeypatch.setattr(scanning, "MOST_PROMPTS", FEW)
    found = measured(llama, prompts(), PROBES)
    said = f"controls read {FEW} of the {N} prompts, drawn at random; measured on all: attention_focus"
    assert found.warnings[0] == said
    assert found.facts["prompts"] == N and len(found.prompts["text"]) == FEW
    assert found.facts["prompts_hash"] == every.facts["prompts_hash"]
    ours, theirs = heads(found, "attention_focus"), heads(every, "attention_focus")
    for name, head in ours.items():
        assert (head.value, head.low, head.high, head.n) == (theirs[name].value, theirs[name].low, theirs[name].high, N)
    assert {h.n for h in heads(found, "value_manifold").values() if "dimension" not in h.name} == {FEW}
    look = SimpleNamespace(NEEDS=Needs({Site.VALUE}), measure=lambda view: seen(np.zeros(2)))
    again, other = (measured(llama, prompts(), {"look": look}, seed=seed).prompts["pieces"] for seed in (5, 6))
    assert again == found.prompts["pieces"] != other


def test_the_sample_that_a_probe_is_held_against_is_that_of_the_nulls(llama, monkeypatch):
    monkeypatch.setattr(scanning, "MOST_PROMPTS", FEW)
    views = {}

    def looking(name, most):
        sizes = {"control_prompts": most, "examine": lambda who, captures: len(captures[""].batch)}
        needs = Needs(attention_focus.NEEDS.sites, **sizes)
        return SimpleNamespace(NEEDS=needs, measure=lambda view: views.update({name: view}) or seen(np.zeros(2)))

    measured(llama, prompts(), {"few": looking("few", 0), "many": looking("many", FEW)})
    few = views["few"]
    assert few.null_subset is few and few.observations == FEW and len(few.entropy) == FEW == len(few.capture.prompt)
    batch = few.capture.batch
    tokens = prompts().inputs
    chosen = [next(i for i in range(N) if torch.equal(tokens.ids[i], row)) for row in batch.inputs.ids]
    assert chosen == sorted(set(chosen)) and len(chosen) == FEW and max(chosen) > FEW
    assert batch.cluster == tuple(f"t{i // 2}" for i in chosen)
    control = llama.untrained(6).capture(prompts().take(chosen), few.capture.tensors and {Site.ATTENTION_ENTROPY})
    for layer, theirs in enumerate(control.layers(Site.ATTENTION_ENTROPY)):
        torch.testing.assert_close(few.untrained[0].tensors[Site.ATTENTION_ENTROPY, layer], theirs, atol=1e-6, rtol=0)
    assert all(len(one.prompt) == FEW for one in (*few.untrained, *few.shuffled))


def test_a_second_sample_that_is_large_is_cut_as_well(llama, monkeypatch):
    monkeypatch.setattr(scanning, "MOST_PROMPTS", FEW)
    views, needs = [], Needs({Site.VALUE}, samples=("other",), control_prompts=FEW)
    look = SimpleNamespace(NEEDS=needs, measure=lambda view: views.append(view) or seen(np.zeros(2)))
    measured(llama, prompts(), {"seen": look}, samples={"other": prompts(100, seed=8)}, controls=2)
    (view,) = views
    assert len(view.entropy) == N == len(view.capture.prompt) and len(view.null_subset.entropy) == FEW
    sample = view.samples["other"]
    assert len(sample.entropy) == FEW == len(sample.clusters)
    assert all(len(control.prompt) == FEW for control in sample.untrained)
    assert view.untrained == () and len(view.null_subset.untrained) == 2
