"""The registry of wind tunnels, the grammar of their specs, and what every task is: drawn, split, hashed, sampled."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch

from llmgeom.batch import Rows, Tokens
from llmgeom.errors import UserError
from llmgeom.task import Categorical, Task, held_out, seeded, uniform
from llmgeom.wind_tunnels import load_task, names
from llmgeom.wind_tunnels.sampling import constants
from llmgeom.wind_tunnels.tasks.bijection import Bijection
from llmgeom.wind_tunnels.tasks.coin import Coin
from llmgeom.wind_tunnels.tasks.recall import Recall
from llmgeom.wind_tunnels.tasks.regression import Regression
from tests.refusals import refused

OWN = '''
from __future__ import annotations
from dataclasses import dataclass
import torch
from llmgeom.task import Categorical, Sequences, Task, uniform

@dataclass(frozen=True)
class Die(Task):
    """A fair die."""

    sides: int
    weight: float = 0.5
    vocabulary = property(lambda self: self.sides)
    length = property(lambda self: 2)
    query = property(lambda self: (0, 1))
    answers = property(lambda self: Categorical(tuple(range(self.sides))))

    def draw(self, hypothesis, generator, training=False):
        rolled = torch.randint(self.sides, (len(hypothesis), 3), generator=generator)
        return Sequences(rolled[:, :2], rolled[:, 1:])

    def log_predictive(self, inputs):
        return uniform(inputs, 2, self.sides)

@dataclass
class Thawed(Task):
    """A die that may change."""

@dataclass(frozen=True)
class Half(Task):
    """Half a task."""
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "dice.py"
    path.write_text(OWN, encoding="utf-8")
    return path


# ---- names and specs ------------------------------------------------------------------------------------------------


def test_every_file_is_a_task_with_a_one_line_title_and_defaults():
    assert {"bijection", "coin", "recall", "recurrence", "regression"} <= set(names())
    assert not {"task", "answers", "laws", "train", "models"} & set(names())
    for name in names():
        task = load_task(name)
        assert task.title == name and dataclasses.is_dataclass(task)
        assert type(task).__doc__.splitlines()[0].endswith(".")


@pytest.mark.parametrize(
    "spec",
    [
        "bijection:vocab=20,pairs=19",
        "bijection:replacement=True,sticky=0.25",
        "coin:flips=7,prior=beta:0.5,2",
        "coin:prior=list:0.1,0.5,0.8",
        "recall:layout=papers",
        "regression:noise=0.125",
        "recurrence:opaque=True",
    ],
)
def test_a_title_is_the_spec_that_makes_the_task(spec):
    task = load_task(spec)
    assert task.title == spec
    assert load_task(task.title) == task


def test_values_may_hold_commas_and_fields_come_in_any_order():
    assert load_task("coin:prior=list:0.2,0.7,flips=5") == Coin(flips=5, prior="list:0.2,0.7")
    assert load_task("bijection:replacement=TRUE,pairs=9") == Bijection(pairs=9, replacement=True)
    assert load_task("bijection:replacement=false") == Bijection() == load_task("bijection:") == load_task("bijection")


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("bijektion", ("bijektion", "bijection", *names())),
        ("zzz:a=1", ("zzz", *names())),
        ("laws", ("laws",)),
        ("coin:flip=3", ("coin", "flip=3", "flips", 24, "prior", "beta:1,1")),
        ("coin:flips", ("coin", "flips", "int")),
        ("coin:flips=three", ("coin", "flips", "three", "int")),
        ("coin:flips=2.5", ("coin", "flips", 2.5, "int")),
        ("bijection:sticky=much", ("bijection", "sticky", "much", "float")),
        ("bijection:replacement=yes", ("bijection", "replacement", "yes", "bool")),
        ("bijection:vocab=1", ("bijection:vocab=1", 2)),
        ("none/there.py:X", ("none/there.py", "path/to/file.py")),
    ],
)
def test_a_spec_that_does_not_fit_is_refused_in_one_sentence(spec, values):
    with refused(UserError, *values):
        load_task(spec)


def test_a_file_of_one_s_own_is_a_task_that_its_title_finds_again(own):
    task = load_task(f"{own}:Die:sides=6")
    assert task.title == f"{own.resolve()}:Die:sides=6"
    again = load_task(task.title)
    assert again.title == task.title and dataclasses.asdict(again) == {"sides": 6, "weight": 0.5}
    batch = task.sample(5, 0)
    assert batch.source["name"] == task.title
    torch.testing.assert_close(batch.posterior.predictive.exp(), torch.full((5, 2, 6), 1 / 6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("rest", "values"),
    [
        (":Die", ("Die", "sides")),
        (":Cube", ("Cube", "Die", "Thawed", "Half")),
        ("", ("Die", "Thawed", "Half")),
        (":Categorical", ("Categorical",)),
        (":Thawed:sides=6", ("Thawed", "@dataclass(frozen=True)")),
        (":Half", ("Half", "draw", "length", "log_predictive", "vocabulary")),
        (":Die:sides=6,colour=1", ("Die", "colour=1", "sides", "weight", 0.5)),
    ],
)
def test_what_a_file_of_one_s_own_lacks_is_named(own, rest, values):
    with refused(UserError, *values):
        load_task(f"{own}{rest}")


def test_a_file_without_a_task_is_said_to_have_none(tmp_path):
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    with refused(UserError, "X"):
        load_task(f"{tmp_path / 'empty.py'}:X")


# ---- hypotheses that are held out -----------------------------------------------------------------------------------


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
    task = load_task(name)
    if task.memorisable:
        for split in ("seen", "held-out"):
            with refused(UserError, name, task.memorisable):
                task.draw_split(2, seeded("here", 0), split)
        return
    for split in ("seen", "held-out"):
        found = task._hypotheses(3000, seeded("here", 0), split)
        assert len(found) == 3000
        assert (held_out(task.split_key(found)) == (split == "held-out")).all()
        assert len(found.flatten(1).unique(dim=0)) > 100


def test_few_hypotheses_are_drawn_again_rather_than_taken_from_the_other_split():
    task = Bijection(4, 3)  # 24 of them
    for split in ("seen", "held-out"):
        found = task._hypotheses(20_000, seeded("here", 0), split)
        assert len(found) == 20_000 and (held_out(task.split_key(found)) == (split == "held-out")).all()


@dataclass(frozen=True)
class Scarce(Bijection):
    """Holds out one in forty, and is believed to hold out a half."""

    _held_out_share = 0.5


def test_where_the_reserve_is_too_small_hypotheses_come_twice():
    found = Scarce(8, 3)._hypotheses(500, seeded("here", 0), "held-out")
    assert len(found) == 500 and held_out(found).all()
    assert len(found.unique(dim=0)) < 300


def test_a_prior_that_holds_nothing_out_is_refused_for_a_split():
    task = Bijection(2, 2)
    assert held_out(torch.tensor([[0, 1], [1, 0]])).sum() == 0
    with refused(UserError, "0.00%"):
        task.draw_split(3, seeded("here", 0), "held-out")


def test_a_task_without_hypotheses_holds_none_out(own):
    task = load_task(f"{own}:Die:sides=6")
    assert task.memorisable == "it gives no `hypothesis`" and not Bijection().memorisable and Coin().memorisable
    assert task.log2_hypotheses == math.inf
    with refused(UserError, "hypothesis"):
        task.draw_split(3, seeded("here", 0), "seen")


def test_real_hypotheses_are_hashed_by_cells_a_quarter_wide():
    cells = Task.split_key(Bijection(), torch.tensor([[-0.26, 0.24], [0.0, 1.0]]))
    assert cells.tolist() == [[-2, 0], [0, 4]]
    assert Regression(scale=2.0).split_key(torch.tensor([[0.019, -0.001]])).tolist() == [[0, -1]]
    assert Task.split_key(Bijection(), torch.tensor([[[3, 1], [0, 2]]])).tolist() == [[3, 1, 0, 2]]


# ---- drawing and sampling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_a_task_is_consistent_with_itself(name):
    task = load_task(name)
    drawn = task.draw_split(64, seeded("here", 0))
    assert list(task.query) == sorted(set(task.query)) and task.query[0] >= 0 and task.query[-1] < task.length
    assert 1 <= task.trained_queries <= len(task.query)
    assert drawn.target.shape == (64, len(task.query))
    assert task.mask().nonzero()[:, 0].tolist() == list(task.query)
    if task.features:
        assert drawn.inputs.shape == (64, task.length, task.features) and drawn.inputs.dtype == torch.float32
    else:
        assert drawn.inputs.shape == (64, task.length) and drawn.inputs.dtype == torch.int64
        assert drawn.inputs.min() >= 0 and drawn.inputs.max() < task.vocabulary
    exact = task.log_predictive(drawn.inputs)
    assert exact.dtype == torch.float64
    if isinstance(task.answers, Categorical):
        assert exact.shape == (*drawn.target.shape, len(task.answers.tokens)) and drawn.target.dtype == torch.int64
        assert max(task.answers.tokens) < task.vocabulary
        assert drawn.target.min() >= 0 and drawn.target.max() < len(task.answers.tokens)
    else:
        assert exact.shape == (*drawn.target.shape, 2) and task.vocabulary == 2 and drawn.target.dtype == torch.float32
    belief = task.log_belief(drawn.inputs)
    assert belief is None or belief.shape[:2] == drawn.target.shape


@pytest.mark.parametrize("task", [Bijection(5, 4), Bijection(5, 7, True), Recall(), Coin(flips=6)])
def test_a_target_is_the_token_that_stands_after_its_query(task):
    drawn = task.draw_split(100, seeded("here", 0))
    for j, at in enumerate(task.query):
        if at + 1 < task.length:
            assert torch.equal(drawn.inputs[:, at + 1], drawn.target[:, j] + task.answers.tokens[0])


@pytest.mark.parametrize("name", names())
def test_a_sample_carries_its_exact_answers_and_where_it_came_from(name):
    task = load_task(name)
    batch = task.sample(6, 3)
    torch.manual_seed(0)
    again, other = task.sample(6, 3), task.sample(6, 4)
    inputs = batch.inputs.values if task.features else batch.inputs.ids
    assert isinstance(batch.inputs, Rows if task.features else Tokens)
    assert torch.equal(inputs, again.inputs.values if task.features else again.inputs.ids)
    assert torch.equal(batch.target, again.target) and not torch.equal(batch.target, other.target)
    assert batch.inputs.lengths.tolist() == [task.length] * 6
    assert len(set(batch.cluster)) == 6 and batch.query.sum(1).tolist() == [len(task.query)] * 6
    assert torch.equal(batch.posterior.predictive, task.log_predictive(inputs))
    assert batch.source == {
        "kind": "task", "name": name, "n": 6, "seed": 3, "split": "any", "spec": dataclasses.asdict(task),
        "trained": task.trained_queries,
    }  # fmt: skip
    part = batch.take([4, 1])
    assert torch.equal(part.target, batch.target[[4, 1]])
    assert torch.equal(part.posterior.predictive, batch.posterior.predictive[[4, 1]])


def test_each_split_and_each_purpose_has_draws_of_its_own():
    task = Bijection()
    found = [task.sample(20, 0, split).target for split in ("any", "seen", "held-out")]
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    for split, target in zip(("any", "seen", "held-out"), found, strict=True):
        assert torch.equal(target, task.draw_split(20, seeded(f"sample/{split}", 0), split).target)
    a, b = (torch.rand(3, generator=seeded(purpose, 0)) for purpose in ("train", "sample"))
    assert not torch.equal(a, b)
    assert torch.equal(a, torch.rand(3, generator=seeded("train", 0)))


def test_constants_are_made_in_double_precision():
    assert constants([0.1, 2], torch.device("cpu")).tolist() == [0.1, 2.0]
    found = uniform(torch.zeros(2, 9), 3, 7)
    assert found.shape == (2, 3, 7) and found.dtype == torch.float64 and found.unique().item() == -math.log(7)
