"""Do the last token's value vectors lie on a low-dimensional manifold that is ordered by predictive entropy?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llmgeom.claims import Null, declared, estimate
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.probe import LENGTH, ONE_TOKEN, UNSTRATIFIED, Needs, ProbeInput, Sample
from llmgeom.probes.shared.representation_geometry import (
    OWN,
    PERMUTATIONS,
    RHO,
    TWIN,
    CloudResult,
    Portrait,
    correlation,
    describe,
    entropy_of,
    final_tokens,
    flat,
    rhos,
    untrained_nulls,
)
from llmgeom.result import Estimate, Figure, quantity
from llmgeom.stats.manifold import Dimension, intrinsic_dimension, unroll
from llmgeom.stats.pca import standardised
from llmgeom.stats.tests import correlation_test, spearman

SECOND = (UNSTRATIFIED, ONE_TOKEN, LENGTH)
NEEDS = Needs(frozenset({Site.VALUE}), samples=frozenset(SECOND))
CLAIMS = declared("value_manifold")
DIMENSION, ORDER = "intrinsic dimension (TwoNN) over Gaussian", "order along the curve"
GAUSSIANS, GAUSSIANS_OF_TWINS = 199, 39
FAR, SHOWN = 6.0, 5  # robust standard deviations; rows that a warning lists


@dataclass(frozen=True, kw_only=True)
class Result(CloudResult):
    """Shares of variance of the value vectors at the queried positions, how they hold entropy, and their shape."""

    TITLE = "Value manifold"
    MEANING = (
        "If a model keeps its uncertainty on a value manifold, the value vectors of the last token vary along few "
        "directions and the first of them follows the entropy of the next-token distribution. A share above both nulls "
        "says that training made the values lower-dimensional than an untrained model or scrambled text would; a "
        "correlation above its null says that the order along PC1 is not a mere look-up of the same tokens. A curved "
        "manifold can hide from PC1: entropy decodability asks for any direction, order along the curve for a bent "
        "one, and an intrinsic dimension below that of a Gaussian with the same spectrum says that there is a bend or "
        "that there are clusters."
    )
    COMPUTED = (
        "Values per true key-value head at the final token, heads concatenated, each coordinate standardised over "
        "prompts, PCA. PC1 and PC1+PC2 are shares of the total variance; the participation ratio is (sum of "
        "eigenvalues)^2 / sum of squared eigenvalues over all of them. |rho| is Spearman's rank correlation of the PC1 "
        "score with next-token entropy in bits; its sign is a convention and is dropped. Held-out R2 is the share of "
        "the variance of entropy that ridge regression predicts for templates it was not fitted on (5 folds, penalty "
        "chosen inside the others): 1 is exact, 0 is no better than the mean, below 0 is worse. The intrinsic "
        "dimension is TwoNN, from the ratio of distances to the second and the first neighbour, over one prompt a "
        "template; the metric divides it by its median in Gaussian clouds with the same spectrum. Order along the "
        "curve is |Spearman| of entropy with the first coordinate of Isomap (graph of 5 neighbours). Verdicts are "
        "about the last layer, fixed beforehand. Intervals are jackknifed over templates, the dimension's comes from "
        "its likelihood; the estimand is the expected value at this number of prompts and coordinates."
    )
    NULL = (
        "Shares: the same model re-initialised, and the same prompts with all tokens but the last shuffled; both "
        "must be beaten. Correlation, decodability and order: the re-initialised models' values against the trained "
        "model's entropy (what a look-up of the same tokens already predicts) and against their own, and permutations "
        "of whole templates; all must be beaten. Dimension: Gaussian clouds with exactly the same spectrum, and the "
        "re-initialised models, each over its own Gaussian clouds (untrained values cluster by token too); both must "
        "be beaten."
    )
    FAILURE_MODES = (
        "PC1 misses curved or oblique manifolds. Value coordinates depend on the basis inside each head, which "
        "training does not fix; what attention writes does not depend on it (probe attention_write). Stratifying "
        "prompts by entropy widens its range and with it the correlation: see the unstratified row. Length and the "
        "identity of the final token can carry the correlation: see the rows that hold them fixed. At 75 prompts the "
        "order along a curve that turns more than once is lost to short cuts between its turns, so a low value there "
        "excludes nothing. Noise thicker than the gaps between prompts counts as dimensions, and clusters read as a "
        "low one: a ratio below 1 does not yet mean a curve. Decodability says that entropy can be read, not that the "
        "model reads it. Shares, dimensions and R2 at another number of prompts or another width are not comparable."
    )

    unrolled: np.ndarray = quantity(
        "prompt component",
        "distance along the graph",
        "neighbour embedding (Isomap), last layer: component 1 is the order along the curve",
        Figure("scatter"),
    )
    dimension: np.ndarray = quantity("", "dimensions", "intrinsic dimension, TwoNN, last layer (0: too few points)")
    dimension_gaussian: np.ndarray = quantity("", "dimensions", "its median in Gaussian clouds with the same spectrum")
    dimension_mle: np.ndarray = quantity(
        "", "dimensions", "intrinsic dimension, Levina and Bickel's over 10 neighbours, last layer (0: too few points)"
    )
    dimension_mle_gaussian: np.ndarray = quantity(
        "", "dimensions", "its median in Gaussian clouds with the same spectrum"
    )


def measure(view: ProbeInput) -> Result:
    """Shares, |rho| and held-out R2 at every layer, with nulls; shape and metrics at the last. Raises UserError."""
    common = describe(view, Site.VALUE, CLAIMS)
    last, theirs = _last(view.capture), [_last(control) for control in view.untrained]
    dimension, shape, notes = _shape(view, last, theirs)
    unrolled = unroll(standardised(last))
    second, missing = _second(view)
    *plain, decoded = common.estimates
    return Result(
        **common.fields,
        unrolled=unrolled,
        **dimension,
        estimates=(*plain, *second, decoded, *shape, _order(view, unrolled, theirs)),
        warnings=(*common.warnings, *missing, *notes, *_far(view.capture, last)),
    )


def _last(capture: Capture) -> np.ndarray:
    return flat(capture.layers(Site.VALUE)[-1])


def _second(view: ProbeInput) -> tuple[list[Estimate], list[str]]:
    """|rho| in every second sample that there is; a sentence where it cannot be had."""
    found, missing = [], []
    for name in SECOND:
        if name in view.samples:
            try:
                found.append(_sample_rho(name, view.samples[name], view.seed))
            except UserError as refusal:
                missing.append(f"{RHO}, {name}: not measured, because {refusal}")
    return found, missing


def _sample_rho(name: str, sample: Sample, seed: int) -> Estimate:
    scores = Portrait.of(_last(sample.capture)).scores[:, 0]
    test = correlation_test(scores, sample.entropy, sample.clusters, PERMUTATIONS, seed)
    draws = rhos(sample.untrained, [[Portrait.of(_last(control))] for control in sample.untrained], sample.entropy)
    return correlation(CLAIMS[f"{RHO}, {name}"], scores, sample.entropy, sample.clusters, test, draws)


def _order(view: ProbeInput, unrolled: np.ndarray, theirs: list[np.ndarray]) -> Estimate:
    """|Spearman| of entropy and the place along the curve."""
    place = unrolled[:, 0]
    test = correlation_test(place, view.entropy, view.clusters, PERMUTATIONS, view.seed)
    places = [unroll(standardised(x))[:, 0] for x in theirs]
    draws = {
        TWIN: np.array([abs(spearman(other, view.entropy)) for other in places]),
        OWN: np.array(
            [abs(spearman(p, entropy_of(control))) for p, control in zip(places, view.untrained, strict=True)]
        ),
    }
    return correlation(CLAIMS[ORDER], place, view.entropy, view.clusters, test, draws)


def _shape(view: ProbeInput, last: np.ndarray, theirs: list[np.ndarray]) -> tuple[dict, list[Estimate], list[str]]:
    """Intrinsic dimension: the single numbers, the metric, and what a reader should know of the points.

    The spectrum-matched Gaussian is an exact test of "a Gaussian", but what is not Gaussian need not be learnt: tokens
    are discrete, and an untrained model's values cluster by them as well. So controls decide too, on the same scale.
    """
    names = ("dimension", "dimension_gaussian", "dimension_mle", "dimension_mle_gaussian")
    try:
        own = intrinsic_dimension(last, view.clusters, GAUSSIANS, view.seed)
        untrained = np.array(
            [intrinsic_dimension(x, view.clusters, GAUSSIANS_OF_TWINS, view.seed).ratio for x in theirs]
        )
    except UserError as refusal:
        return dict.fromkeys(names, np.float64(0)), [], [f"{DIMENSION}: not measured, because {refusal}"]
    notes = []
    if own.coinciding:
        notes.append(f"{own.coinciding} prompts have the values of another and were left out of the dimension")
    numbers = (own.twonn, np.median(own.gaussian), own.mle, np.median(own.gaussian_mle))
    return {n: np.float64(v) for n, v in zip(names, numbers, strict=True)}, [_dimension(own, untrained)], notes


def _dimension(own: Dimension, untrained: np.ndarray) -> Estimate:
    drawn = own.gaussian / np.median(own.gaussian)
    # Gaussian clouds and controls carry the sampling noise of neighbours as we do: p is against all of them, and the
    # interval must clear their median.
    gaussian = replace(Null.of("Gaussian of the same spectrum", own.ratio, drawn, "lower"), margin=1.0)
    learnt = untrained_nulls(own.ratio, {TWIN: untrained}, "lower")
    interval = own.ratio_interval()
    return estimate(CLAIMS[DIMENSION], own.ratio, interval, [gaussian, *learnt], n=own.points, clusters=own.points)


def _far(capture: Capture, last: np.ndarray) -> list[str]:
    """A warning that lists rows whose vector is unusually long or short: they can make a component of their own."""
    norm = np.linalg.norm(last, axis=1)
    away = np.abs(norm - np.median(norm))
    robust = 1.4826 * float(np.median(away))  # the sd of a normal variable whose median deviation this is
    rows = np.flatnonzero(away > FAR * robust) if robust > 0 else np.flatnonzero(away > 0)
    if not len(rows):
        return []
    rows, tokens = rows[np.argsort(-away[rows], kind="stable")], final_tokens(capture)
    listed = ", ".join(f"prompt {capture.prompt[row]} (token {tokens[row]})" for row in rows[:SHOWN])
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return [f"value norms at the last layer lie more than {FAR:g} robust sd off the median for {listed}{more}"]
