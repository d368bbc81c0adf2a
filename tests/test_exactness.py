"""Every check passes on every shipped task, and each finds a task that is wrong in its way."""

import math
from dataclasses import dataclass

import pytest
import torch

from llmgeom.errors import UserError
from llmgeom.wind_tunnels import load_world, names
from llmgeom.wind_tunnels.exactness import ALARM, _by_simulation, _excess, check, require_exact
from llmgeom.wind_tunnels.worlds.bijection import Bijection
from llmgeom.wind_tunnels.worlds.coin import Coin
from llmgeom.wind_tunnels.worlds.recall import Recall
from llmgeom.wind_tunnels.worlds.recurrence import Recurrence
from llmgeom.wind_tunnels.worlds.regression import Regression
from llmgeom.world import Sequences, seeded, uniform
from tests.refusals import refused

VARIANTS = [
    "bijection:vocab=6,pairs=9,replacement=true",
    "coin:prior=list:0.1,0.5,0.8",
    "recall:layout=papers,pairs=6,queries=3,filler=4,keys=9,values=12",
    "recall:distinct=false,values=3",
    "regression:layout=separate,bins=5",
    "markov:symbols=3,fixed=false",
    "edge-hmm:process=mess3+rrxor,steps=6",
    "recurrence:opaque=true,modulus=7,steps=8",
]
# Words by which each law is found among the names.
NORMALISED, SCORE, FREQUENCY = "sum to one", "the mean loss", "as often as it was probable"
RESIDUAL, PAST, FUTURE = "standardised", "nothing shown", "comes after it"
TRIVIAL, SEED, HELD_OUT = "no trivial", "the seed alone", "held-out"


def broken(task):
    return [law.name for law in check(task, 2000, 0) if not law.passed]


@pytest.mark.parametrize("spec", [*names(), *VARIANTS])
def test_laws_hold(spec):
    laws = check(load_world(spec), n=1000)
    assert len(laws) == 9 and len({law.name for law in laws}) == 9
    assert [f"{law.name}: {law.detail}" for law in laws if not law.passed] == []


def wrong(base, what, **methods):
    """A kind of task that is wrong in one thing, said in `what`."""
    return dataclass(frozen=True)(type("Wrong", (base,), {"__doc__": what, **methods}))


def late(base):
    def log_predictive(self, inputs):
        found = base.log_predictive(self, inputs)
        return torch.cat([found[:, :1], found[:, :-1]], 1)

    return wrong(base, "The answer of the query before.", log_predictive=log_predictive)


def forgetful(base, log_predictive):
    return wrong(base, "The prior, whatever was seen.", log_predictive=log_predictive, trivial=lambda self, x: {})


def with_trivial(what, trivial, base=Bijection):
    return wrong(base, f"A trivial predictor {what}.", trivial=trivial)


def silent(self, inputs):
    found = Regression.log_predictive(self, inputs)
    found[3, 2, 1] = math.nan
    return found


def certain(self, inputs):
    sure = torch.tensor([0.0, -math.inf], dtype=torch.float64)
    heads = (inputs == 0).cumsum(1)[..., None] > 0
    return torch.where(heads, sure, Coin.log_predictive(self, inputs))


@dataclass(frozen=True)
class Confident(Regression):
    """Residuals are larger than it says."""

    factor: float = 1.1

    def log_predictive(self, inputs):
        return super().log_predictive(inputs) + torch.tensor([0.0, -2 * math.log(self.factor)])


def by_the_global_generator(self, hypothesis, generator, training=False):
    flips = (torch.rand(len(hypothesis), self.steps) >= hypothesis).long()
    return Sequences(torch.cat([torch.full_like(flips[:, :1], 2), flips[:, :-1]], 1), flips)


def by_one_seed(self, n, generator, split="any", training=False):
    return Coin.draw_split(self, n, seeded("mine", 0), split, training)


def of_its_own(self, hypothesis, generator, training=False):
    return Bijection.draw(self, self.hypothesis(len(hypothesis), generator), generator, training)


Forgetful = forgetful(Bijection, lambda self, x: uniform(x, self.pairs, self.vocab))
Memoryless = wrong(Regression, "The prior.", log_predictive=lambda self, x: Regression.trivial(self, x)["memoryless"])
Bag = wrong(Recall, "Values without keys.", log_predictive=lambda self, x: Recall.trivial(self, x)["bag of values"])
Certain = wrong(Coin, "Heads, once there was a head.", log_predictive=certain)
Halved = with_trivial("of a half", lambda self, x: {"halved": uniform(x, self.pairs, self.vocab) - math.log(2)})
WRONG = {
    "late coin": (late(Coin)(), {PAST}),
    "late bijection": (late(Bijection)(), {PAST, TRIVIAL}),
    "counts the flip that is queried": (
        wrong(Coin, "Ahead.", log_predictive=lambda self, x: Coin.log_predictive(self, x).roll(-1, 1))(),
        {FUTURE, SCORE, PAST},
    ),
    "probabilities above 1": (
        wrong(Coin, "Above 1.", log_predictive=lambda self, x: Coin.log_predictive(self, x) + 0.01)(),
        {NORMALISED, PAST},
    ),
    "NaN at one query": (
        wrong(Regression, "NaN.", log_predictive=silent)(),
        {"are finite", FUTURE, TRIVIAL, PAST, RESIDUAL, SCORE},
    ),
    "forgetful bijection": (Forgetful(), {PAST}),
    "forgetful regression": (Memoryless(), {PAST, SCORE}),
    "chance": (forgetful(Recurrence, lambda self, x: uniform(x, self.steps - 1, self.modulus))(), {PAST}),
    "values without their keys": (Bag(), {PAST}),
    "every flip counts twice": (
        wrong(Coin, "Twice.", after=lambda self, x, seen: Coin.after(self, x, 2 * seen))(),
        {SCORE, PAST},
    ),
    "certain": (Certain(), {SCORE, FREQUENCY, PAST, TRIVIAL}),
    "confident": (Confident(), {SCORE, RESIDUAL}),
    "the global generator": (wrong(Coin, "Global.", draw=by_the_global_generator)(), {SEED}),
    "one seed": (wrong(Coin, "Constant.", draw_split=by_one_seed)(), {SEED}),
    "a bijection of its own": (wrong(Bijection, "Private.", draw=of_its_own)(), {HELD_OUT}),
    "trains on whatever was drawn": (
        wrong(Bijection, "Any.", _hypotheses=lambda self, n, generator, split: self.hypothesis(n, generator))(5, 4),
        {HELD_OUT},
    ),
    "a trivial predictor of a half": (Halved(), {TRIVIAL}),
    "a trivial predictor that knows more": (
        with_trivial("that is exact", lambda self, x: {"exact": Bijection.log_predictive(self, x)}, Forgetful)(),
        {TRIVIAL, PAST},
    ),
    "a trivial predictor that looks ahead": (
        with_trivial("ahead", lambda self, x: {"ahead": self.log_predictive(x.roll(-1, 1))}, Coin)(),
        {FUTURE, TRIVIAL},
    ),
    "a belief that sums to two": (
        wrong(
            Recurrence, "Two.", log_belief=lambda self, x: Recurrence.log_belief(self, x) + math.log(2),
            log_predictive=lambda self, x: Recurrence(self.modulus, self.steps).log_predictive(x),
        )(),
        {NORMALISED},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_task_breaks_these_laws_and_no_other(what):
    task, laws = WRONG[what]
    found = broken(task)
    assert {next((law for law in laws if law in name), name) for name in found} == laws


def test_a_process_of_one_symbol_has_nothing_to_predict(tmp_path):
    (tmp_path / "one.py").write_text(
        "from dataclasses import dataclass\nimport torch\nfrom llmgeom.wind_tunnels.worlds.edge_hmm import EdgeHMM\n"
        "@dataclass(frozen=True)\nclass One(EdgeHMM):\n"
        "    def matrices(self): return torch.tensor([[[.3, .7], [.6, .4]]], dtype=torch.float64)\n"
    )
    with refused(UserError, "one symbol: nothing to predict"):
        require_exact(load_world(f"{tmp_path / 'one.py'}:One"))


@dataclass(frozen=True)
class Rounded(Bijection):
    """Exact, in single precision."""

    def log_predictive(self, inputs):
        return super().log_predictive(inputs).float()


def test_rounding_is_no_deviation():
    assert broken(Rounded()) == broken(Rounded(vocab=7, pairs=9, replacement=True)) == []


@pytest.mark.parametrize("chance", [0.5, 0.01, 1e-4])
def test_a_rare_outcome_raises_no_false_alarm(chance):
    """Sums of 2000 coins, against the binomial tail: the bound is never less than the truth."""
    from scipy.stats import binom

    mean, variance = 2000 * chance, torch.tensor(2000 * chance * (1 - chance), dtype=torch.float64)
    for count in (0, math.ceil(mean), math.ceil(2 * mean) + 1, math.ceil(mean + 6 * math.sqrt(mean)) + 3):
        truth = binom.sf(count - 1, 2000, chance) if count > mean else binom.cdf(count, 2000, chance)
        excess = _excess(torch.tensor(count - mean, dtype=torch.float64), variance, 1.0)
        assert math.exp(-excess.item()) >= truth * (1 - 1e-9)


@pytest.mark.parametrize("task", [Bijection(4, 3), Coin(steps=5), Recurrence(modulus=3, steps=5), Regression(points=4)])
def test_laws_hold_under_many_seeds(task):
    assert [law for seed in range(4) for law in check(task, 200, seed) if not law.passed] == []


def test_the_alarm_is_shared_among_all_that_is_looked_at():
    one = _excess(torch.tensor(4.4), torch.tensor(1.0), 0.0)
    assert one.item() == pytest.approx(4.4**2 / 2)
    assert _by_simulation("", one, "").passed and not _by_simulation("", one + 0.3, "").passed
    assert _by_simulation("", torch.stack([one + 0.3, one * 0]), "").passed
    assert math.log(2 / ALARM) == pytest.approx(9.9, abs=0.01)
    assert not _by_simulation("", torch.tensor([math.inf]), "").passed
    assert not _by_simulation("", _excess(torch.tensor(math.nan), torch.tensor(1.0), 0.0), "").passed
