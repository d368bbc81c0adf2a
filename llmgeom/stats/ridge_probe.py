"""Held-out R2 of a number that ridge regression predicts from vectors, with whole clusters held out.

Prompts of one template are never on both sides of a fold, since the regression could memorise what they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int, Real

from llmgeom.errors import UserError
from llmgeom.stats import tall_ridge
from llmgeom.stats.resampling import (
    LEAST_CLUSTERS,
    Clusters,
    Interval,
    jackknife,
    permute_clusters,
    require_clusters,
    rows_by_cluster,
)

Rows = Float[np.ndarray, "row coordinate"]
Weight = Float[np.ndarray, " row"] | None
Stratum = Int[np.ndarray, " row"] | None
Fold = Int[np.ndarray, " row"]
Repeats = Int[np.ndarray, "repeat row"]
FOLDS = 5
GROUPS = 25
REPEATS, REPEATED_ROWS = 20, 1500  # divisions into folds over which an R2 is averaged; fewer of more than 75 rows
TALL = 2000  # from this number of rows, sums over folds cost less than an eigendecomposition and its blocks
PENALTIES = 10.0 ** np.arange(-3, 4.01, 0.5)
AT_ONCE = 10_000  # below this size of an inner fold, all penalties share one call of LAPACK
TALL_PENALTIES = PENALTIES[::2]  # every other one: with many rows each costs a factorisation


@dataclass(frozen=True)
class Readout:
    """Held-out predictions of a number, in its own unit.

    Attributes:
        truth, prediction: [row column]; each prediction comes from rows of other clusters only.
        fold: [row] the fold in which the row was held out.
        penalty: [fold column] the penalty that the other folds chose.
        error: [fold column] mean squared error with that penalty, when the other folds are held out in turn.
        stratum, baseline: [row] and [row column], if rows are compared within strata. The baseline is the mean over the
            rows of the same stratum outside the fold. A row whose stratum lies in one fold only has its truth as
            prediction and baseline.
    """

    truth: np.ndarray
    prediction: np.ndarray
    fold: np.ndarray
    penalty: np.ndarray
    error: np.ndarray
    stratum: np.ndarray | None = None
    baseline: np.ndarray | None = None

    @property
    def r2(self) -> Float[np.ndarray, " column"]:
        """1 - sum (y - prediction)^2 / sum (y - mean)^2, pooled over all rows: 1 is exact, 0 as good as the mean of all
        rows, below 0 worse (an unreadable number is slightly below 0: the mean of the other rows predicts it).
        Within strata the baseline replaces the mean."""
        spread = np.square(self.truth - (self.truth.mean(0) if self.baseline is None else self.baseline)).sum(0)
        return 1 - np.square(self.truth - self.prediction).sum(0) / spread


def read(
    x: Rows,
    y: Real[np.ndarray, "row column"],
    fold: Fold,
    confounds: Float[np.ndarray, "row confound"] | None = None,
    weight: Weight = None,
    stratum: Stratum = None,
) -> Readout:
    """Ridge regression of each column of y on x, each fold predicted from the others.

    In the rows outside a fold, coordinates are standardised (constant ones left out) and y is centred. The weights
    minimise sum (y - z w)^2 / d + penalty |w|^2 with d coordinates, so that a penalty means the same at every width.
    Each column has the penalty of PENALTIES with the least squared error when the remaining folds are held out in turn.
    The inner errors are exact and cost one eigendecomposition: with
    H = 1/m + U diag(l / (l + penalty)) U', where U diag(l) U' = z z' / d over m rows, the residuals of rows G without G
    are (I - H_GG)^-1 (y - H y)_G (block form of the leave-one-out identity of least squares with a quadratic penalty;
    derived here). Inner folds share the standardisation of their outer fold, which excludes the scored rows.
    If no coordinate varies outside a fold, the mean is predicted. Given confounds, x is replaced by its residual from
    least squares on a constant and the confounds, fitted to the rows outside the fold.
    A row of weight w counts as w equal rows: every mean and sum of squares is weighted (rows scaled by sqrt(w)).
    Given strata, the means over the rows of the same stratum outside the fold are subtracted from x and y. With means
    over all rows, noise of 75 sequences at 23 positions had an R2 of up to .34: held-out rows leaked into their own
    prediction.

    Raises:
        UserError: a column of y is constant outside a fold, or values are not finite.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    weight, baseline = np.ones(len(x)) if weight is None else weight, None
    if stratum is not None:
        if confounds is not None:
            raise ValueError("strata and confounds cannot be combined: add the strata as columns of the confounds")
        confounds, baseline = np.eye(int(stratum.max()) + 1)[stratum], np.empty_like(y)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise UserError("a readout cannot use values that are not finite; drop those rows or find out why they occur")
    count, tall = int(fold.max()) + 1, None
    prediction, penalty, error = np.empty_like(y), np.empty((count, y.shape[1])), np.empty((count, y.shape[1]))
    # [fold coordinate] the smallest and largest value in each fold, which say what varies outside any of them.
    low = np.array([x[fold == held].min(0, initial=np.inf) for held in range(count)])
    high = np.array([x[fold == held].max(0, initial=-np.inf) for held in range(count)])
    for test_fold in range(count):
        out, rest = fold == test_fold, fold != test_fold
        if (y[rest].max(0) == y[rest].min(0)).any():
            raise UserError(f"the target is constant over {rest.sum()} rows: nothing can be learnt from them")
        w = weight[rest]
        if baseline is None or stratum is None:
            mean, of_rest = np.broadcast_to(np.average(y[rest], 0, w), y.shape), None
        else:
            mean, of_rest = _means(y, stratum, rest, weight), stratum[rest]
            baseline[out] = mean[out]
        varies = np.delete(low, test_fold, 0).min(0) != np.delete(high, test_fold, 0).max(0)
        if rest.sum() > max(TALL, 2 * varies.sum()) and varies.any():
            if tall is None:
                every = np.ones(len(x), dtype=bool)
                centre = np.average(y, 0, weight) if stratum is None else _means(y, stratum, every, weight)
                tall = tall_ridge.Folds(x, y - centre, fold, confounds, weight)
            prediction[out], penalty[test_fold], error[test_fold] = tall.read(test_fold, varies, TALL_PENALTIES)
        else:
            residual = residuals(x, confounds, rest, weight)
            prediction[out], penalty[test_fold], error[test_fold] = _one_fold(
                residual[rest], residual[out], y[rest] - mean[rest], fold[rest], w, of_rest
            )
        prediction[out] += mean[out]
        error[test_fold] /= w.sum()
    if baseline is not None and stratum is not None:
        alone = ~_in_two_folds(stratum, fold)
        prediction[alone] = baseline[alone] = y[alone]
    return Readout(y, prediction, fold, penalty, error, stratum, baseline)


def _one_fold(
    x: np.ndarray, new: np.ndarray, y: np.ndarray, fold: np.ndarray, weight: np.ndarray, stratum: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictions of new rows from x and centred y, the penalty of each column, and its error over the inner folds."""
    root = np.sqrt(weight)
    z, new = standardised(x, new, weight)
    z, y = z * root[:, None], y * root[:, None]
    values, vectors = _eigen(z)
    errors = _inner_errors(values, vectors, y, fold, root, stratum)
    penalty = PENALTIES[errors.argmin(0)]
    return (new @ z.T) @ _dual(values, vectors, y, penalty), penalty, errors.min(0)


def _means(values: np.ndarray, stratum: np.ndarray, rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[row column] the weighted mean over those of `rows` that share the row's stratum; 0 if there is none."""
    count = int(stratum.max()) + 1
    sums, total = np.zeros((count, values.shape[1])), np.bincount(stratum[rows], weight[rows], minlength=count)
    np.add.at(sums, stratum[rows], values[rows] * weight[rows, None])
    return (sums / np.where(total > 0, total, 1)[:, None])[stratum]


def _in_two_folds(stratum: np.ndarray, fold: np.ndarray) -> Bool[np.ndarray, " row"]:
    """Whether a row's stratum has rows in another fold."""
    folds_of = np.zeros((int(stratum.max()) + 1, int(fold.max()) + 1), dtype=bool)
    folds_of[stratum, fold] = True
    return folds_of.sum(1)[stratum] > 1


def residuals(
    x: Rows, confounds: Float[np.ndarray, "row confound"] | None, rest: Bool[np.ndarray, " row"], weight: Weight = None
) -> Rows:
    """x minus its least-squares prediction from a constant and the confounds, fitted to the rows `rest` only.

    Collinear confounds get the weights of minimum norm. Coordinates that are constant in those rows become 0: rounding
    errors would otherwise grow to the size of any coordinate when standardised.
    """
    if confounds is None:
        return x
    varies = x[rest].max(0) != x[rest].min(0)
    design = np.column_stack([np.ones(len(x)), confounds])
    # The pseudo-inverse of the few columns: least squares with a thousand right-hand sides costs ten times more.
    if weight is None:
        take = np.linalg.pinv(design[rest], rcond=1e-10)
    else:
        root = np.sqrt(weight[rest])
        take = np.linalg.pinv(design[rest] * root[:, None], rcond=1e-10) * root
    left = np.where(varies, x - design @ (take @ x[rest]), 0)
    explained = np.abs(left[rest]).max(0) <= 1e-10 * np.abs(x[rest]).max(0)  # their residual is rounding
    return np.where(explained, 0, left) if explained.any() else left


def fit(
    x: Rows, y: Float[np.ndarray, " row"], fold: Fold, weight: Weight = None
) -> tuple[Float[np.ndarray, " coordinate"], float]:
    """Weights and intercept of the ridge regression of y on x over all rows; coordinates are not standardised.

    The penalty per coordinate is chosen over folds as in `read`.
    """
    w = np.ones(len(x)) if weight is None else weight
    root, each = np.sqrt(x.shape[1]), np.sqrt(w)
    centre, mean = np.average(x, 0, w), np.average(y, 0, w)
    z, target = (x - centre) * each[:, None] / root, ((y - mean) * each)[:, None]
    values, vectors = _eigen(z)
    penalty = PENALTIES[_inner_errors(values, vectors, target, fold, each).argmin(0)]
    weights = (z.T @ _dual(values, vectors, target, penalty))[:, 0] / root
    return weights, float(mean - weights @ centre)


def standardised(rows: np.ndarray, new: np.ndarray, weight: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Both by the weighted mean and sd of `rows`, over sqrt(coordinates that vary there); the others are left out."""
    varies = rows.max(0) != rows.min(0)
    if not varies.all():
        rows, new = rows[:, varies], new[:, varies]
    w = np.ones(len(rows)) if weight is None else weight
    total, each = w.sum(), w[:, None]  # np.average takes three times as long on few rows, thousands of times
    centre = (rows * each).sum(0) / total
    rows = rows - centre
    scale = 1 / np.sqrt((np.square(rows) * each).sum(0) / total * max(len(centre), 1))
    return rows * scale, (new - centre) * scale


def _eigen(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nonzero eigenvalues l and eigenvectors U of z z', from the smaller of z z' and z' z."""
    if len(z) <= z.shape[1]:
        values, vectors = np.linalg.eigh(z @ z.T)
    else:
        values, vectors = np.linalg.eigh(z.T @ z)
    kept = values > 1e-10 * len(z)  # the sum of the eigenvalues is about the number of rows
    values, vectors = values[kept], vectors[:, kept]
    return values, vectors if len(z) <= z.shape[1] else z @ vectors / np.sqrt(values)


def _dual(values: np.ndarray, vectors: np.ndarray, y: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """[row column] dual coefficients a with weights w = z' a, without the null space of z'."""
    return vectors @ ((vectors.T @ y) / (values[:, None] + penalty))


def _inner_errors(
    values: np.ndarray,
    vectors: np.ndarray,
    y: np.ndarray,
    fold: np.ndarray,
    root: np.ndarray,
    stratum: np.ndarray | None = None,
) -> np.ndarray:
    """[penalty column] sum over inner folds of squared errors of centred y; rows are scaled by `root` of the weights.

    I - H_GG is positive definite as long as each stratum of G has rows outside G; rows of a stratum that lies entirely
    in G stay in the fit. H projects on the strata instead of the constant, so stratum means exclude G, too. With means
    over all these rows, noise chose the smallest penalties and had an R2 of -.7 (75 rows in 23 strata).
    """
    along = vectors.T @ y
    errors = np.zeros((len(PENALTIES), y.shape[1]))
    stratum = np.zeros(len(y), dtype=int) if stratum is None else stratum
    size = np.bincount(stratum, np.square(root))
    shrunk = values / (values + PENALTIES[:, None])
    shrunk_root, shrunk_along = np.sqrt(shrunk)[:, None], shrunk[..., None] * along
    for held in np.flatnonzero(np.bincount(fold)):
        rows = (fold == held) & (np.bincount(stratum, fold != held, minlength=len(size)) > 0)[stratum]
        held_out, weight, group = vectors[rows], root[rows], stratum[rows]
        same = group[:, None] == group
        left = np.eye(len(held_out)) - same * np.outer(weight, weight) / size[group]
        step = -(-len(PENALTIES) // (1 + held_out.size // AT_ONCE))
        for at in range(0, len(PENALTIES), step):
            some = slice(at, at + step)
            half = held_out * shrunk_root[some]
            missed = y[rows] - held_out @ shrunk_along[some]
            errors[some] += np.square(np.linalg.solve(left - half @ half.swapaxes(1, 2), missed)).sum(1)
    return errors


def folds(clusters: Clusters, seed: int, count: int = FOLDS) -> Fold:
    """The fold of each row: the largest clusters first, equal ones in random order, each to the fold with fewest rows.

    scikit-learn's GroupKFold fills folds the same way but without a seed: names would order clusters of equal size.

    Args:
        clusters: The cluster of each row.
        seed: Decides the order among clusters of equal size.
        count: Number of folds; with fewer clusters, each cluster is a fold.

    Raises:
        UserError: fewer than 5 clusters.
    """
    rows = rows_by_cluster(clusters, len(clusters))
    if len(rows) < LEAST_CLUSTERS:
        raise UserError(
            f"a readout needs at least {LEAST_CLUSTERS} clusters, got {len(rows)}: add templates or documents"
        )
    sizes = np.array([len(members) for members in rows])
    order = np.random.default_rng(seed).permutation(len(rows))
    order = order[np.argsort(-sizes[order], kind="stable")]
    filled, fold = np.zeros(min(count, len(rows)), dtype=np.int64), np.empty(len(clusters), dtype=np.int64)
    for cluster in order:
        fold[rows[cluster]] = emptiest = filled.argmin()
        filled[emptiest] += sizes[cluster]
    return fold


def repeated_folds(clusters: Clusters, seed: int, most: int = REPEATS) -> Int[np.ndarray, "repeat row"]:
    """Several divisions into folds, over which a held-out R2 is averaged: the seed of one division alone moves it.

    At 75 rows there are 20, above that as many as keep the work about the same, at least 2. For the entropy of 75
    prompts of math from SmolLM2's values, R2 has a standard deviation of .059 over seeds with one division, and of .014
    with 20 (`python -m studies.decodability`).
    """
    count = min(most, max(2, REPEATED_ROWS // len(clusters)))
    return np.stack([folds(clusters, seed + 1000 * i) for i in range(count)])


def decodability(x: Rows, y: Real[np.ndarray, " row"], fold: Fold | Repeats, stratum: Stratum = None) -> float:
    """Held-out R2 of one number (see `Readout.r2`), the mean over the divisions into folds."""
    return float(np.mean([read(x, np.asarray(y)[:, None], one, stratum=stratum).r2[0] for one in np.atleast_2d(fold)]))


def against_number(
    x: Rows, y: Real[np.ndarray, " row"], clusters: Clusters, sizes: Sequence[int], seed: int, draws: int = REPEATS
) -> Float[np.ndarray, " size"]:
    """Held-out R2 of random subsets of the clusters, [size] of each number of clusters, the mean over `draws` subsets.

    Whether R2 still rises at the end says whether it is a property of the vectors or of the number of rows.
    """
    names, of = np.unique(np.asarray(clusters), return_inverse=True)
    found = np.empty((len(sizes), draws))
    for i, size in enumerate(sizes):
        for j in range(draws):
            kept = np.random.default_rng([seed, i, j]).permutation(len(names))[:size]
            rows = np.flatnonzero(np.isin(of, kept))
            found[i, j] = decodability(x[rows], np.asarray(y)[rows], folds(of[rows], seed + j))
    return found.mean(1)


def decodability_interval(
    x: Rows,
    readouts: Sequence[Readout],
    clusters: Clusters,
    less: tuple[Rows, Sequence[Readout]] | None = None,
) -> Interval:
    """Delete-a-group jackknife interval of the held-out R2 of one number, or of the difference of two R2.

    Clusters are in 25 groups (with fewer clusters, one group each), spread evenly over the folds. The regression is
    refitted without each group, with the chosen penalties.

    Estimand: the expected R2 at this number of rows. Measured at 75 rows, d = 128, 160 repetitions, an R2 of -0.06 to
    0.85, one or two rows per cluster: covers 94-98 %. Errors of the held-out rows without refits cover 73-93 %, since
    all rows share their fits; choosing the penalties anew covers 95-100 %, up to twice too wide, since they jump.

    Args:
        x: The vectors.
        readouts: Their read-out in each division into folds; the R2 is the mean over them.
        clusters: [row] the cluster of each row.
        less: Other vectors of the same rows and their read-outs of the same number over the same folds. The interval is
            then that of R2(x) - R2(other), paired, since a group is left out of both.
    """

    def r2(rows: np.ndarray) -> float:
        value = np.mean([_refitted_r2(x, one, rows) for one in readouts])
        return float(value if less is None else value - np.mean([_refitted_r2(less[0], one, rows) for one in less[1]]))

    group = groups(clusters, readouts[0].fold)
    method = f"jackknife over {group.max() + 1} groups of {len(set(clusters))} clusters"
    return replace(jackknife(r2, np.arange(len(x)), group), method=method)


def groups(clusters: Clusters, fold: Fold) -> Fold:
    """The group of each row for a jackknife: whole clusters, 25 groups (or fewer, one each), spread over folds.

    Raises:
        UserError: fewer than 5 clusters.
    """
    rows = rows_by_cluster(clusters, len(fold))
    require_clusters(len(rows))
    group = np.empty(len(fold), dtype=np.int64)
    for i, members in enumerate(sorted(rows, key=lambda members: int(fold[members[0]]))):
        group[members] = i % GROUPS
    return group


def _refitted_r2(x: np.ndarray, readout: Readout, rows: np.ndarray) -> float:
    """Held-out R2 of a subset of rows, refitted in the same folds with the chosen penalties."""
    truth, fold, x = readout.truth[rows], readout.fold[rows], x[rows]
    prediction, stratum, baseline = np.empty_like(truth), None, None
    if readout.stratum is not None:
        stratum, baseline = readout.stratum[rows], np.empty_like(truth)
    for number in np.unique(fold):
        out, rest = fold == number, fold != number
        mean, part = np.broadcast_to(truth[rest].mean(0), truth.shape), x
        if stratum is not None and baseline is not None:
            mean = _means(truth, stratum, rest, np.ones(len(x)))
            part = residuals(x, np.eye(int(stratum.max()) + 1)[stratum], rest)
            baseline[out] = mean[out]
        z, new = standardised(part[rest], part[out])
        inner = z @ z.T
        inner[np.diag_indices(len(inner))] += readout.penalty[number]
        prediction[out] = mean[out] + (new @ z.T) @ np.linalg.solve(inner, truth[rest] - mean[rest])
    if stratum is not None and baseline is not None:
        alone = ~_in_two_folds(stratum, fold)
        prediction[alone] = baseline[alone] = truth[alone]
    return float(replace(readout, truth=truth, prediction=prediction, baseline=baseline).r2[0])


def permuted_decodability(
    x: Rows,
    y: Real[np.ndarray, " row"],
    fold: Fold | Repeats,
    clusters: Clusters,
    permutations: int,
    seed: int,
    stratum: Stratum = None,
) -> Float[np.ndarray, " permutation"]:
    """Held-out R2 with whole clusters of y permuted: the mean over the same divisions into folds, a penalty chosen anew
    for every permutation.

    Given strata, their means are subtracted from y before it is permuted, and again in each fold afterwards.
    """
    moved = np.asarray(y)[permute_clusters(np.random.default_rng(seed), clusters, permutations)]
    return np.mean([read(x, moved.T, one, stratum=stratum).r2 for one in np.atleast_2d(fold)], axis=0)
