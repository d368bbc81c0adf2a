"""Attention on bearing positions, on attention whose answer is known and on a model set by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from llmgeom.batch import Batch
from llmgeom.errors import Unavailable, UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.probe import WHOLE, ProbeInput
from llmgeom.probes import qk_alignment
from llmgeom.probes.qk_alignment import BEST, CHANGE, LAST, PLACES
from llmgeom.probes.shared.nulls import cross_selected
from llmgeom.run import run_probes
from llmgeom.wind_tunnels import load_world
from tests.refusals import refused
from tests.words import beyond

RECALL = load_world("recall:keys=12,values=12,queries=3")


@pytest.fixture(autouse=True)
def _fewer_placebos(monkeypatch):
    monkeypatch.setattr(qk_alignment, "PLACEBOS", 99)


def captured(batch: Batch, rows: list[np.ndarray]) -> Capture:
    """Attention rows [sequence query head position] of each layer, as they would have been captured."""
    prompt, position = batch.query.nonzero(as_tuple=True)
    tensors = {(Site.ATTENTION, i): torch.from_numpy(x).flatten(0, 1).float() for i, x in enumerate(rows)}
    return Capture(batch, prompt, position, batch.inputs.lengths, tensors)


def even(task, n: int, heads: int = 2, window: int = 99) -> np.ndarray:
    """Over all positions up to the query, or the last `window` of them."""
    x = np.zeros((n, len(task.query), heads, task.length))
    for i, q in enumerate(task.query):
        first = max(0, q + 1 - window)
        x[:, i, :, first : q + 1] = 1 / (q + 1 - first)
    return x


def noisy(task, n: int, rng: np.random.Generator, heads: int = 2) -> np.ndarray:
    x = even(task, n, heads) * np.exp(0.5 * rng.standard_normal((n, len(task.query), heads, task.length)))
    return x / x.sum(-1, keepdims=True)


def on_bearing(batch: Batch) -> np.ndarray:
    """All weight evenly on what bears, the query's own position left out; one head."""
    x = batch.posterior.bearing.numpy().astype(float)
    for i, q in enumerate(batch.query[0].nonzero()[:, 0].tolist()):
        x[:, i, q] = 0
    return (x / np.maximum(x.sum(-1, keepdims=True), 1))[:, :, None]


def measured(task, batch: Batch, rows: list[np.ndarray], seed: int = 0, untrained=None):
    rng = np.random.default_rng(seed)
    n, heads = len(batch), rows[0].shape[2]
    untrained = untrained or [[noisy(task, n, rng, heads) for _ in rows] for _ in range(20)]

    whole = ProbeInput(captured(batch, rows), np.zeros(0), tuple(captured(batch, one) for one in untrained))
    return qk_alignment.measure(ProbeInput(whole.capture, np.zeros(n), samples={WHOLE: whole}, seed=seed))


def heads(result) -> dict:
    return {h.name: h for h in result.estimates}


def test_even_attention_has_no_excess_whatever_the_first_position_and_the_query_itself_take():
    batch = RECALL.sample(40, 0)
    sink = even(RECALL, 40)
    sink *= 0.1
    sink[..., 0] += 0.6
    for i, q in enumerate(RECALL.query):
        sink[:, i, :, q] += 0.3
    result = measured(RECALL, batch, [even(RECALL, 40), sink])
    np.testing.assert_allclose(result["excess"], 0, atol=1e-6)
    found = heads(result)
    for name in (LAST, CHANGE):
        assert found[name].value == pytest.approx(0, abs=1e-6) and beyond(found[name]) == "no"


def by_hand(batch: Batch, rows: np.ndarray, head: int, back: int = 99) -> float:
    """The mean over queries with contrast of weight on bearing positions less their share of the weight, in Python."""
    found = []
    for s in range(len(batch)):
        for i, q in enumerate(batch.query[s].nonzero()[:, 0].tolist()):
            counts = [j for j in range(1, q) if q - j <= back]
            bears = [j for j in counts if batch.posterior.bearing[s, i, j]]
            if 0 < len(bears) < len(counts):
                a = rows[s, i, head]
                found.append(sum(a[j] for j in bears) - sum(a[j] for j in counts) * len(bears) / len(counts))
    return float(np.mean(found))


def test_attention_on_the_matching_pair_is_found_in_value_head_and_verdict():
    batch, rng = RECALL.sample(60, 1), np.random.default_rng(1)
    blank, sharp = noisy(RECALL, 60, rng), noisy(RECALL, 60, rng)
    sharp[:, :, 1] = on_bearing(batch)[:, :, 0]
    result = measured(RECALL, batch, [blank, sharp])
    for layer, rows in enumerate((blank, sharp)):
        for head in (0, 1):
            assert result["excess"][layer, head] == pytest.approx(by_hand(batch, rows, head), abs=1e-6)
    assert result["content"][1, 1] > 0.5 and abs(result["content"][:, 0]).max() < 0.05
    found = heads(result)
    assert found[BEST].value == pytest.approx(result["content"][1, 1], abs=1e-9)
    assert found[LAST].value == pytest.approx(result["excess"][1].mean(), abs=1e-9)
    assert found[CHANGE].value == pytest.approx(result["excess"][1].mean() - result["excess"][0].mean(), abs=1e-9)
    assert {beyond(found[name]) for name in (LAST, CHANGE, BEST)} == {"yes"}
    assert result.notes[-1].endswith("on the other: L1H1, L1H1")
    assert result["excess"][1, 1] < result["most"] < 1
    # Turned round, the last layer has lost what the first had.
    turned = heads(measured(RECALL, batch, [sharp, blank]))
    assert turned[CHANGE].value == pytest.approx(-found[CHANGE].value) and beyond(turned[CHANGE]) == "no"
    assert turned[BEST].value == pytest.approx(found[BEST].value) and beyond(turned[BEST]) == "yes"


def test_attention_on_what_bears_in_another_sequence_is_above_untrained_models_and_not_above_its_null():
    """A rule about places: always the values, none the keys, in whichever sequence."""
    task = load_world("bijection:replacement=true")
    batch, rows = task.sample(80, 2), None
    rows = even(task, 80)
    rows[..., 0::2] = 0
    rows /= np.maximum(rows.sum(-1, keepdims=True), 1e-9)
    result = measured(task, batch, [rows, rows])
    found = heads(result)
    assert found[LAST].value > 0.15 and found[LAST].null.startswith("positions that bear in another sequence")
    assert beyond(found[LAST]) != "yes" and beyond(found[BEST]) != "yes"
    # Exchanges hold the sampling noise themselves: the interval has their centre to clear, not their end.
    assert found[LAST].null_low < found[LAST].centre < found[LAST].null_high
    assert abs(result["content"]).max() < 0.05
    turned = replace(batch, posterior=batch.posterior.take(np.arange(79, -1, -1)))
    exchanged = measured(task, batch, [on_bearing(turned)])
    assert beyond(heads(exchanged)[BEST]) != "yes" and abs(heads(exchanged)[BEST].value) < 0.1


def test_where_the_same_places_bear_everywhere_the_headline_says_so():
    task = load_world("bijection")
    batch = task.sample(40, 3)
    result = measured(task, batch, [even(task, 40, 1), on_bearing(batch)])
    found = heads(result)
    assert set(found) == {LAST + PLACES, CHANGE + PLACES}
    assert beyond(found[LAST + PLACES]) == "yes" and found[LAST + PLACES].null == "untrained (20 draws)"
    assert found[CHANGE + PLACES].claim and not found[LAST + PLACES].claim
    assert "the same positions bear in every sequence" in result.notes[-1]
    np.testing.assert_allclose(result["content"], 0, atol=1e-9)


def test_a_task_without_contrast_is_refused_and_one_layer_has_no_change():
    ring, coin = load_world("markov:steps=6"), load_world("coin:steps=6")
    with refused(UserError, "no query has both"):
        measured(ring, ring.sample(20, 0), [even(ring, 20)])
    with refused(Unavailable, "which positions bear"):
        measured(coin, coin.sample(20, 0), [even(coin, 20)])
    one = measured(RECALL, RECALL.sample(40, 0), [even(RECALL, 40)])
    assert CHANGE in one.unmeasured and CHANGE not in heads(one)


def test_a_head_that_chance_made_largest_is_not_above_its_null():
    """Best of 8 heads that know nothing: found and measured on the same sequences it would mostly be above 0."""
    half, rng = np.arange(40) % 2, np.random.default_rng(0)
    above = [cross_selected(rng.standard_normal((8, 40)), half, 0)[0].mean() for _ in range(400)]
    assert abs(np.mean(above)) < 4 * np.std(above) / 20
    each = rng.standard_normal((3, 40))
    each[2, half == 0] += 9
    each[1, half == 1] += 9
    value, which = cross_selected(each, half, 0)
    assert which == (2, 1)
    np.testing.assert_array_equal(value, np.where(half == 0, each[1], each[2]))


def untrained(seed: int) -> Model:
    config = transformers.GPT2Config(
        vocab_size=RECALL.vocabulary, n_positions=16, n_embd=32, n_layer=2, n_head=2, initializer_range=0.18
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model.of(transformers.GPT2LMHeadModel(config))


def matching() -> Model:
    """Two layers of one head: the first attends evenly, the second to every token like the query's; nothing is written.

    Embeddings are one-hot, positions nothing, so that a layer norm keeps equal tokens equal and others at one angle.
    """
    subject = untrained(0)
    config = subject.model.config
    config.n_head = 1
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(torch.eye(config.vocab_size, config.n_embd))
        for block in model.transformer.h:
            block.ln_1.weight.fill_(1)
        width = config.n_embd
        strong = 3 * torch.eye(width)
        model.transformer.h[1].attn.c_attn.weight[:, : 2 * width] = torch.cat([strong, strong], 1)
        # Elsewhere keys have a direction too, or their cosines would be 0 over 0; queries of 0 see them all alike.
        model.transformer.h[0].attn.c_attn.weight[:, width : 2 * width] = strong
    return Model.of(model, name="matching")


def test_a_model_set_by_hand_to_look_at_the_matching_key():
    """Half of the weight is on the key that is asked about, half on the query itself, which is the same token."""
    task, subject = RECALL, matching()
    # GPT-2's width must hold every token.
    assert subject.facts["d_model"] >= task.vocabulary
    record = run_probes(
        subject, task.truncated(60, 0), {"qk_alignment": qk_alignment}, samples={WHOLE: task.sample(60, 0)}, seed=0
    )
    batch, expected = task.sample(60, 0), []
    for x in batch.inputs.data.tolist():
        for q in task.query:
            place = x.index(x[q])  # the first position does not count: there the pair's value alone bears, unseen
            expected.append(0.0 if place == 0 else 0.5 * (1 - 2 / (q - 1)))
    found = {h.name: h for h in record.results["qk_alignment"].estimates}
    for name in (LAST, CHANGE):
        assert found[name].value == pytest.approx(np.mean(expected), abs=1e-3)
        assert found[name].verdict == "holds"
    assert beyond(found[BEST]) == "yes"


def test_a_window_s_even_attention_has_no_excess_either():
    task = load_world("bijection")
    batch, rows = task.sample(30, 4), even(task, 30, window=4)
    untrained = [[even(task, 30), rows]] * 20
    result = measured(task, batch, [even(task, 30), rows], untrained=untrained)
    np.testing.assert_allclose(result["excess"], 0, atol=1e-6)
    rows = noisy(task, 30, np.random.default_rng(0)) * (rows > 0)
    assert measured(task, batch, [rows], untrained=[[rows]] * 20)["excess"][0, 1] == pytest.approx(
        by_hand(batch, rows, 1, back=3), abs=1e-6
    )
