"""Every world once: exact answers against every sequence written out, the splits, the text, and what is refused."""

import dataclasses
import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from llmgeom.batch import Rows, Tokens
from llmgeom.errors import UserError
from llmgeom.prompts import text
from llmgeom.stats.information import bits, entropy, kl
from llmgeom.wind_tunnels import load_world, names
from llmgeom.wind_tunnels.chains import hundredths
from llmgeom.wind_tunnels.worlds import edge_hmm
from llmgeom.wind_tunnels.worlds.bijection import Bijection
from llmgeom.wind_tunnels.worlds.hmm import HMM
from llmgeom.wind_tunnels.worlds.keyed_hmm import KeyedHMM
from llmgeom.wind_tunnels.worlds.recall import Recall
from llmgeom.wind_tunnels.worlds.recurrence import Recurrence
from llmgeom.wind_tunnels.worlds.regression import Regression, gaussian_regression
from llmgeom.world import World, held_out, seeded
from tests import brute_force as brute
from tests.refusals import refused


def ring(many, stay):
    """The sticky ring, a row at a time."""
    rows = []
    for i in range(many):
        weight = [1 / min(abs(i - j), many - abs(i - j)) if i != j else stay for j in range(many)]
        rows.append([(1 - stay) * w / sum(weight) + stay * (i == j) for j, w in enumerate(weight)])
    return rows


def fixed_chain(rows, steps):
    many = len(rows)
    return brute.edges([[[rows[i][j] * (j == x) for j in range(many)] for i in range(many)] for x in range(many)],
                       [1 / many] * many, steps)  # fmt: skip


def mixture(stays, weights, r, steps):
    """Chain by chain, two states each: a state moves, then a symbol shows where it arrived."""
    shows = [[r, 1 - r], [1 - r, r]]
    blocks = [[[s, 1 - s], [1 - s, s]] for s in stays]
    size = 2 * len(stays)
    move = [[blocks[i // 2][i % 2][j % 2] if i // 2 == j // 2 else 0 for j in range(size)] for i in range(size)]
    moves = [[[move[i][j] * shows[j % 2][x] for j in range(size)] for i in range(size)] for x in range(2)]
    return brute.edges(moves, [w / sum(weights) / 2 for w in weights for _ in range(2)], steps)


def mess3(stay, emit, steps):
    move = [[stay if i == j else (1 - stay) / 2 for j in range(3)] for i in range(3)]
    moves = [
        [[move[i][j] * (emit if x == j else (1 - emit) / 2) for j in range(3)] for i in range(3)] for x in range(3)
    ]
    return brute.edges(moves, [1 / 3] * 3, steps)


def rrxor(steps):
    """Before the first bit; after a first bit of 0 or of 1; before an exclusive or of 1 or of 0."""
    moves = [[[0.0] * 5 for _ in range(5)] for _ in range(2)]
    moves[0][0][1] = moves[1][0][2] = moves[0][1][4] = moves[1][1][3] = moves[0][2][3] = moves[1][2][4] = 0.5
    moves[1][3][0] = moves[0][4][0] = 1.0
    return brute.edges(moves, [1 / 3, 1 / 6, 1 / 6, 1 / 6, 1 / 6], steps)


def hidden(steps):
    """The moves and emissions of `hmm:fixed=true`: a state moves, then a symbol shows where it arrived."""
    rows = (HMM(fixed=True).hypothesis(1, seeded("any", 0))[0].double() / 100).tolist()
    moves = [[[rows[i][j] * rows[j][3 + x] for j in range(3)] for i in range(3)] for x in range(3)]
    step = np.linalg.matrix_power(np.array([row[:3] for row in rows]), 200)
    return brute.edges(moves, step[0].tolist(), steps)


def stated(reliabilities, priors, steps):
    found = []
    for r, p in product(reliabilities, priors):
        shares = [[r / 10, 1 - r / 10], [1 - r / 10, r / 10]]
        found += brute.given_cause(shares, [p / 10, 1 - p / 10], steps, (p + 1, r + 10))
    return found


# A world, and every sequence that it can draw.
ENUMERATED = {
    "bijection:vocab=4,pairs=4": lambda: brute.bijections(4, 4, False),
    "bijection:vocab=4,pairs=3,replacement=true": lambda: brute.bijections(4, 3, True),
    "recall:pairs=3,queries=2,filler=3,keys=3,values=4": lambda: brute.recalls(3, 2, 3, 3, 4),
    "recall:pairs=3,queries=2,filler=3,keys=3,values=4,layout=papers": lambda: brute.recalls(3, 2, 3, 3, 4, True),
    "recall:pairs=3,queries=2,keys=4,values=2,distinct=false": lambda: brute.recalls(3, 2, 0, 4, 2, distinct=False),
    "recurrence:modulus=5,steps=5": lambda: brute.recurrences(5, 5, 0.5),
    "recurrence:modulus=5,steps=5,program=0.9": lambda: brute.recurrences(5, 5, 0.9),
    "recurrence:modulus=3,steps=5,opaque=true": lambda: brute.recurrences(3, 5, 0.5, True),
    "coin:steps=5,prior=list:0.1,0.5,0.8": lambda: brute.given_cause(
        [[0.1, 0.9], [0.5, 0.5], [0.8, 0.2]], [1 / 3] * 3, 5, (2,)
    ),
    "coin:steps=3,prior=list:0,1": lambda: brute.given_cause([[0, 1], [1, 0]], [0.5] * 2, 3, (2,)),
    "coin:steps=5,prior=beta:0.5,2": lambda: brute.of_shares([0.5, 2], 5),
    "two-point:steps=5,reliability=0.8": lambda: brute.given_cause([[0.8, 0.2], [0.2, 0.8]], [0.5] * 2, 5, (2,)),
    "dirichlet:steps=4,symbols=3,a=0.7": lambda: brute.of_shares([0.7] * 3, 4),
    "stated:steps=4,reliabilities=3,9,priors=2,5": lambda: stated((3, 9), (2, 5), 4),
    "markov:symbols=3,steps=4,fixed=false,a=0.5": lambda: brute.visible_chains(3, 4, 0.5),
    "markov:symbols=4,steps=3": lambda: fixed_chain(ring(4, 0.3), 3),
    "hmm-mixture:steps=4,stays=0.8,0.3,weights=2,1,reliability=0.7": lambda: mixture((0.8, 0.3), (2, 1), 0.7, 4),
    "edge-hmm:steps=3,stay=0.8": lambda: mess3(0.8, 0.85, 3),
    "edge-hmm:process=rrxor,steps=5": lambda: rrxor(5),
    "edge-hmm:process=hmm,steps=3": lambda: hidden(3),
}


@pytest.mark.parametrize("spec", ENUMERATED)
def test_answers_and_beliefs_are_those_of_every_sequence_written_out(spec):
    world, sequences = load_world(spec), [one for one in ENUMERATED[spec]() if one[0]]
    expected = brute.conditionals(sequences)
    inputs = torch.tensor(sorted({inputs for _, inputs, _ in sequences}))
    assert inputs.shape[1] == world.length
    assert tuple(position for position, *_ in sequences[0][2]) == world.query
    answer, belief = world.log_predictive(inputs).exp(), world.log_belief(inputs)
    for i, tokens in enumerate(inputs.tolist()):
        for j, position in enumerate(world.query):
            outcomes, latent = expected[tuple(tokens[: position + 1])]
            np.testing.assert_allclose(answer[i, j], [outcomes.get(k, 0) for k in range(answer.shape[-1])], atol=1e-12)
            if belief is not None:
                states = [latent.get(k, 0) for k in range(belief.shape[-1])]
                np.testing.assert_allclose(belief[i, j].exp(), states, atol=1e-12)
    possible = {(tokens, tuple(k for _, k, _ in queries)) for _, tokens, queries in sequences}
    drawn = world.draw_split(400, seeded("here", 0))
    found = set(zip(map(tuple, drawn.inputs.tolist()), map(tuple, drawn.target.tolist()), strict=True))
    assert found <= possible and len(found) > min(100, len(possible) / 3)
    assert max(max(tokens) for tokens, _ in possible) < world.vocabulary


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def read(world, inputs):
    """T, E and the observations of one sequence of an HMM world, by the independent reader."""
    if world.fixed:
        pair = world.hypothesis(1, seeded("any", 0))[0].double() / 100
        rows = inputs.tolist()
        shown = brute.observations_of_tokens(rows) if world.encoding == "tokens" else map(brute.hot, rows)
        return pair[:, : world.states].tolist(), pair[:, world.states :].tolist(), list(shown)
    if world.encoding == "tokens":
        return brute.hmm_of_tokens(inputs.tolist(), world.states, world.symbols)
    move, emit, shown = brute.hmm_of_rows(inputs.tolist(), world.states, world.symbols)
    return move, emit, [brute.hot(row) for row in shown]


@pytest.mark.parametrize(
    ("encoding", "predict", "fixed"), list(product(("rows", "tokens"), ("state", "observation"), (False, True)))
)
def test_hmm_belief_answer_and_observers_are_those_of_all_hidden_paths(encoding, predict, fixed):
    world = HMM(2, 3, 5, encoding, predict, fixed)
    batch = world.sample(3, seed=4)
    inputs = batch.inputs.data
    for i in range(3):
        move, emit, shown = read(world, inputs[i])
        belief = brute.filtered(shown, move, emit)
        close(batch.posterior.belief[i].exp(), belief)
        expected = belief if predict == "state" else brute.next_symbol(shown, move, emit)
        close(batch.posterior.predictive[i].exp(), expected)
        if predict == "state":
            still = [[float(a == b) for b in range(2)] for a in range(2)]
            close(world.trivial(inputs)["memoryless"][i].exp(), [brute.filtered([o], move, emit)[0] for o in shown])
            close(world.trivial(inputs)["bag of values"][i].exp(), brute.filtered(shown, still, emit))


@pytest.mark.parametrize(("states", "symbols", "steps", "chains"), [(2, 3, 7, 2), (3, 2, 5, 3), (2, 2, 5, 1)])
def test_keyed_belief_is_that_of_all_paths_of_all_chains(states, symbols, steps, chains):
    world = KeyedHMM(states, symbols, steps, chains)
    batch = world.sample(5, seed=1)
    for inputs, log_p in zip(batch.inputs.values, batch.posterior.predictive, strict=True):
        move, emit, shown = brute.hmm_of_rows(inputs.tolist(), states, symbols)
        keys, shown = [brute.hot(row[symbols:]) for row in shown], [brute.hot(row[:symbols]) for row in shown]
        close(log_p.exp(), brute.keyed(shown, keys, chains, move, emit))
        close(world.trivial(inputs[None])["one chain"][0].exp(), brute.filtered(shown, move, emit))


@pytest.mark.parametrize(("noise", "scale", "layout"), [(0.5, 1.0, "paired"), (0.2, 2.0, "separate")])
def test_regression_by_a_sum_over_weights(layout, noise, scale):
    world = Regression(dims=1, points=4, noise=noise, scale=scale, layout=layout)
    drawn = world.draw_split(5, seeded("here", 0))
    rows = drawn.inputs.double().tolist()
    for i, found in enumerate(world.log_predictive(drawn.inputs).tolist()):
        x = [row[0] for row in (rows[i] if layout == "paired" else rows[i][0::2])]
        for t in range(4):
            seen = [value.item() for value in drawn.target[i, :t].double()]
            mean, variance = brute.regression(x[:t], seen, x[t], noise, scale)
            assert found[t] == pytest.approx([mean, math.log(variance)], abs=1e-7)


def test_regression_in_three_dimensions_by_conditioning_one_joint_normal():
    """y is jointly normal with covariance scale^2 x.x' + noise^2; no weights are mentioned."""
    x, y = torch.randn(2, 6, 4, dtype=torch.float64, generator=seeded("here", 0)).split([3, 1], -1)
    found = gaussian_regression(x, y[..., 0], 0.3, 1.7)
    for i, t in product(range(2), range(6)):
        cov = 1.7**2 * x[i].numpy() @ x[i].numpy().T + 0.09 * np.eye(6)
        gain = np.linalg.solve(cov[:t, :t], cov[:t, t])
        expected = gain @ y[i, :t, 0].numpy(), np.log(cov[t, t] - gain @ cov[:t, t])
        np.testing.assert_allclose(found[i, t], expected, atol=1e-10)


def test_intervals_are_equally_probable_before_x_is_known_and_cdf_differences_after():
    whole, cut = Regression(dims=2, points=6), Regression(dims=2, points=6, bins=7)
    exact, binned = whole.draw_split(500, seeded("here", 0)), cut.draw_split(500, seeded("here", 0))
    ends = stats.norm(scale=math.sqrt(2 + 0.25)).ppf(np.arange(8) / 7)
    np.testing.assert_array_equal(np.digitize(exact.target.double(), ends[1:-1]), binned.target)
    m, log_v = whole.log_predictive(exact.inputs).unbind(-1)
    expected = np.diff(stats.norm.cdf(ends, m[..., None], log_v.div(2).exp()[..., None]), axis=-1)
    np.testing.assert_allclose(cut.log_predictive(binned.inputs).exp(), expected, atol=1e-13)
    far = Regression(dims=1, points=2, noise=0.02, bins=4)  # scipy's logsf has the other tail
    inputs = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 1.0, 0.3]]])
    m, log_v = Regression(dims=1, points=2, noise=0.02).log_predictive(inputs)[0, 1].tolist()
    last = stats.norm.logsf(math.sqrt(1.0004) * stats.norm.ppf(0.75), m, math.exp(log_v / 2))
    assert last < -50
    np.testing.assert_allclose(far.log_predictive(inputs)[0, 1, 3], last)


# ---- numbers of the papers and their code ---------------------------------------------------------------------------


def test_bijection_of_twenty_has_the_papers_entropies():
    batch = Bijection(vocab=20, pairs=19).sample(100, 0)
    h = bits(entropy(batch.posterior.predictive))
    np.testing.assert_allclose(h, np.log2(20 - np.arange(19)) * np.ones((100, 1)))
    hit = batch.posterior.predictive.gather(-1, batch.target[..., None])
    assert -hit.mean().item() == pytest.approx(2.2282, abs=5e-5)
    assert Bijection(vocab=20).log2_hypotheses == pytest.approx(math.log2(math.factorial(20)))


def test_recall_of_the_papers_is_329_tokens_of_522():
    world = Recall(pairs=64, queries=3, filler=32, keys=256, values=256, layout="papers")
    assert (world.length, world.vocabulary) == (329, 522)
    tokens = world.draw_split(1, seeded("here", 0)).inputs
    assert bits(-world.trivial(tokens)["bag of values"].max()).item() == pytest.approx(6)


def test_recurrence_has_the_papers_entropies():
    h = bits(entropy(Recurrence().sample(40_000, 0).posterior.predictive)).mean(0)
    # As printed by numbers seen, to the noise of 40,000 sequences; before any number it is log2 17 too.
    printed = [4.0875, 4.017, 2.832, 2.173, 2.047, 2.030, 2.032]
    assert h[:7].tolist() == pytest.approx(printed, abs=0.03)
    assert h[7:].tolist() == pytest.approx([2.03] * 8, abs=0.03)


def test_entropies_of_the_papers_hidden_chains():
    """Bits, as measured with the production generator on 1,500 sequences of twenty steps with five states and symbols.
    The tolerances are three standard errors of such a measurement; ours is on ten times as many."""
    world = HMM(5, 5, 20)
    inputs = world.draw_split(15_000, seeded("papers", 0)).inputs
    exact, memoryless = world.log_predictive(inputs), world.trivial(inputs)["memoryless"]
    h = bits(entropy(exact))
    assert h.mean().item() == pytest.approx(1.909, abs=0.009) and h.std().item() == pytest.approx(0.248, abs=0.009)
    for t, expected in {1: 2.022, 2: 1.922, 3: 1.916, 5: 1.901, 10: 1.908}.items():
        assert h[:, t - 1].mean().item() == pytest.approx(expected, abs=0.018)
    assert bits(kl(exact, memoryless)).mean().item() == pytest.approx(0.112, abs=0.005)


def test_the_ring_stays_more_than_it_says():
    found = load_world("markov").ring().numpy()
    np.testing.assert_allclose(np.diag(found), 0.349802, atol=5e-7)
    assert (-found * np.log(found)).sum(1).mean() == pytest.approx(1.829188, abs=5e-7)


@pytest.mark.parametrize("columns", [2, 3, 5, 10])
def test_hundredths_are_mended_one_unit_at_a_time(columns):
    even = torch.empty(400, columns, dtype=torch.float64).exponential_(generator=seeded("shares", columns))
    share = torch.cat([even, even**6, torch.eye(columns, dtype=torch.float64)])  # few entries hold nearly everything
    share = share / share.sum(1, keepdim=True)
    for row, expected in zip(hundredths(share).tolist(), map(brute.hundredths, share.tolist()), strict=True):
        assert sum(row) == 100 and min(row) >= 5 and row == expected


def test_mess3_has_the_matrices_that_were_printed():
    """Shai et al. (2024), appendix."""
    moves = edge_hmm.EdgeHMM().matrices()
    printed = [[0.765, 0.00375, 0.00375], [0.0425, 0.0675, 0.00375], [0.0425, 0.00375, 0.0675]]
    np.testing.assert_allclose(moves[0], printed, atol=1e-12)


def test_a_product_is_two_chains_side_by_side_and_a_sequence_that_cannot_come_starts_again():
    world, parts = load_world("edge-hmm:process=mess3+rrxor,steps=6"), ("mess3", "rrxor")
    ids = world.sample(20, 0).inputs.ids
    one, other = (
        edge_hmm.EdgeHMM(process=name, steps=6).log_belief(shown).exp()
        for name, shown in zip(parts, (ids // 2, ids % 2), strict=True)
    )
    expected = (one[..., :, None] * other[..., None, :]).flatten(2)
    torch.testing.assert_close(world.log_belief(ids).exp(), expected, atol=1e-12, rtol=0)
    ones = torch.ones(1, 6, dtype=torch.int64)  # of 0 1 1 1 1 0, four in a row are the most
    belief = edge_hmm.EdgeHMM(process="rrxor", steps=6).log_belief(ones).exp()
    np.testing.assert_allclose(belief[0, 4], [1 / 3, 1 / 6, 1 / 6, 1 / 6, 1 / 6])


@pytest.mark.parametrize("closed", [1, 3])
def test_a_long_chain_has_one_distribution_for_each_set_of_states_that_is_never_left(closed):
    """Counts of paths in as many steps as there are states pass the largest float."""
    states = 600
    at, part = np.arange(states), np.arange(states) * closed // states
    near = (abs(at[:, None] - at) <= 2) & (part[:, None] == part)
    move = 0.2 * near + np.diag(1 - 0.2 * near.sum(1))  # symmetric, so that every state of a set is equally likely
    found = edge_hmm._stationary(torch.from_numpy(move)[None]).numpy()
    assert len(found) == closed
    np.testing.assert_allclose(found.sum(0), closed / states, atol=1e-12)


# ---- drawing --------------------------------------------------------------------------------------------------------


def test_sticky_keys_come_again_as_often_as_said_and_in_training_alone():
    world = Bijection(vocab=50, pairs=6, replacement=True, sticky=0.6)

    def again(training):
        keys = world.draw_split(4000, seeded("here", 0), training=training).inputs[:, 0::2]
        return (keys[:, :, None] == keys[:, None, :]).tril(-1).any(2).double().mean(0)

    assert again(False)[1].item() == pytest.approx(1 / 50, abs=0.01)
    assert again(True)[1].item() == pytest.approx(0.6 + 0.4 / 50, abs=0.03)


@pytest.mark.parametrize(
    ("spec", "cdf"),
    [
        ("coin:prior=beta:0.5,2", stats.beta(0.5, 2).cdf),
        ("dirichlet:symbols=3,a=0.7", stats.beta(0.7, 1.4).cdf),
        ("markov:symbols=3,fixed=false", stats.beta(1, 2).cdf),
    ],
)
def test_causes_have_their_prior(spec, cdf):
    found = load_world(spec).hypothesis(5000, seeded("here", 0)).flatten(1)[:, 0]
    assert stats.kstest(found.numpy(), cdf).pvalue > 1e-4


@pytest.mark.parametrize("world", [HMM(3, 4, 9, fixed=True), HMM(3, 4, 9), KeyedHMM(3, 4, 9, chains=2)])
def test_states_move_and_emit_as_often_as_the_matrices_say(world):
    """Summed over all steps, fine enough to see one hundredth go astray."""
    n, generator = 30_000, seeded("frequency", 0)
    hypothesis = world.hypothesis(n, generator)
    drawn = world.draw(hypothesis, generator)
    states, shown = drawn.target, drawn.inputs[:, -9:]
    keyed = isinstance(world, KeyedHMM)
    symbols = (shown[..., 10:14] if keyed else shown[..., -4:]).argmax(-1)
    # Only where the same chain has its turn twice running is it known where it came from.
    keys = shown[..., 14:].argmax(-1) if keyed else torch.zeros_like(states)
    again = keys[:, :-1] == keys[:, 1:]
    move, emission = (hypothesis.double() / 100).split([3, 4], -1)
    for matrix, before, after, known in [
        (emission, states, symbols, torch.ones_like(states, dtype=torch.bool)),
        (move, states[:, :-1], states[:, 1:], again),
    ]:
        columns = matrix.shape[-1]
        p = matrix.gather(1, before[..., None].expand(-1, -1, columns))[known]
        error = torch.nn.functional.one_hot(after[known], columns) - p
        assert (error.sum(0).abs() < 4.5 * (p * (1 - p)).sum(0).sqrt()).all()


# ---- hypotheses and states that are held out ------------------------------------------------------------------------


def splitmix(columns):
    """The same hash in Python's own integers: Steele, Lea & Flood 2014."""
    state, whole = 0, (1 << 64) - 1
    for column in columns:
        state = (state + column + 0x9E3779B97F4A7C15) & whole
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & whole
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & whole
        state ^= state >> 31
    return state


def test_the_hash_is_splitmix_and_holds_out_a_tenth_of_what_is_alike():
    assert splitmix([0]) == 0xE220A8397B1DCDAF  # the generator's first number from seed 0, as published
    cells = torch.cartesian_prod(torch.arange(-50, 50), torch.arange(200))
    expected = [(splitmix(cell) >> 1) % 10 == 0 for cell in cells.tolist()]
    assert held_out(cells).tolist() == expected
    found = held_out(cells).reshape(100, 200).double()
    assert found.mean().item() == pytest.approx(0.1, abs=0.01)
    assert found.mean(0).max() < 0.3 and found.mean(1).max() < 0.2  # no row or column is favoured


@pytest.mark.parametrize("name", names())
def test_splits_share_no_hypothesis(name):
    world = load_world(name)
    if world.memorisable:
        with refused(UserError, name, world.memorisable):
            world.draw_split(2, seeded("here", 0), "seen")
        return
    for split in ("seen", "held-out"):
        found = world._hypotheses(3000, seeded("here", 0), split)
        assert len(found) == 3000
        assert (held_out(world.split_key(found)) == (split == "held-out")).all()
        assert len(found.flatten(1).unique(dim=0)) > 100


def test_the_order_in_which_pairs_are_stored_does_not_make_a_new_hypothesis():
    for world, size in ((Recall(3, 3, 0, 5, 4), 10 * 24), (Recall(3, 3, 0, 5, 2, distinct=False), 10 * 8)):
        hypotheses = world.hypothesis(6000, seeded("here", 0))
        maps = {tuple(sorted(zip(*rows, strict=True))) for rows in hypotheses.tolist()}
        cells = {tuple(cell) for cell in world.split_key(hypotheses).tolist()}
        assert len(maps) == len(cells) == round(2**world.log2_hypotheses) == size


@dataclass(frozen=True)
class Scarce(Bijection):
    """Holds out one in forty, and is believed to hold out a half."""

    _held_out_share = 0.5


def test_where_hypotheses_are_few_they_come_twice_and_none_is_of_the_other_split():
    found = Scarce(8, 3)._hypotheses(500, seeded("here", 0), "held-out")
    assert len(found) == 500 and held_out(found).all() and len(found.unique(dim=0)) < 300
    with refused(UserError, "0.00%"):
        Bijection(2, 2).draw_split(3, seeded("here", 0), "held-out")


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_a_sample_carries_its_exact_answers_and_where_it_came_from(name):
    world = load_world(name)
    batch = world.sample(6, 3)
    torch.manual_seed(0)
    again, other = world.sample(6, 3), world.sample(6, 4)
    assert isinstance(batch.inputs, Rows if world.features else Tokens)
    assert torch.equal(batch.inputs.data, again.inputs.data)
    assert torch.equal(batch.target, again.target) and not torch.equal(batch.target, other.target)
    assert batch.query.sum(1).tolist() == [len(world.query)] * 6 and batch.target.shape == (6, len(world.query))
    assert torch.equal(batch.posterior.predictive, world.log_predictive(batch.inputs.data))
    assert batch.source["name"] == name and batch.source["spec"] == dataclasses.asdict(world)
    assert batch.posterior.predictive.dtype == torch.float64


# ---- as text --------------------------------------------------------------------------------------------------------

IN_TEXT = [
    *names(text=True), "markov:symbols=3,a=1", "dirichlet:symbols=4", "bijection:vocab=4,replacement=false",
    "hmm-mixture:symbols=3", "edge-hmm:process=rrxor",
]  # fmt: skip
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def parsed(prompt):
    """What a person reads: stated numbers, the marks in the order named, pairs of item and mark, and the question."""
    stated = []
    if "of 10 lists" in prompt:
        numbers, prompt = prompt.removeprefix("/* ").split(" times in 10.", 1)
        stated = [int(word) for word in numbers.replace(",", "").split() if word.isdigit()]
        prompt = prompt.removeprefix(" */").strip()
    if " = " in prompt:
        *lines, last = (line.removesuffix(" =").split(" = ") for line in prompt.split("; "))
    elif prompt.startswith("The first is"):
        *lines, last = (line.removeprefix("The ").removesuffix(" is").split(" is ") for line in prompt.split(". "))
    else:
        opening, rest = prompt.split(". ", 1)
        *lines, last = (
            line.removesuffix(":").split(": ") for line in (*opening.lower().split(", "), *rest.split(", "))
        )
    marks = [mark for item, mark in lines if item in ORDINALS]
    assert [item for item, _ in lines[: len(marks)]] == list(ORDINALS[: len(marks)])
    return stated, marks, [tuple(line) for line in lines[len(marks) :]], last[0]


def tokens(name, stated, seen, items):
    """A sequence in the format of the world."""
    if name in ("bijection", "recall"):
        keys = {item: i for i, item in enumerate(dict.fromkeys(items))}
        after = 5 if name == "bijection" else 8
        pairs = [token for item, mark in zip(items, seen, strict=False) for token in (keys[item], after + mark)]
        return [*pairs, keys[items[-1]]]
    opening = {"coin": [2], "two-point": [2], "dirichlet": [3]}
    return [*(opening.get(name, []) if not stated else [stated[0] + 1, stated[-1] + 10]), *seen]


@pytest.mark.parametrize("spec", names(text=True))
def test_a_prompt_shows_a_sequence_and_has_its_exact_answer(spec):
    """The words are read back by hand into the tokens of the world, whose answers are those of every sequence."""
    world = load_world(spec, text=True)
    batch = text.sample(world, 9, 1, ks=[k for k in (3, 4, 6) if k in world.KS or k == 3])
    assert set(batch.columns["surface"]) == set(text.SURFACES)
    for i, prompt in enumerate(batch.text):
        stated, marks, pairs, asked = parsed(prompt)
        assert marks == batch.columns["marks"][i].split() and len(pairs) == batch.columns["k"][i]
        seen = [marks.index(mark) for _, mark in pairs]
        sequence = torch.tensor([tokens(spec, stated, seen, [item for item, _ in pairs] + [asked])])
        at_k = world.showing(len(pairs))
        torch.testing.assert_close(batch.exact.predictive[i], at_k.log_predictive(sequence)[0, -1:], rtol=0, atol=1e-12)
        for name, log_p in at_k.trivial(sequence).items():
            torch.testing.assert_close(batch.exact.trivial[name][i], log_p[0, -1:], rtol=0, atol=1e-12)
        h = bits(entropy(batch.exact.predictive[i, 0])).item()
        assert batch.columns["exact_entropy"][i] == pytest.approx(h, abs=1e-6)


@pytest.mark.parametrize("spec", IN_TEXT)
def test_what_follows_is_drawn_from_the_exact_answer(spec):
    """At each k the outcomes drawn less their probabilities sum to nothing, in total and along the probabilities."""
    world = load_world(spec, text=True)
    batch = text.sample(world, 1500, 3, ks=(3,))
    p = batch.exact.predictive[:, 0].exp().numpy()
    drawn = np.eye(p.shape[1])[batch.target[:, 0].numpy()]
    for weight in (np.ones_like(p), p):
        excess, variance = ((drawn - p) * weight).sum(0), (p * (1 - p) * weight**2).sum(0)
        assert (np.abs(excess) <= 4.5 * np.sqrt(variance) + 1e-9).all()
    assert (p[np.arange(len(p)), batch.target[:, 0]] > 0).all()


@pytest.mark.parametrize("spec", IN_TEXT)
def test_one_observation_is_changed_into_a_sequence_that_could_come(spec):
    """The exact answer to the changed sequence has the shift, and in a bijection no value comes twice."""
    world = load_world(spec, text=True)
    batch = text.sample(world, 6, 2, ks=(3,))
    for change in text.changes(world, batch, 0):
        drawn = text._Drawn.of(world, 6, 2, 3)
        before = drawn.inputs[change.prompt]
        after = before.clone()
        after[drawn.places[change.place]] = change.mark + world.answers.tokens[0]
        log_p = drawn.world.log_predictive(torch.stack([before, after]))[:, -1]
        old = before[drawn.places[change.place]].item() - world.answers.tokens[0]
        odds = log_p[:, change.mark] - log_p[:, old]
        if log_p.isfinite().all():
            assert change.shift == pytest.approx(bits((odds[1] - odds[0]).item()))
        assert change.mark != old and (log_p[0] - log_p[1]).exp().ne(1).any()
        if world.name == "bijection":
            of = dict(zip(after[0::2].tolist(), after[1::2].tolist(), strict=False))
            assert len(set(of.values())) == len(of)


def test_conditions_change_one_thing_each():
    world = load_world("two-point", text=True)
    of = {name: text.sample(world, 30, 0, ks=(0, 2, 5), condition=name) for name in text.CONDITIONS}
    seen = {name: [list(map(int, row)) for row in batch.columns["seen"]] for name, batch in of.items()}
    assert seen["remap"] == seen[""] and of["remap"].text != of[""].text
    assert all(not {*a.split()} & {*b.split()} for a, b in zip(of["remap"].columns["marks"], of[""].columns["marks"],
                                                              strict=True))  # fmt: skip
    assert seen["swap"] == [[1 - x for x in row] for row in seen[""]]
    assert [sorted(row) for row in seen["permuted"]] == [sorted(row) for row in seen[""]] != seen["permuted"]
    assert seen["consistent"] == [row[:1] * len(row) for row in seen[""]]
    assert seen["alternating"] == [[(row[0] + j) % 2 for j in range(len(row))] for row in seen[""]]
    for name, batch in of.items():
        assert batch.cluster == of[""].cluster and batch.columns["items"] == of[""].columns["items"]
        n1, n2 = np.array([[row.count(0), row.count(1)] for row in seen[name]]).T
        rules = 1 / (1 + 9.0 ** (n2 - n1))
        np.testing.assert_allclose(batch.exact.predictive[:, 0, 0].exp(), 0.9 * rules + 0.1 * (1 - rules))


# ---- specs, files of one's own, refusals ----------------------------------------------------------------------------

OWN = '''
from __future__ import annotations
from dataclasses import dataclass, replace
import torch
from llmgeom.world import Categorical, Sequences, World, uniform
from llmgeom.sampling import integers
from llmgeom.wind_tunnels.worlds.edge_hmm import EdgeHMM

@dataclass(frozen=True)
class Die(World):
    """A fair die."""

    sides: int
    throws: int = 2
    vocabulary = property(lambda self: self.sides)
    length = property(lambda self: self.throws)

    def showing(self, k):
        return replace(self, throws=k)

    def draw(self, hypothesis, generator, training=False):
        rolled = integers(self.sides, generator, len(hypothesis), self.throws + 1)
        return Sequences(rolled[:, :-1], rolled[:, 1:])

    def log_predictive(self, inputs):
        return uniform(inputs, self.throws, self.sides)

@dataclass
class Thawed(World):
    """A die that may change."""

@dataclass(frozen=True)
class Half(World):
    """Half a world."""

@dataclass(frozen=True)
class Golden(EdgeHMM):
    def matrices(self):
        # The golden mean process: after a 0 comes a 1.
        return torch.tensor([[[0, 0.5], [0, 0]], [[0.5, 0], [1, 0]]], dtype=torch.float64)

@dataclass(frozen=True)
class Leaky(EdgeHMM):
    def matrices(self):
        return torch.tensor([[[0.5, 0], [0, 0.5]], [[0.4, 0], [0, 0.5]]], dtype=torch.float64)

@dataclass(frozen=True)
class Split(EdgeHMM):
    def matrices(self):
        return torch.tensor([[[0.5, 0], [0, 0.5]], [[0.5, 0], [0, 0.5]]], dtype=torch.float64)

@dataclass(frozen=True)
class Ragged(EdgeHMM):
    def matrices(self):
        return [[[0.5, 0.0], [1.0]], [[0.0, 0.5], [0.0, 0.0]]]
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "dice.py"
    path.write_text(OWN, encoding="utf-8")
    return path


def test_a_file_of_one_s_own_is_a_world_that_its_title_finds_again_and_it_has_text(own):
    world = load_world(f"{own}:Die:sides=6")
    assert world.title == f"{own.resolve()}:Die:sides=6" and load_world(world.title).title == world.title
    batch = world.sample(5, 0)
    torch.testing.assert_close(batch.posterior.predictive.exp(), torch.full((5, 2, 6), 1 / 6, dtype=torch.float64))
    prompts = text.sample(load_world(f"{own}:Die:sides=3", text=True), 6, 0, ks=(4,))
    assert [len(parsed(prompt)[2]) for prompt in prompts.text] == [4] * 6
    golden = load_world(f"{own}:Golden:steps=6")
    moves, first = [[[0, 0.5], [0, 0]], [[0.5, 0], [1, 0]]], [2 / 3, 1 / 3]
    ids = golden.sample(300, 0).inputs.ids
    expected = brute.conditionals([one for one in brute.edges(moves, first, 3) if one[0]])
    outcomes, _ = expected[tuple(ids[0, :3].tolist())]
    np.testing.assert_allclose(golden.log_predictive(ids)[0, 2].exp(), [outcomes.get(k, 0) for k in range(2)])


@pytest.mark.parametrize(
    "spec", [*names(), "bijection:vocab=20,pairs=19", "coin:steps=7,prior=beta:0.5,2", "recurrence:opaque=True"]
)
def test_a_title_is_the_spec_that_makes_the_world(spec):
    world = load_world(spec)
    assert world.title == spec and load_world(world.title) == world == load_world(spec.replace("-", "_"))
    if spec in names(text=True):
        assert text.title(load_world(spec, text=True)) == spec


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("bijektion", ("bijektion", "bijection", *names())),
        ("coin:step=3", ("coin", "step=3", "steps", 24, "prior", "beta:1,1")),
        ("coin:steps", ("coin", "steps", "int")),
        ("coin:steps=2.5", ("coin", "steps", 2.5, "int")),
        ("bijection:sticky=much", ("bijection", "sticky", "much", "float")),
        ("bijection:replacement=yes", ("bijection", "replacement", "yes", "bool")),
        ("bijection:pairs=9", (9, 8, "replacement=true")),
        ("none/there.py:X", ("none/there.py", "path/to/file.py")),
        ("recall:layout=long", ("recall:layout=long", "compact", "papers")),
        ("recall:pairs=9", ("recall:pairs=9", "queries")),
        ("regression:noise=0", ("noise",)),
        ("regression:bins=1", ("bins", 1, 2)),
        ("recurrence:modulus=9", ("modulus", 9, "prime")),
        ("recurrence:horizon=16", ("horizon", 16, 15)),
        ("coin:prior=beta:1", ("beta:1", "beta:A,B", "list:P,P")),
        ("coin:prior=list:0.5,1.5", ("list:0.5,1.5", "list:P,P")),
        ("two-point:reliability=1", ("two-point:reliability=1.0", 0.5)),
        ("dirichlet:a=0", ("dirichlet:a=0.0", 0.01, "mass")),
        ("markov:a=0", ("markov:a=0.0", 0.01, "mass")),
        ("markov:stay=1", ("stay", 1.0)),
        ("stated:priors=0,5", ("stated:priors=0,5", 1, 9, "mass")),
        ("stated:priors=a", ("priors='a'",)),
        ("hmm:encoding=bits", ("hmm:encoding=bits", "rows", "tokens")),
        ("hmm:states=1", ("hmm:states=1", 2, 10)),
        ("hmm:horizon=13", ("horizon", 13, 12)),
        ("keyed-hmm:chains=0", ("chains", 0, 1)),
        ("hmm-mixture:weights=0,0", ("hmm-mixture:weights=0,0", "mass")),
        ("hmm-mixture:weights=1", ("hmm-mixture:weights=1", "weight")),
        ("hmm-mixture:stays=2,0.1", ("stays",)),
        ("edge-hmm:process=mess4", ("mess4", "mess3", "rrxor")),
        ("edge-hmm:stay=1", ("stay", 1.0)),
    ],
)
def test_a_world_that_cannot_be_is_refused_in_one_sentence(spec, values):
    with refused(UserError, *values):
        load_world(spec)


@pytest.mark.parametrize(
    ("rest", "values"),
    [
        (":Die", ("Die", "sides")),
        (":Cube", ("Cube", "Die", "Thawed", "Half")),
        (":Categorical", ("Categorical",)),
        (":Thawed:sides=6", ("Thawed", "@dataclass(frozen=True)")),
        (":Half", ("Half", "draw", "length", "log_predictive", "vocabulary")),
        (":Leaky", ("sum to 1",)),
        (":Split", ("several",)),
        (":Ragged", ("numbers",)),
    ],
)
def test_what_a_file_of_one_s_own_lacks_is_named(own, rest, values):
    with refused(UserError, *values):
        load_world(f"{own}{rest}")


def test_prompts_that_cannot_be():
    with refused(UserError, "regression", "no form as text", "markov"):
        load_world("regression", text=True)
    markov = load_world("markov", text=True)
    with refused(UserError, "--k 0", "markov", "steps"):
        text.sample(markov, 3, 0, ks=(0, 2))
    with refused(UserError, 25, "markov", 24):
        text.sample(markov, 3, 0, ks=(25,))
    with refused(UserError, "lists", "list", "code"):
        text.sample(markov, 3, 0, surfaces=("lists",))
    with refused(UserError, "--n 0"):
        text.sample(markov, 0, 0)
    with refused(UserError, "dirichlet:symbols=9", 2, 8):
        text.sample(load_world("dirichlet:symbols=9", text=True), 3, 0)


def test_real_hypotheses_are_hashed_by_cells_a_quarter_wide():
    cells = World.split_key(Bijection(), torch.tensor([[-0.26, 0.24], [0.0, 1.0]]))
    assert cells.tolist() == [[-2, 0], [0, 4]]
