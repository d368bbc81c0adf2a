"""Attention focus on rows whose entropy is known: sinks, windows, uniform rows, and curves that fall or wander."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.probe import ProbeInput
from llmgeom.probes import attention_focus
from llmgeom.probes.attention_focus import Reach, visible
from tests.families import FAMILIES, LENGTHS, ragged
from tests.observed import observe
from tests.refusals import refused
from tests.words import beyond, named

N = 60
SITES = (Site.ATTENTION_ENTROPY, Site.ATTENTION_FIRST, Site.ATTENTION_REST)


def entropies(w: np.ndarray) -> np.ndarray:
    """Nats, by numpy; 0 log 0 is 0."""
    w = w / w.sum(-1, keepdims=True)
    return -np.where(w > 0, w * np.log(np.where(w > 0, w, 1)), 0).sum(-1)


def of_rows(rows: list[np.ndarray], positions: np.ndarray | None = None) -> Capture:
    """From attention rows [prompt head token] of each layer."""
    n, _, length = rows[0].shape
    tensors = {}
    for layer, w in enumerate(rows):
        for site, x in zip(SITES, (entropies(w), w[..., 0], entropies(w[..., 1:])), strict=True):
            tensors[site, layer] = torch.from_numpy(x.astype(np.float32))
    position = torch.full((n,), length - 1) if positions is None else torch.from_numpy(positions)
    batch = Batch(
        Tokens(torch.zeros(n, length, dtype=torch.int64), position + 1), tuple(f"t{i // 2}" for i in range(n)), {}
    )
    return Capture(batch, torch.arange(n), position, position + 1, tensors)


def drawn(rng: np.random.Generator, sharp: list[float], sink: float = 0.0, n=N, heads=3, length=12) -> list[np.ndarray]:
    """Softmax rows, one sharpness a layer; `sink` of the last layer's mass sits on the first token."""
    rows = []
    for s in sharp:
        w = np.exp(s * rng.standard_normal((n, heads, length)))
        rows.append(w / w.sum(-1, keepdims=True))
    rows[-1] *= 1 - sink
    rows[-1][..., 0] += sink
    return rows


def view(sharp: list[float], seed: int, sink: float = 0.0, null: float = 0.5) -> ProbeInput:
    rng = np.random.default_rng(seed)
    own, entropy = of_rows(drawn(rng, sharp, sink)), rng.uniform(0, 8, N)
    untrained, shuffled = (tuple(of_rows(drawn(rng, [null] * len(sharp))) for _ in range(20)) for _ in range(2))
    return ProbeInput(own, entropy, untrained, shuffled, seed=seed)


def verdicts(result) -> dict[str, str]:
    return {h.name: beyond(h) for h in result.estimates}


def test_focusing_is_one_minus_the_ratio_of_the_mean_entropies():
    given = view([0.5, 1.5, 3.0], 0)
    result = attention_focus.measure(given)
    first = given.capture.tensors[Site.ATTENTION_ENTROPY, 0].double().mean() / np.log(12)
    last = given.capture.tensors[Site.ATTENTION_ENTROPY, 2].double().mean() / np.log(12)
    found = named(result)
    assert found["focusing"].value == pytest.approx(1 - float(last / first), abs=1e-6)
    assert result["normalised"][0] == pytest.approx(float(first), abs=1e-6)
    words = {"focusing": "yes", "focusing without the first token": "yes", "weight on the first token": "no"}
    assert verdicts(result) == words


def test_a_sink_alone_narrows_attention_but_not_without_the_first_token():
    found = verdicts(attention_focus.measure(view([0.5, 0.5, 0.5], 1, sink=0.9)))
    assert found["focusing"] == "yes"
    assert found["focusing without the first token"] != "yes"
    assert found["weight on the first token"] == "yes"


def test_what_untrained_models_or_scrambled_text_do_as_well_is_not_above_the_null():
    given = view([0.5, 1.0, 3.0], 3)
    same = [tuple(of_rows(drawn(np.random.default_rng(i), [0.5, 1.0, 3.0])) for i in range(20))] * 2
    for untrained, shuffled in ((same[0], given.shuffled), (given.untrained, same[1])):
        found = verdicts(attention_focus.measure(replace(given, untrained=untrained, shuffled=shuffled)))
        assert found["focusing"] != "yes"


def test_one_layer_has_nothing_to_narrow_from_and_no_verdict_about_it():
    result = attention_focus.measure(view([0.5], 7))
    assert set(named(result)) == {"weight on the first token"}
    assert result.warnings == ("1 layer: the first layer is also the last, and focusing is left out",)


def windowed(n: int, positions: np.ndarray, width: int) -> np.ndarray:
    """Even rows over the last `width` tokens up to each position."""
    w = np.zeros((n, 2, 16))
    for i, at in enumerate(positions):
        first = max(0, at + 1 - width)
        w[i, :, first : at + 1] = 1 / (at + 1 - first)
    return w


def test_even_attention_over_a_window_is_at_its_maximum_too():
    positions = np.resize([15, 11, 5, 3, 2], N)
    rows = [windowed(N, positions, width) for width in (16, 4, 16)]
    null = of_rows(rows, positions)
    given = ProbeInput(null, np.zeros(N), (null,) * 20, (null,) * 20, observations=Reach((16, 4, 16), (1.0, 1.0, 1.0)))
    result = attention_focus.measure(given)
    np.testing.assert_allclose(result["normalised"], 1, atol=1e-6)
    np.testing.assert_allclose(result["rest"], 1, atol=1e-6)
    assert result["entropy"][1] == pytest.approx(np.mean(np.log2(np.minimum(positions + 1, 4))), abs=1e-6)
    assert result.warnings == (
        "the final query sees at most 4 tokens in layers 1: entropy there is over log2 of that; "
        "its bits still fall with the window",
    )
    # Told of no window, the same rows look focused in the middle.
    blind = attention_focus.measure(replace(given, observations=None))
    assert blind["normalised"][1] < 0.8 and blind.warnings == ()


def test_a_window_of_one_token_is_refused():
    given = view([0.5, 0.5, 0.5], 8)
    with refused(UserError, "layer 1"):
        attention_focus.measure(replace(given, observations=Reach((12, 1, 12), (1.0, 1.0, 1.0))))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_reach_is_the_window_of_each_family_s_first_layer(name):
    family = FAMILIES[name]
    found = observe(Model.of(family.model(), None, name), ragged(), attention_focus.NEEDS)
    everything = max(LENGTHS)
    assert found.tokens[0] == (family.window or everything)
    layered = "layer_types" in family.settings or name == "gpt_oss"
    assert found.tokens[1] == (everything if layered or not family.window else family.window)
    assert all(weight < 0.99 for weight in found.weight) == (name == "gpt_oss")


def test_a_weight_of_one_head_that_rounds_to_nothing_is_no_window():
    """What is out of a window's reach has no weight in any head."""
    weights = torch.full((1, 2, 6), 1 / 6)
    weights[0, 0, :4] = 0
    step = SimpleNamespace(
        layers=lambda site: [weights, weights[:, :1]], numbers=lambda site: [1, 3], prompt=[0], logits=weights
    )
    seen = visible(step)
    assert seen["first"].tolist() == [[0, 0, 0, 4]], "layers 0 and 2 have no attention, and hide nothing"
    torch.testing.assert_close(seen["weight"], torch.tensor([[1, 2 / 6, 1, 2 / 6]]))


def test_short_prompts_are_left_out_and_said_so():
    given = view([0.5, 0.5, 0.5], 10)
    position = given.capture.position.clone()
    position[:10] = 1
    result = attention_focus.measure(replace(given, capture=replace(given.capture, position=position)))
    assert result.estimates[0].n == N - 10
    kept = given.capture.tensors[Site.ATTENTION_FIRST, 2][10:].double().mean()
    assert named(result)["weight on the first token"].value == pytest.approx(float(kept))
    assert result.warnings == ("10 prompts of fewer than 3 tokens were left out",)


def test_too_few_long_prompts_are_refused():
    given = view([0.5, 0.5, 0.5], 11)
    short = replace(given.capture, position=given.capture.position * 0)
    with refused(UserError, 0, 3, 5):
        attention_focus.measure(replace(given, capture=short))
