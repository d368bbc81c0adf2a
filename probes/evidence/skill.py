"""In-context evidence: the model's answers against the exact ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmgeom.claims import Null, declared, layer_band
from llmgeom.probe import Batch, ProbeInput
from llmgeom.probes.evidence.estimates import BASELINE, UNTRAINED, Statistic, against_untrained, indicators, mean_by
from llmgeom.probes.evidence.predictions import LABEL_NEEDS, ExactAnswers, LabelPredictions, label_entropy
from llmgeom.result import Curve, Estimate, Figure, Result, curve, quantity
from llmgeom.stats.information import skill_by_count
from llmgeom.stats.resampling import Interval
from llmgeom.stats.tests import correlation_interval, spearman

EVIDENCE = "sula"
FEW = "the two labels together have less than half of the model's probability: the rest is not compared"
CLAIMS = declared(EVIDENCE)
NEEDS = LABEL_NEEDS


@dataclass(frozen=True, kw_only=True)
class Evidence(Result):
    """The model's answers and the exact ones, by k."""

    TITLE = "In-context evidence (SULA)"

    k: np.ndarray = quantity("k", "observations", "number of labelled words before the question")
    h_label: Curve = curve(
        "k", "bits", "entropy of the two labels, mean over prompts", null="band of untrained copies", beside="h_exact"
    )
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


def measure(data: ProbeInput) -> Evidence:
    """Skill and calibration. Raises UserError for fewer than 5 clusters."""
    return measure_evidence(data.capture.batch, (data.observations, *data.control_observations))


def measure_evidence(batch: Batch, models: Sequence[LabelPredictions]) -> Evidence:
    """`measure` from predictions: `models` are the model, then its untrained controls."""
    truth, (trained, *untrained) = ExactAnswers(batch), models
    k, cluster, observed = truth.k, truth.cluster, truth.observed
    h_exact, h_latent = label_entropy(truth.log_p), label_entropy(truth.belief)
    several = np.flatnonzero(k >= 2)

    def error_below(target: np.ndarray) -> Statistic:
        def below(model: LabelPredictions, rows: np.ndarray) -> float:
            constant = np.abs(target[rows] - np.median(target[rows])).mean()
            return float(1 - np.abs(model.h_label[rows] - target[rows]).mean() / constant)

        return below

    def rank_correlation(model: LabelPredictions, rows: np.ndarray) -> float:
        return spearman(model.h_label[rows], h_exact[rows], indicators(k[rows]))

    def skill_of(model: LabelPredictions, rows: np.ndarray) -> float:
        return skill_by_count(truth.log_p[rows], model.log_p[rows], k[rows])

    same_k = correlation_interval(
        trained.h_label[several], h_exact[several], cluster[several], indicators(k[several]), signed=True
    )

    def row(name: str, statistic: Statistic, rows: np.ndarray = observed, interval: Interval | None = None) -> Estimate:
        return against_untrained(EVIDENCE, name, statistic, models, rows, cluster, interval)

    # Without the control 0, even answers would hold: untrained models with large logits lie far below them.
    baseline = [Null.number(BASELINE, 0.0)]
    estimates = (
        against_untrained(EVIDENCE, "skill", skill_of, models, observed, cluster, nulls=baseline),
        row("rho of H label and exact entropy, given k", rank_correlation, several, same_k),
        row("error of H label, below a constant's", error_below(h_exact)),
        row("error of H label, latent class, below a constant's", error_below(h_latent)),
        row("mass of the two labels", lambda model, rows: float(model.mass[rows].mean())),
    )
    deciles = np.array_split(np.argsort(trained.p[observed], kind="stable"), 10)
    drawn = np.array(batch.columns["next"])[observed] == 0
    exact_p = np.exp(truth.log_p[observed, 0])
    return Evidence(
        k=np.array(truth.ks, dtype=float),
        h_label=Curve(
            mean_by(k, trained.h_label),
            null=layer_band({UNTRAINED: np.array([mean_by(k, control.h_label) for control in untrained])}),
        ),
        h_exact=mean_by(k, h_exact),
        h_latent=mean_by(k, h_latent),
        h_vocabulary=mean_by(k, trained.h_vocab),
        mass=mean_by(k, trained.mass),
        skill=np.array([skill_of(trained, np.flatnonzero(k == number)) if number else 0.0 for number in truth.ks]),
        error=mean_by(k, np.abs(trained.h_label - h_exact)),
        predicted=np.array([trained.p[observed][rows].mean() for rows in deciles]),
        exact=np.array([exact_p[rows].mean() for rows in deciles]),
        drawn=np.array([drawn[rows].mean() for rows in deciles]),
        answers=np.stack([np.exp(truth.log_p[:, 0]), trained.p], 1),
        estimates=estimates,
        ticks={"k": tuple(truth.ks), "answer": ("exact P(first)", "the model's P(first)")},
        warnings=(FEW,) * bool(trained.mass[observed].mean() < 0.5),
        notes=("k = 0 enters no metric: there is nothing to weigh",) * (0 in truth.ks),
    )
