"""An edited pass that begins at its first edited layer and position is the whole edited pass."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmgeom.batch import Batch, Tokens
from llmgeom.model import resume
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit, Resume, Where
from llmgeom.model.intervention import Intervention, Runner, add
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer, Step
from llmgeom.model.resume import clean_pass
from tests.families import FAMILIES, ragged

SITES = {Site.FINAL, Site.LOG_PROBS}
POINTS = ("residual", "query", "key", "value", "z", "attn_out", "mlp_out")


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request) -> Model:
    return Model.of(FAMILIES[request.param].model(), name=request.param)


def moved(point, layer: int, first: torch.Tensor) -> Edit:
    """Adds something that differs at every position from `first` on, in each copy of a batch another thing."""

    def function(x, where: Where):
        place, copy = where.position + 1.0, 1.0 + where.prompt[:, None] // len(first)
        step = torch.randn(x.shape[2:], generator=torch.Generator().manual_seed(3))
        size = (place * copy * (where.position >= first[where.prompt % len(first)][:, None])).to(x)
        return x + 0.3 * size.view(*size.shape, *[1] * (x.dim() - 2)) * step

    return Edit(point, function, (layer,), spec={"add": point})


@pytest.fixture(scope="module")
def clean(subject):
    return clean_pass(subject, ragged())


@pytest.mark.parametrize("point", POINTS)
def test_it_is_the_whole_edited_pass(subject, clean, point):
    """In two copies of four ragged prompts, with windows, caps, sinks, grouped heads and parallel branches; compared
    in the final residual stream's rms, which each edit moves by far more."""
    batch = ragged()
    lengths, two = subject.tokens(batch).lengths, batch.take([*range(len(batch))] * 2)
    assert clean is not None
    plain = subject.capture(two, {Site.FINAL})
    for layer in range(len(subject.blocks)):
        first = (lengths - 2 - layer % 2).clamp(min=0)
        edit = moved(point, layer, first)
        ours = subject.capture(two, SITES, [edit], resume=Resume(clean, layer, first))
        whole = subject.capture(two, SITES, [edit])
        rms = whole.final.square().mean().sqrt()
        assert (ours.final - whole.final).abs().max() < 1e-5 * rms
        assert (ours.log_probs - whole.log_probs).abs().max() < 1e-4
        assert (whole.final - plain.final).abs().max() > 1e-2 * rms


def test_copies_that_begin_at_positions_of_their_own_are_the_whole_passes(subject, clean):
    """Of a runner: other layers and positions in each copy, read at the end or in what attention writes in a layer."""
    batch = ragged()
    tokens = subject.tokens(batch)
    place = torch.arange(tokens.data.shape[1])
    real = place < tokens.lengths[:, None]
    steps = 0.3 * torch.randn(int(real.sum()), subject.facts["d_model"], dtype=torch.float64)
    at = (place == tokens.lengths[:, None] - 1, place >= tokens.lengths[:, None] // 2, place == 0)
    whole = Runner(subject, batch, real, lambda _, x: {"x": x[0].float().flatten(1).numpy()})
    resumed = replace(whole, clean=clean)
    for layer in range(len(subject.blocks)):
        edits = [Intervention("", {("residual", k): add(steps)}, at=one & real) for k in (0, layer) for one in at]
        ours, theirs = resumed.measure(edits)["x"], whole.measure(edits)["x"]
        assert np.abs(ours - theirs).max() < 1e-4 and np.abs(theirs[0] - theirs[1]).max() > 1e-2
        inside = {"sites": (Site.ATTN_OUT,), "layer": layer, "batch": replace(batch, query=real)}
        if subject.partial({Site.ATTN_OUT}):
            continue
        ours, theirs = (replace(one, **inside).measure(edits[3:])["x"] for one in (resumed, whole))
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


def test_layers_below_and_positions_before_do_not_run(subject, clean):
    batch, ran = ragged(), []
    lengths = subject.tokens(batch).lengths

    def watched(layer: int):
        def hook(_module, _args, out):
            ran.append((layer, (out[0] if isinstance(out, tuple) else out).shape[:-1].numel()))

        return hook

    writers = [(i, block.mlp_writer) for i, block in enumerate(subject.blocks) if block.mlp_writer is not None]
    handles = [module.register_forward_hook(watched(i)) for i, module in writers]
    subject.capture(batch, SITES, resume=Resume(clean, len(subject.blocks) - 1, lengths - 1))
    for handle in handles:
        handle.remove()
    assert {layer for layer, _ in ran} <= {len(subject.blocks) - 1}
    assert sum(tokens for _, tokens in ran) == len(batch)
    assert all("forward" not in vars(block.layer) for block in subject.blocks)  # the model is as it was


def test_a_forward_of_a_layer_s_own_stays():
    """accelerate, and users, set `forward` on a module: it runs, and is there afterwards."""
    subject, batch, ran = Model.of(FAMILIES["llama"].model(), name="llama"), ragged(), []
    layer = subject.blocks[-1].layer
    plain = layer.forward
    layer.forward = own = lambda *args, **kwargs: (ran.append(1), plain(*args, **kwargs))[1]
    clean, lengths = clean_pass(subject, batch), subject.tokens(batch).lengths
    ran.clear()
    subject.capture(batch, SITES, resume=Resume(clean, len(subject.blocks) - 1, lengths - 1))
    assert ran and layer.forward is own


def test_where_it_would_be_wrong_every_pass_is_whole(monkeypatch, caplog):
    """A family whose mask is not what the clean pass saw is noticed; an edited model has edits before the first."""
    subject = Model.of(FAMILIES["llama"].model(), name="llama")
    batch = ragged()
    with caplog.at_level(logging.INFO, "llmgeom"):
        assert clean_pass(subject.edit("value", 0, layers=0), batch) is None and "it has edits" in caplog.text
        seen = resume._seen
        everything = torch.ones(99, 99, dtype=torch.bool)
        monkeypatch.setattr(resume, "_seen", lambda *given: ((everything,) * len(subject.blocks), seen(*given)[1]))
        assert clean_pass(subject, batch) is None and "of the rms away" in caplog.text


EVERYWHERE = (Site.ATTN_OUT, Site.MLP_OUT, Site.VALUE, Site.RESIDUAL)


def sums(step: Step) -> dict[str, torch.Tensor]:
    """[row] of each site the sum over layers, positions and coordinates, each position with a weight of its own."""
    weight = step.all_position + 1.0
    return {
        site: sum(step.sums(x.flatten(1).sum(1) * weight) for x in step.everywhere(site))[step.prompt]
        for site in EVERYWHERE
    }


def test_tokens_with_which_all_inputs_begin_run_once(subject, monkeypatch):
    """What is captured is what it is without that, rows of attention over the whole text and sums over it, too."""
    ids = torch.randint(1, 90, (60, 24), generator=torch.Generator().manual_seed(0))
    ids[:, :13] = ids[0, :13]
    ids[40, 11] = 91  # one input parts from the others earlier
    batch = Batch(Tokens(ids, torch.arange(60) % 10 + 15), ("a",) * 60, {})
    ran = []
    subject.capture(batch.take([0]), Site)  # what is found by trial is found at the first use
    subject.model.get_input_embeddings().register_forward_hook(lambda _m, args, _o: ran.append(args[0].numel()))
    reading = {"positions": (-1, -2), "observers": (Observer("all", sums, everywhere=frozenset({*EVERYWHERE})),)}
    shared = subject.capture(batch, Site, **reading)
    monkeypatch.setattr("llmgeom.model.passes.SPARED", 99)
    tokens, ran[:] = sum(ran), []
    whole = subject.capture(batch, Site, **reading)
    assert tokens < 0.8 * sum(ran)
    assert shared.position.equal(whole.position) and shared.tensors.keys() == whole.tensors.keys()
    for key, tensor in whole.tensors.items():
        ours = shared.tensors[key]
        if key[0] is Site.LIKELY:  # the last of several tokens that are as likely may be another
            ours, tensor = ours[:, 1], tensor[:, 1]
        near = 1e-4 if str(key[0]).startswith("all.") else 1e-5  # of sums
        assert (ours - tensor).abs().max() < near * tensor.square().mean().sqrt() + 1e-6, key
