"""Observer models of processes with several labels, an order, or items: their inputs and rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import softmax

from llmgeom.batch import Batch
from llmgeom.probes.evidence.observers import COUNT, EXACT, SLOPE, Observer, Sequences, labels_and_exact

FORGETTING_BAYES = "Bayes that forgets"
DISCOUNT = (0.0, 1.5)  # of counts; above 1 earlier labels weigh more; an interval may include values above 1
RETENTION = (0.0, 1.0)  # a probability


@dataclass(frozen=True, eq=False)
class ProcessSequences(Sequences):
    """The observations of each prompt of a process, as an observer sees them.

    Attributes:
        asked: whether the observation has the queried item.
        cells: the value of the prompt's sufficient statistic.
    """

    asked: Bool[np.ndarray, "prompt k"]
    cells: Int[np.ndarray, " prompt"]

    @classmethod
    def of(cls, batch: Batch) -> ProcessSequences:
        """Sequences from a batch of a process, by its columns `seen`, `items` and `statistic`."""
        labels, exact = labels_and_exact(batch)
        asked = np.zeros(labels.shape, dtype=bool)
        for row, items in zip(asked, batch.columns["items"], strict=True):
            *shown, last = items.split()
            row[: len(shown)] = [item == last for item in shown]
        cells = np.unique(np.array(batch.columns["statistic"]), return_inverse=True)[1].ravel()
        return cls(labels, exact, asked, cells)

    @property
    def answers(self) -> Float[np.ndarray, "prompt label"]:
        """Exact probabilities."""
        return np.exp(self.exact)

    @property
    def size(self) -> int:
        """K, the number of labels."""
        return self.exact.shape[1]

    @cached_property
    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct sequences of labels, and the index of each prompt's sequence."""
        sequences, place = np.unique(self.labels, axis=0, return_inverse=True)
        return sequences, place.ravel()

    @cached_property
    def marks(self) -> Float[np.ndarray, "prompt k label"]:
        """1 for the label of each observation; padding is 0 everywhere."""
        return (self.labels[:, :, None] == np.arange(self.size)).astype(float)

    @cached_property
    def last(self) -> Float[np.ndarray, "prompt label"]:
        """1 for the last label."""
        return self.marks[np.arange(len(self.k)), self.k - 1]

    @cached_property
    def steps(self) -> Float[np.ndarray, "prompt k label"]:
        """`marks` of the labels that followed an earlier occurrence of the last label."""
        before = np.concatenate([np.zeros_like(self.marks[:, :1]), self.marks[:, :-1]], 1)
        return self.marks * (before * self.last[:, None]).sum(2, keepdims=True)


Rule = Float[np.ndarray, "prompt label"]


def _lapsing(shown: ProcessSequences, p: Rule, lapse: float) -> Rule:
    """p mixed with a lapse, after which all labels are equally likely."""
    return (1 - lapse) * p + lapse / shown.size


# ---- counts ---------------------------------------------------------------------------------------------------------


def _shares(of: str, shown: ProcessSequences, discount: float, prior: float) -> Rule:
    """(prior + c_j) / (K prior + sum of c), c_j the sum of discount^age over labels j, or over steps to j."""
    counts = ((discount**shown.age)[:, :, None] * getattr(shown, of)).sum(1)
    return (prior + counts) / (shown.size * prior + counts.sum(1, keepdims=True))


def _counter(shown: ProcessSequences, slope: float) -> Rule:
    return softmax(slope * shown.marks.sum(1), axis=1)


def _majority(shown: ProcessSequences, error: float) -> Rule:
    counts = shown.marks.sum(1)
    first = counts == counts.max(1, keepdims=True)
    return _lapsing(shown, first / first.sum(1, keepdims=True), error)


# ---- a hidden state -------------------------------------------------------------------------------------------------


def _filter(shown: ProcessSequences, stay: float, reliability: float, discount: float = 1.0) -> Rule:
    """The forward algorithm over two chains, one that stays with probability `stay` and one that moves with it.

    Before every step the belief over chain and state is raised to the power `discount` and normalised: 1 is Bayes'
    rule, 0 forgets everything.
    """
    size = shown.size

    def mixing(p: float) -> np.ndarray:
        return np.where(np.eye(size) > 0, p, (1 - p) / (size - 1))

    moves = np.zeros((2 * size, 2 * size))
    moves[:size, :size], moves[size:, size:] = mixing(stay), mixing(1 - stay)
    shows = np.tile(mixing(reliability), (2, 1))
    labels, place = shown.distinct
    belief = np.full((len(labels), 2 * size), 1 / (2 * size))
    for step in range(labels.shape[1]):
        on = labels[:, step] >= 0
        filtered = belief[on] * shows.T[labels[on, step]]
        if discount != 1:
            filtered **= discount
        belief[on] = filtered / filtered.sum(1, keepdims=True) @ moves
    return (belief @ shows)[place]


# ---- items ----------------------------------------------------------------------------------------------------------


def _recall(shown: ProcessSequences, lapse: float, retention: float = 1.0, eliminates: bool = False) -> Rule:
    """The mark of the queried item, if it was shown and is not forgotten; else any mark.

    Each observation is remembered with probability retention^age. With `eliminates` a new item has a mark that no
    remembered observation has.
    """
    kept = retention**shown.age
    known = ((shown.asked * kept)[:, :, None] * shown.marks).sum(1)
    free = 1 - (kept[:, :, None] * shown.marks).max(1) if eliminates else np.ones_like(known)
    is_known = shown.asked.any(1, keepdims=True)
    open_to = np.where(is_known | (free.sum(1, keepdims=True) < 1e-9), 1.0, free)
    rest = 1 - known.sum(1, keepdims=True)
    return _lapsing(shown, known + rest * open_to / open_to.sum(1, keepdims=True), lapse)


def _only_eliminates(shown: ProcessSequences, lapse: float) -> Rule:
    """A mark that was not shown, whichever item is queried."""
    free = 1 - shown.marks.max(1)
    return _lapsing(shown, free / free.sum(1, keepdims=True), lapse)


def _knows_new_items(shown: ProcessSequences, lapse: float, eliminates: bool = False) -> Rule:
    """The share of each mark for an item that was shown, whichever mark it had; for a new item as in `_recall`."""
    counts = shown.marks.sum(1)
    free = (counts == 0) if eliminates else np.ones_like(counts)
    answer = np.where(shown.asked.any(1, keepdims=True), counts, free).astype(float)
    return _lapsing(shown, answer / answer.sum(1, keepdims=True), lapse)


# ---- the rules of each process --------------------------------------------------------------------------------------

LABELS, STEPS = partial(_shares, "marks"), partial(_shares, "steps")
ERROR = ("error",), (0.3,), ((1e-3, 0.999),)
RIVALS = (
    Observer("logit-linear counter", False, _counter, ("slope",), (0.5,), (SLOPE,)),
    Observer("majority", False, _majority, *ERROR),
    Observer("copy-last", False, lambda shown, error: _lapsing(shown, shown.last, error), *ERROR),
    Observer("indifferent", False, lambda shown: np.full(shown.exact.shape, 1 / shown.size)),
)
WITH_DISCOUNT = (("discount", "prior"), (0.8, 1.0), (DISCOUNT, COUNT))
UNIGRAM = Observer("unigram that forgets", False, LABELS, *WITH_DISCOUNT)
MARKOV = Observer("Markov counts that forget", False, STEPS, *WITH_DISCOUNT)


def _forgets(rule: Callable[..., Rule], names: tuple, start: tuple, bounds: tuple) -> Observer:
    return Observer(FORGETTING_BAYES, False, rule, names, start, bounds, nests=True)


def _of_counts(rule: partial, rival: Observer) -> tuple[Observer, ...]:
    """Bayes' rule with a fitted Dirichlet prior, its version with a discount, and a rival with other counts."""
    fitted = Observer(
        "Bayes: fitted prior", True, lambda shown, prior: rule(shown, 1.0, prior), ("prior",), (1.0,), (COUNT,)
    )
    return (EXACT, fitted, _forgets(rule, *WITH_DISCOUNT), rival, *RIVALS)


def _of_items(eliminates: bool) -> tuple[Observer, ...]:
    """Bayes' rule with a lapse, its version with forgetting, and for a bijection the rules that use half of it."""
    recall = partial(_recall, eliminates=eliminates)
    lapse = ("lapse",), (0.1,), ((0.0, 1.0),)
    half = (
        Observer("binds, does not eliminate", False, _recall, *lapse),
        Observer("eliminates, does not bind", False, _only_eliminates, *lapse),
    )
    return (
        EXACT,
        Observer("Bayes with a lapse", True, recall, *lapse),
        _forgets(recall, ("lapse", "retention"), (0.1, 0.8), ((0.0, 1.0), RETENTION)),
        Observer("tells new items, does not bind", False, partial(_knows_new_items, eliminates=eliminates), *lapse),
        *half[: 2 * eliminates],
        UNIGRAM,
        *RIVALS,
    )


CHAINS = (("stay", "reliability"), (0.8, 0.8), ((0.501, 0.999), (0.501, 0.999)))
OF_PROCESS: dict[str, tuple[Observer, ...]] = {
    "dirichlet": _of_counts(LABELS, MARKOV),
    "markov": _of_counts(STEPS, UNIGRAM),
    "hmm": (
        EXACT,
        Observer("Bayes: fitted chains", True, _filter, *CHAINS),
        _forgets(_filter, (*CHAINS[0], "discount"), (*CHAINS[1], 0.9), (*CHAINS[2], DISCOUNT)),
        MARKOV,
        UNIGRAM,
        *RIVALS,
    ),
    "recall": _of_items(False),
    "bijection": _of_items(True),
}
