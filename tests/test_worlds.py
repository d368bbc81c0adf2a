"""Every world once: exact answers against every sequence written out, the splits, the text, and what is refused."""

import dataclasses
import math
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
from llmgeom.world import seeded
from tests import brute_force as brute
from tests.refusals import refused


def hidden(steps):
    """The moves and emissions of `hmm:fixed=true`."""
    rows = (HMM(fixed=True).hypothesis(1, seeded("any", 0))[0].double() / 100).tolist()
    move = [row[:3] for row in rows]
    first = np.linalg.matrix_power(np.array(move), 200)[0].tolist()
    return brute.edges(brute.arriving(move, [row[3:] for row in rows]), first, steps)


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
    "stated:steps=4,reliabilities=3,9,priors=2,5": lambda: brute.stated((3, 9), (2, 5), 4),
    "markov:symbols=3,steps=4,fixed=false,a=0.5": lambda: brute.visible_chains(3, 4, 0.5),
    "markov:symbols=4,steps=3": lambda: brute.edges(
        brute.arriving(brute.ring(4, 0.3), brute.mixing(4, 1.0)), [1 / 4] * 4, 3
    ),
    "hmm-mixture:steps=4,stays=0.8,0.3,weights=2,1,reliability=0.7": lambda: brute.mixture((0.8, 0.3), (2, 1), 0.7, 4),
    "edge-hmm:steps=3,stay=0.8": lambda: brute.edges(
        brute.arriving(brute.mixing(3, 0.8), brute.mixing(3, 0.85)), [1 / 3] * 3, 3
    ),
    "edge-hmm:process=rrxor,steps=5": lambda: brute.rrxor(5),
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
    h = bits(entropy(Recurrence().sample(20_000, 0).posterior.predictive)).mean(0)
    # As printed by numbers seen, to the noise of 20,000 sequences; before any number it is log2 17 too.
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


def test_processes_have_the_names_of_their_papers():
    assert load_world("mess3:stay=0.8") == load_world("edge-hmm:stay=0.8")
    assert load_world("rrxor:steps=6") == load_world("edge-hmm:process=rrxor,steps=6")


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
    assert [len(seen) for seen in prompts.columns["seen"]] == [4] * 6
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
