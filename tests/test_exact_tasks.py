"""Posteriors of the wind tunnels, against every sequence written out, sums over a grid, and the papers' numbers."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad

from llmgeom.stats.information import bits, entropy
from llmgeom.task import seeded
from llmgeom.wind_tunnels.tasks.bijection import Bijection
from llmgeom.wind_tunnels.tasks.coin import Coin
from llmgeom.wind_tunnels.tasks.recall import Recall
from llmgeom.wind_tunnels.tasks.recurrence import Recurrence
from llmgeom.wind_tunnels.tasks.regression import Regression, gaussian_regression
from tests import brute_force_more as brute
from tests.refusals import refused


def assert_is_enumerated(task, sequences, belief=False):
    """The task's answer at every query of every sequence, and that what it draws is among the sequences."""
    expected = brute.conditionals(sequences)
    inputs = torch.tensor(sorted({inputs for _, inputs, _ in sequences}))
    assert inputs.shape[1] == task.length
    assert tuple(position for position, *_ in sequences[0][2]) == task.query
    answer = task.log_predictive(inputs).exp()
    states = task.log_belief(inputs).exp() if belief else None
    for i, tokens in enumerate(inputs.tolist()):
        for j, position in enumerate(task.query):
            outcomes, latent = expected[tuple(tokens[: position + 1])]
            np.testing.assert_allclose(answer[i, j], [outcomes.get(k, 0) for k in range(answer.shape[-1])], atol=1e-12)
            if belief:
                np.testing.assert_allclose(states[i, j], [latent.get(k, 0) for k in range(2)], atol=1e-12)
    possible = {(tokens, tuple(k for _, k, _ in queries)) for _, tokens, queries in sequences}
    drawn = task.draw_split(400, seeded("here", 0))
    found = set(zip(map(tuple, drawn.inputs.tolist()), map(tuple, drawn.target.tolist()), strict=True))
    assert found <= possible and len(found) > min(100, len(possible) / 3)
    assert max(max(tokens) for tokens, _ in possible) < task.vocabulary


@pytest.mark.parametrize("replacement", [False, True])
def test_bijection_by_every_bijection_of_four(replacement):
    task = Bijection(vocab=4, pairs=4 if not replacement else 3, replacement=replacement)
    assert_is_enumerated(task, brute.bijections(4, task.pairs, replacement))


@pytest.mark.parametrize("layout", ["compact", "papers"])
@pytest.mark.parametrize(("pairs", "queries", "filler"), [(2, 2, 0), (3, 2, 3), (1, 1, 1)])
def test_recall_by_every_choice_of_keys_values_and_questions(layout, pairs, queries, filler):
    task = Recall(pairs, queries, filler, keys=3, values=4, layout=layout)
    assert_is_enumerated(task, brute.recalls(pairs, queries, filler, 3, 4, layout == "papers"))


@pytest.mark.parametrize("program", [0.5, 0.9])
def test_recurrence_by_every_program_and_every_prefix_of_four_numbers(program):
    task = Recurrence(modulus=5, steps=5, program=program)
    assert_is_enumerated(task, brute.recurrences(5, 5, program), belief=True)


@pytest.mark.parametrize(("modulus", "steps"), [(3, 5), (2, 6)])
def test_opaque_recurrence_by_every_program_and_every_naming(modulus, steps):
    task = Recurrence(modulus=modulus, steps=steps, opaque=True)
    assert_is_enumerated(task, brute.recurrences(modulus, steps, 0.5, opaque=True), belief=True)


def flipped(k):
    """Every sequence of k flips as the coin's inputs."""
    return torch.tensor([[2, *flips] for flips in product((0, 1), repeat=k)])


@pytest.mark.parametrize(("a", "b"), [(1, 1), (0.5, 2), (3, 4)])
def test_coin_by_an_integral_over_its_bias(a, b):
    inputs = flipped(3)
    answer = Coin(flips=4, prior=f"beta:{a},{b}").log_predictive(inputs).exp()

    def moment(heads, tails):
        return quad(lambda p: p ** (a + heads - 1) * (1 - p) ** (b + tails - 1), 0, 1)[0]

    for row, found in zip(inputs.tolist(), answer, strict=True):
        for t in range(4):
            heads, tails = row[1 : t + 1].count(0), row[1 : t + 1].count(1)
            chance = moment(heads + 1, tails) / moment(heads, tails)
            np.testing.assert_allclose(found[t], [chance, 1 - chance], rtol=1e-6)


def test_a_coin_from_a_list_by_its_biases():
    inputs, biases = flipped(4), (0.1, 0.5, 0.8)
    task = Coin(flips=5, prior="list:0.1,0.5,0.8")
    answer, belief = task.log_predictive(inputs).exp(), task.log_belief(inputs).exp()
    for row, found, latent in zip(inputs.tolist(), answer, belief, strict=True):
        for t in range(5):
            outcome, states = brute.coin(row[1 : t + 1], [(bias, 1 / 3) for bias in biases])
            np.testing.assert_allclose(found[t], outcome)
            np.testing.assert_allclose(latent[t], states)


def test_a_coin_that_always_falls_one_way_leaves_no_doubt_after_one_flip():
    task = Coin(flips=3, prior="list:0,1")
    found = task.log_predictive(torch.tensor([[2, 0, 0], [2, 1, 1]])).exp()
    np.testing.assert_allclose(found[:, 0], 0.5)
    np.testing.assert_allclose(found[:, 1:], [[[1, 0], [1, 0]], [[0, 1], [0, 1]]])
    assert (task.sample(50, 0).target == task.sample(50, 0).target[:, :1]).all()


@pytest.mark.parametrize(("noise", "scale"), [(0.5, 1.0), (0.2, 2.0)])
@pytest.mark.parametrize("layout", ["paired", "separate"])
def test_regression_by_a_sum_over_weights(layout, noise, scale):
    task = Regression(dims=1, points=4, noise=noise, scale=scale, layout=layout)
    drawn = task.draw_split(5, seeded("here", 0))
    rows = drawn.inputs.double().tolist()
    for i, found in enumerate(task.log_predictive(drawn.inputs).tolist()):
        x = [row[0] for row in (rows[i] if layout == "paired" else rows[i][0::2])]
        for t in range(4):
            seen = [value.item() for value in drawn.target[i, :t].double()]
            mean, variance = brute.regression(x[:t], seen, x[t], noise, scale)
            assert found[t] == pytest.approx([mean, math.log(variance)], abs=1e-7)


def test_regression_in_three_dimensions_by_conditioning_one_joint_normal():
    """y is jointly normal with covariance scale^2 x.x' + noise^2; no weights are mentioned."""
    x, y = torch.randn(2, 6, 4, dtype=torch.float64, generator=seeded("here", 0)).split([3, 1], -1)
    found = gaussian_regression(x, y[..., 0], 0.3, 1.7)
    assert torch.equal(found, gaussian_regression(x, y[:, :-1, 0], 0.3, 1.7))
    for i, t in product(range(2), range(6)):
        cov = 1.7**2 * x[i].numpy() @ x[i].numpy().T + 0.09 * np.eye(6)
        gain = np.linalg.solve(cov[:t, :t], cov[:t, t])
        expected = gain @ y[i, :t, 0].numpy(), np.log(cov[t, t] - gain @ cov[:t, t])
        np.testing.assert_allclose(found[i, t], expected, atol=1e-10)


@pytest.mark.parametrize(("noise", "scale"), [(0, 1), (1, -1)])
def test_a_regression_without_spread_is_named(noise, scale):
    with refused(ValueError, noise, scale):
        gaussian_regression(torch.zeros(1, 1), torch.zeros(1), noise, scale)


def test_intervals_are_equally_probable_before_x_is_known_and_cdf_differences_after():
    whole, cut = Regression(dims=2, points=6), Regression(dims=2, points=6, bins=7)
    exact, binned = whole.draw_split(500, seeded("here", 0)), cut.draw_split(500, seeded("here", 0))
    assert torch.equal(exact.inputs, binned.inputs)
    ends = stats.norm(scale=math.sqrt(2 + 0.25)).ppf(np.arange(8) / 7)
    np.testing.assert_array_equal(np.digitize(exact.target.double(), ends[1:-1]), binned.target)
    m, log_v = whole.log_predictive(exact.inputs).unbind(-1)
    expected = np.diff(stats.norm.cdf(ends, m[..., None], log_v.div(2).exp()[..., None]), axis=-1)
    np.testing.assert_allclose(cut.log_predictive(binned.inputs).exp(), expected, atol=1e-13)


def test_an_interval_far_from_the_mean_keeps_its_digits():
    """Against scipy's logsf, which has the other tail."""
    task = Regression(dims=1, points=2, noise=0.02, bins=4)
    inputs = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 1.0, 0.3]], [[1.0, 0.0, 0.0], [1.0, 1.0, -0.3]]])
    m, log_v = Regression(dims=1, points=2, noise=0.02).log_predictive(inputs)[0, 1].tolist()
    quartile = math.sqrt(1.0004) * stats.norm.ppf(0.75)
    last = stats.norm.logsf(quartile, m, math.exp(log_v / 2))
    assert last < -50
    found = task.log_predictive(inputs)[:, 1]
    np.testing.assert_allclose(found[0, 3], last)
    np.testing.assert_allclose(found[0], found[1].flip(0))


def test_rows_hold_the_pair_before_or_a_point_and_a_value_in_turn():
    paired, separate = Regression(dims=2, points=3), Regression(dims=2, points=3, layout="separate")
    one, two = paired.draw_split(4, seeded("here", 0)), separate.draw_split(4, seeded("here", 0))
    assert torch.equal(one.target, two.target)
    x, y = one.inputs[..., :2], one.target
    assert (one.inputs[:, 0, 2:] == 0).all()
    assert torch.equal(one.inputs[:, 1:, 2:4], x[:, :-1]) and torch.equal(one.inputs[:, 1:, 4], y[:, :-1])
    assert torch.equal(two.inputs[:, ::2, :2], x) and (two.inputs[:, ::2, 2:] == 0).all()
    assert torch.equal(two.inputs[:, 1::2, 2], y[:, :-1])
    assert (two.inputs[:, 1::2, 3] == 1).all() and (two.inputs[:, 1::2, :2] == 0).all()
    assert paired.query == (0, 1, 2) and separate.query == (0, 2, 4)
    torch.testing.assert_close(paired.log_predictive(one.inputs), separate.log_predictive(two.inputs))


# ---- the papers' numbers --------------------------------------------------------------------------------------------


def test_bijection_of_twenty_has_the_papers_entropies():
    task = Bijection(vocab=20, pairs=19)
    batch = task.sample(100, 0)
    h = bits(entropy(batch.posterior.predictive))
    np.testing.assert_allclose(h, np.log2(20 - np.arange(19)) * np.ones((100, 1)))
    assert h[0, [0, 9, 18]].tolist() == pytest.approx([4.3219, 3.4594, 1.0], abs=5e-5)
    assert h.mean().item() == pytest.approx(3.2146, abs=5e-5)
    assert (math.log2(20) - h).mean().item() == pytest.approx(1.1073, abs=5e-5)
    hit = batch.posterior.predictive.gather(-1, batch.target[..., None])
    assert -hit.mean().item() == pytest.approx(2.2282, abs=5e-5)
    assert task.log2_hypotheses == pytest.approx(math.log2(math.factorial(20)))


def test_recall_of_the_papers_is_329_tokens_of_522():
    task = Recall(pairs=64, queries=3, filler=32, keys=256, values=256, layout="papers")
    assert (task.length, task.vocabulary) == (329, 522)
    tokens, target = task.draw_split(1, seeded("here", 0)).inputs[0], task.draw_split(1, seeded("here", 0)).target[0]
    assert tokens[:256:4].eq(1).all() and tokens[2:256:4].eq(4).all() and tokens[256:288].eq(2).all()
    for j, at in enumerate((288, 307, 326)):
        assert tokens[at] == 3 and tokens[at + 2] == 0 and task.query[j] == at + 1
        place = tokens[1:256:4].tolist().index(tokens[at + 1].item())
        assert tokens[3:256:4][place] == 266 + target[j]
    assert bits(-task.trivial(tokens[None])["bag of values"].max()).item() == pytest.approx(6)
    assert task.log2_hypotheses == pytest.approx(
        (math.lgamma(257) - math.lgamma(193) - math.lgamma(65) + math.lgamma(257) - math.lgamma(193)) / math.log(2)
    )


@pytest.mark.parametrize(("pairs", "level"), [(4, 1.146), (8, 1.912)])
def test_the_set_strategy_on_recall_is_at_its_measured_level(pairs, level):
    task = Recall(pairs=pairs, queries=pairs, keys=2 * pairs, values=2 * pairs)
    drawn = task.draw_split(10, seeded("here", 0))
    bag = task.trivial(drawn.inputs)["bag of values"]
    loss = bits(-bag.gather(-1, drawn.target[..., None])).mean().item()
    assert loss == pytest.approx(math.log2(math.factorial(pairs)) / pairs) == pytest.approx(level, abs=1e-3)


def test_recurrence_has_the_papers_entropies():
    task = Recurrence()
    h = bits(entropy(task.sample(40_000, 0).posterior.predictive)).mean(0)
    # As printed by numbers seen, to the noise of 40,000 sequences; before any number it is log2 17 too.
    printed = [4.0875, 4.017, 2.832, 2.173, 2.047, 2.030, 2.032]
    assert h[0].item() == pytest.approx(math.log2(17)) == pytest.approx(printed[0], abs=5e-5)
    assert h[:7].tolist() == pytest.approx(printed, abs=0.03)
    assert h[7:].tolist() == pytest.approx([2.03] * 8, abs=0.03)


def test_after_four_numbers_that_agree_a_program_is_17_times_as_likely_as_chance():
    task = Recurrence()
    assert task.log2_hypotheses == pytest.approx(math.log2(290))  # 289 programs, and chance
    tokens = [1]
    while len(tokens) < 15:
        tokens.append((3 * tokens[-1] + 5) % 17)
    broken = [*tokens[:5], (tokens[5] + 1) % 17, *tokens[6:]]
    belief = task.log_belief(torch.tensor([tokens, broken])).exp()
    assert belief[:, 3, 0].tolist() == pytest.approx([17 / 18, 17 / 18])
    assert belief[:, :3, 0].tolist() == [pytest.approx([0.5] * 3)] * 2
    assert belief[0, 4, 0].item() == pytest.approx(289 / 290)
    assert (belief[1, 5:, 0] == 0).all()


# ---- what a predictor without inference says ------------------------------------------------------------------------


def test_memoryless_is_what_the_last_token_alone_says_by_enumeration():
    task, weights = Recurrence(modulus=5, steps=5, program=0.7), {}
    for weight, tokens, queries in brute.recurrences(5, 5, 0.7):
        for t, (position, outcome, _) in enumerate(queries):
            key = (t, tokens[position], outcome)
            weights[key] = weights.get(key, 0) + weight
    inputs = task.draw_split(60, seeded("here", 0)).inputs
    found = task.trivial(inputs)["memoryless"].exp()
    for i, t in product(range(60), range(4)):
        joint = np.array([weights[t, inputs[i, t].item(), k] for k in range(5)])
        np.testing.assert_allclose(found[i, t], joint / joint.sum())


def test_memoryless_of_a_coin_knows_one_flip():
    for prior in ("beta:1,1", "list:0.2,0.7"):
        found = Coin(flips=3, prior=prior).trivial(torch.tensor([[2, 0, 1]]))["memoryless"]
        one = Coin(flips=2, prior=prior).log_predictive(torch.tensor([[2, 0], [2, 1]]))
        torch.testing.assert_close(found[0], torch.stack([one[0, 0], one[0, 1], one[1, 1]]))


def test_memoryless_of_a_regression_is_its_first_answer():
    task = Regression(dims=3, points=4, scale=2.0, bins=5)
    inputs = task.draw_split(5, seeded("here", 0)).inputs
    found = task.trivial(inputs)["memoryless"]
    for t in range(4):
        alone = torch.cat([inputs[:, t : t + 1], inputs[:, 1:]], 1)
        torch.testing.assert_close(found[:, t], task.log_predictive(alone)[:, 0])


def test_a_bag_of_values_is_exact_where_keys_never_come_again_and_knows_only_that_they_do_elsewhere():
    task = Bijection(6, 5)
    inputs = task.draw_split(50, seeded("here", 0)).inputs
    assert torch.equal(task.trivial(inputs)["bag of values"], task.log_predictive(inputs))
    bag = Bijection(3, 4, True).trivial(torch.tensor([[0, 4, 1, 3, 0, 4, 2]]))["bag of values"].exp()[0]
    np.testing.assert_allclose(bag, [[1 / 3] * 3, [0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0, 1]])
