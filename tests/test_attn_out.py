"""What attention writes is measured as values are, and no change of basis inside a head alters it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmgeom.batch import Batch, Tokens
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.probe import ProbeInput
from llmgeom.probes import value_manifold
from llmgeom.probes.shared import representation_geometry
from llmgeom.probes.value_manifold import WRITE
from llmgeom.stats.manifold import shares
from tests.families import FAMILIES, VOCAB

N = 40


@pytest.fixture(autouse=True, scope="module")
def few_draws():
    """No p is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(representation_geometry, "RIDGE_PERMUTATIONS", 9)
        patch.setattr(representation_geometry, "PERMUTATIONS", 99)
        patch.setattr(value_manifold, "GAUSSIANS_OF_CONTROLS", 3)
        yield


SITES = value_manifold.NEEDS.sites | value_manifold.NEEDS.optional


def prompts() -> Batch:
    """Random prompts, two a unit; the last token is one of 6, so that the partial correlation has covariates."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (N, 9), generator=generator)
    ids[:, 8] = torch.randint(3, 9, (N,), generator=generator)
    clusters = tuple(str(i // 2) for i in range(N))
    return Batch(Tokens(ids, torch.full((N,), 9)), clusters, {"kind": "random"})


def turned(model, seed: int):
    """The same Llama in another basis of every kv head: values R v, and W_O undoing R for each query head."""
    other = copy.deepcopy(model)
    heads, groups = other.config.num_attention_heads, other.config.num_key_value_heads
    dim = other.config.hidden_size // heads
    generator = torch.Generator().manual_seed(seed)
    for layer in other.model.layers:
        values, output = layer.self_attn.v_proj, layer.self_attn.o_proj
        for group in range(groups):
            r = torch.eye(dim) + 0.9 * torch.randn(dim, dim, generator=generator) / dim**0.5
            r = r.to(output.weight.dtype)
            rows = slice(group * dim, (group + 1) * dim)
            with torch.no_grad():
                values.weight[rows] = r @ values.weight[rows]
                for head in range(group * heads // groups, (group + 1) * heads // groups):
                    columns = slice(head * dim, (head + 1) * dim)
                    output.weight[:, columns] = output.weight[:, columns] @ torch.linalg.inv(r)
    return other


def made(subject: Model, batch: Batch) -> ProbeInput:
    """A scan's view with a few untrained controls only: what is compared are values, not verdicts."""
    capture = subject.capture(batch, SITES)
    untrained = tuple(subject.untrained(1 + i).capture(batch, {*SITES, Site.ENTROPY}) for i in range(2))
    entropy = np.random.default_rng(0).uniform(0, 8, N)
    return ProbeInput(capture=capture, entropy=entropy, untrained=untrained, shuffled=untrained, seed=0)


def numbers(result) -> np.ndarray:
    """Every curve, the scores' size, and every metric's value and interval."""
    names = ("pc1", "pc12", "participation", "rho", "r2", "scores")
    curves = [np.abs(result[WRITE + name]).ravel() for name in names]
    of_writes = [h for h in result.estimates if "attn_out" in h.name]
    assert of_writes
    return np.concatenate([*curves, *([h.value, h.low, h.high] for h in of_writes)])


def test_a_change_of_basis_inside_heads_alters_values_and_not_writes():
    batch, model = prompts(), FAMILIES["llama"].model().double()
    plain, other = Model.of(model), Model.of(turned(model, 1))
    ids = batch.inputs.ids
    with torch.no_grad():
        np.testing.assert_allclose(other.model(ids).logits, plain.model(ids).logits, atol=1e-8)
    before = made(plain, batch)
    after = replace(before, capture=other.capture(batch, SITES))
    own, moved = (value_manifold.measure(v) for v in (before, after))
    np.testing.assert_allclose(numbers(moved), numbers(own), rtol=1e-4, atol=1e-4)
    for layer, write in enumerate(before.capture.attn_out.double().numpy()):
        assert own[WRITE + "pc12"][layer] == pytest.approx(shares(write).numbers[1]), "of the writes themselves"
    for field in ("pc1", "pc12", "participation", "r2"):
        change = np.abs(moved[field] / own[field] - 1)
        assert change.max() > 0.01, field
