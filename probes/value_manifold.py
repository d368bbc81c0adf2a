"""Do values and attention's writes lie on a low-dimensional manifold that is ordered by predictive entropy?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from llmgeom.claims import Null, declared, estimate
from llmgeom.probe import (
    MATCHED,
    Capture,
    Needs,
    ProbeInput,
    Site,
    Unavailable,
    UserError,
)
from llmgeom.probes.shared.domain_gain import DomainGain, measure_gain
from llmgeom.probes.shared.matrices import captured, entropy_of, final_tokens, last_layer
from llmgeom.probes.shared.nulls import UNTRAINED
from llmgeom.probes.shared.representation_geometry import (
    OWN_ENTROPY,
    PERMUTATIONS,
    Axis,
    Geometry,
    GeometryResult,
    correlation,
    measure_geometry,
)
from llmgeom.probes.shared.targets import Constant, Target, follows
from llmgeom.result import Combined, Estimate, Figure, quantity
from llmgeom.stats.manifold import Dimension, intrinsic_dimension, unroll
from llmgeom.stats.pca import standardised
from llmgeom.stats.resampling import Clusters
from llmgeom.stats.tests import correlation_test, spearman

NEEDS = Needs(
    frozenset({Site.VALUE}),
    optional=frozenset({Site.ATTENTION_WRITE}),
    samples=frozenset({MATCHED}),
    follows_entropy=True,
    chosen_layers=True,
)
CLAIMS = declared("value_manifold")
WRITE, DOMAIN = "attention_write_", "domain_"  # prefixes of quantities
CALLED = "attention write: "  # prefix of the names of its metrics
DIMENSION, ORDER = "intrinsic dimension (TwoNN) over Gaussian", "order along the curve"
GAUSSIANS, GAUSSIANS_OF_CONTROLS = 199, 39
FAR, SHOWN = 6.0, 5  # robust standard deviations; rows that a warning lists


@dataclass(frozen=True)
class Result(Combined):
    """Geometry of attention's writes and of the values, and the gain of a domain over mixed prompts."""

    TITLE = "Value manifold"


@dataclass(frozen=True, kw_only=True)
class ValueGeometry(GeometryResult):
    """Geometry of the values, and the shape on which they lie."""

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
    """Geometry of both sites at every layer with nulls, their metrics at the last layer, and the gain of a domain.

    Raises:
        UserError: neither site can be measured. A single part that cannot is a warning, or a note if this model or
            source has no such part.
    """
    geometry = cache(lambda: measure_geometry(view, Site.VALUE, CLAIMS))
    parts: dict[str, GeometryResult | DomainGain] = {}
    reasons: dict[str, UserError] = {}
    notes: list[str] = []
    warnings: list[str] = []
    for prefix, name, part in (
        (WRITE, "attention write", lambda: _write(view)),
        ("", "values", lambda: _values(view, geometry())),
        (DOMAIN, "domain restriction", lambda: measure_gain(view, CLAIMS, geometry())),
    ):
        try:
            parts[prefix] = part()
        except UserError as reason:
            reasons[name] = reason
            missing = notes if isinstance(reason, Unavailable) else warnings
            missing.append(f"{name}: not measured, because {reason}")
    if not parts:
        raise reasons["values"]
    return Result.of(parts, warnings, notes)


def _write(view: ProbeInput) -> GeometryResult:
    if not captured(view.capture, Site.ATTENTION_WRITE):
        raise Unavailable("the module that writes attention to the residual stream is unknown in this model")
    return GeometryResult(**measure_geometry(view, Site.ATTENTION_WRITE, CLAIMS, CALLED).fields)


def _values(view: ProbeInput, geometry: Geometry) -> ValueGeometry:
    last = last_layer(view.capture, Site.VALUE)
    controls = [last_layer(control, Site.VALUE) for control in view.untrained]
    dimension, shape, shape_warnings = _shape(view, last, controls)
    unrolled = unroll(standardised(last))
    order, unmeasured = [], {}
    try:
        order.append(_order(view, controls))
    except Constant as reason:
        unmeasured[ORDER] = str(reason)
    fields = {**geometry.fields, **dimension, "unrolled": unrolled}
    fields["estimates"] += *shape, *order
    fields["warnings"] += *shape_warnings, *_far(view.capture, last)
    fields["unmeasured"] = {**fields["unmeasured"], **unmeasured}
    return ValueGeometry(**fields)


def _order(view: ProbeInput, controls: list[np.ndarray]) -> Estimate:
    """|Spearman| of entropy and the place along the curve; if entropy is exact, both minus their mean at a position."""
    target = Target.of(view.capture, view.entropy).require()
    axis = curve_axis(last_layer(view.capture, Site.VALUE), target, view.clusters, view.seed)
    fixed = target.covariates()
    test = correlation_test(axis.scores, target.values, view.clusters, PERMUTATIONS, view.seed, fixed)
    places = [target.within(place(x)) for x in controls]
    draws = {UNTRAINED: np.array([abs(spearman(other, target.values, fixed)) for other in places])}
    if not target.exact:
        entropies = [entropy_of(control) for control in view.untrained]
        draws[OWN_ENTROPY] = np.array([abs(spearman(places[i], entropies[i])) for i in follows(entropies)])
    without = None
    if view.no_context is not None:
        without = curve_axis(last_layer(view.no_context, Site.VALUE), target, view.clusters, view.seed)
    return correlation(CLAIMS[ORDER], axis, test, draws, without=without)


def place(x: np.ndarray) -> np.ndarray:
    """[row] place along the curve on which vectors lie: Isomap's first coordinate."""
    return unroll(standardised(x))[:, 0]


def curve_axis(last: np.ndarray, target: Target, clusters: Clusters, seed: int) -> Axis:
    """Places along the curve, which is unrolled again without each group.

    Simulated at 75 points, 60 samples: intervals of |rho| cover .97 to 1.00; with fixed places they cover .70 if the
    vectors fill a ball of three dimensions, in which Isomap's first coordinate may turn from sample to sample.
    """
    return Axis.of(last, target, clusters, seed, lambda x, within: within(place(x)))


def _shape(view: ProbeInput, last: np.ndarray, controls: list[np.ndarray]) -> tuple[dict, list[Estimate], list[str]]:
    """Intrinsic dimension: single numbers, the metric, and warnings about the points.

    Gaussian clouds of the same spectrum are an exact test of "a Gaussian", but a departure need not be learnt: tokens
    are discrete, and an untrained model's values cluster by them too. So untrained controls decide as well.
    """
    names = ("dimension", "dimension_gaussian", "dimension_mle", "dimension_mle_gaussian")
    try:
        dimension = intrinsic_dimension(last, view.clusters, GAUSSIANS, view.seed)
        untrained = np.array(
            [intrinsic_dimension(x, view.clusters, GAUSSIANS_OF_CONTROLS, view.seed).ratio for x in controls]
        )
    except UserError as reason:
        return dict.fromkeys(names, np.float64(0)), [], [f"{DIMENSION}: not measured, because {reason}"]
    coinciding = f"the dimension leaves out {dimension.coinciding} prompts whose values equal those of another prompt"
    warnings = [coinciding] if dimension.coinciding else []
    numbers = (dimension.twonn, np.median(dimension.gaussian), dimension.mle, np.median(dimension.gaussian_mle))
    return {n: np.float64(v) for n, v in zip(names, numbers, strict=True)}, [_dimension(dimension, untrained)], warnings


def _dimension(dimension: Dimension, untrained: np.ndarray) -> Estimate:
    # Gaussian clouds and controls have the same sampling noise of neighbours as the model.
    gaussian, points = dimension.gaussian / np.median(dimension.gaussian), dimension.points
    drawn = {"Gaussian of the same spectrum": gaussian, UNTRAINED: untrained}
    nulls = [Null.of(name, ratios, "lower", noisy=True) for name, ratios in drawn.items()]
    return estimate(CLAIMS[DIMENSION], dimension.ratio, dimension.ratio_interval(), nulls, n=points, clusters=points)


def _far(capture: Capture, last: np.ndarray) -> list[str]:
    """A warning that lists rows with an unusually long or short vector, which alone can make a component."""
    norm = np.linalg.norm(last, axis=1)
    away = np.abs(norm - np.median(norm))
    robust = 1.4826 * float(np.median(away))  # the sd of a normal variable with this median deviation
    rows = np.flatnonzero(away > FAR * robust) if robust > 0 else np.flatnonzero(away > 0)
    if not len(rows):
        return []
    rows, tokens = rows[np.argsort(-away[rows], kind="stable")], final_tokens(capture)
    listed = ", ".join(f"prompt {capture.prompt[row]} (token {tokens[row]})" for row in rows[:SHOWN])
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return [f"value norms at the last layer lie more than {FAR:g} robust sd off the median for {listed}{more}"]
