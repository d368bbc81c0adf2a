"""Scores of predicted labels.

For held-out predictions: AUROC within folds, balanced accuracy and R2. For probabilities of answers: adaptive
calibration error, Brier score, and the AUROC of right over wrong answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy.stats import rankdata

from llmgeom.errors import UserError
from llmgeom.stats.resampling import TIE, Clusters, rows_by_cluster

Columns = Float[np.ndarray, "row column"]
Fold = Int[np.ndarray, " row"]
Kind = Literal["binary", "classes", "number"]
METRICS: dict[str, str] = {"binary": "AUROC", "classes": "balanced accuracy", "number": "R2"}
BINS = 10
LEAST_ORDERS = 100
TRIES = 20  # attempts to draw an order of clusters that leaves every class in two folds


def coded(kind: Kind, label: Shaped[np.ndarray, " row"], classes: Sequence | None = None) -> Columns:
    """The label as columns for a regression: the number, 1 for the second of two values, or one indicator per class.

    Classes are in the given order, else sorted.
    """
    if kind == "number":
        return np.asarray(label, dtype=np.float64)[:, None]
    values = np.unique(label) if classes is None else np.array(classes)
    return (label[:, None] == (values if kind == "classes" else values[[1]])).astype(np.float64)


def score(
    kind: Kind,
    truth: Columns,
    prediction: Columns,
    fold: Fold,
    rows: Bool[np.ndarray, " row"] | None = None,
) -> float:
    """Score of predictions of a label; 1 is perfect.

    Args:
        kind: decides the score. "binary": AUROC over all pairs of a positive and a negative row of one fold, ties half.
            Pairs across folds would compare two fits with different intercepts, which biases AUROC below 1/2 where the
            label is unreadable. "classes": balanced accuracy, the mean over classes of the share of rows that
            `classified` puts into their class. "number": R2, 1 - sum (y - prediction)^2 / sum (y - mean)^2.
        rows: score these rows alone.

    Raises:
        UserError: no fold has a pair, or the label is constant.
    """
    named = classified(truth, prediction, fold) if kind == "classes" else fold  # from all rows
    if rows is not None:
        truth, prediction, fold, named = (x[rows] for x in (truth, prediction, fold, named))
    if kind == "binary":
        return float(_aurocs(truth[:, :1] > 0.5, prediction[:, :1], fold)[0])
    if kind == "number":
        spread = np.square(truth - truth.mean(0)).sum()
        if not spread > 0:
            raise UserError("the label is constant: it cannot be predicted")
        return float(1 - np.square(truth - prediction).sum() / spread)
    label = truth.argmax(1)
    count, right = np.bincount(label), np.bincount(label, named == label)
    return float((right[count > 0] / count[count > 0]).mean())


def classified(truth: Float[np.ndarray, "row class"], prediction: Float[np.ndarray, "row class"], fold: Fold) -> Fold:
    """The class of each row: the largest of its predictions over the shares of the classes in the other folds.

    P(class | row) / P(class) is what balanced accuracy asks for. The largest prediction is the commonest class in every
    row where classes are unequal: of 6, 6 and 68 rows, whose small classes have an AUROC of .92 each, 1/3 in the model
    and in every control, and "ruled out" in 8 of 8 samples.
    """
    outside = truth.sum(0) - np.stack([truth[fold == held].sum(0) for held in range(int(fold.max()) + 1)])
    share = outside / np.maximum(outside.sum(1, keepdims=True), 1e-300)
    return np.where(share[fold] > 1e-12, prediction / np.maximum(share[fold], 1e-12), -np.inf).argmax(1)


def chance(kind: Kind, columns: int) -> float:
    """The score of uninformative predictions."""
    return {"binary": 0.5, "number": 0.0, "classes": 1 / columns}[kind]


def bounds(kind: Kind) -> tuple[float, float]:
    """The least and the largest score: 0 and 1; R2 has no least."""
    return (-math.inf if kind == "number" else 0.0), 1.0


def scores(
    kind: Kind,
    truth: Float[np.ndarray, "row draw column"],
    prediction: Float[np.ndarray, "row draw column"],
    fold: Fold,
) -> Float[np.ndarray, " draw"]:
    """`score` for each draw."""
    if kind == "binary":
        return _aurocs(truth[:, :, 0] > 0.5, prediction[:, :, 0], fold)
    return np.array([score(kind, truth[:, i], prediction[:, i], fold) for i in range(truth.shape[1])])


def _aurocs(positive: np.ndarray, prediction: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """AUROC of each draw within folds: each positive row counts the negatives of its fold below it, and half of its
    ties: its rank there less that among positive rows (Mann and Whitney 1947)."""
    won, pairs = np.zeros(positive.shape[1]), np.zeros(positive.shape[1])
    for here in (fold == held for held in np.unique(fold)):
        yes = positive[here].sum(0)
        won += (rankdata(prediction[here], axis=0) * positive[here]).sum(0) - yes * (yes + 1) / 2
        pairs += yes * (here.sum() - yes)
    if not pairs.all():
        raise UserError("no fold contains both values of the label: give more clusters of the rarer value")
    return won / pairs


def moved(
    label: Shaped[np.ndarray, " row"],
    cluster: Shaped[np.ndarray, " row"],
    draws: int,
    seed: int,
    fold: Fold | None = None,
) -> Int[np.ndarray, "draw row"]:
    """Permutations of rows for the null of a label: they break its relations and keep its spread over clusters.

    Clusters of any size exchange their labels. Where the label varies inside clusters, a smaller cluster takes a random
    part of the other's labels, a larger one repeats them to fill its rows, and inside a cluster their order is random.
    Under the null, clusters are exchangeable and so are the rows of one cluster; the order of rows in a file decides
    nothing. Two roads failed. When rows kept their order inside clusters, clusters of a templates-by-fillers design
    received equal labels: each draw was the label itself. When only clusters of equal size exchanged, a cluster of
    unique size kept its labels: with 27 clusters of 3 to 29 rows, a label that mostly follows the cluster had an AUROC
    of .93 and this control one of .92.

    Give the folds if they are stratified by the label: clusters then exchange only within their fold, and each fold
    keeps its classes. Otherwise a class that is frequent in a fold is rare in its training rows, and permuted labels
    score below chance: balanced accuracy .18 for four classes that nothing predicts, 80 rows, and p <= .025 in 10 % of
    400 simulated labels. An order that leaves a class in only one fold cannot be scored: it is drawn again, and after
    TRIES such orders clusters keep their labels.

    Entry [draw, r] is the row whose label moves to row r. Few of them may differ: see `few_orders`.
    """
    rng, groups = np.random.default_rng(seed), rows_by_cluster(cluster, len(label))
    first = np.array([rows[0] for rows in groups])
    stratum = np.zeros(len(groups)) if fold is None else fold[first]
    if all(len(set(label[rows].tolist())) == 1 for rows in groups):
        order = np.tile(np.arange(len(label)), (draws, 1))
        for here in (np.flatnonzero(stratum == value) for value in np.unique(stratum)):
            source = np.array([rng.permutation(first[here]) for _ in range(draws)])
            for i, group in enumerate(here):
                order[:, groups[group]] = source[:, [i]]
        return order
    size, rows = np.array([len(members) for members in groups]), np.concatenate(groups)
    start, member = size.cumsum() - size, np.repeat(np.arange(len(groups)), size)
    place, by_stratum = np.arange(len(rows)) - start[member], np.argsort(stratum, kind="stable")
    classes = np.unique(label, return_inverse=True)[1]

    def drawn(exchange: bool) -> np.ndarray:
        source, moved_to = np.arange(len(groups)), np.empty_like(rows)
        if exchange:
            source[by_stratum] = np.lexsort((rng.random(len(groups)), stratum))
        mixed = rows[np.lexsort((rng.random(len(rows)), member))]  # inside each cluster
        moved_to[rows] = mixed[start[source[member]] + place % size[source[member]]]
        return moved_to

    def readable(order: np.ndarray) -> bool:
        """Whether every class is in at least two folds, and some fold has at least two classes."""
        if fold is None:
            return True
        there = np.zeros((classes.max() + 1, int(fold.max()) + 1), dtype=bool)
        there[classes[order], fold] = True
        return bool((there.sum(1) > 1).all() and (there.sum(0) > 1).any())

    def permutation() -> np.ndarray:
        tries = (drawn(exchange=True) for _ in range(TRIES))
        exchanged = next((order for order in tries if readable(order)), None)
        return drawn(exchange=False) if exchanged is None else exchanged

    return np.array([permutation() for _ in range(draws)])


def few_orders(label: Shaped[np.ndarray, " row"], cluster: Shaped[np.ndarray, " row"], fold: Fold | None = None) -> str:
    """The reason if `moved` can make fewer than LEAST_ORDERS different labels (p < .01 is then impossible), else ''.

    A label that is constant in each of 10 clusters, two per fold, has 32 orders: its claim could never hold.
    """
    groups = rows_by_cluster(cluster, len(label))
    values = [label[rows].tolist() for rows in groups]
    exchangeable: dict[int, list] = {}
    for rows, value in zip(groups, values, strict=True):
        shares = tuple(sorted((name, n / len(value)) for name, n in Counter(value).items()))
        exchangeable.setdefault(0 if fold is None else int(fold[rows[0]]), []).append(shares)
    orders = 0.0  # log of their number; the number itself takes minutes for a million rows
    for some in [*values, *exchangeable.values()]:
        orders += math.lgamma(len(some) + 1) - sum(math.lgamma(count + 1) for count in Counter(some).values())
    if orders >= math.log(LEAST_ORDERS) - 1e-6:
        return ""
    return (
        f"the label can be put in fewer than {LEAST_ORDERS} different orders over {len(groups)} clusters"
        f"{' in 5 folds' * (fold is not None)}, too few for a permutation null: add clusters of every class"
    )


# ---- probabilities of answers ----------------------------------------------------------------------------------------


def bins(confidence: Float[np.ndarray, " prompt"]) -> Int[np.ndarray, " prompt"]:
    """The bin of each prompt: bins of nearly equal size in order of confidence; equal confidences share a bin.

    Nixon and others (2019), Measuring calibration in deep learning. With fewer than 5 prompts per bin, fewer bins.
    """
    n = len(confidence)
    count = max(1, min(BINS, n // 5))
    place = rankdata(confidence, method="min") - 1
    return np.unique((place * count / n).astype(np.int64), return_inverse=True)[1]


def reliability(
    confidence: Float[np.ndarray, " prompt"], right: Bool[np.ndarray, " prompt"]
) -> tuple[Float[np.ndarray, " bin"], Float[np.ndarray, " bin"], Int[np.ndarray, " bin"]]:
    """Mean confidence, share of right answers, and number of prompts, bin by bin."""
    bin_of = bins(confidence)
    count = np.bincount(bin_of)
    return np.bincount(bin_of, confidence) / count, np.bincount(bin_of, right) / count, count


def calibration_error(confidence: Float[np.ndarray, " prompt"], right: Bool[np.ndarray, " prompt"]) -> float:
    """Adaptive ECE: sum over bins of (prompts in the bin / prompts) |mean confidence - share right|.

    A calibrated model tends to 0 as prompts grow; few prompts give more than 0, so compare with `calibrated_errors`.
    """
    mean, share, count = reliability(confidence, right)
    return float((count * np.abs(mean - share)).sum() / count.sum())


def calibrated_errors(
    confidence: Float[np.ndarray, " prompt"],
    draws: int,
    seed: int,
    clusters: Clusters | None = None,
    correlation: float = 0.0,
) -> Float[np.ndarray, " draw"]:
    """Calibration errors of a simulated calibrated model: each answer is right with probability its confidence.

    With probability `correlation` (see `cluster_correlation`), one random number decides the answers of two prompts of
    one cluster: the more confident answer is then right whenever the other is.
    """
    rng, n = np.random.default_rng(seed), len(confidence)
    cluster = np.arange(n)
    for i, rows in enumerate([] if clusters is None else rows_by_cluster(clusters, n)):
        cluster[rows] = i

    def uniform() -> np.ndarray:
        independent = rng.random(n)
        if not correlation:
            return independent
        common = rng.random(n) < math.sqrt(correlation)
        return np.where(common, rng.random(cluster.max() + 1)[cluster], independent)

    return np.array([calibration_error(confidence, uniform() < confidence) for _ in range(draws)])


def cluster_correlation(
    confidence: Float[np.ndarray, " prompt"], right: Bool[np.ndarray, " prompt"], clusters: Clusters
) -> float:
    """The correlation of right answers inside clusters (0-1): 0 for independent prompts, 1 for copies of one prompt.

    sum e_i e_j / sum (min(c_i, c_j) - c_i c_j) over pairs in a cluster, cut to 0..1, c the confidence, e = right - c,
    whose mean is 0 in a calibrated model. The denominator is the largest covariance that two answers with these
    confidences can have. Derived here. If prompts were taken as independent, a calibrated model of 20 questions in 10
    wordings each had p <= .05 in 60 of 60 samples; with this correlation it has in 10 of 100.
    """
    e, together, most = right - confidence, 0.0, 0.0
    for rows in rows_by_cluster(clusters, len(confidence)):
        c = np.sort(confidence[rows])
        together += e[rows].sum() ** 2 - np.square(e[rows]).sum()
        most += 2 * c @ np.arange(len(c))[::-1] - c.sum() ** 2 + np.square(c).sum()
    return float(np.clip(together / most, 0, 1)) if most > TIE else 0.0


def brier(probability: Float[np.ndarray, "prompt answer"], right: Int[np.ndarray, " prompt"]) -> float:
    """Brier score: mean over prompts of sum over answers of (p - 1 if right, else p)^2; 0 is perfect, 2 the worst."""
    truth = right[:, None] == np.arange(probability.shape[1])
    return float(np.square(probability - truth).sum(1).mean())


def ranking(score: Float[np.ndarray, " prompt"], right: Bool[np.ndarray, " prompt"]) -> float:
    """AUROC: P(a right answer scores higher than a wrong one), ties half; 1/2 where all are right or all wrong."""
    if right.all() or not right.any():
        return 0.5
    return float(_aurocs(right[:, None], score[:, None], np.zeros(len(right)))[0])
