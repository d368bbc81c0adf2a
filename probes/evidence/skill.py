"""In-context evidence: the model's answers against the exact ones, and which observer model predicts them best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmgeom.batch import Batch
from llmgeom.claims import declared, layer_band
from llmgeom.probe import Needs, ProbeInput
from llmgeom.probes.evidence.estimates import UNTRAINED, Statistic, against_untrained, indicators, mean_by
from llmgeom.probes.evidence.observers import Shown, advantage, losses, observers
from llmgeom.probes.evidence.predictions import LABELS, MAIN, ExactAnswers, LabelPredictions, label_entropy
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.stats.information import skill_by_count
from llmgeom.stats.resampling import jackknife
from llmgeom.stats.tests import correlation_interval, spearman

EVIDENCE = "sula"
BAYES = "Bayesian over other observers"
LEAST_GAIN = 1e-4  # bits per label
CLAIMS = declared(EVIDENCE)
NEEDS = Needs(
    shuffled=False,
    no_context=False,
    exact=True,
    observers=(LABELS,),
    collect=lambda captures, _: LabelPredictions.of(captures[MAIN]),
)


@dataclass(frozen=True, kw_only=True)
class Evidence(Result):
    """The model's answers and the exact ones, by k, and how well observer models predict the model's."""

    TITLE = "In-context evidence (SULA)"
    TEXT = Path(__file__).parents[1] / "texts" / "evidence.md"

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


def measure(data: ProbeInput) -> Evidence:
    """Skill, calibration and observer models. Raises UserError for fewer than 5 clusters."""
    return measure_evidence(data.capture.batch, (data.observations, *data.control_observations))


def measure_evidence(batch: Batch, models: Sequence[LabelPredictions]) -> Evidence:
    """The same from the predictions of the model and then of its untrained controls."""
    truth, (own, *untrained) = ExactAnswers(batch), models
    k, cluster, observed = truth.k, truth.cluster, truth.observed
    h_exact, h_latent = label_entropy(truth.log_p), label_entropy(truth.belief)
    several = np.flatnonzero(k >= 2)
    rules, shown = observers(), Shown.of(batch).take(observed)
    _, pair = np.unique(cluster, return_inverse=True)
    half = np.random.default_rng(0).permutation(pair.max() + 1)[pair[observed]] % 2 == 0

    def scores(log_p: np.ndarray) -> np.ndarray:
        return np.stack([losses(rule, shown, log_p[observed], half) for rule in rules])

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
        return spearman(model.h_label[rows], h_exact[rows], indicators(k[rows]))

    def skill_of(model: LabelPredictions, rows: np.ndarray) -> float:
        return skill_by_count(truth.log_p[rows], model.log_p[rows], k[rows])

    by_observer = scores(own.log_p)
    attainable = float(gains(scores(truth.log_p))[observed].mean())
    same_k = correlation_interval(
        own.h_label[several], h_exact[several], cluster[several], indicators(k[several]), signed=True
    )
    estimates = [against_untrained(EVIDENCE, "skill", skill_of, models, observed, cluster)]
    if attainable > LEAST_GAIN:
        all_gains = [gains(by_observer), *(gains(scores(control.log_p)) for control in untrained)]
        estimates.append(
            against_untrained(
                EVIDENCE,
                BAYES,
                lambda gain, rows: float(gain[rows].mean() / attainable),
                all_gains,
                observed,
                cluster,
            )
        )
    estimates += [
        against_untrained(
            EVIDENCE,
            "rho of H label and exact entropy, given k",
            rank_correlation,
            models,
            several,
            cluster,
            same_k,
        ),
        *(
            against_untrained(EVIDENCE, name, statistic, models, observed, cluster)
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
        k=np.array(truth.ks, dtype=float),
        h_label=mean_by(k, own.h_label),
        h_label_null=layer_band({UNTRAINED: np.stack([mean_by(k, control.h_label) for control in untrained])}),
        h_exact=mean_by(k, h_exact),
        h_latent=mean_by(k, h_latent),
        h_vocabulary=mean_by(k, own.h_vocab),
        mass=mean_by(k, own.mass),
        skill=np.array([skill_of(own, np.flatnonzero(k == number)) if number else 0.0 for number in truth.ks]),
        error=mean_by(k, np.abs(own.h_label - h_exact)),
        predicted=np.array([own.p[observed][rows].mean() for rows in deciles]),
        exact=np.array([exact_p[rows].mean() for rows in deciles]),
        drawn=np.array([drawn[rows].mean() for rows in deciles]),
        answers=np.stack([np.exp(truth.log_p[:, 0]), own.p], 1),
        observer=by_observer.mean(1),
        observer_interval=np.array([[interval.low, interval.high] for interval in intervals]),
        estimates=tuple(estimates),
        ticks={
            "k": tuple(truth.ks),
            "observer": tuple(rule.name for rule in rules),
            "answer": ("exact P(first)", "the model's P(first)"),
        },
        attainable=attainable,
        warnings=tuple(_doubts(own.mass[observed].mean(), attainable)),
        notes=("k = 0 enters no metric: there is nothing to weigh",) * (0 in truth.ks),
    )


def _doubts(mass: float, attainable: float) -> Iterator[str]:
    if attainable <= LEAST_GAIN:
        yield f"{BAYES}: not measured, because an exact model answers these prompts like one that counts; add larger k"
    if mass < 0.5:
        yield f"the two labels have {mass:.1%} of the model's probability: renormalised answers are a small part of it"
