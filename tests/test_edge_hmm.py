"""Edge-emitting chains: matrices as printed, answers by enumeration of every hidden path, refusals, a file's own."""

from itertools import product

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.probe import WHOLE
from llmgeom.probes import known
from llmgeom.probes.posterior.scores import Evaluation
from llmgeom.run import run_probes
from llmgeom.task import seeded
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.tasks import edge_hmm
from llmgeom.wind_tunnels.tasks.edge_hmm import EdgeHMM
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused

OWN = """
from dataclasses import dataclass
import torch
from llmgeom.wind_tunnels.tasks.edge_hmm import EdgeHMM

@dataclass(frozen=True)
class Golden(EdgeHMM):
    def matrices(self):
        # The golden mean process: after a 0 comes a 1.
        return torch.tensor([[[0, 0.5], [0, 0]], [[0.5, 0], [1, 0]]], dtype=torch.float64)

@dataclass(frozen=True)
class Rounded(EdgeHMM):
    def matrices(self):
        return EdgeHMM.matrices(self).float()

@dataclass(frozen=True)
class Leaky(EdgeHMM):
    def matrices(self):
        return torch.tensor([[[0.5, 0], [0, 0.5]], [[0.4, 0], [0, 0.5]]], dtype=torch.float64)

@dataclass(frozen=True)
class Split(EdgeHMM):
    def matrices(self):
        return torch.tensor([[[0.5, 0], [0, 0.5]], [[0.5, 0], [0, 0.5]]], dtype=torch.float64)

@dataclass(frozen=True)
class Still(EdgeHMM):
    def matrices(self):
        return [[[0.3]], [[0.7]]]

@dataclass(frozen=True)
class Ragged(EdgeHMM):
    def matrices(self):
        return [[[0.5, 0.0], [1.0]], [[0.0, 0.5], [0.0, 0.0]]]

@dataclass(frozen=True)
class Words(EdgeHMM):
    def matrices(self):
        return "mess3"

@dataclass(frozen=True)
class Flat(EdgeHMM):
    def matrices(self):
        return torch.ones(2, 2, dtype=torch.float64)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def by_paths(task: EdgeHMM, symbols: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Belief and next-observation distribution from the joint probability of every path of states."""
    moves = task.matrices().numpy()
    states, step = moves.shape[1], moves.sum(0)
    values, vectors = np.linalg.eig(step.T)
    pi = np.real(vectors[:, np.argmin(abs(values - 1))])
    pi = pi / pi.sum()
    belief = np.zeros(states)
    for path in product(range(states), repeat=len(symbols) + 1):
        steps = zip(symbols, path[:-1], path[1:], strict=True)
        belief[path[-1]] += pi[path[0]] * np.prod([moves[x, i, j] for x, i, j in steps])
    belief /= belief.sum()
    return belief, np.array([belief @ move @ np.ones(states) for move in moves])


@pytest.mark.parametrize("spec", ["edge_hmm:steps=5", "edge_hmm:process=rrxor,steps=5"])
def test_answers_are_those_of_all_hidden_paths(spec):
    task = load_task(spec)
    batch = task.sample(8, 0)
    for row, symbols in enumerate(batch.inputs.ids.tolist()):
        for at in range(task.steps):
            belief, following = by_paths(task, symbols[: at + 1])
            np.testing.assert_allclose(batch.posterior.belief[row, at].exp(), belief, atol=1e-12)
            np.testing.assert_allclose(batch.posterior.predictive[row, at].exp(), following, atol=1e-12)


def test_mess3_has_the_matrices_that_were_printed():
    """Shai et al. (2024), appendix."""
    moves = EdgeHMM().matrices()
    np.testing.assert_allclose(
        moves[0], [[0.765, 0.00375, 0.00375], [0.0425, 0.0675, 0.00375], [0.0425, 0.00375, 0.0675]], atol=1e-12
    )
    for symbol in (1, 2):  # the states are alike but for their names
        turned = [(i - symbol) % 3 for i in range(3)]
        np.testing.assert_allclose(moves[symbol], moves[0][turned][:, turned], atol=1e-12)


def test_mess3_with_other_probabilities_moves_and_shows_by_them():
    moves = EdgeHMM(stay=0.6, emit=0.95).matrices()
    np.testing.assert_allclose(moves.sum(0), [[0.6, 0.2, 0.2], [0.2, 0.6, 0.2], [0.2, 0.2, 0.6]], atol=1e-12)
    # The symbol is that of the state arrived at with .95, whatever the state before.
    np.testing.assert_allclose(moves[1, :, 1] / moves.sum(0)[:, 1], 0.95, atol=1e-12)
    np.testing.assert_allclose(moves[0, :, 1] / moves.sum(0)[:, 1], 0.025, atol=1e-12)
    with refused(UserError, "stay", "1.0"):
        EdgeHMM(stay=1.0)


def test_rrxor_shows_the_exclusive_or_of_two_bits_and_has_36_beliefs():
    task = load_task("edge_hmm:process=rrxor,steps=12")
    batch = task.sample(4000, 0)
    phases = [
        np.mean([np.all(ids[at + 2 :: 3][:3] == (ids[at::3][:3] ^ ids[at + 1 :: 3][:3])) for at in range(3)])
        for ids in batch.inputs.ids.numpy()
    ]
    assert min(phases) >= 1 / 3, "one of the three phases fits every sequence"
    beliefs = batch.posterior.belief.exp().flatten(0, 1)
    prior = torch.tensor([[1 / 3, 1 / 6, 1 / 6, 1 / 6, 1 / 6]], dtype=torch.float64)
    assert len((torch.cat([beliefs, prior]) * 1e6).round().unique(dim=0)) == 36


def test_a_product_is_two_chains_side_by_side():
    task, parts = load_task("edge_hmm:process=mess3+rrxor,steps=6"), ("mess3", "rrxor")
    ids = task.sample(20, 0).inputs.ids
    assert task.vocabulary == 6
    one, other = (
        EdgeHMM(process=name, steps=6).log_belief(shown).exp()
        for name, shown in zip(parts, (ids // 2, ids % 2), strict=True)
    )
    expected = (one[..., :, None] * other[..., None, :]).flatten(2)
    torch.testing.assert_close(task.log_belief(ids).exp(), expected, atol=1e-12, rtol=0)


def test_the_belief_of_mess3_is_a_linear_map_of_the_next_observation_and_that_of_rrxor_is_not():
    for name, rank in (("mess3", 3), ("rrxor", 2)):
        emitted = EdgeHMM(process=name).matrices().sum(2).T
        assert torch.linalg.matrix_rank(emitted) == rank
    assert torch.linalg.inv(EdgeHMM().matrices().sum(2)).isfinite().all()


def shares(process: str) -> tuple[list[float], float, float]:
    """Of the belief's variance within positions, the shares that are a linear map of the last 1, 2, 3 symbols; a linear
    map of the distribution of the next one; and any function of it and the position."""
    task = EdgeHMM(process=process)
    batch = task.sample(4000, 1)
    belief, following = (x.exp().flatten(0, 1).numpy() for x in (batch.posterior.belief, batch.posterior.predictive))
    position = np.tile(np.arange(task.steps), 4000)
    places, ids = np.eye(task.steps)[position], batch.inputs.ids.numpy()
    spread = np.square(belief - LinearRegression().fit(places, belief).predict(places)).sum()

    def given(x: np.ndarray) -> float:
        x = np.hstack([places, x])
        return float(1 - np.square(belief - LinearRegression().fit(x, belief).predict(x)).sum() / spread)

    symbols = np.eye(task.vocabulary + 1)
    back = [np.pad(ids, ((0, 0), (i, 0)), constant_values=task.vocabulary)[:, : task.steps] for i in range(3)]
    last = [given(np.hstack([symbols[one.ravel()] for one in back[:count]])) for count in (1, 2, 3)]
    cell = np.unique(np.column_stack([following.round(8), position]), axis=0, return_inverse=True)[1].ravel()
    sums = np.stack([np.bincount(cell, column) for column in belief.T], 1)
    any_function = 1 - np.square(belief - (sums / np.bincount(cell)[:, None])[cell]).sum() / spread
    return last, given(following), float(any_function)


def test_how_much_of_a_belief_the_last_symbols_and_the_next_one_give():
    """What docs/tunnels.md says, by scikit-learn."""
    last, linear, any_function = shares("mess3")
    assert last[0] == pytest.approx(0.83, abs=0.005) and last[2] == pytest.approx(0.96, abs=0.005)
    assert linear == pytest.approx(1) == any_function
    _, linear, any_function = shares("rrxor")
    assert linear == pytest.approx(0.25, abs=0.01) and any_function == pytest.approx(0.48, abs=0.01)
    assert (any_function - linear) / (1 - linear) == pytest.approx(0.31, abs=0.01)


def test_another_symbol_is_evidence_only_where_it_could_have_come():
    task = EdgeHMM()
    inputs = task.sample(50, 0).inputs.ids
    other = task.counterfactual(inputs, seeded("here", 0))
    assert other is not None and ((other != inputs).sum(1) == 1).all()
    assert EdgeHMM(process="rrxor").counterfactual(inputs % 2, seeded("here", 0)) is None


def test_a_sequence_that_cannot_come_starts_again_and_no_nan_travels():
    task = EdgeHMM(process="rrxor", steps=6)
    ones = torch.ones(1, 6, dtype=torch.int64)  # of 0 1 1 1 1 0, four in a row are the most
    belief = task.log_belief(ones).exp()
    assert not torch.isnan(task.log_predictive(ones)).any() and (belief[0, 3] > 0).sum() == 1
    np.testing.assert_allclose(belief[0, 4], [1 / 3, 1 / 6, 1 / 6, 1 / 6, 1 / 6])


def test_a_matrix_of_one_s_own_is_a_task(own):
    task = load_task(f"{own}:Golden:steps=6")
    ids = task.sample(300, 0).inputs.ids
    assert not ((ids[:, :-1] == 0) & (ids[:, 1:] == 0)).any() and task.vocabulary == 2
    assert abs(float((ids == 0).double().mean()) - 1 / 3) < 0.03
    belief, following = by_paths(task, ids[0, :3].tolist())
    np.testing.assert_allclose(task.log_predictive(ids)[0, 2].exp(), following, atol=1e-12)
    np.testing.assert_allclose(task.log_belief(ids)[0, 2].exp(), belief, atol=1e-12)


def test_matrices_may_be_rounded(own):
    rounded, exact = load_task(f"{own}:Rounded"), EdgeHMM()
    ids = exact.sample(20, 0).inputs.ids
    torch.testing.assert_close(rounded.log_predictive(ids), exact.log_predictive(ids), atol=1e-6, rtol=0)


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


def test_one_state_holds_nothing_to_infer_or_to_cluster(own, tmp_path):
    """The chain is a coin of .7: the exact answer is constant, so that a model which says it has inferred nothing."""
    task = load_task(f"{own}:Still:steps=4")
    evaluation = Evaluation(task, 50, 0, task.test_split, 4)
    scores = evaluation.posterior_scores(task.answers.exact(evaluation.batch.exact.predictive))
    with refused(UserError, "position alone", "nothing is left to infer"):
        _ = scores.best
    folder = train(Training(task.title, width=16, layers=1, heads=2, steps=3, batch=8), tmp_path / "t").out
    asked = known(["belief_clusters", "belief_readout"])
    subject, samples = Subject.load(str(folder)), {WHOLE: task.sample(20, 0)}
    record = run_probes(subject, task.truncated(20, 0), asked, controls=1, samples=samples)
    assert record.unmeasured.keys() == asked.keys()


def test_what_is_no_chain_is_refused(own):
    with refused(UserError, "mess4", "mess3"):
        load_task("edge_hmm:process=mess4")
    wrong = {
        "Leaky": "sum to 1",
        "Split": "one set of states",
        "Flat": "[2, 2]",
        "Ragged": "length",
        "Words": "numbers",
    }
    for name, expected in wrong.items():
        with refused(UserError, name, expected):
            load_task(f"{own}:{name}")
    for field in ("steps=0", "horizon=11"):
        with refused(UserError, field.split("=")[0]):
            load_task(f"edge_hmm:{field}")


def test_a_task_of_one_symbol_has_nothing_to_predict(tmp_path):
    (tmp_path / "one.py").write_text(
        "from dataclasses import dataclass\nimport torch\nfrom llmgeom.wind_tunnels.tasks.edge_hmm import EdgeHMM\n"
        "@dataclass(frozen=True)\nclass One(EdgeHMM):\n"
        "    def matrices(self): return torch.tensor([[[.3, .7], [.6, .4]]], dtype=torch.float64)\n"
    )
    with refused(UserError, "One", "one symbol: nothing to predict"):
        train(Training(f"{tmp_path / 'one.py'}:One", width=16, layers=1, heads=2, steps=3, batch=8), tmp_path / "t")
