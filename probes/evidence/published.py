"""SULA and the entropy axis as Paper III defines them, flaws included: `llmgeom evidence --protocol published`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmgeom.claims import Null, declared, estimate
from llmgeom.errors import UserError
from llmgeom.probes.evidence.answers import Reading, Truth, label_entropy
from llmgeom.prompts.sula import Sula
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.stats.pca import standardised
from llmgeom.stats.resampling import Interval, jackknife
from llmgeom.stats.tests import correlation_interval, spearman

PROBE = "published_sula"
TEMPLATE = "plain"
CONDITIONS = ("main", "remap", "shuffled", "no words")
ERROR, PEARSON = (
    "error of H label, latent class, k = 0 included",
    "Pearson of H label and latent entropy, k = 0 included",
)
RANKED, STEPS = "|rho| of PC1 and latent entropy, k = 0 included", "|rho| of PC1 and k"
REMAP, SHUFFLED = "error of H label after remap", "error of H label, shuffled, 1 bit expected"
ABLATED, AXIS = "error of H label, no words, 1 bit expected", "correlation of the axis and H label"


@dataclass(frozen=True, kw_only=True)
class Published(Result):
    """Paper III's SULA numbers and its cut of the entropy axis, measured on itself."""

    TITLE: ClassVar[str] = "In-context evidence, as published"
    MEANING: ClassVar[str] = (
        "What the published definitions give on this model and on untrained ones. The error of a constant that reads "
        "nothing stands beside the model's: an error no smaller shows no tracking of evidence."
    )
    COMPUTED: ClassVar[str] = (
        "H label against the entropy of the latent class, although the model predicts the next label; prompts without "
        "evidence (k = 0) included; no correction for k. PC1 of the last layer's standardised values. Controls: "
        "another pair of labels; labels drawn 1/2 each and words replaced, both expected at 1 bit. Axis: u, PC1 in "
        "standardised coordinates; the correlation of v . u with H label, v the values as they are; after the cut v - "
        "(v . u) u it is what rounding leaves, whatever the model. Jackknifed over label pairs."
    )
    NULL: ClassVar[str] = "The same model re-initialised, the same prompts."
    FAILURE_MODES: ClassVar[str] = (
        "The target is of another variable than the answer. Words carry no evidence, so removing them must change "
        "nothing; at k = 1 shuffled prompts are distributed as unshuffled ones; k = 0 prompts differ in length "
        "from all others and carry the correlations. See the sound measures of `llmgeom evidence` and `llmgeom ablate`."
    )

    k: np.ndarray = quantity("k", "observations", "number of labelled words before the question")
    h_label: np.ndarray = quantity(
        "k", "bits", "entropy of the two labels, mean over prompts", Figure("curve", beside="h_latent")
    )
    h_latent: np.ndarray = quantity("k", "bits", "exact entropy of the latent class")
    constant: float = quantity("", "bits", "error of the best constant, against the latent class")
    after: float = quantity("", "of v . u before", "largest |v . u| that the cut leaves: rounding")
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()


def measure_published(
    source: Sula, truth: Mapping[str, Truth], own: Mapping[str, Reading], untrained: Sequence[Mapping[str, Reading]]
) -> Published:
    """The published numbers, readings by condition. Raises UserError where no coordinate varies and for few pairs."""
    main = truth["main"]
    k, cluster, every = main.k, main.cluster, np.arange(len(main.batch))
    target, ones = label_entropy(main.belief), np.ones(len(every))
    everyone = (own, *untrained)
    first = [_axis(who["main"].value) for who in everyone]  # u, and the score in standardised coordinates
    along = [who["main"].value @ u for who, (u, _) in zip(everyone, first, strict=True)]
    scores = [score for _, score in first]

    labels = [who["main"].h_label for who in everyone]

    def row(name: str, values: Sequence[float], span: Interval) -> Estimate:
        claim, (value, *draws) = declared(PROBE)[name], values
        null = Null.of("re-initialised", value, np.array(draws), claim.side)
        return estimate(claim, value, span, [null], n=len(every), clusters=len(set(cluster)))

    def missed(name: str, condition: str, expected: np.ndarray) -> Estimate:
        each = [np.abs(who[condition].h_label - expected) for who in everyone]
        return row(name, [one.mean() for one in each], jackknife(np.mean, each[0], cluster))

    def linear(name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]], of=float) -> Estimate:
        a, b = pairs[0]
        span = jackknife(lambda rows: of(_pearson(a[rows], b[rows])), every, cluster)
        return row(name, [of(_pearson(*pair)) for pair in pairs], span)

    def ordered(name: str, other: np.ndarray) -> Estimate:
        span = correlation_interval(scores[0], other, cluster)
        return row(name, [abs(spearman(one, other)) for one in scores], span)

    cut = own["main"].value - along[0][:, None] * first[0][0]
    estimates = (
        missed(ERROR, "main", target),
        linear(PEARSON, [(h, target) for h in labels]),
        ordered(RANKED, target),
        ordered(STEPS, k.astype(float)),
        missed(REMAP, "remap", label_entropy(truth["remap"].belief)),
        missed(SHUFFLED, "shuffled", ones),
        missed(ABLATED, "no words", ones),
        linear(AXIS, [*zip(along, labels, strict=True)], abs),
    )
    ks = list(source.ks)
    return Published(
        k=np.array(ks, dtype=float),
        h_label=np.array([labels[0][k == one].mean() for one in ks]),
        h_latent=np.array([target[k == one].mean() for one in ks]),
        constant=float(np.abs(target - np.median(target)).mean()),
        after=float(np.abs(cut @ first[0][0]).max() / np.abs(along[0]).max()),
        estimates=estimates,
        ticks={"k": tuple(ks)},
    )


def _axis(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit vector of PC1 in standardised coordinates, [coordinate] with 0 where one does not vary, and its score."""
    z = standardised(values)
    left, size, axes = np.linalg.svd(z, full_matrices=False)
    u = np.zeros(values.shape[1])
    u[values.max(0) != values.min(0)] = axes[0]
    return u, left[:, 0] * size[0]


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    if a.max() == a.min() or b.max() == b.min():
        raise UserError("a quantity that is the same for every prompt has no correlation")
    return float(np.corrcoef(a, b)[0, 1])
