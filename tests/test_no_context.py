"""The control without context: its means are those of other clusters, and nothing moves between positions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import Unavailable
from llmgeom.model import running
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.model.no_context import FOLDS, WRITES, NoContext
from llmgeom.model.passes import plan_capture
from llmgeom.plan import Plan
from llmgeom.probe import NO_CONTEXT, Needs, probe
from llmgeom.run import run_probes
from tests.families import FAMILIES, ragged
from tests.test_run import texts, values

SITES = frozenset({Site.VALUE, Site.ATTN_OUT, Site.RESIDUAL, Site.ENTROPY})


def look(seen: dict):
    """A probe that keeps what it was given."""
    return lambda data: seen.update(view=data) or values(data)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi", "gpt2", "gemma2"])
def test_the_means_are_those_of_every_real_position_of_other_clusters(name):
    """The oracle is a capture of all positions, averaged by hand."""
    subject = Model.of(FAMILIES[name].model(), name=name)
    batch = ragged()
    batch = Batch(batch.inputs, tuple(f"c{i % 3}" for i in range(len(batch))), batch.source)
    control = NoContext.of(subject, batch, 0)
    capture = subject.capture(batch, {Site.ENTROPY}, observers=(WRITES,), batch_tokens=24)
    whole = subject.capture(batch, {Site.ATTN_OUT}, positions="all")
    means = control.means(capture)
    for cluster, fold in control.fold.items():
        others = torch.tensor([batch.cluster[i] != cluster for i in whole.prompt.tolist()])
        expected = whole.attn_out[:, others].mean(1)
        torch.testing.assert_close(means[fold], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(means[-1], whole.attn_out.mean(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "mixing"), [*((name, False) for name in FAMILIES), ("llama", True)])
def test_the_last_position_runs_alone_and_is_what_it_is_in_the_whole_pass(name, mixing, monkeypatch):
    """A family that also mixes positions in another way than attention is noticed, and every position runs."""
    subject = Model.of(FAMILIES[name].model(), name=name)
    batch, sites, ran = ragged(), {Site.ATTN_OUT, Site.RESIDUAL, Site.ENTROPY}, []
    control = NoContext.of(subject, batch, 0)
    means = torch.randn(max(control.fold.values()) + 2, len(subject.blocks), subject.facts["d_model"])
    edits = [control.edit(batch, means)]
    if mixing:
        embedding = subject.model.get_input_embeddings()
        embedding.register_forward_hook(lambda _m, _a, out: out + 0.1 * out.cumsum(1))
    whole = subject.capture(batch, sites, edits)
    plan = plan_capture(subject, batch, sites, edits, alone=True)
    one_pass = running.one_pass
    monkeypatch.setattr(running, "one_pass", lambda *a: ran.append(a[1].resume) or one_pass(*a))
    alone = running.gather(subject, plan)
    assert (ran[-1] is None) == mixing
    for key, tensor in whole.tensors.items():
        torch.testing.assert_close(alone.tensors[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2"])
def test_without_context_the_last_token_decides_alone(name):
    """Prompts of one fold that end in one token, at one position, are the same to the control, whatever came before."""
    subject = Model.of(FAMILIES[name].model(), name=name)
    ids = torch.randint(3, 60, (12, 9), generator=torch.Generator().manual_seed(3))
    ids[:, -1] = 7
    batch = Batch(Tokens(ids, torch.full((12,), 9)), tuple(f"c{i}" for i in range(12)), {"name": "x"})
    seen: dict = {}
    run_probes(subject, batch, {"look": probe(Needs(SITES, controls={NO_CONTEXT}))(look(seen))})
    control = NoContext.of(subject, batch, 0)
    folds = np.array([control.fold[cluster] for cluster in batch.cluster])
    last = seen["view"].no_context.layers(Site.VALUE)[-1].flatten(1).double().numpy()
    own = seen["view"].capture.layers(Site.VALUE)[-1].flatten(1).double().numpy()
    for fold in range(FOLDS):
        rows = last[folds == fold]
        assert np.abs(rows - rows[0]).max() < 1e-5 < np.abs(own[folds == fold] - own[folds == fold][0]).max()


def test_another_assignment_to_folds_is_another_capture(tmp_path):
    needs = {"one": probe(Needs(frozenset({Site.VALUE})))(values)}
    batch = texts(*range(12))
    subject = Model.load("pocket:llama", device="cpu")
    found = []
    for cluster in (batch.cluster, batch.cluster, tuple(f"t{i // 2}" for i in range(12))):
        plan = Plan.of(subject, Batch(batch.inputs, cluster, batch.source), needs, 1, 0)
        found += [work.store.of for kind, _, work in plan.every(str(tmp_path)) if kind == NO_CONTEXT]
    assert found[0] == found[1] != found[2]


def test_where_there_is_no_such_control_the_record_says_why():
    subject = Model.of(FAMILIES["llama"].model(), name="llama")
    batch = ragged()
    alike = Batch(batch.inputs, ("one",) * len(batch), batch.source)
    with pytest.raises(Unavailable, match="one cluster"):
        NoContext.of(subject, alike, 0)
    seen: dict = {}
    record = run_probes(subject, alike, {"look": probe(Needs(SITES, controls={NO_CONTEXT}))(look(seen))})
    assert seen["view"].no_context is None
    assert any("one cluster" in warning for warning in record.warnings)
    none = {"look": probe(Needs(SITES, controls=()))(look(seen))}
    assert not any("one cluster" in warning for warning in run_probes(subject, alike, none).warnings)


def test_a_prompt_of_one_token_has_no_context_to_lose():
    """The control is then the model itself, and a claim to beat it cannot hold; a longer prompt is another one."""
    subject = Model.load("pocket:llama", device="cpu")  # which puts a BOS before each prompt or none, by its tokenizer
    words = [" ".join([word] * times) for times in (1, 3) for word in "abcdef"]
    batch = replace(Batch.of(words), inputs=subject.tokens(words))
    one = batch.tokens.lengths == batch.tokens.lengths.min()
    assert 0 < one.sum() < len(words)
    seen: dict = {}
    run_probes(subject, batch, {"look": probe(Needs(SITES, controls={NO_CONTEXT}))(look(seen))})
    cut, own = seen["view"].no_context.residual[-1], seen["view"].capture.residual[-1]
    torch.testing.assert_close(cut[one], own[one], rtol=1e-5, atol=1e-5)
    assert ((cut - own)[~one].abs().amax(-1) > 1e-2).all()


def test_with_attention_cut_the_control_is_the_model_itself():
    """W_O = 0: the mean of nothing is nothing, and the control differs from the model nowhere."""
    subject = Model.load("pocket:llama", device="cpu")
    with torch.no_grad():
        for layer in subject.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    seen: dict = {}
    run_probes(subject, texts(*range(12)), {"look": probe(Needs(SITES, controls={NO_CONTEXT}))(look(seen))})
    view = seen["view"]
    assert torch.equal(view.no_context.residual, view.capture.residual)
    assert torch.equal(view.no_context.entropy, view.capture.entropy)


def test_the_runner_reads_it_once_over_all_samples_and_a_repeat_reads_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path))
    subject = Model.load("pocket:llama", device="cpu")
    samples = {"a": texts(20, 21, 3)}
    seen: dict = {}
    needs = Needs(frozenset({Site.RESIDUAL, Site.VALUE}), samples=("a",), controls={NO_CONTEXT})
    options = {"samples": samples, "controls": 1, "store": str(tmp_path / "captures")}
    run_probes(subject, texts(*range(10)), {"one": probe(needs)(look(seen))}, **options)
    first = seen["view"].no_context.residual
    batch = replace(texts(*range(10)), inputs=subject.tokens(texts(*range(10))))
    plan = Plan.of(subject, batch, {"one": probe(needs)(values)}, 1, 0, samples=samples)
    works = [work for kind, _, work in plan.every(str(tmp_path / "captures")) if kind == NO_CONTEXT]
    assert works and not [shard for work in works for shard in work.missing(range(len(work.groups)))]
    assert len(seen["view"].samples["a"].no_context.prompt) == 3
    monkeypatch.setattr("llmgeom.model.running.one_pass", None)
    other = probe(needs)(lambda data: look(seen)(data))  # another probe of the same captures
    run_probes(subject, texts(*range(10)), {"two": other}, **options)
    assert torch.equal(seen["view"].no_context.residual, first)
