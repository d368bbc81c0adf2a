"""A scan holds the same batch against untrained controls and scrambled text, and says what it could not measure."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from llmgeom.batch import Batch, Tokens
from llmgeom.commands.scan import RunConfig, perform as perform_scan, prepare
from llmgeom.errors import Unavailable
from llmgeom.model import hub, running
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.model.tokenizing import shuffle
from llmgeom.probe import NO_CONTEXT, Needs
from llmgeom.probes.value_manifold import unequal
from llmgeom.progress import shown
from llmgeom.result import Result, line
from llmgeom.run import run_probes

N = 30


@pytest.fixture(scope="module")
def subject() -> Model:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 60}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return Model.of(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)), None, "tiny")


@pytest.fixture(scope="module")
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = Tokens(torch.randint(60, (N, 14), generator=generator), torch.randint(4, 14, (N,), generator=generator))
    return Batch(tokens, tuple(f"t{i // 2}" for i in range(N)), {"name": "noise"})


def seen(mean: np.ndarray, estimates=()) -> Result:
    return Result.of("what the probe was given", line("mean", mean, "layer", "1", "mean value"), estimates=estimates)


def probe(measure, **needs):
    return SimpleNamespace(NEEDS=Needs(frozenset({Site.VALUE}), **needs), measure=measure)


def test_a_probe_gets_twins_and_shuffled_prompts_that_are_what_they_are_called(subject, batch):
    views = []

    def measure(view):
        views.append(view)
        return seen(mean=view.capture.value.double().mean((1, 2, 3)).numpy())

    record = run_probes(subject, batch, {"seen": probe(measure)}, controls=3, seed=5)
    (view,) = views
    assert len(view.untrained) == len(view.shuffled) == 3
    for i, control in enumerate(view.untrained):
        alone = subject.untrained(6 + i).capture(batch, {Site.VALUE})
        torch.testing.assert_close(control.value, alone.value, rtol=0, atol=0)
        assert not torch.allclose(control.value, view.capture.value, atol=1e-3)
    assert not torch.allclose(view.shuffled[0].value, view.shuffled[1].value, atol=1e-4)
    assert record.facts["nulls"] == 3 and record.facts["prompts"] == N and record.facts["clusters"] == N // 2
    # At layer 0 a value depends on its own token only, and the final one is left in place: shuffling changes nothing.
    torch.testing.assert_close(view.shuffled[0].value[0], view.capture.value[0])


def test_shuffling_keeps_the_final_token_the_special_ones_and_the_multiset(batch):
    shuffled = shuffle(batch.inputs, 1, seed=3)
    moved = 0
    for before, after, length in zip(batch.inputs.ids, shuffled.ids, batch.inputs.lengths.tolist(), strict=True):
        assert before[0] == after[0] and before[length - 1] == after[length - 1]
        assert sorted(before[:length].tolist()) == sorted(after[:length].tolist())
        assert torch.equal(before[length:], after[length:])
        moved += int(not torch.equal(before, after))
    assert moved > N * 0.6


def test_entropy_in_the_prompt_table_is_the_model_s_own_in_bits(subject, batch):
    record = run_probes(subject, batch, {}, controls=1)
    ids, lengths = batch.inputs.ids, batch.inputs.lengths
    for i in range(3):
        with torch.no_grad():
            p = subject.model(ids[i : i + 1, : lengths[i]]).logits[0, -1].double().softmax(-1)
        assert record.prompts["entropy"][i] == pytest.approx(float(-(p * p.log2()).sum()), abs=1e-5)
    assert record.prompts["tokens"] == tuple(lengths.tolist())


def test_a_probe_that_cannot_run_is_a_row_with_the_reason_and_a_bug_ends_the_scan(subject, batch):
    def cannot(view):
        raise Unavailable("an LSTM has no keys")

    record = run_probes(subject, batch, {"keys": probe(cannot, controls={NO_CONTEXT})}, controls=1)
    assert record.unmeasured == {"keys": "an LSTM has no keys"} and not record.results

    def broken(view):
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo"):
        run_probes(subject, batch, {"keys": probe(broken, controls={NO_CONTEXT})}, controls=1)


def test_nulls_nobody_needs_are_not_run(subject, batch):
    stages = []
    needs = probe(lambda v: seen(np.zeros(2)), controls=())
    with shown(lambda *told: stages.append(told[:3])):
        run_probes(subject, batch, {"seen": needs}, controls=20)
    assert stages == [("prompts", 1, 1), ("measuring seen", 0, 1), ("measuring seen", 1, 1)]


def test_what_could_overturn_a_verdict_is_said(subject, batch):
    few = run_probes(subject, batch, {}, controls=1)
    assert "only 1 draw of each control, too few to know how much they vary: take 8 or more" in few.warnings
    crowded = Batch(batch.inputs, ("one",) * 5 + tuple(map(str, range(N - 5))), {"name": "crowded", "kind": "file"})
    assert run_probes(subject, crowded, {}, controls=20).warnings == ()
    sizes = Batch(batch.inputs, tuple(np.repeat(list("abcdefgh"), (1, 1, 2, 2, 3, 5, 6, 10))), {"kind": "file"})
    (said,) = unequal(sizes.cluster)
    assert said.startswith("80% of the prompts are in templates of a size that no other has")
    assert unequal(batch.cluster) == []


def test_a_reading_is_taken_of_the_subject_and_of_every_twin_and_given_to_its_probe(subject, batch):
    def norm(who, captures):
        assert torch.equal(captures[""].batch.inputs.ids, batch.inputs.ids)
        return who.model.lm_head.weight.double().norm().item()

    views = {}

    def measure(name):
        return lambda view: views.setdefault(name, view) and seen(mean=np.zeros(2))

    probes = {
        "reads": probe(measure("reads"), examine=norm),
        "names": probe(measure("names"), examine=lambda who, captures: who.name),
        "neither": probe(measure("neither")),
    }
    run_probes(subject, batch, probes, controls=2, seed=5)
    whole = {"": views["reads"].capture}
    assert views["reads"].observations == norm(subject, whole)
    assert views["reads"].control_observations == tuple(norm(subject.untrained(6 + i), whole) for i in range(2))
    assert len({views["reads"].observations, *views["reads"].control_observations}) == 3
    assert views["names"].observations == "tiny" and views["names"].control_observations == ("tiny untrained",) * 2
    assert views["neither"].observations is None and views["neither"].control_observations == ()


def test_a_site_that_the_model_cannot_give_is_a_row_and_is_not_captured(subject, batch):
    why = "not compared: the family hides them"
    told = replace(subject, facts={**subject.facts, "self_check": {"writes": why}})
    needs = SimpleNamespace(NEEDS=Needs(frozenset({Site.MLP_OUT})), measure=lambda v: pytest.fail("it was measured"))
    captured = []

    def measure(view):
        captured.append({site for site, _ in view.capture.tensors})
        return seen(mean=np.zeros(2))

    record = run_probes(told, batch, {"writes": needs, "values": probe(measure)}, controls=2)
    assert record.unmeasured == {"writes": f"writes to the residual stream are {why}"}
    # The page shows the attention of every prompt.
    assert captured == [{Site.VALUE, Site.ENTROPY, Site.LIKELY, "attention rows.weights"}]
    assert set(record.results) == {"values"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model of random weights that reads text, as a person would have it on disk."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(hub.locate("pocket:pythia").path)
    torch.manual_seed(1)
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    config = LlamaConfig(hidden_size=32, vocab_size=len(tokenizer), max_position_embeddings=256, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def perform(out, **asked) -> dict:
    plan = prepare(RunConfig(nulls=2, out=str(out), **asked))
    return dict(zip(plan.pools, (record for _, record in perform_scan(plan)), strict=True))


def test_a_domain_is_compared_with_mixed_prompts_and_mixed_prompts_say_why_they_are_not(folder, tmp_path):
    probes = ("attention_focus", "value_manifold")
    found = perform(tmp_path / "run", model=folder, domains=("math", "mixed"), n=30, limit=100, probes=probes)
    math, mixed = found["math"], found["mixed"]
    # Entropy hardly varies in a model of random weights, so that its metrics are not measured; the probes are.
    assert set(math.results) == set(probes) and not set(probes) & set(math.unmeasured)
    gains = [h for h in math.results["value_manifold"].estimates if h.name.startswith(("gain in", "change in"))]
    assert [(h.n, h.claim != "") for h in gains] == [(30, True)]
    assert all(h.value == pytest.approx(0, abs=0.3) for h in gains if h.unit == "fraction")
    (said,) = math.results["value_manifold"].notes
    assert "different tokens, different final tokens and templates: math " in said
    assert set(mixed.results) == set(probes) and not set(probes) & set(mixed.unmeasured)
    (said,) = mixed.results["value_manifold"].notes
    assert said.startswith("domain restriction: not measured")
    assert not any(h.name.startswith("gain in") for h in mixed.results["value_manifold"].estimates)
    focus = {h.name for h in math.results["attention_focus"].estimates}
    assert focus == {"focusing", "focusing without the first token", "weight on the first token"}


def test_a_preview_reads_its_own_prompts_alone(folder, tmp_path, monkeypatch):
    """No pool, no sample to compare with, no probe of weights."""
    read = []
    one_pass = running.one_pass
    monkeypatch.setattr(running, "one_pass", lambda *a: read.append(len(a[2])) or one_pass(*a))
    asked = prepare(RunConfig(model=folder, domains=("math", "mixed"), n=20, limit=100, out=str(tmp_path / "run")))
    subject = asked.settings.load()
    _ = subject.unembed  # found by trial
    read.clear()
    seen = [record for _, record in perform_scan(asked, subject, preview=True)]
    assert sum(read) == 2 * 20
    assert not any(h.claim for record in seen for of in record.results.values() for h in of.estimates)
    assert all("attention_focus" in record.results for record in seen) and (tmp_path / "run" / "report.html").exists()


def test_documents_of_a_folder_are_scanned_stratified(folder, tmp_path):
    rng = np.random.default_rng(0)
    words = ["river", "stone", "light", "garden", "winter", "music", "paper", "window", "bread", "silver", "island"]
    texts = [" ".join(rng.choice(words, rng.integers(12, 40))) + f" {i}" for i in range(90)]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    asked = {"model": folder, "probes": ("value_manifold",), "n": 20}
    (record,) = perform(tmp_path / "run", prompts_file=f"hf:{tmp_path / 'set'}", **asked).values()
    assert record.source["kind"] == "documents"
    assert record.source["stratified"] == {"n": 20, "bins": 5, "per_template": 2, "seed": 0}
    assert record.facts["prompts"] == record.facts["clusters"] == 20
    assert any(note.startswith("domain restriction: not measured") for note in record.results["value_manifold"].notes)
    for text in record.prompts["text"]:
        assert any(whole.startswith(text) for whole in texts)


def test_a_finished_run_is_shown_again_without_its_model_unless_anything_differs(folder, tmp_path, monkeypatch):
    def request(**more):
        asked = {"domains": ("math",), "limit": 60, "n": 20, "nulls": 2, "probes": ("value_manifold",)}
        return prepare(RunConfig(str(folder), **asked | {"out": str(tmp_path / "a")} | more))

    ((place, measured),) = perform_scan(request())
    with monkeypatch.context() as patch:
        patch.setattr(RunConfig, "subject", lambda *_: pytest.fail("the model was read"))
        ((again, shown),) = perform_scan(request())
        assert again == place and (shown.facts, shown.run) == (measured.facts, measured.run)
        assert not request(out=str(tmp_path / "b")).finished and not request(device="cpu").finished
    with monkeypatch.context() as patch:
        patch.setattr("llmgeom.cache.keys.of_program", lambda: "other code")
        assert not request().finished
    weights = Path(folder) / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        assert not request().finished
    finally:
        weights.write_bytes(kept)
    assert request().finished
    (place / "arrays.safetensors").write_bytes(b"damaged")
    assert not request().finished


def test_a_reading_that_is_refused_is_a_row_and_the_other_probes_are_measured(subject, batch):
    def read(who, captures):
        raise Unavailable("W_K cannot be read")

    plain = probe(lambda v: seen(np.ones(2)))
    probes = {"reads": probe(lambda v: seen(np.zeros(2)), examine=read), "plain": plain}
    record = run_probes(subject, batch, probes, controls=2)
    assert record.unmeasured == {"reads": "W_K cannot be read"} and set(record.results) == {"plain"}


@pytest.mark.parametrize("where", ["untrained controls", "shuffled"])
def test_memory_that_ran_out_in_any_pass_is_told_once(subject, batch, monkeypatch, where):
    whole, passed = running.one_pass, []

    def scarce(self, work, members):
        control = self.facts.get("untrained") is not None
        shuffled = not torch.equal(work.tokens.data, batch.tokens.data)
        passed.append((control, shuffled, len(members)))
        if {"untrained controls": control, "shuffled": shuffled}[where] and len(members) == N:
            raise torch.OutOfMemoryError("no memory")
        return whole(self, work, members)

    monkeypatch.setattr(running, "one_pass", scarce)
    record = run_probes(subject, batch, {"seen": probe(lambda view: seen(np.zeros(2)))}, controls=3, batch_tokens=10**6)
    assert passed.count((where == "untrained controls", where == "shuffled", N)) == 3
    assert [w for w in record.warnings if "memory" in w] == [f"out of memory: a batch of {N} prompts was run in halves"]


def test_candidates_longer_than_the_model_s_positions_are_left_out_and_said_so(folder):
    asked = RunConfig(model=folder, domains=("math",), probes=(), n=30, limit=150, seed=3)
    plan = prepare(asked, write=False)
    subject = plan.settings.load()
    lengths = subject.tokens(plan.pools["math"]).lengths
    limit = int(lengths.sort().values[-4])
    short = replace(subject, facts={**subject.facts, "positions": limit})
    planned = plan.plan(short, "math")
    batch, notes = planned.batch, planned.notes
    assert notes == [f"{(lengths > limit).sum()} of 150 prompts of the pool have more than {limit} tokens: left out"]
    assert short.tokens(batch).lengths.max() <= limit < lengths.max()
