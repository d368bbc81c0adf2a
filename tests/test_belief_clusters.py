"""Belief clusters: judged by scikit-learn, states whose clusters were put where they are, and simulated nulls."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_score
from transformers import AutoModelForCausalLM, LlamaConfig

from llmgeom import wind_tunnels
from llmgeom.batch import Batch, Posterior, Tokens
from llmgeom.claims import judge
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.probe import WHOLE, ProbeInput
from llmgeom.probes import belief_clusters
from llmgeom.probes.belief_clusters import ALL, ALONE, BEYOND, Grouped, _spaces
from llmgeom.run import run_probes
from llmgeom.stats.manifold import distances
from llmgeom.wind_tunnels.models.architectures import build
from llmgeom.world import Gaussian
from tests.observed import observe
from tests.refusals import refused
from tests.words import beyond

N, STEPS, K, D = 60, 5, 3, 12
NAME = "silhouette beyond the read-out"
GIVEN = f"{NAME}, given the last observation"


# ---- states made by hand ---------------------------------------------------------------------------------------------


def read_rows(seed: int = 0) -> np.ndarray:
    """[outcome d]: what an output embedding would read, in the first K coordinates alone."""
    rows = np.zeros((K, D))
    rows[:, :K] = np.random.default_rng(seed).normal(size=(K, K))
    return rows


def of(x: np.ndarray, label: np.ndarray, token: np.ndarray, sure: float = 0.9, steps: int = STEPS) -> Capture:
    """A capture of final states [sequence step d] with beliefs that are `sure` of their label."""
    n = len(x)
    belief = np.full((n, steps, K), (1 - sure) / (K - 1))
    np.put_along_axis(belief, label[..., None], sure, -1)
    # What is asked is something else than the belief: labels are to be the belief's.
    asked = Posterior(torch.zeros(n, steps, K).log_softmax(-1), torch.from_numpy(belief).log(), tuple(range(K)))
    lengths = torch.full((n,), steps)
    ids = torch.from_numpy(token)
    batch = Batch(Tokens(ids, lengths), tuple(f"s{i}" for i in range(n)), {"kind": "task"}, posterior=asked)
    prompt, position = torch.ones(n, steps).nonzero(as_tuple=True)
    final = torch.from_numpy(x.reshape(n * steps, -1).astype(np.float32))
    return Capture(batch, prompt, position, lengths, {(Site.FINAL, -1): final})


def view(where: str, seed: int, strength: float = 3.0, n: int = N) -> ProbeInput:
    """Sequences whose final states are noise and a centre for each group, in the read-out's space, in a direction that
    nothing reads ("free"), for each token instead ("token"), or nowhere."""
    rng = np.random.default_rng(seed)
    token = rng.integers(K, size=(n, STEPS))
    # The label follows the token in two of three cases.
    label = np.where(rng.random((n, STEPS)) < 0.67, token, rng.integers(K, size=(n, STEPS)))
    rows, centres = read_rows(), rng.normal(size=(K, D))
    centred = rows - rows.mean(0)
    into = centred.T @ np.linalg.pinv(centred.T)
    centres = centres @ into if where == "read" else centres - centres @ into
    noise = lambda: rng.normal(size=(n, STEPS, D))  # noqa: E731
    x = noise() + (strength * centres[token if where == "token" else label] if where != "nowhere" else 0)
    untrained = tuple(of(noise(), label, token) for _ in range(20))
    main, reading = of(x, label, token), {"rows": rows}
    whole = ProbeInput(main, np.zeros(n * STEPS), untrained)
    few = replace(main, tensors={(Site.FINAL, -1): main.final[:40]})
    readings = tuple({"rows": read_rows(1 + i)} for i in range(20))
    return ProbeInput(few, np.zeros(40), (), (), {WHOLE: whole}, reading, readings, seed)


def measured(given: ProbeInput):
    result = belief_clusters.measure(given)
    return result, {h.name: h for h in judge({"belief_clusters": result})["belief_clusters"].estimates}


def space(result, name: str) -> float:
    return result["silhouettes"][result.ticks["space"].index(name)]


def test_clusters_in_the_read_out_are_gone_once_it_is_removed():
    result, found = measured(view("read", 0))
    assert beyond(found["silhouette"]) == "yes" and space(result, ALL) > 0.1
    assert found[NAME].verdict == "ruled out" and abs(space(result, BEYOND)) < 0.03
    assert beyond(found[GIVEN]) == "no"
    assert space(result, ALONE) > space(result, ALL)


def test_clusters_in_a_direction_that_nothing_reads_stay():
    result, found = measured(view("free", 1))
    assert beyond(found["silhouette"]) == "yes" and found[NAME].verdict == "holds"
    assert beyond(found[GIVEN]) == "yes"
    assert space(result, BEYOND) > space(result, ALL) > 0.1 and abs(space(result, ALONE)) < 0.05


def test_clusters_of_the_last_token_are_not_of_belief():
    """They would pass for belief's, which follows the token, were both not told apart."""
    result, found = measured(view("token", 2, 6.0))
    assert space(result, BEYOND) > 0.05 > result["silhouettes_null"][1, 1] and found[NAME].null_high > 0.05
    assert found[NAME].verdict == "ruled out"
    assert beyond(found[GIVEN]) == "no" and abs(found[GIVEN].value) < 0.02


def test_noise_is_seldom_called_a_cluster():
    """Labels that follow nothing: each of the three metrics is above its nulls no more often than it may be."""
    verdicts = [[beyond(h) for h in measured(view("nowhere", seed, n=24))[1].values()] for seed in range(10, 22)]
    for column in zip(*verdicts, strict=True):
        assert column.count("yes") <= 1


def test_headlines_are_what_scikit_learn_says_of_the_rows():
    given = view("free", 3)
    result, found = measured(given)
    capture, rows = given.samples[WHOLE].capture, read_rows()
    label = capture.exact.belief.argmax(-1).numpy()
    x = capture.final.double().numpy()
    basis = np.linalg.qr((rows[1:] - rows[0]).T)[0]
    beyond = x - x @ basis @ basis.T
    assert found["silhouette"].value == pytest.approx(silhouette_score(x, label), abs=1e-9)
    assert found[NAME].value == pytest.approx(silhouette_score(beyond, label), abs=1e-9)
    assert space(result, ALONE) == pytest.approx(silhouette_score(x @ basis, label), abs=1e-9)
    # Without one sequence after the other, by scikit-learn: the jackknife's own formula.
    sequence = capture.prompt.numpy()
    without = np.array([silhouette_score(x[sequence != i], label[sequence != i]) for i in range(N)])
    error = np.sqrt((N - 1) / N * np.square(without - without.mean()).sum())
    from scipy.stats import t

    half = t.ppf(0.975, N - 1) * error
    assert found["silhouette"].high == pytest.approx(found["silhouette"].value + half, abs=1e-9)
    assert found["silhouette"].clusters == N and found["silhouette"].n == N * STEPS
    # An untrained control is read through its own rows.
    untrained, theirs = given.samples[WHOLE].untrained, given.control_observations
    bands = []
    for control, one in zip(untrained, theirs, strict=True):
        own = np.linalg.qr((one["rows"][1:] - one["rows"][0]).T)[0]
        y = control.final.double().numpy()
        bands.append((silhouette_score(y, label), silhouette_score(y @ own, label)))
    low, high = result["silhouettes_null"][[0, 2]].T
    np.testing.assert_allclose(low, np.min(bands, 0), atol=1e-9)
    np.testing.assert_allclose(high, np.max(bands, 0), atol=1e-9)


# ---- silhouettes and spaces ------------------------------------------------------------------------------------------


def test_a_silhouette_of_some_of_the_rows_is_theirs_alone():
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(50, 4)), rng.integers(4, size=50)
    label[7] = 9  # alone in its group
    made = Grouped(distances(x), label)
    assert made.silhouette() == pytest.approx(silhouette_score(x, label))
    for kept in (np.arange(0, 50, 2), np.flatnonzero(label != 1), np.arange(3, 20)):
        assert made.silhouette(kept) == pytest.approx(silhouette_score(x[kept], label[kept]))
    assert made.silhouette(np.flatnonzero(label == 2)) == 0


def test_rows_that_are_alike_remove_nothing_and_as_many_as_coordinates_leave_nothing():
    x = np.random.default_rng(1).normal(size=(30, 9))
    np.testing.assert_allclose(_spaces(x, np.ones((2, 9)))[BEYOND], x)
    with refused(UserError, 10, 9):
        _spaces(x, x[:10])


# ---- which rows, which labels ----------------------------------------------------------------------------------------


def test_near_ties_and_small_groups_are_left_out_and_counted():
    given = view("free", 4)
    capture = given.samples[WHOLE].capture
    belief = capture.batch.posterior.belief.exp()
    belief[:, 0] = torch.tensor([0.42, 0.38, 0.2])  # within .05
    belief[:, 1] = torch.tensor([0.45, 0.39, 0.16])  # not
    belief[:, 2:] = torch.tensor([0.05, 0.9, 0.05])
    belief[3, 2] = torch.tensor([0.05, 0.05, 0.9])
    batch = replace(capture.batch, posterior=replace(capture.batch.posterior, belief=belief.log()))
    groups = belief_clusters._believed(replace(capture, batch=batch))
    position = capture.position.numpy()[groups.rows]
    assert len(groups.rows) == 4 * N - 1 and set(position) == {1, 2, 3, 4}
    assert (groups.label == np.where(position == 1, 0, 1)).all()
    assert groups.notes[0] == f"{N} of {N * STEPS} rows are left out, whose two likeliest are within 0.05"
    assert groups.notes[1] == "1 rows are left out, whose group has fewer than 5"


def test_labels_are_exchanged_within_query_and_token():
    capture = view("free", 6).samples[WHOLE].capture
    groups = belief_clusters._believed(capture)
    token = capture.batch.inputs.ids.flatten().numpy()
    drawn = groups.exchanged(0)
    changed = 0
    for query in range(STEPS):
        for one in range(K):
            cell = (capture.position.numpy() == query) & (token == one)
            for draw in drawn:
                assert sorted(draw[cell]) == sorted(groups.label[cell])
                changed += (draw[cell] != groups.label[cell]).any()
    assert changed > 0.9 * STEPS * K * len(drawn)


def test_one_group_is_refused():
    given = view("free", 8)
    capture = given.samples[WHOLE].capture
    same = replace(capture.batch.posterior, belief=capture.batch.posterior.belief[:1, :1].expand(N, STEPS, K))
    one = replace(capture, batch=replace(capture.batch, posterior=same))
    with refused(UserError, 1, 5):
        belief_clusters.measure(replace(given, samples={WHOLE: replace(given.samples[WHOLE], capture=one)}))


def test_a_cut_sequence_says_which_state_is_likeliest_where_it_is_asked():
    tunnel = wind_tunnels.load_world("hmm:predict=observation")
    whole, cut = tunnel.sample(20, 1), tunnel.truncated(20, 1)
    for i, at in enumerate(cut.columns["asked_at"]):
        assert cut.columns["likeliest"][i] == whole.posterior.belief[i, tunnel.query.index(at)].argmax()
    plain = wind_tunnels.load_world("bijection").truncated(5, 1)
    assert plain.columns["likeliest"] == tuple(plain.posterior.predictive[:, 0].argmax(-1).tolist())
    real = wind_tunnels.load_world("regression")
    assert isinstance(real.answers, Gaussian) and "likeliest" not in real.truncated(5, 1).columns


# ---- real models -----------------------------------------------------------------------------------------------------


def tunnel_subject(arch: str, task, seed: int = 0) -> Model:
    shape = {"vocabulary": task.vocabulary, "length": task.length, "features": task.features}
    return Model.of(build(arch, **shape, width=16, layers=1, heads=4, seed=seed), None, arch)


@pytest.mark.parametrize("arch", ["gqa", "lstm"])
def test_what_is_measured_is_scikit_learn_s_of_the_captured_states(arch):
    task = wind_tunnels.load_world("hmm:steps=4")
    subject, whole = tunnel_subject(arch, task), task.sample(30, 0, "held-out")
    probes = {"belief_clusters": belief_clusters}
    record = run_probes(subject, task.truncated(30, 0, "held-out"), probes, controls=2, samples={WHOLE: whole})
    found = record.results["belief_clusters"]
    assert found.arrays["scores"].shape == (30, 2) == found.arrays["scores_beyond"].shape
    captured = subject.capture(whole, {Site.FINAL, Site.LOG_PROBS})
    # What is read is what is captured: the rows times the state are the logits.
    rows = observe(subject, whole, belief_clusters.NEEDS)["rows"]
    logits = torch.from_numpy(captured.final.double().numpy() @ rows.T)
    torch.testing.assert_close(logits.log_softmax(-1).float(), captured.log_probs, atol=1e-4, rtol=0)
    belief = captured.exact.belief.exp()
    sure = (belief.topk(2).values @ torch.tensor([1.0, -1.0], dtype=belief.dtype)) >= 0.05
    x, label = captured.final.double().numpy()[sure], belief.argmax(-1).numpy()[sure]
    assert found.estimates[0].value == pytest.approx(silhouette_score(x, label), abs=1e-6)


def test_an_untrained_model_does_not_pass():
    task = wind_tunnels.load_world("hmm:steps=4")
    whole, cut = task.sample(60, 0, "held-out"), task.truncated(60, 0, "held-out")
    probes = {"belief_clusters": belief_clusters}
    for arch, seed in (("gpt2", 300), ("lstm", 301)):
        record = run_probes(tunnel_subject(arch, task, seed), cut, probes, controls=20, samples={WHOLE: whole})
        found = {h.name: h for h in record.results["belief_clusters"].estimates}
        assert found[NAME].verdict != "holds", (arch, found[NAME].why)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def llama(seed: int) -> Model:
    shape = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=30)
    torch.manual_seed(seed)
    return Model.of(AutoModelForCausalLM.from_config(LlamaConfig(**shape)), None, "small")


def prompts(n: int = 60) -> Batch:
    """Of six final tokens: an untrained model's answer is a look-up of the last one."""
    ids = torch.randint(6, (n, 5), generator=torch.Generator().manual_seed(0))
    return Batch(Tokens(ids, torch.full((n,), 5)), tuple(f"t{i // 2}" for i in range(n)), {"kind": "test"})


def test_prompts_are_grouped_by_the_model_s_own_likeliest_token():
    subject, batch = llama(3), prompts()
    read = observe(subject, batch, belief_clusters.NEEDS)
    with torch.no_grad():
        logits = subject.model(batch.inputs.ids).logits[:, -1]
    expected = logits.argmax(-1).numpy()
    assert (read["labels"] == expected).all() and (read["tokens"] == np.unique(expected)).all()
    np.testing.assert_allclose(read["rows"], subject.model.lm_head.weight.detach().numpy()[read["tokens"]])
    # An untrained model's answer is a look-up of the last token: nothing is left to tell.
    record = run_probes(subject, batch, {"belief_clusters": belief_clusters}, controls=2)
    assert "belief clusters cannot be distinguished from token clusters" in record.unmeasured["belief_clusters"]


def test_prompts_that_end_alike_are_measured_in_the_directions_of_their_groups():
    """Labels and states by hand, of three final tokens; a rare answer takes no direction away."""
    rng = np.random.default_rng(0)
    label = np.array([*rng.permutation([4, 9] * 28), 2, 7, 7, 2])
    ids = torch.from_numpy(rng.integers(3, size=(60, 2)))
    batch = Batch(Tokens(ids, torch.full((60,), 2)), tuple(f"t{i // 2}" for i in range(60)), {"kind": "test"})
    free = np.zeros(8)
    free[5] = 3.0

    def states(x) -> Capture:
        rows, ends = torch.arange(60), torch.ones(60, dtype=torch.int64)
        return Capture(batch, rows, ends, ends + 1, {(Site.FINAL, -1): torch.from_numpy(x)})

    noise = lambda: rng.normal(size=(60, 8))  # noqa: E731
    read = {"tokens": np.unique(label), "rows": rng.normal(size=(4, 8)), "labels": label}
    x = noise() + (label == 9)[:, None] * free
    untrained = tuple(states(noise()) for _ in range(20))
    given = ProbeInput(states(x), np.zeros(60), untrained, observations=read, control_observations=(read,) * 20)
    result, found = measured(given)
    assert found["silhouette"].n == 56
    assert result.notes == ("4 rows are left out, whose group has fewer than 5",)
    way = read["rows"][3] - read["rows"][1]
    beyond = (x - np.outer(x @ way, way) / (way @ way))[:56]
    assert found[NAME].value == pytest.approx(silhouette_score(beyond, label[:56]))
    assert found[NAME].verdict == "holds" and found[NAME].clusters == 28
