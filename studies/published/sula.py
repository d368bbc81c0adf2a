"""SULA and the entropy axis as Paper III defines them, flaws included, on prompts of the world `two-point`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmgeom.claims import Null, declared, estimate
from llmgeom.probe import UNTRAINED, Capture, Needs, Observer, ProbeInput, Site, UserError, exact_answers
from llmgeom.probes.evidence.predictions import (
    LABELS,
    MAIN,
    ExactAnswers,
    LabelPredictions,
    by_sample,
    label_entropy,
)
from llmgeom.result import Estimate, Result, labelled, line
from llmgeom.stats.manifold import standardised
from llmgeom.stats.resampling import Clusters, Interval, in_groups, jackknife
from llmgeom.stats.tests import regrouped_interval, spearman
from studies.published import CLAIMS_FOLDER

PROBE = "published_sula"
Correlation = Callable[[np.ndarray, np.ndarray], float]
CLAIMS = declared(PROBE, CLAIMS_FOLDER)
CONDITIONS = (MAIN, "remap")
ERROR, PEARSON = (
    "error of H label, latent class, k = 0 included",
    "Pearson of H label and latent entropy, k = 0 included",
)
RANKED, STEPS = "|rho| of PC1 and latent entropy, k = 0 included", "|rho| of PC1 and k"
REMAP, AXIS = "error of H label after remap", "correlation of the axis and H label"
VALUES = Observer(
    "values", lambda step: {"last": step.layers(Site.VALUE)[-1].flatten(1)}, frozenset({Site.VALUE}), version="1"
)
NEEDS = Needs(
    controls=frozenset({UNTRAINED}),
    check=exact_answers,
    samples=frozenset(CONDITIONS) - {MAIN},
    observers=(LABELS, VALUES),
)


def measure(data: ProbeInput) -> Result:
    """The published numbers. Raises UserError: no coordinate varies, or few pairs of labels."""

    def values(capture: Capture) -> np.ndarray:
        return capture.observed("values.last").double().numpy()

    samples = by_sample(data, CONDITIONS)
    truth = {name: ExactAnswers(of.capture.batch) for name, of in samples.items()}
    captures = [{name: of.capture for name, of in samples.items()}]
    captures += [{name: of.untrained[draw] for name, of in samples.items()} for draw in range(len(data.untrained))]
    models = [{name: LabelPredictions.of(one) for name, one in each.items()} for each in captures]
    return measure_published(truth, models, [values(data.capture), *map(values, data.untrained)])


def latent(truth: ExactAnswers) -> np.ndarray:
    """[prompt state] exact log-probability of the latent class, nats."""
    return truth.batch.exact.belief[:, -1].numpy()


def measure_published(
    truth: Mapping[str, ExactAnswers], models: Sequence[Mapping[str, LabelPredictions]], vectors: Sequence[np.ndarray]
) -> Result:
    """`measure` from exact answers and predictions by sample, and values of the last layer [prompt coordinate]: of the
    model, then of its untrained controls."""
    main = truth[MAIN]
    ks, k, cluster, every = main.ks, main.k, main.cluster, np.arange(len(main.batch))
    target = label_entropy(latent(main))
    labels = [model[MAIN].h_label for model in models]
    # Of each model: PC1 of its vectors, their scores in standardised coordinates, and their projections on it.
    axes, scores = zip(*map(_axis, vectors), strict=True)
    along = [x @ u for x, u in zip(vectors, axes, strict=True)]
    refits = Refits.of(vectors[0], cluster)

    def row(name: str, values: Sequence[float], interval: Interval) -> Estimate:
        claim, (value, *draws) = CLAIMS[name], values
        null = Null.of("untrained", np.array(draws), claim.side)
        return estimate(claim, value, interval, [null], n=len(every), clusters=len(set(cluster)))

    def error(name: str, condition: str, expected: np.ndarray) -> Estimate:
        errors = [np.abs(model[condition].h_label - expected) for model in models]
        return row(name, [x.mean() for x in errors], jackknife(np.mean, errors[0], cluster))

    def linear(name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Estimate:
        a, b = pairs[0]
        interval = jackknife(lambda rows: _pearson(a[rows], b[rows]), every, cluster)
        return row(name, [_pearson(*pair) for pair in pairs], interval)

    def ranked(name: str, other: np.ndarray) -> Estimate:
        rhos = [abs(spearman(score, other)) for score in scores]
        return row(name, rhos, regrouped_interval(*refits.signed(1, other, spearman), refits.group))

    def axis_of(name: str) -> Estimate:
        correlations = [abs(_pearson(*pair)) for pair in zip(along, labels, strict=True)]
        return row(name, correlations, regrouped_interval(*refits.signed(0, labels[0], _pearson), refits.group))

    removed = vectors[0] - along[0][:, None] * axes[0]
    estimates = (
        error(ERROR, MAIN, target),
        linear(PEARSON, [(h, target) for h in labels]),
        ranked(RANKED, target),
        ranked(STEPS, k.astype(float)),
        error(REMAP, "remap", label_entropy(latent(truth["remap"]))),
        axis_of(AXIS),
    )
    shown, exact = ([of[k == number].mean() for number in ks] for of in (labels[0], target))
    constant, after = (
        np.abs(target - np.median(target)).mean(),
        np.abs(removed @ axes[0]).max() / np.abs(along[0]).max(),
    )
    said, before = "entropy of the two labels, mean over prompts", "number of labelled words before the question"
    return Result.of(
        "In-context evidence, as published",
        {
            "k": labelled(np.array(ks, dtype=float), "k", "observations", before),
            **line("h_label", shown, "k", "bits", said, beside="h_latent"),
            "h_latent": labelled(exact, "k", "bits", "exact entropy of the latent class"),
            "constant": labelled(constant, "", "bits", "error of the best constant, against the latent class"),
            "after": labelled(after, "", "of v . u before", "largest |v . u| after removing the axis: rounding"),
        },
        __name__,
        estimates=estimates,
        ticks={"k": tuple(ks)},
    )


@dataclass(frozen=True)
class Refits:
    """PC1 of all rows, and of the rows outside each group of clusters, computed as in `representation_geometry.Axis`.

    If PC2 has .9 of the variance of PC1, intervals cover the mean of |rho| in .82 or more of simulated samples, and in
    less than .6 with PC1 fixed.

    Attributes:
        rows: All rows, then the rows outside each group.
        scores: For these rows, projections on the axis and scores in standardised coordinates, with matching signs.
        group: [row] number of the group.
    """

    rows: Sequence[np.ndarray]
    scores: Sequence[tuple[np.ndarray, np.ndarray]]
    group: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, cluster: Clusters) -> Refits:
        """Refit the axis without each group."""
        group = in_groups(cluster, 0)
        rows = [np.arange(len(values)), *(np.flatnonzero(group != i) for i in range(int(group.max()) + 1))]
        scores: list[tuple[np.ndarray, np.ndarray]] = []
        for kept in rows:
            u, score = _axis(values[kept])
            sign = -1 if scores and score @ scores[0][1][kept] < 0 else 1
            scores.append((sign * (values[kept] @ u), sign * score))
        return cls(rows, scores, group)

    def signed(self, kind: int, other: np.ndarray, correlation: Correlation) -> tuple[float, np.ndarray]:
        """|Correlation| of scores of a kind with another number; [group] the same without each, in its direction."""
        refits = zip(self.scores, self.rows, strict=True)
        whole, *without = (correlation(scores[kind], other[rows]) for scores, rows in refits)
        return abs(whole), np.sign(whole) * np.array(without)


def _axis(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit vector of PC1 in standardised coordinates, [coordinate], 0 where one is constant; and its scores."""
    z = standardised(values)
    left, size, axes = np.linalg.svd(z, full_matrices=False)
    u = np.zeros(values.shape[1])
    u[values.max(0) != values.min(0)] = axes[0]
    return u, left[:, 0] * size[0]


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    if a.max() == a.min() or b.max() == b.min():
        raise UserError("a quantity that is the same for every prompt has no correlation")
    return float(np.corrcoef(a, b)[0, 1])
