"""Predictions, scores and deletions of the label probe are scikit-learn's, by both of its roads."""

from functools import partial

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import balanced_accuracy_score, r2_score, roc_auc_score
from sklearn.model_selection import GridSearchCV, PredefinedSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from llmgeom.stats import ridge_probe
from llmgeom.stats.label_scores import coded, moved, score
from llmgeom.stats.nested_probe import Design, deletions, groups, held_out, log_odds, stratified_folds, weights
from studies.planted_labels import DIM
from tests.label_tables import sklearn_predictions

# ---- equal numbers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def table():
    rng = np.random.default_rng(5)
    cluster = np.repeat(np.arange(30), 2)
    x = rng.standard_normal((60, DIM)) * np.logspace(-1, 2, DIM)
    label = x[:, 0] * 8 + rng.standard_normal(60)
    return x, label, cluster


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rows", ["few", "many"])
def test_predictions_are_those_of_scikit_learns_nested_search(table, rows, given, monkeypatch):
    """Both roads: the eigendecomposition, and the one for many rows, from sums over folds less their confounds."""
    if rows == "many":
        monkeypatch.setattr(ridge_probe, "TALL", 10)
        monkeypatch.setattr(ridge_probe, "TALL_PENALTIES", ridge_probe.PENALTIES)
    x, label, cluster = table
    fold = ridge_probe.folds(cluster, 0)
    confounds = np.random.default_rng(6).standard_normal((60, 2)) + x[:, :2] if given else None
    own = held_out(Design("number", label[:, None], fold, confounds), [lambda: x])
    expected = sklearn_predictions(x, label, fold, confounds)
    # A grid search weighs inner folds alike, ours rows: the folds here are of equal size, so both choose alike.
    assert len(set(np.bincount(fold).tolist())) == 1
    np.testing.assert_allclose(own.prediction[:, 0], expected, rtol=1e-8, atol=1e-8)
    assert own.value == pytest.approx(r2_score(label, expected))


def test_the_place_is_chosen_without_the_rows_that_are_scored(table):
    x, label, cluster = table
    fold = ridge_probe.folds(cluster, 0)
    noise = np.random.default_rng(7).standard_normal(x.shape)
    own = held_out(Design("number", label[:, None], fold), [lambda: noise, lambda: x])
    assert own.chosen.tolist() == [1] * 5
    # Labels of a fold that are turned round change neither what its other rows choose nor its predictions.
    turned = np.where(fold == 2, -label, label)
    other = held_out(Design("number", turned[:, None], fold), [lambda: noise, lambda: x])
    np.testing.assert_array_equal(other.prediction[fold == 2], own.prediction[fold == 2])
    assert other.chosen[2] == own.chosen[2]


def test_scores_are_scikit_learns():
    rng = np.random.default_rng(0)
    fold, prediction = np.repeat([0, 1], 40), np.round(rng.standard_normal((80, 3)), 1)
    yes = rng.random(80) < 0.4
    pairs = np.array([yes[fold == f].sum() * (~yes[fold == f]).sum() for f in (0, 1)])
    areas = [roc_auc_score(yes[fold == f], prediction[fold == f, 0]) for f in (0, 1)]
    assert score("binary", coded("binary", yes), prediction[:, :1], fold) == pytest.approx(pairs @ areas / pairs.sum())
    names = np.array(["a", "b", "c"])
    label = rng.choice(names, 80, p=[0.2, 0.3, 0.5])
    shares = np.array([[(label[fold != f] == name).mean() for name in names] for f in (0, 1)])
    of_row = names[(prediction / shares[fold]).argmax(1)]
    classes = coded("classes", label), prediction, fold
    assert score("classes", *classes) == pytest.approx(balanced_accuracy_score(label, of_row))
    one = fold == 1  # scored alone, with the shares of the other fold
    assert score("classes", *classes, rows=one) == pytest.approx(balanced_accuracy_score(label[one], of_row[one]))
    number = rng.standard_normal((80, 1))
    assert score("number", number, prediction[:, :1], fold) == pytest.approx(r2_score(number, prediction[:, :1]))


def test_small_classes_are_named_where_they_are_read():
    """Two classes of 6 rows against 68: the largest prediction is the large class in every row, an accuracy of 1/3."""
    found, largest, nothing = [], [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        label = rng.permutation(np.repeat(["a", "b", "c"], [6, 6, 68]))
        noise = rng.standard_normal((80, DIM))
        x = noise.copy()
        for i, name in enumerate("ab"):
            x[label == name, i] += 2.0
        fold = stratified_folds("classes", label, np.arange(80), seed)
        one, none = (held_out(Design("classes", coded("classes", label), fold), [lambda z=z: z]) for z in (x, noise))
        found.append(one.value)
        nothing.append(none.value)
        largest.append(balanced_accuracy_score(label, np.array(["a", "b", "c"])[one.prediction.argmax(1)]))
    assert np.mean(found) > 0.5 and np.mean(largest) < 0.4
    assert np.mean(nothing) == pytest.approx(1 / 3, abs=0.08)


def test_deletions_are_fits_without_the_group(table):
    """Without each group: scikit-learn's ridge with the penalty and scale of the whole fold, on the rows left."""
    x, label, cluster = table
    fold = ridge_probe.folds(cluster, 0)
    own = held_out(Design("number", label[:, None], fold), [lambda: x])
    fixed, found = deletions(own, [lambda: x], cluster).without
    group = groups(cluster, fold)
    assert len(found) == 25
    for g in (0, 3, 24):
        prediction, kept = np.empty(60), group != g
        for held in range(5):
            out, rest = fold == held, (fold != held) & kept
            scaler = StandardScaler().fit(x[fold != held])
            fit = Ridge(alpha=own.penalty[held, 0] * DIM).fit(scaler.transform(x[rest]), label[rest])
            prediction[out] = fit.predict(scaler.transform(x[out]))
        assert found[g] == pytest.approx(r2_score(label[kept], prediction[kept]), rel=1e-8)
        assert fixed[g] == pytest.approx(r2_score(label[kept], own.prediction[kept, 0]), rel=1e-8)


def test_weights_and_probabilities_are_those_of_scikit_learns_pipeline(table):
    """Three classes: a standardised ridge whose penalty a grid search chose, and Platt's logistic regression."""
    x, label, cluster = table
    fold, third = ridge_probe.folds(cluster, 0), np.digitize(label, np.quantile(label, (1 / 3, 2 / 3)))
    truth = coded("classes", third)
    found, intercept = weights(x, truth, fold)
    odds = log_odds(x, truth, fold)
    for column in range(3):
        pipe, grid = make_pipeline(StandardScaler(), Ridge()), {"ridge__alpha": ridge_probe.PENALTIES * DIM}

        def best(rows, column=column, pipe=pipe, grid=grid):
            options = {"cv": PredefinedSplit(fold[rows]), "scoring": "neg_mean_squared_error"}
            return GridSearchCV(pipe, grid, **options).fit(x[rows], truth[rows, column]).best_estimator_

        every = best(np.arange(60))
        np.testing.assert_allclose(x @ found[column] + intercept[column], every.predict(x), rtol=1e-6, atol=1e-9)
        held = np.empty(60)
        for out in (fold == one for one in range(5)):
            held[out] = best(np.flatnonzero(~out)).predict(x[out])
        n = truth[:, column].sum()
        one = np.where(truth[:, column] > 0.5, (n + 1) / (n + 2), 1 / (60 - n + 2))
        platt = LogisticRegression(C=np.inf, tol=1e-10).fit(
            np.tile(held, 2)[:, None], np.repeat([1, 0], 60), np.concatenate([one, 1 - one])
        )
        expected = [platt.coef_[0, 0], platt.intercept_[0]]
        if expected[0] < 0:  # the middle class, which no direction tells from both others: its share, smoothed
            expected = [0, np.log(one.mean() / (1 - one.mean()))]
        np.testing.assert_allclose(odds[column], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hard", ["large means", "unseen level", "one fold"])
def test_sums_keep_their_digits(hard, monkeypatch):
    """Where differences of sums could lose digits: the predictions of both roads, as above."""
    rng = np.random.default_rng(4)
    fold = np.arange(400) % 5
    x, confounds = rng.standard_normal((400, 12)), rng.standard_normal((400, 3))
    y = x[:, :2] + rng.standard_normal((400, 2))
    x[:, 2] += 2 * confounds[:, 0]
    if hard == "large means":
        x += 1e4 * rng.standard_normal(12)
        y += 1e3
    elif hard == "unseen level":  # in fold 1 alone: the others do not determine its coefficient
        level = (fold == 1) & (rng.random(400) < 0.5)
        confounds, x = np.column_stack([confounds, level, ~level]), x + level[:, None] * 3
    elif hard == "one fold":
        x[fold == 3, 0] *= 1e6
        x[fold != 2, 5] = 7
    few = ridge_probe.read(x, y, fold, confounds)
    assert not set(few.penalty.ravel()) - set(ridge_probe.PENALTIES)
    monkeypatch.setattr(ridge_probe, "TALL", 100)
    monkeypatch.setattr(ridge_probe, "TALL_PENALTIES", ridge_probe.PENALTIES)
    many = ridge_probe.read(x, y, fold, confounds)
    np.testing.assert_array_equal(many.penalty, few.penalty)
    np.testing.assert_allclose(many.prediction, few.prediction, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(many.error, few.error, rtol=1e-9)


def test_the_place_kept_is_the_one_of_least_inner_error(table):
    """Places are compared one by one as they are read: the same as choosing among all at the end."""
    x, label, cluster = table
    fold, rng = ridge_probe.folds(cluster, 0), np.random.default_rng(8)
    places = [lambda z=z: z for z in (x[:, 3:], x[:, [0]] + rng.standard_normal((60, 4)) * 9, x[:, 2:], x[:, 3:])]
    orders = moved(label, cluster, 30, 0)
    own = held_out(Design("number", label[:, None], fold), places, orders)
    np.testing.assert_array_equal(own.chosen, own.errors.argmin(0))
    np.testing.assert_array_equal(own.prediction, own.at[own.chosen[fold], np.arange(60)])
    for draw in (0, 7, 29):
        alone = held_out(Design("number", label[orders[draw]][:, None], fold), places)
        assert own.moved[draw] == pytest.approx(alone.value, rel=1e-9)
        np.testing.assert_allclose(own.moved_at[:, draw], alone.scores, rtol=1e-9)


def test_layers_read_at_the_same_time_give_the_numbers_of_layers_read_in_turn(monkeypatch):
    monkeypatch.setattr(ridge_probe, "TALL", 100)
    rng, n = np.random.default_rng(0), 250
    truth, fold = rng.standard_normal((n, 1)), np.arange(n) % 5
    activations = [rng.standard_normal((n, 6)) + share * truth for share in (0, 0.5, 1, 0.2, 0)]
    places = [partial(np.asarray, x) for x in activations]
    orders = np.stack([rng.permutation(n) for _ in range(3)])
    results = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        results.append(held_out(Design("number", truth, fold), places, orders))
    in_turn, together = results
    assert set(in_turn.chosen) == {2}
    for name in ("prediction", "chosen", "penalty", "scores", "at", "moved", "moved_at", "errors"):
        np.testing.assert_array_equal(getattr(together, name), getattr(in_turn, name))
