"""Labels of the user's own: equal numbers with scikit-learn, planted truths, and refusals by row."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from sklearn.cross_decomposition import PLSRegression
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.metrics import balanced_accuracy_score, log_loss, r2_score, roc_auc_score
from sklearn.model_selection import GridSearchCV, PredefinedSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.probe import ProbeInput
from llmgeom.probes.labels.probe import LabelProbe
from llmgeom.prompts import files
from llmgeom.stats import ridge_probe
from llmgeom.stats.label_scores import coded, moved, score
from llmgeom.stats.nested_probe import deletions, direction, groups, held_out, interval, stratified_folds
from studies.planted_labels import DIM, World, claim, leak, planned
from tests.refusals import refused

# ---- equal numbers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def table():
    rng = np.random.default_rng(5)
    cluster = np.repeat(np.arange(30), 2)
    x = rng.standard_normal((60, DIM)) * np.logspace(-1, 2, DIM)
    label = x[:, 0] * 8 + rng.standard_normal(60)
    return x, label, cluster


def sklearn_predictions(x, y, fold, confounds=None):
    """Nested cross-validation by scikit-learn's own parts: scaled outside a fold, penalty by grid search within."""
    prediction = np.empty(len(y))
    for held in np.unique(fold):
        out, rest = fold == held, fold != held
        own = x
        if confounds is not None:
            own = x - LinearRegression().fit(confounds[rest], x[rest]).predict(confounds)
        scaler = StandardScaler().fit(own[rest])
        # Ours divides by the number of coordinates, so that a penalty means the same at every width.
        grid = {"alpha": ridge_probe.PENALTIES * x.shape[1]}
        search = GridSearchCV(Ridge(), grid, cv=PredefinedSplit(fold[rest]), scoring="neg_mean_squared_error")
        search.fit(scaler.transform(own[rest]), y[rest])
        prediction[out] = search.predict(scaler.transform(own[out]))
    return prediction


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
    own = held_out("number", label[:, None], [lambda: x], fold, confounds)
    expected = sklearn_predictions(x, label, fold, confounds)
    # A grid search weighs inner folds alike, ours rows: the folds here are of equal size, so both choose alike.
    assert len(set(np.bincount(fold).tolist())) == 1
    np.testing.assert_allclose(own.prediction[:, 0], expected, rtol=1e-8, atol=1e-8)
    assert own.value == pytest.approx(r2_score(label, expected))


@pytest.mark.parametrize("given", [False, True])
def test_logistic_predictions_are_those_of_scikit_learns_pipeline(table, given):
    x, label, cluster = table
    fold, yes = ridge_probe.folds(cluster, 0), label > np.median(label)
    confounds = np.random.default_rng(6).standard_normal((60, 2)) + x[:, :2] if given else None
    own = held_out("binary", coded("binary", yes), [lambda: x], fold, confounds, estimator="logistic")
    expected = np.empty(60)
    for held in range(5):
        out, rest = fold == held, fold != held
        left = x if confounds is None else x - LinearRegression().fit(confounds[rest], x[rest]).predict(confounds)
        scaler = StandardScaler().fit(left[rest])
        losses = []
        for c in (penalties := 10.0 ** np.arange(-3, 1)):
            held_in = [
                (yes[rest][test], LogisticRegression(C=1 / (c * len(train)), max_iter=1000)
                 .fit(scaler.transform(left[rest])[train], yes[rest][train])
                 .predict_proba(scaler.transform(left[rest])[test])[:, 1])
                for train, test in PredefinedSplit(fold[rest]).split()
            ]  # fmt: skip
            losses.append(log_loss(*map(np.concatenate, zip(*held_in, strict=True))))
        best = LogisticRegression(C=1 / (penalties[np.argmin(losses)] * rest.sum()), max_iter=1000)
        best.fit(scaler.transform(left[rest]), yes[rest])
        expected[out] = best.predict_proba(scaler.transform(left[out]))[:, 1]
    np.testing.assert_allclose(own.prediction[:, 0], expected, rtol=1e-6)


def test_means_are_the_difference_of_class_means_and_scikit_learns_partial_least_squares(table):
    x, label, cluster = table
    fold, yes = ridge_probe.folds(cluster, 0), label > np.median(label)
    own = held_out("binary", coded("binary", yes), [lambda: x], fold, estimator="means")
    rest = fold != 0
    scaler = StandardScaler().fit(x[rest])
    z, new = scaler.transform(x[rest]), scaler.transform(x[~rest])
    along = new @ (z[yes[rest]].mean(0) - z[~yes[rest]].mean(0))
    np.testing.assert_array_equal(np.argsort(own.prediction[~rest, 0]), np.argsort(along))
    expected = PLSRegression(1, scale=False).fit(z, yes[rest].astype(float)).predict(new)
    np.testing.assert_allclose(own.prediction[~rest, 0], expected.ravel(), rtol=1e-6)


def test_partial_least_squares_predictions_are_those_of_scikit_learns_pipeline(table):
    x, label, cluster = table
    fold = ridge_probe.folds(cluster, 0)
    own = held_out("number", label[:, None], [lambda: x], fold, estimator="pls")
    expected = np.empty(60)
    for held in range(5):
        out, rest = fold == held, fold != held
        scaler = StandardScaler().fit(x[rest])
        grid = {"n_components": [1, 2, 3, 5, 8]}
        search = GridSearchCV(
            PLSRegression(scale=False), grid, cv=PredefinedSplit(fold[rest]), scoring="neg_mean_squared_error"
        ).fit(scaler.transform(x[rest]), label[rest])
        expected[out] = search.predict(scaler.transform(x[out])).ravel()
        assert own.penalty[held, 0] == search.best_params_["n_components"]
    np.testing.assert_allclose(own.prediction[:, 0], expected, rtol=1e-7)


@pytest.mark.parametrize("kind", ["binary", "classes", "number"])
@pytest.mark.parametrize("estimator", ["ridge", "tall", "pls", "means", "logistic"])
def test_whole_weights_are_repeated_rows(estimator, kind, table, monkeypatch):
    """Predictions, choices, score and direction of weighted rows against those of each row as often as it weighs."""
    if estimator == "logistic" and kind == "number":
        return
    if estimator == "tall":
        monkeypatch.setattr(ridge_probe, "TALL", 10)
    x, number, cluster = table
    rng = np.random.default_rng(9)
    label = {"number": number, "binary": number > 0, "classes": np.digitize(number, [-0.6, 0.6])}[kind]
    weight, confounds = rng.integers(1, 4, 60), rng.standard_normal((60, 2)) + x[:, :2]
    often, fold = np.repeat(np.arange(60), weight), ridge_probe.folds(cluster, 0)
    name = "ridge" if estimator == "tall" else estimator
    truth = coded(kind, label)
    one = held_out(kind, truth, [lambda: x], fold, confounds, None, name, weight.astype(float))
    many = held_out(kind, truth[often], [lambda: x[often]], fold[often], confounds[often], None, name)
    # scikit-learn's logistic regression stops at a gradient of 1e-4.
    close = {"rtol": 1e-3, "atol": 1e-3} if estimator == "logistic" else {"rtol": 1e-7, "atol": 1e-9}
    np.testing.assert_allclose(one.prediction[often], many.prediction, **close)
    np.testing.assert_array_equal(one.penalty, many.penalty)
    assert one.value == pytest.approx(many.value, rel=1e-3 if estimator == "logistic" else 1e-9)
    lost = deletions(one, [lambda: x], cluster, confounds).without
    group = groups(cluster, fold)
    kept = group[often] != 4
    expected = score(kind, truth[often][kept], many.prediction[kept], fold[often][kept])
    assert lost[0, 4] == pytest.approx(expected, rel=1e-3)
    if kind != "classes" and estimator == "ridge":
        along = direction(x, truth[:, 0], fold, confounds, weight.astype(float))
        np.testing.assert_allclose(along, direction(x[often], truth[often, 0], fold[often], confounds[often]))


def test_new_fits_of_weighted_rows_are_those_of_scikit_learn(table):
    x, label, cluster = table
    weight = np.random.default_rng(9).uniform(0.2, 3, 60)
    fold = ridge_probe.folds(cluster, 0)
    own = held_out("number", label[:, None], [lambda: x], fold, weight=weight)
    found, group = deletions(own, [lambda: x], cluster).without[1], groups(cluster, fold)
    prediction, kept = np.empty(60), group != 3
    for held in range(5):
        out, whole = fold == held, fold != held
        rest = whole & kept
        scaler = StandardScaler().fit(x[whole], sample_weight=weight[whole])
        fit = Ridge(alpha=own.penalty[held, 0] * DIM)
        fit.fit(scaler.transform(x[rest]), label[rest], sample_weight=weight[rest])
        prediction[out] = fit.predict(scaler.transform(x[out]))
    expected = r2_score(label[kept], prediction[kept], sample_weight=weight[kept])
    assert found[3] == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("estimator", ["logistic", "means"])
def test_deletions_of_the_other_estimators_are_their_fits_without_the_group(table, estimator):
    x, label, cluster = table
    fold, yes = ridge_probe.folds(cluster, 0), label > np.median(label)
    own = held_out("binary", coded("binary", yes), [lambda: x], fold, estimator=estimator)
    group, g = groups(cluster, fold), 7
    prediction = np.empty(60)
    for held in range(5):
        out, rest = fold == held, (fold != held) & (group != g)
        scaler = StandardScaler().fit(x[fold != held])
        z, new = scaler.transform(x[rest]), scaler.transform(x[out])
        if estimator == "means":
            prediction[out] = PLSRegression(1, scale=False).fit(z, yes[rest].astype(float)).predict(new).ravel()
        else:
            fit = LogisticRegression(C=1 / (own.penalty[held, 0] * rest.sum()), max_iter=1000).fit(z, yes[rest])
            prediction[out] = fit.predict_proba(new)[:, 1]
    kept = group != g
    expected = score("binary", coded("binary", yes)[kept], prediction[kept, None], fold[kept])
    assert deletions(own, [lambda: x], cluster).without[1, g] == pytest.approx(expected, rel=1e-6)


def test_the_place_is_chosen_without_the_rows_that_are_scored(table):
    x, label, cluster = table
    fold = ridge_probe.folds(cluster, 0)
    noise = np.random.default_rng(7).standard_normal(x.shape)
    own = held_out("number", label[:, None], [lambda: noise, lambda: x], fold)
    assert own.chosen.tolist() == [1] * 5
    # Labels of a fold that are turned round change neither what its other rows choose nor its predictions.
    turned = np.where(fold == 2, -label, label)
    other = held_out("number", turned[:, None], [lambda: noise, lambda: x], fold)
    np.testing.assert_array_equal(other.prediction[fold == 2], own.prediction[fold == 2])
    assert other.chosen[2] == own.chosen[2]


def test_scores_are_scikit_learns():
    rng = np.random.default_rng(0)
    fold, prediction = np.repeat([0, 1], 40), np.round(rng.standard_normal((80, 3)), 1)
    yes = rng.random(80) < 0.4
    pairs = np.array([yes[fold == f].sum() * (~yes[fold == f]).sum() for f in (0, 1)])
    areas = [roc_auc_score(yes[fold == f], prediction[fold == f, 0]) for f in (0, 1)]
    assert score("binary", coded("binary", yes), prediction[:, :1], fold) == pytest.approx(pairs @ areas / pairs.sum())
    label = rng.choice(["a", "b", "c"], 80)
    expected = balanced_accuracy_score(label, np.array(["a", "b", "c"])[prediction.argmax(1)])
    assert score("classes", coded("classes", label), prediction, fold) == pytest.approx(expected)
    number = rng.standard_normal((80, 1))
    assert score("number", number, prediction[:, :1], fold) == pytest.approx(r2_score(number, prediction[:, :1]))


def test_deletions_are_fits_without_the_group(table):
    """Without each group: scikit-learn's ridge with the penalty and scale of the whole fold, on the rows left."""
    x, label, cluster = table
    fold = ridge_probe.folds(cluster, 0)
    own = held_out("number", label[:, None], [lambda: x], fold)
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


def test_a_direction_is_the_gradient_of_scikit_learns_pipeline(table):
    x, label, cluster = table
    fold = ridge_probe.folds(cluster, 0)
    weights = direction(x, label, fold)
    pipe = make_pipeline(StandardScaler(), Ridge())
    search = GridSearchCV(
        pipe, {"ridge__alpha": ridge_probe.PENALTIES * DIM}, cv=PredefinedSplit(fold), scoring="neg_mean_squared_error"
    ).fit(x, label)
    best = search.best_estimator_
    expected = best["ridge"].coef_ / best["standardscaler"].scale_
    cosine = weights @ expected / np.linalg.norm(weights) / np.linalg.norm(expected)
    assert cosine > 0.999  # the search scales within its folds, ours once


def test_labels_move_with_their_clusters():
    cluster = np.array([0, 0, 0, 1, 2, 2, 3, 4, 5, 6])
    label = np.array([1, 1, 1, 0, 1, 1, 0, 0, 1, 0])
    for order in moved(label, cluster, 50, 0):
        assert all(len(set(label[order][cluster == c])) == 1 for c in range(7))
        firsts = [label[order][cluster == c][0] for c in range(7)]
        assert sorted(firsts) == [0, 0, 0, 0, 1, 1, 1]


# ---- planted truths --------------------------------------------------------------------------------------------------


def test_a_direction_in_the_model_alone_is_found():
    assert claim(World(strength=1.5).data(0)).verdict == "holds"


def test_a_label_that_a_confound_carries_is_not_found_given_it():
    result = LabelProbe("label", given=("carrier",)).measure(World(confounded=2.0, n=160).data(1))
    own, left_in = result.estimates
    assert left_in.value > 0.85 and own.value < 0.62
    assert own.p > 0.05


def test_a_label_in_the_tokens_is_caught_by_the_bag():
    data = World(strength=1.0).data(2, in_tokens=True)
    estimate = claim(data)
    assert "bag of tokens" in estimate.null and estimate.centre > 0.95
    assert estimate.value < estimate.centre and claim(data).verdict in ("ruled out", "opposite", "open")
    assert not estimate.room  # a control near 1 leaves no room for the effect: nothing is ruled out by it


def test_a_label_in_every_control_is_no_finding():
    data = World(strength=1.0, looked_up=1.0).data(3)
    assert abs(claim(data).value - claim(data).centre) < 0.15
    assert claim(data).verdict in ("ruled out", "open")


def test_templates_that_leak_are_caught_by_the_clusters():
    by_row, by_cluster = leak(0)
    assert by_row == 1.0
    assert abs(by_cluster - 0.5) < 0.25


@pytest.mark.slow
def test_a_label_of_chance_holds_in_at_most_one_of_twenty_runs():
    """200 labels that nothing carries; simulated: 0 of 120 at 80 prompts, since every control must be beaten."""
    assert sum(claim(World(n=60).data(1000 + seed)).verdict == "holds" for seed in range(200)) <= 10


@pytest.mark.slow
def test_a_real_direction_is_found_at_the_planned_number_of_prompts():
    """The rule's own plan, from the noise and the true excess of pilots of 100 prompts."""
    n = planned(0.9, 10)
    assert 100 < n < 300
    assert sum(claim(World(n=n, strength=0.9).data(5000 + seed)).verdict == "holds" for seed in range(50)) >= 44


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_intervals_cover_the_expected_score(strength):
    """AUROC of 100 rows of 12 coordinates; 120 samples, of which 95 % should cover their mean: 88 % to 100 %."""
    found = []
    for seed in range(120):
        rng = np.random.default_rng(seed)
        label, x = rng.permutation(np.arange(100) % 2), rng.standard_normal((100, DIM))
        x[:, 0] += strength * (2 * label - 1)
        fold = stratified_folds("binary", label, np.arange(100), seed)
        own = held_out("binary", coded("binary", label), [lambda x=x: x], fold)
        span = interval(own.value, deletions(own, [lambda x=x: x], np.arange(100)), np.arange(100))
        found.append((own.value, span.low, span.high))
    value, low, high = np.array(found).T
    assert ((low <= value.mean()) & (value.mean() <= high)).mean() >= 0.88
    assert (high - low).mean() / 2 < 1.5 * 1.98 * value.std()  # and is not much wider than it must be


def test_of_many_prompts_the_claim_is_that_of_the_part_that_controls_read():
    """All prompts are read too: the score there is that of a probe that is given all of them and no controls."""
    data = World(strength=1.0, n=160).data(4)
    part = torch.arange(0, 160, 4).repeat_interleave(2) + torch.tensor([0, 1]).repeat(40)  # half of the clusters

    def taken(capture: Capture) -> Capture:
        return capture.take(part)

    few = replace(
        data,
        capture=taken(data.capture),
        entropy=data.entropy[part.numpy()],
        untrained=tuple(map(taken, data.untrained)),
        shuffled=tuple(map(taken, data.shuffled)),
        no_context=taken(data.no_context),
    )
    whole = replace(data, untrained=(), shuffled=(), no_context=None, subset=few)
    claimed, left_in, every = LabelProbe("label").measure(whole).estimates
    assert (claimed, left_in) == LabelProbe("label").measure(few).estimates
    alone = LabelProbe("label").measure(replace(data, untrained=(), shuffled=()))
    assert every.name == "AUROC, all prompts" and every.n == 160
    assert every.value == alone.estimates[0].value
    arrays = LabelProbe("label").measure(whole).lowered().arrays
    np.testing.assert_array_equal(arrays["residual_all_prompts_score"], alone.lowered().arrays["residual_score"])


def test_transfer_tells_a_direction_that_all_values_share_from_one_each():
    """Three groups: with one direction for all, each is predicted from the others; with three, none is."""

    def measured(shared: bool):
        data = World(n=180, strength=0.0, controls=5).data(7)
        rng = np.random.default_rng(8)
        group = np.repeat(["x", "y", "z"], 60)
        label = np.array([cell == "b" for cell in data.capture.batch.columns["label"]]) * 2 - 1
        x = rng.standard_normal((180, DIM))
        for i, name in enumerate("xyz"):
            x[group == name, 0 if shared else i] += 1.5 * label[group == name]
        batch = replace(data.capture.batch, columns={**data.capture.batch.columns, "group": tuple(group)})
        capture = replace(data.capture, batch=batch, tensors={(Site.RESIDUAL, 0): torch.from_numpy(x)})
        probe = LabelProbe("label", layers=(0,), transfer="group")
        return probe.measure(replace(data, capture=capture)).lowered()

    one, several = measured(True), measured(False)
    assert one.ticks["value"] == ("x", "y", "z")
    assert one.arrays["transfer_score"].min() > 0.85
    assert several.arrays["transfer_score"].max() < 0.7 < several.arrays["transfer_within"].min()


# ---- refusals --------------------------------------------------------------------------------------------------------


def labelled(values) -> ProbeInput:
    data = World(n=len(values), controls=1).data(0)
    batch = replace(data.capture.batch, columns={"label": tuple(values)})
    return replace(data, capture=replace(data.capture, batch=batch))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["a"] * 20, ("'a'", "all 20 rows", "two values")),
        (["a"] * 18 + ["b"] * 2, ("fewer than 5 rows of 'b'", "rows 19, 20")),
        ([1, 2, "x"] * 8, ("mixes kinds", "rows 3, 6, 9, 12, 15 and 3 more")),
        ([1.5, None] * 10, ("no value in rows 2, 4")),
        ([str(i) for i in range(40)], ("40 classes in 40 rows",)),
    ],
)
def test_labels_that_cannot_be_read_are_refused_by_row(values, words):
    with refused(UserError, *([words] if isinstance(words, str) else words)):
        LabelProbe("label").measure(labelled(values))


def test_a_column_that_is_not_there_is_refused_with_the_nearest():
    with refused(UserError, "labell", "label"):
        LabelProbe("labell").measure(labelled(["a", "b"] * 10))


# ---- files -----------------------------------------------------------------------------------------------------------


def test_every_further_column_is_kept(tmp_path):
    rows = [{"text": f"prompt {i}", "n": i / 2, "right": i % 2 == 0, "who": "ab"[i % 2]} for i in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "a.csv").write_text(
        "text,n,right,who\n" + "".join(f"{r['text']},{r['n']},{r['right']},{r['who']}\n" for r in rows),
        encoding="utf-8",
    )
    json_batch, csv_batch = (files.read(str(tmp_path / f"a.{kind}"), "who") for kind in ("jsonl", "csv"))
    assert json_batch.columns["n"] == csv_batch.columns["n"] == (0, 0.5, 1, 1.5, 2, 2.5)
    assert json_batch.columns["right"] == (True, False) * 3
    assert csv_batch.columns["right"] == ("True", "False") * 3
    assert json_batch.cluster == csv_batch.cluster == ("a", "b") * 3
    frame = files.from_frame({"text": [r["text"] for r in rows], "n": np.arange(6) / 2})
    assert frame.columns["n"] == json_batch.columns["n"]


def test_a_stray_word_in_a_column_of_numbers_is_refused_by_its_row(tmp_path):
    cells = [str(i) for i in range(30)]
    cells[6], cells[20] = "n/a", ""
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"prompt {i},{cell}\n" for i, cell in enumerate(cells)))
    batch = files.read(str(tmp_path / "a.csv"))
    assert batch.columns["n"][:8] == (0, 1, 2, 3, 4, 5, "n/a", 7) and batch.columns["n"][20] is None
    with refused(UserError, "no value in row 21"):
        batch.column("n")
    cells[20] = "2.5"
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"prompt {i},{cell}\n" for i, cell in enumerate(cells)))
    with refused(UserError, "numbers in rows 1, 2", "text in row 7"):
        files.read(str(tmp_path / "a.csv")).column("n")


def test_parquet_is_read(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "n": [1, None]}), tmp_path / "a.parquet")
    batch = files.read(str(tmp_path / "a.parquet"))
    assert batch.text == ("one", "two") and batch.columns["n"] == (1, None)
    with refused(UserError, "'n'", "no value in row 2"):
        batch.column("n")


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        ("", ("is empty",)),
        ("text,n\n", ("no rows",)),
        ("prompt,n\na,1\n", ('"text"', "'prompt'")),
        ("text,n\na,1,2\n", ("row 1", "3 cells")),
        ('text,n\n"a,1\n', ("not a CSV",)),
        ("text,n\na,1\na,2\n", ("rows 1 and 2 are the same",)),
    ],
)
def test_refusals_of_csv(blob, words, tmp_path):
    (tmp_path / "a.csv").write_text(blob, encoding="utf-8")
    with refused(UserError, *words):
        files.read(str(tmp_path / "a.csv"))


def test_columns_of_lists_are_left_out_and_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": [1]}\n{"text": "b", "n": [2]}\n', encoding="utf-8")
    batch = files.read(str(tmp_path / "a.jsonl"))
    assert "n" not in batch.columns and batch.source["columns left out"] == "'n' holds a list in rows 1, 2"


def test_sums_over_folds_give_the_numbers_of_the_eigendecomposition(monkeypatch):
    """The road for many rows against the road for few, on the same rows; confounds and constant coordinates too."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((300, 20)) * np.logspace(-2, 2, 20)
    x[:, 4] = 1
    y = np.column_stack([x[:, 0] * 90 + rng.standard_normal(300), rng.standard_normal(300), x[:, 19]])
    fold, confounds = ridge_probe.folds(np.arange(300) // 3, 0), rng.standard_normal((300, 2))
    few = ridge_probe.read(x, y, fold, confounds)
    monkeypatch.setattr(ridge_probe, "TALL", 100)
    monkeypatch.setattr(ridge_probe, "TALL_PENALTIES", ridge_probe.PENALTIES)
    many = ridge_probe.read(x, y, fold, confounds)
    np.testing.assert_array_equal(many.penalty, few.penalty)
    np.testing.assert_allclose(many.prediction, few.prediction, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(many.error, few.error, rtol=1e-7)


@pytest.mark.parametrize("hard", ["large means", "unseen level", "one fold", "weights"])
def test_sums_keep_their_digits(hard, monkeypatch):
    """Where differences of sums could lose digits: the predictions of both roads, as above."""
    rng = np.random.default_rng(4)
    fold, weight = np.arange(400) % 5, rng.uniform(0.2, 3, 400) if hard == "weights" else None
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
    few = ridge_probe.read(x, y, fold, confounds, weight)
    assert not set(few.penalty.ravel()) - set(ridge_probe.PENALTIES)
    monkeypatch.setattr(ridge_probe, "TALL", 100)
    monkeypatch.setattr(ridge_probe, "TALL_PENALTIES", ridge_probe.PENALTIES)
    many = ridge_probe.read(x, y, fold, confounds, weight)
    np.testing.assert_array_equal(many.penalty, few.penalty)
    np.testing.assert_allclose(many.prediction, few.prediction, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(many.error, few.error, rtol=1e-9)


def test_a_constant_coordinate_adds_nothing_given_confounds(table):
    """Its residual is rounding errors, which standardising would make as large as any coordinate."""
    x, label, cluster = table
    fold, confounds = ridge_probe.folds(cluster, 0), np.random.default_rng(6).standard_normal((60, 2))
    constant = np.column_stack([x, np.full(60, 0.1)])
    expected = ridge_probe.read(x, label[:, None], fold, confounds).prediction
    np.testing.assert_allclose(ridge_probe.read(constant, label[:, None], fold, confounds).prediction, expected)


def test_the_place_kept_is_the_one_of_least_inner_error(table):
    """Places are compared one by one as they are read: the same as choosing among all at the end."""
    x, label, cluster = table
    fold, rng = ridge_probe.folds(cluster, 0), np.random.default_rng(8)
    places = [lambda z=z: z for z in (x[:, 3:], x[:, [0]] + rng.standard_normal((60, 4)) * 9, x[:, 2:], x[:, 3:])]
    orders = moved(label, cluster, 30, 0)
    own = held_out("number", label[:, None], places, fold, orders=orders)
    np.testing.assert_array_equal(own.chosen, own.errors.argmin(0))
    np.testing.assert_array_equal(own.prediction, own.at[own.chosen[fold], np.arange(60)])
    for draw in (0, 7, 29):
        alone = held_out("number", label[orders[draw]][:, None], places, fold)
        assert own.moved[draw] == pytest.approx(alone.value, rel=1e-9)
        np.testing.assert_allclose(own.moved_at[:, draw], alone.scores, rtol=1e-9)


def test_labels_of_whole_clusters_move_as_cluster_by_cluster():
    cluster = np.random.default_rng(1).integers(0, 40, 200)
    label, found = cluster % 2, moved(cluster % 2, cluster, 20, 3)
    rng, names = np.random.default_rng(3), list(dict.fromkeys(cluster.tolist()))
    first = np.array([np.flatnonzero(cluster == name)[0] for name in names])
    for order in found:
        for name, source in zip(names, rng.permutation(first), strict=True):
            assert (order[cluster == name] == source).all() and len(set(label[order][cluster == name])) == 1


def test_layers_read_at_the_same_time_give_the_numbers_of_layers_read_in_turn(monkeypatch):
    rng = np.random.default_rng(0)
    truth, fold = rng.standard_normal((2100, 1)), np.arange(2100) % 5
    activations = [rng.standard_normal((2100, 6)) + share * truth for share in (0, 0.5, 1, 0.2, 0)]
    places = [partial(np.asarray, x) for x in activations]
    orders = np.stack([rng.permutation(2100) for _ in range(3)])
    results = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        results.append(held_out("number", truth, places, fold, orders=orders))
    in_turn, together = results
    assert set(in_turn.chosen) == {2}
    for name in ("prediction", "chosen", "penalty", "scores", "at", "moved", "moved_at", "errors"):
        np.testing.assert_array_equal(getattr(together, name), getattr(in_turn, name))
