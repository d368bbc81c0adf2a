"""What attention writes is measured as values are, and no change of basis inside a head alters it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from llmgeom.batch import Batch, Tokens
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.probe import ProbeInput
from llmgeom.probes import value_manifold
from llmgeom.probes.shared.representation_geometry import PARTIAL, R2, RHO
from llmgeom.probes.value_manifold import CALLED, WRITE
from tests.families import FAMILIES, VOCAB

N = 40
SITES = value_manifold.NEEDS.sites | value_manifold.NEEDS.optional


def prompts() -> Batch:
    """Random prompts, two a unit; the last token is one of 6, so that the partial correlation has covariates."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (N, 9), generator=generator)
    ids[:, 8] = torch.randint(3, 9, (N,), generator=generator)
    clusters = tuple(str(i // 2) for i in range(N))
    return Batch(Tokens(ids, torch.full((N,), 9)), clusters, {"kind": "random"})


def turned(name: str, model, seed: int):
    """The same model in another basis of every kv head: values R v, and W_O undoing R for each query head."""
    other = copy.deepcopy(model)
    heads = other.config.num_attention_heads
    groups = getattr(other.config, "num_key_value_heads", None) or heads
    dim = other.config.hidden_size // heads
    generator = torch.Generator().manual_seed(seed)
    for index in range(other.config.num_hidden_layers):
        family = FAMILIES[name]
        projection = family.part(other, index, family.projection)
        output = family.part(other, index, family.output)
        for group in range(groups):
            r = torch.eye(dim) + 0.9 * torch.randn(dim, dim, generator=generator) / dim**0.5
            r = r.to(output.weight.dtype)
            # Rows of the fused projection, [head (query key value) dim], or of v_proj, [kv_head dim].
            start = (3 * group + 2) * dim if name == "gpt_neox" else group * dim
            rows = slice(start, start + dim)
            with torch.no_grad():
                projection.weight[rows] = r @ projection.weight[rows]
                if projection.bias is not None:
                    projection.bias[rows] = r @ projection.bias[rows]
                for head in range(group * heads // groups, (group + 1) * heads // groups):
                    columns = slice(head * dim, (head + 1) * dim)
                    output.weight[:, columns] = output.weight[:, columns] @ torch.linalg.inv(r)
    return other


def made(subject: Subject, batch: Batch, entropy: np.ndarray | None = None) -> ProbeInput:
    """A scan's view with a few untrained controls only: what is compared are values, not verdicts."""
    capture = subject.capture(batch, SITES)
    untrained = tuple(subject.untrained(1 + i).capture(batch, {*SITES, Site.ENTROPY}) for i in range(2))
    found = np.random.default_rng(0).uniform(0, 8, N) if entropy is None else entropy
    return ProbeInput(capture=capture, entropy=found, untrained=untrained, shuffled=untrained, seed=0)


def measure(view: ProbeInput, part: str):
    return value_manifold.measure(view).parts[part]


def numbers(result) -> np.ndarray:
    """Every curve, the scores' size, and every metric's value and interval."""
    curves = [
        result.pc1.value,
        result.pc12.value,
        result.participation.value,
        result.rho.value,
        result.r2.value,
        np.abs(result.scores).ravel(),
    ]
    return np.concatenate([*curves, *([h.value, h.low, h.high] for h in result.estimates)])


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_change_of_basis_inside_heads_alters_values_and_not_writes(name):
    batch, model = prompts(), FAMILIES[name].model().double()
    plain, other = Subject.of(model), Subject.of(turned(name, model, 1))
    ids = batch.inputs.ids
    with torch.no_grad():
        np.testing.assert_allclose(other.model(ids).logits, plain.model(ids).logits, atol=1e-8)
    before = made(plain, batch)
    after = replace(before, capture=other.capture(batch, SITES))
    writes = [numbers(measure(v, WRITE)) for v in (before, after)]
    np.testing.assert_allclose(writes[1], writes[0], rtol=1e-4, atol=1e-4)
    own, moved = (measure(v, "") for v in (before, after))
    for field in ("pc1", "pc12", "participation", "r2"):
        change = np.abs(getattr(moved, field).value / getattr(own, field).value - 1)
        assert change.max() > 0.01, field


def test_it_measures_the_writes_themselves_under_names_of_its_own():
    batch = prompts()
    view = made(Subject.of(FAMILIES["llama"].model()), batch)
    result = measure(view, WRITE)
    for layer, write in enumerate(view.capture.attention_write.double().numpy()):
        z = StandardScaler().fit_transform(write)
        pca = PCA().fit(z)
        assert result.pc12.value[layer] == pytest.approx(pca.explained_variance_ratio_[:2].sum(), rel=1e-5)
        score = pca.transform(z)[:, 0]
        assert result.rho.value[layer] == pytest.approx(abs(spearmanr(score, view.entropy)[0]), abs=1e-6)
    names = {h.name: h for h in result.estimates}
    expected = {"PC1 share", "PC1+PC2 share", "participation ratio", RHO, f"{RHO}, {PARTIAL}", R2}
    assert set(names) == {CALLED + name for name in expected}
    assert names[CALLED + "PC1+PC2 share"].value == pytest.approx(result.pc12.value[-1])
    assert names[CALLED + R2].value == pytest.approx(result.r2.value[-1])


def test_entropy_that_the_write_holds_is_read_from_it():
    batch = prompts()
    subject = Subject.of(FAMILIES["llama"].model())
    write = subject.capture(batch, SITES).attention_write[-1].double().numpy()
    direction = np.random.default_rng(1).standard_normal(write.shape[1])
    z = StandardScaler().fit_transform(write)
    held, noise = (measure(made(subject, batch, e), WRITE) for e in (z @ direction, None))
    assert held.r2.value[-1] > 0.3 > noise.r2.value[-1]
