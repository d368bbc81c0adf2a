"""A scan holds the same batch against re-initialised twins and scrambled text, and says what it could not measure."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from llmgeom.batch import Batch, Tokens
from llmgeom.capture import Site
from llmgeom.errors import Unavailable
from llmgeom.result import Figure, quantity
from llmgeom.result import Result as Base
from llmgeom.scan import Needs, scan, shuffle
from llmgeom.subject import Subject

N = 30


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=60,
        max_position_embeddings=32,
        sliding_window=None,
    )
    return Subject.of(AutoModelForCausalLM.from_config(config), None, "tiny")


@pytest.fixture(scope="module")
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = Tokens(torch.randint(60, (N, 14), generator=generator), torch.randint(4, 14, (N,), generator=generator))
    return Batch(tokens, tuple(f"t{i // 2}" for i in range(N)), {"name": "noise"})


@dataclass(frozen=True)
class Seen(Base):
    TITLE = MEANING = COMPUTED = NULL = FAILURE_MODES = "what the probe was given"
    mean: np.ndarray = quantity("layer", "1", "mean value", Figure("curve"))
    headlines: tuple = ()
    warnings: tuple = ()


def probe(measure, **needs):
    return SimpleNamespace(NEEDS=Needs(frozenset({Site.VALUE}), **needs), measure=measure)


def test_a_probe_gets_twins_and_shuffled_prompts_that_are_what_they_are_called(subject, batch):
    views = []

    def measure(view):
        views.append(view)
        return Seen(mean=view.capture.value.double().mean((1, 2, 3)).numpy())

    record = scan(subject, batch, {"seen": probe(measure)}, nulls=3, seed=5)
    (view,) = views
    assert len(view.twins) == len(view.shuffled) == 3
    for i, twin in enumerate(view.twins):
        alone = subject.twin(6 + i).capture(batch, {Site.VALUE})
        torch.testing.assert_close(twin.value, alone.value, rtol=0, atol=0)
        assert not torch.allclose(twin.value, view.capture.value, atol=1e-3)
    assert not torch.allclose(view.shuffled[0].value, view.shuffled[1].value, atol=1e-4)
    assert record.facts["nulls"] == 3 and record.facts["prompts"] == N and record.facts["units"] == N // 2
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
    record = scan(subject, batch, {}, nulls=1)
    ids, lengths = batch.inputs.ids, batch.inputs.lengths
    for i in range(3):
        with torch.no_grad():
            p = subject.model(ids[i : i + 1, : lengths[i]]).logits[0, -1].double().softmax(-1)
        assert record.prompts["entropy"][i] == pytest.approx(float(-(p * p.log2()).sum()), abs=1e-5)
    assert record.prompts["tokens"] == tuple(lengths.tolist())


def test_a_probe_that_cannot_run_is_a_row_with_the_reason_and_a_bug_ends_the_scan(subject, batch):
    def cannot(view):
        raise Unavailable("an LSTM has no keys")

    record = scan(subject, batch, {"keys": probe(cannot, twins=False, shuffled=False)}, nulls=1)
    assert record.unmeasured == {"keys": "an LSTM has no keys"} and not record.results

    def broken(view):
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo"):
        scan(subject, batch, {"keys": probe(broken, twins=False, shuffled=False)}, nulls=1)


def test_nulls_nobody_needs_are_not_run(subject, batch):
    stages = []
    needs = probe(lambda v: Seen(mean=np.zeros(2)), twins=False, shuffled=False)
    scan(subject, batch, {"seen": needs}, nulls=20, progress=lambda stage, done, total: stages.append(stage))
    assert stages == ["prompts", "measuring seen"]


def test_what_could_overturn_a_verdict_is_said(subject, batch):
    few = scan(subject, batch, {}, nulls=5)
    assert "only 5 draws of each null: at least 20 are needed to decide at p < .05" in few.warnings
    assert any("entropy spans only" in w for w in few.warnings)
    crowded = Batch(batch.inputs, ("one",) * 5 + tuple(map(str, range(N - 5))), {"name": "crowded"})
    warnings = scan(subject, crowded, {}, nulls=20).warnings
    assert "up to 5 prompts share one template; n counts templates, not prompts" in warnings


def test_an_inactive_window_is_said():
    from transformers import MistralConfig

    config = MistralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=60,
        sliding_window=20,
        max_position_embeddings=32,
    )
    subject = Subject.of(AutoModelForCausalLM.from_config(config), None, "windowed")
    tokens = Tokens(torch.ones(4, 9, dtype=torch.int64), torch.full((4,), 9))
    record = scan(subject, Batch(tokens, tuple("abcd"), {"name": "ones"}), {}, nulls=20)
    assert "window inactive: the longest prompt has 9 tokens, the sliding window 20" in record.warnings


def test_equal_scans_give_equal_records_whatever_ran_before(subject, batch, tmp_path):
    from llmgeom.probes import known

    for name, noise in (("a", 1), ("b", 2)):
        torch.manual_seed(noise)
        np.random.seed(noise)
        torch.rand(noise)
        scan(subject, batch, known(), nulls=2, seed=1).save(tmp_path / name)
    a, b = tmp_path / "a", tmp_path / "b"
    for name in ("arrays.safetensors", "prompts.jsonl"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
