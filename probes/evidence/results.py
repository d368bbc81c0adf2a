"""Results of in-context evidence: skill, observer models, certainty in representations, controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom.batch import Batch
from llmgeom.claims import Null, declared, estimate, layer_band
from llmgeom.probes.evidence.observers import advantage, labels_seen, losses, observers
from llmgeom.probes.evidence.predictions import ExactAnswers, LabelPredictions, label_entropy
from llmgeom.prompts.sula import Sula
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.stats.information import skill_by_count
from llmgeom.stats.pca import standardised
from llmgeom.stats.resampling import Interval, jackknife
from llmgeom.stats.ridge_probe import decodability_interval, folds, read
from llmgeom.stats.tests import correlation_interval, spearman

PROSE = Path(__file__).parents[1] / "texts" / "evidence.md"
BAYES, UNTRAINED = "Bayesian over other observers", "re-initialised"
LEAST_GAIN = 1e-4  # bits per label
EVIDENCE, BELIEF, CONTROLS = "sula", "sula_belief", "sula_controls"
MOVED = ("remap", "permuted", "swap")
PUBLISHED = ("shuffled", "no words")


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evidence(Result):
    """The model's answers and the exact ones, by k, and how well observer models predict the model's."""

    TITLE = "In-context evidence (SULA)"
    TEXT = PROSE

    k: np.ndarray = quantity("k", "observations", "number of labelled words before the question")
    h_label: np.ndarray = quantity(
        "k",
        "bits",
        "entropy of the two labels, mean over prompts",
        Figure("curve", band="h_label_null", beside="h_exact"),
    )
    h_label_null: np.ndarray = quantity("k bound", "bits", "null band of the labels' entropy")
    h_exact: np.ndarray = quantity("k", "bits", "exact entropy of the next label")
    h_latent: np.ndarray = quantity("k", "bits", "exact entropy of the latent class")
    h_vocabulary: np.ndarray = quantity("k", "bits", "entropy over the whole vocabulary")
    mass: np.ndarray = quantity("k", "fraction", "probability of the two labels together")
    skill: np.ndarray = quantity("k", "skill", "skill after k observations; 0 where k = 0, which has nothing to weigh")
    error: np.ndarray = quantity("k", "bits", "mean |H label - exact entropy of the next label|")
    predicted: np.ndarray = quantity(
        "decile", "probability", "the model's P(first) by its deciles", Figure("curve", beside="exact")
    )
    exact: np.ndarray = quantity("decile", "probability", "exact P(first) in the same prompts")
    answers: np.ndarray = quantity(
        "prompt answer",
        "probability",
        "P(first) of the exact posterior and of the model, which agree on the diagonal",
        Figure("scatter", colour="k"),
    )
    drawn: np.ndarray = quantity("decile", "fraction", "how often the first label was drawn in the same prompts")
    observer: np.ndarray = quantity(
        "observer",
        "bits",
        "KL(model || observer) per label, held-out pairs",
        Figure("curve", interval="observer_interval"),
    )
    observer_interval: np.ndarray = quantity("observer bound", "bits", "95 % interval over label pairs")
    attainable: float = quantity("", "bits", "advantage per label of Bayesian observers for a model that is exact")
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Belief(Result):
    """How well the exact certainty can be read from the last token's representations."""

    TITLE = "Certainty in representations (SULA)"
    TEXT = PROSE

    decoded: np.ndarray = quantity(
        "layer", "R2", "exact entropy read from the residual stream, given k", Figure("curve", band="decoded_null")
    )
    decoded_null: np.ndarray = quantity("layer bound", "R2", "null band of the same")
    odds: np.ndarray = quantity(
        "layer", "R2", "exact log-odds of the label named first, given k", Figure("curve", band="odds_null")
    )
    odds_null: np.ndarray = quantity("layer bound", "R2", "null band of the same")
    k: np.ndarray = quantity("k", "observations", "number of labelled words before the question")
    pc1: np.ndarray = quantity("k", "standard deviations", "PC1 of the last layer's values, mean", Figure("curve"))
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Controls(Result):
    """How the model's answers move when the prompt changes in a way whose effect on the exact answer is known."""

    TITLE = "Controls (SULA)"
    TEXT = PROSE

    movement: np.ndarray = quantity(
        "control",
        "probability",
        "mean |change of P(first)| beyond the exact one",
        Figure("curve", interval="movement_interval"),
    )
    movement_interval: np.ndarray = quantity("control bound", "probability", "95 % interval over label pairs")
    published: np.ndarray = quantity(
        "published target", "bits", "mean |H label - target| of the published controls: 1 bit, observer's"
    )
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()


# ---- measuring ------------------------------------------------------------------------------------------------------


Statistic = Callable[[Any, np.ndarray], float]  # (what was taken from one model, rows of prompts) -> value


def _means(k: np.ndarray, ks: Sequence[int], values: np.ndarray) -> np.ndarray:
    """[k] means."""
    return np.array([values[k == number].mean() for number in ks])


def _indicators(k: np.ndarray) -> np.ndarray:
    return (k[:, None] == np.unique(k)[1:]).astype(float)


def _estimate(
    probe: str,
    name: str,
    statistic: Statistic,
    models: Sequence[Any],
    rows: np.ndarray,
    cluster: np.ndarray,
    interval: Interval | None = None,
) -> Estimate:
    """A statistic of the first model against the same of the others, its untrained controls; jackknifed by default."""
    (own, *untrained), claim = models, declared(probe)[name]
    value = statistic(own, rows)
    interval = interval or jackknife(partial(statistic, own), rows, cluster[rows])
    draws = np.array([statistic(control, rows) for control in untrained])
    null = Null.of(UNTRAINED, value, draws, claim.side)
    return estimate(claim, value, interval, [null], n=len(rows), clusters=len(set(cluster[rows])))


def measure_evidence(
    source: Sula, batch: Batch, own: LabelPredictions, untrained: Sequence[LabelPredictions]
) -> Evidence:
    """Skill, calibration and observer models. Raises UserError for fewer than 5 pairs of labels."""
    truth = ExactAnswers(batch)
    ks, k, cluster, observed = list(source.ks), truth.k, truth.cluster, truth.observed
    h_exact, h_latent = label_entropy(truth.log_p), label_entropy(truth.belief)
    several = np.flatnonzero(k >= 2)
    rules, labels = observers(source.prior), labels_seen(batch)[observed]
    _, pair = np.unique(cluster, return_inverse=True)
    half = np.random.default_rng(0).permutation(pair.max() + 1)[pair[observed]] % 2 == 0

    def scores(log_p: np.ndarray) -> np.ndarray:
        return np.stack([losses(rule, labels, log_p[observed], half) for rule in rules])

    def gains(by_observer: np.ndarray) -> np.ndarray:
        """[prompt] bits per label; 0 where k = 0."""
        gain = np.zeros(len(k))
        gain[observed] = advantage(by_observer, half, [rule.bayesian for rule in rules])
        return gain

    def error_below(target: np.ndarray) -> Statistic:
        def below(model: LabelPredictions, rows: np.ndarray) -> float:
            constant = np.abs(target[rows] - np.median(target[rows])).mean()
            return float(1 - np.abs(model.h_label[rows] - target[rows]).mean() / constant)

        return below

    def rank_correlation(model: LabelPredictions, rows: np.ndarray) -> float:
        return spearman(model.h_label[rows], h_exact[rows], _indicators(k[rows]))

    def skill_of(model: LabelPredictions, rows: np.ndarray) -> float:
        return skill_by_count(truth.log_p[rows], model.log_p[rows], k[rows])

    models, by_observer = (own, *untrained), scores(own.log_p)
    attainable = float(gains(scores(truth.log_p))[observed].mean())
    same_k = correlation_interval(
        own.h_label[several], h_exact[several], cluster[several], _indicators(k[several]), signed=True
    )
    estimates = [_estimate(EVIDENCE, "skill", skill_of, models, observed, cluster)]
    if attainable > LEAST_GAIN:
        all_gains = [gains(by_observer), *(gains(scores(control.log_p)) for control in untrained)]
        estimates.append(
            _estimate(
                EVIDENCE,
                BAYES,
                lambda gain, rows: float(gain[rows].mean() / attainable),
                all_gains,
                observed,
                cluster,
            )
        )
    estimates += [
        _estimate(
            EVIDENCE,
            "rho of H label and exact entropy, given k",
            rank_correlation,
            models,
            several,
            cluster,
            same_k,
        ),
        *(
            _estimate(EVIDENCE, name, statistic, models, observed, cluster)
            for name, statistic in (
                ("error of H label, below a constant's", error_below(h_exact)),
                ("error of H label, latent class, below a constant's", error_below(h_latent)),
                ("mass of the two labels", lambda model, rows: float(model.mass[rows].mean())),
            )
        ),
    ]
    intervals = [jackknife(np.mean, row, cluster[observed]) for row in by_observer]
    deciles = np.array_split(np.argsort(own.p[observed], kind="stable"), 10)
    drawn = np.array(batch.columns["next"])[observed] == 0
    exact_p = np.exp(truth.log_p[observed, 0])
    return Evidence(
        k=np.array(ks, dtype=float),
        h_label=_means(k, ks, own.h_label),
        h_label_null=layer_band({UNTRAINED: np.stack([_means(k, ks, control.h_label) for control in untrained])}),
        h_exact=_means(k, ks, h_exact),
        h_latent=_means(k, ks, h_latent),
        h_vocabulary=_means(k, ks, own.h_vocab),
        mass=_means(k, ks, own.mass),
        skill=np.array([skill_of(own, np.flatnonzero(k == number)) if number else 0.0 for number in ks]),
        error=_means(k, ks, np.abs(own.h_label - h_exact)),
        predicted=np.array([own.p[observed][rows].mean() for rows in deciles]),
        exact=np.array([exact_p[rows].mean() for rows in deciles]),
        drawn=np.array([drawn[rows].mean() for rows in deciles]),
        answers=np.stack([np.exp(truth.log_p[:, 0]), own.p], 1),
        observer=by_observer.mean(1),
        observer_interval=np.array([[interval.low, interval.high] for interval in intervals]),
        estimates=tuple(estimates),
        ticks={
            "k": tuple(ks),
            "observer": tuple(rule.name for rule in rules),
            "answer": ("exact P(first)", "the model's P(first)"),
        },
        attainable=attainable,
        warnings=tuple(_doubts(own.mass[observed].mean(), attainable)),
        notes=("k = 0 enters no metric: there is nothing to weigh",) * (0 in ks),
    )


def _doubts(mass: float, attainable: float) -> Iterator[str]:
    if attainable <= LEAST_GAIN:
        yield f"{BAYES}: not measured, because an exact model answers these prompts like one that counts; add larger k"
    if mass < 0.5:
        yield f"the two labels have {mass:.1%} of the model's probability: renormalised answers are a small part of it"


def measure_belief(
    source: Sula, batch: Batch, own: LabelPredictions, untrained: Sequence[LabelPredictions], seed: int
) -> Belief:
    """Exact entropy read from the residual stream at every depth, given k. Raises UserError for too few lead-ins."""
    truth = ExactAnswers(batch)
    rows = np.flatnonzero(truth.k >= 2)
    k, cluster, ks = truth.k[rows], truth.cluster[rows], list(source.ks)
    leads = np.array(batch.columns["lead"])[rows]
    fold = folds(leads if len(set(leads)) >= 5 else cluster, seed)

    def centred(x: np.ndarray) -> np.ndarray:
        """Less the mean at each k."""
        x = np.array(x, dtype=np.float64)
        for number in np.unique(k):
            x[k == number] -= x[k == number].mean(0)
        return x

    h = label_entropy(truth.log_p)
    target = centred(np.stack([h, truth.log_p[:, 0] - truth.log_p[:, 1]], 1)[rows])

    def decoded(model: LabelPredictions) -> np.ndarray:
        """[depth 2] R2 of the exact entropy, and of the exact log-odds of the label named first."""
        return np.stack([read(centred(x[rows]), target, fold).r2 for x in model.residual])

    def pc1(model: LabelPredictions) -> np.ndarray:
        z = standardised(model.value)
        left, size, _ = np.linalg.svd(z, full_matrices=False)
        score = left[:, 0] * size[0]
        return score * (np.sign(spearman(score, h)) or 1)

    def order(score: np.ndarray, chosen: np.ndarray) -> float:
        return abs(spearman(score[chosen], h[chosen], _indicators(truth.k[chosen])))

    def order_of_k(score: np.ndarray, chosen: np.ndarray) -> float:
        return abs(spearman(score[chosen], truth.k[chosen]))

    values, null = decoded(own), np.array([decoded(control) for control in untrained])
    bands = [layer_band({UNTRAINED: null[..., i]}) for i in (0, 1)]
    last = centred(own.residual[-1][rows])
    at_last = (values[-1, 0], *null[:, -1, 0])
    scores, every = [pc1(model) for model in (own, *untrained)], np.arange(len(batch))
    intervals = (
        decodability_interval(last, read(last, target[:, :1], fold), cluster),
        correlation_interval(scores[0][rows], h[rows], cluster, _indicators(k)),
        correlation_interval(scores[0], truth.k, truth.cluster),
    )
    metrics: tuple[tuple[str, Statistic, Sequence[Any], np.ndarray], ...] = (
        ("exact entropy decoded, last layer, given k", lambda r2, _: float(r2), at_last, rows),
        ("|rho| of PC1 and exact entropy, given k", order, scores, rows),
        ("|rho| of PC1 and k", order_of_k, scores, every),
    )
    return Belief(
        decoded=values[:, 0],
        decoded_null=bands[0],
        odds=values[:, 1],
        odds_null=bands[1],
        k=np.array(ks, dtype=float),
        pc1=_means(truth.k, ks, scores[0] / scores[0].std()),
        estimates=tuple(
            _estimate(BELIEF, *metric, truth.cluster, interval)
            for metric, interval in zip(metrics, intervals, strict=True)
        ),
        ticks={"k": tuple(ks)},
    )


def measure_controls(
    batches: Mapping[str, Batch],
    own: Mapping[str, LabelPredictions],
    untrained: Sequence[Mapping[str, LabelPredictions]],
) -> Controls:
    """Movement under changes whose effect is known; batches and predictions by condition."""
    truth = {name: ExactAnswers(batch) for name, batch in batches.items()}
    main = truth["main"]
    rows, cluster = np.flatnonzero(main.k >= 2), main.cluster

    def movement(model: Mapping[str, LabelPredictions], name: str) -> np.ndarray:
        """[prompt] |change of P(first)| beyond the exact change, after mirroring where labels are exchanged."""
        before, exact_before = model["main"].p, np.exp(main.log_p[:, 0])
        if name == "swap":
            before, exact_before = 1 - before, 1 - exact_before
        return np.abs(model[name].p - before - (np.exp(truth[name].log_p[:, 0]) - exact_before))

    def mean_movement(name: str) -> Statistic:
        return lambda model, chosen: float(movement(model, name)[chosen].mean())

    def separation(model: Mapping[str, LabelPredictions], chosen: np.ndarray) -> float:
        fall = model["alternating"].h_label[chosen] - model["consistent"].h_label[chosen]
        exact = label_entropy(truth["alternating"].log_p)[chosen] - label_entropy(truth["consistent"].log_p)[chosen]
        return float(fall.mean() / exact.mean())

    def errors(name: str) -> list[float]:
        h = own[name].h_label[rows]
        return [float(np.abs(h - 1).mean()), float(np.abs(h - label_entropy(truth[name].log_p)[rows]).mean())]

    statistics = {f"movement: {name}": mean_movement(name) for name in MOVED}
    statistics["consistent against alternating"] = separation
    moved = [movement(own, name)[rows] for name in MOVED]
    intervals = [jackknife(np.mean, x, cluster[rows]) for x in moved]
    return Controls(
        movement=np.array([x.mean() for x in moved]),
        movement_interval=np.array([[interval.low, interval.high] for interval in intervals]),
        published=np.array([errors(name) for name in PUBLISHED]),
        estimates=tuple(
            _estimate(CONTROLS, name, statistic, (own, *untrained), rows, cluster)
            for name, statistic in statistics.items()
        ),
        ticks={"control": MOVED, "published": PUBLISHED, "target": ("1 bit", "observer's")},
    )
