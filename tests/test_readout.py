"""Held-out readouts against scikit-learn's ridge in a written-out loop, and on rows whose answer is known."""

import numpy as np
import pytest
from scipy.stats import t
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler

from llmgeom.errors import UserError
from llmgeom.stats.resampling import jackknife, paired_interval, permute_clusters
from llmgeom.stats.ridge_probe import (
    PENALTIES,
    decodability,
    decodability_interval,
    folds,
    permuted_decodability,
    read,
)
from tests.refusals import refused


def rows(n: int, d: int, seed: int, noise: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of unequal size and mean, and a number that one oblique direction of them holds."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, d))
    direction = rng.standard_normal(d) / d**0.5
    y = z @ direction + noise * rng.standard_normal(n)
    return z * np.exp(rng.standard_normal(d)) + 5 * rng.standard_normal(d), y


def by_scikit_learn(x, y, fold, penalty=None) -> tuple[np.ndarray, list[float]]:
    """The same prediction with a loop over folds, inner folds and penalties, one scikit-learn fit each."""
    predicted, chosen = np.empty_like(y), []
    for held in np.unique(fold):
        out, rest = fold == held, fold != held
        scaler = StandardScaler().fit(x[rest])
        width = (scaler.var_ > 0).sum() ** 0.5
        z, new, kept, inside = scaler.transform(x[rest]) / width, scaler.transform(x[out]) / width, y[rest], fold[rest]
        if penalty is None:
            errors = []
            for alpha in PENALTIES:
                error = 0.0
                for inner in np.unique(inside):
                    fit = Ridge(alpha=alpha).fit(z[inside != inner], kept[inside != inner])
                    error += np.square(kept[inside == inner] - fit.predict(z[inside == inner])).sum()
                errors.append(error)
            chosen.append(PENALTIES[int(np.argmin(errors))])
        else:
            chosen.append(penalty[int(held)])
        predicted[out] = Ridge(alpha=chosen[-1]).fit(z, kept).predict(new)
    return predicted, chosen


@pytest.mark.parametrize(("n", "d"), [(40, 90), (60, 7)])
def test_predictions_and_penalties_are_scikit_learn_s(n, d):
    x, y = rows(n, d, n)
    fold = folds(np.arange(n) // 2, 1)
    found = read(x, np.stack([y, np.cos(y)], axis=1), fold)
    for column in range(2):
        predicted, chosen = by_scikit_learn(x, found.truth[:, column], fold)
        np.testing.assert_allclose(found.prediction[:, column], predicted, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(found.penalty[:, column], chosen)
        assert found.r2[column] == pytest.approx(r2_score(found.truth[:, column], predicted))
    assert len(set(found.penalty.ravel())) > 1


def _fold(n: int) -> np.ndarray:
    return folds(np.arange(n), 0)


def test_folds_hold_whole_units_of_even_number_and_depend_on_the_seed_alone():
    clusters = np.array([f"t{i // 2 if i < 40 else i}" for i in range(75)])
    fold = folds(clusters, 3)
    for unit in set(clusters):
        assert len(set(fold[clusters == unit])) == 1
    assert sorted(np.bincount(fold)) == [15] * 5
    np.random.seed(1)
    np.testing.assert_array_equal(fold, folds(clusters, 3))
    assert (fold != folds(clusters, 4)).any()
    renamed = np.array([f"{hash(u) % 997}-{u}" for u in clusters])
    np.testing.assert_array_equal(fold, folds(renamed, 3))
    assert folds(list("aabbcde"), 0).max() == 4


def test_permuted_readouts_are_those_of_each_permutation_alone():
    x, y = rows(40, 60, 7)
    clusters = np.arange(40) // 2
    fold = folds(clusters, 0)
    order = permute_clusters(np.random.default_rng(9), clusters, 6)
    expected = [decodability(x, y[one], fold) for one in order]
    np.testing.assert_allclose(permuted_decodability(x, y, fold, clusters, 6, 9), expected)


def test_the_interval_is_the_jackknife_over_groups_of_units():
    """12 units are 12 groups; each left out in turn, scikit-learn fits anew with the penalties that were chosen."""
    x, y = rows(30, 15, 11)
    clusters = np.array([f"u{i}" for i in np.arange(30) % 12])
    fold = folds(clusters, 2)
    found = read(x, y[:, None], fold)
    without = []
    for unit in sorted(set(clusters)):
        kept = clusters != unit
        predicted, _ = by_scikit_learn(x[kept], y[kept], fold[kept], found.penalty[:, 0])
        without.append(r2_score(y[kept], predicted))
    units = 30**2 / (6 * 3**2 + 6 * 2**2)  # six of 3 rows and six of 2 say as much as 11.5 of equal size
    half = t.ppf(0.975, units - 1) * np.sqrt(11 / 12 * np.square(without - np.mean(without)).sum())
    made = decodability_interval(x, found, clusters)
    assert (made.low, made.high) == pytest.approx((found.r2[0] - half, found.r2[0] + half))
    assert made.method == "jackknife over 12 groups of 12 clusters"
    x, y = rows(40, 15, 11)
    found = read(x, y[:, None], _fold(40))
    assert decodability_interval(x, found, np.arange(40)).method == "jackknife over 25 groups of 40 clusters"


def test_the_interval_of_a_difference_leaves_each_unit_out_of_both():
    rng = np.random.default_rng(0)
    a = rng.standard_normal(30)
    b, unit = a + 0.1 * rng.standard_normal(30), np.arange(30) // 2
    one, other = (jackknife(np.median, values, unit) for values in (a, b))
    both = jackknife(lambda rows: np.median(a[rows]) - np.median(b[rows]), np.arange(30), unit)
    made = paired_interval(np.median(a) - np.median(b), one, other)
    assert (made.low, made.high, made.units) == pytest.approx((both.low, both.high, both.units))
    assert made.high - made.low < (one.high - one.low) / 2


def test_what_cannot_be_read_is_refused_in_a_sentence():
    x, y = rows(20, 5, 0)
    with refused(UserError, 16):
        decodability(x, np.ones(20), _fold(20))
    with refused(UserError, "finite"):
        decodability(np.where(x > 6, np.nan, x), np.where(y > 0, np.inf, y), _fold(20))
    with refused(UserError, 4, 5):
        folds([1, 2, 3, 4, 4], 0)


def dummies_and_ridge(z, y, stratum, fit, new, penalty) -> np.ndarray:
    """Least squares of y on a free dummy for each stratum and on coordinates z, penalised, in rows `fit`."""
    design = np.hstack([np.eye(stratum.max() + 1)[stratum], z])
    gram = design[fit].T @ design[fit] + np.diag([0.0] * (stratum.max() + 1) + [penalty] * z.shape[1])
    return design[new] @ np.linalg.lstsq(gram, design[fit].T @ y[fit], rcond=1e-12)[0]


def scaled_in_strata(x, stratum, rest) -> np.ndarray:
    """x less the mean of its stratum in rows `rest`, over the sd there and the root of the number of coordinates."""
    means = {s: x[rest][stratum[rest] == s].mean(0) for s in set(stratum[rest].tolist())}
    z = x - np.array([means.get(s, x[rest].mean(0)) for s in stratum.tolist()])
    return z / (z[rest].std(0) * x.shape[1] ** 0.5)


def in_strata(seed: int) -> tuple[np.ndarray, ...]:
    """60 rows in about 9 strata that shift the number: x, y, stratum and fold."""
    x, y = rows(60, 6, seed)
    stratum = np.unique(np.random.default_rng(4).integers(0, 9, 60), return_inverse=True)[1]
    return x, y + 5 * stratum, stratum, folds(np.arange(60), 0)


def test_within_strata_the_penalty_and_the_prediction_are_those_of_least_squares_with_dummies():
    """The oracle fits dummies of the strata, free, and the coordinates, penalised, anew for every inner fold."""
    x, y, stratum, fold = in_strata(3)
    found = read(x, y[:, None], fold, stratum=stratum)
    for held in range(5):
        out, rest = np.flatnonzero(fold == held), np.flatnonzero(fold != held)
        known = out[np.isin(stratum[out], stratum[rest])]
        z = scaled_in_strata(x, stratum, rest)
        errors = []
        for penalty in PENALTIES:
            error = 0.0
            for inner in set(fold[rest].tolist()):
                others = rest[fold[rest] != inner]
                scored = rest[(fold[rest] == inner) & np.isin(stratum[rest], stratum[others])]
                fit = np.setdiff1d(rest, scored)
                error += np.square(y[scored] - dummies_and_ridge(z, y, stratum, fit, scored, penalty)).sum()
            errors.append(error)
        assert found.penalty[held, 0] == PENALTIES[int(np.argmin(errors))]
        assert found.error[held, 0] * len(rest) == pytest.approx(min(errors), rel=1e-8)
        expected = dummies_and_ridge(z, y, stratum, rest, known, found.penalty[held, 0])
        np.testing.assert_allclose(found.prediction[known, 0], expected, rtol=1e-8)


def test_the_interval_within_strata_is_the_jackknife_with_dummies():
    """15 clusters of 4 rows; without each, dummies and coordinates are fitted anew with the penalties as chosen."""
    x, y, stratum, _ = in_strata(3)
    cluster = np.arange(60) % 15
    fold = folds(cluster, 1)
    found = read(x, y[:, None], fold, stratum=stratum)
    without = []
    for number in range(15):
        missed = spread = 0.0
        for held in range(5):
            out = np.flatnonzero((fold == held) & (cluster != number))
            rest = np.flatnonzero((fold != held) & (cluster != number))
            out = out[np.isin(stratum[out], stratum[rest])]
            means = np.array([y[rest][stratum[rest] == s].mean() for s in stratum[out]])
            z = scaled_in_strata(x, stratum, rest)
            predicted = dummies_and_ridge(z, y, stratum, rest, out, found.penalty[held, 0])
            missed, spread = missed + np.square(y[out] - predicted).sum(), spread + np.square(y[out] - means).sum()
        without.append(1 - missed / spread)
    made = decodability_interval(x, found, cluster)
    np.testing.assert_allclose(np.sort(made.deletions.without[0]), np.sort(without), rtol=1e-7)
    half = t.ppf(0.975, 14) * np.sqrt(14 / 15 * np.square(without - np.mean(without)).sum())
    assert (made.low, made.high) == pytest.approx((found.r2[0] - half, found.r2[0] + half))


def test_rows_of_a_stratum_in_one_fold_enter_no_score():
    x, y = rows(60, 6, 3)
    fold, stratum = folds(np.arange(60), 0), np.zeros(60, dtype=int)
    stratum[alone := np.flatnonzero(fold == 2)[:3]] = 1
    found = read(x, y[:, None], fold, stratum=stratum)
    assert (found.prediction[alone, 0] == y[alone]).all() and (found.baseline[alone, 0] == y[alone]).all()


def test_many_rows_are_read_within_strata_as_few_are(monkeypatch):
    """Sums over folds against one decomposition a fold, at the penalties that the sums chose."""
    x, y = rows(400, 6, 5)
    stratum = np.random.default_rng(6).integers(0, 4, 400)
    fold, y = folds(np.arange(400), 0), y + 3 * stratum
    few = read(x, y[:, None], fold, stratum=stratum)
    monkeypatch.setattr("llmgeom.stats.ridge_probe.TALL", 100)
    monkeypatch.setattr("llmgeom.stats.ridge_probe.TALL_PENALTIES", PENALTIES)
    many = read(x, y[:, None], fold, stratum=stratum)
    assert many.r2 == pytest.approx(few.r2, abs=2e-3)
    np.testing.assert_allclose(many.baseline, few.baseline)
    same = (many.penalty == few.penalty)[:, 0]
    rows_alike = same[fold]
    assert same.any()
    np.testing.assert_allclose(many.prediction[rows_alike], few.prediction[rows_alike], rtol=1e-8)


def test_a_planted_direction_is_read_and_noise_is_not():
    noise = []
    for seed in range(24):
        rng = np.random.default_rng([1, seed])
        x, _ = rows(75, 128, seed)
        if seed < 3:
            factor = rng.standard_normal(75)
            assert decodability(x + 4 * x.std(0) * factor[:, None] * rng.standard_normal(128), factor, _fold(75)) > 0.9
        noise.append(decodability(x, rng.standard_normal(75), _fold(75)))
    assert -0.15 < np.mean(noise) < 0


def test_what_units_share_does_not_leak_across_folds():
    """Rows of a unit share a random vector and a random number: a split of rows reads one from the other."""
    random_rows, by_unit = [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        clusters = np.repeat(np.arange(20), 4)
        x = rng.standard_normal((20, 40))[clusters] + 0.3 * rng.standard_normal((80, 40))
        y = rng.standard_normal(20)[clusters] + 0.3 * rng.standard_normal(80)
        random_rows.append(decodability(x, y, _fold(80)))
        by_unit.append(decodability(x, y, folds(clusters, seed)))
    assert np.mean(random_rows) > 0.5
    assert np.mean(by_unit) < 0


def test_where_nothing_varies_the_mean_of_other_units_is_predicted():
    y = np.arange(20.0)
    found = read(np.ones((20, 4)), y[:, None], _fold(20))
    for held in range(5):
        np.testing.assert_allclose(found.prediction[found.fold == held], y[found.fold != held].mean())
    assert found.r2[0] < 0


@pytest.mark.soak
@pytest.mark.parametrize("noise", [0.3, 2.0, 1e6])
def test_the_interval_covers_the_expected_r2(noise):
    made = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        loading = np.random.default_rng(99).standard_normal((20, 128))
        z = rng.standard_normal((75, 20))
        x = z * np.exp(-np.arange(20) / 6) @ loading + 0.3 * rng.standard_normal((75, 128))
        y = z[:, 1] + 0.5 * z[:, 4] + noise * rng.standard_normal(75)
        found = read(x, y[:, None], _fold(75))
        interval = decodability_interval(x, found, np.arange(75))
        made.append((found.r2[0], interval.low, interval.high))
    value, low, high = np.array(made).T
    assert 0.9 <= np.mean((low < value.mean()) & (value.mean() < high)) <= 1
