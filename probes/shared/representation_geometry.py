"""Geometry of one activation site across prompts, per layer: PCA spectrum, and its relation to next-token entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from llmgeom.claims import Claim, Null, estimate
from llmgeom.probe import Capture, ProbeInput, Site, UserError
from llmgeom.probes.shared.matrices import entropy_of, final_tokens, last_layer, layer_matrices, varies
from llmgeom.probes.shared.nulls import HARDEST_BAND, NO_CONTEXT, SHUFFLED, UNTRAINED, null_band, permutation_null
from llmgeom.probes.shared.targets import LEAST_SPREAD, Constant, Target, follows
from llmgeom.result import Curve, Estimate, Figure, Result, curve, quantity
from llmgeom.stats.pca import share_intervals, shares
from llmgeom.stats.resampling import Clusters, Interval, in_groups, jackknife_interval, paired_interval
from llmgeom.stats.ridge_probe import (
    REPEATS,
    Readout,
    against_number,
    decodability,
    decodability_interval,
    permuted_decodability,
    read,
    repeated_folds,
)
from llmgeom.stats.tests import Test, correlation_test, max_statistic, rank_spline, regrouped_interval, spearman
from llmgeom.stats.verdict import LEAST_DRAWS

PERMUTATIONS = 10_000
RIDGE_PERMUTATIONS = 1_000  # fewer, since each chooses its penalty anew
# Divisions into folds behind the R2 of each untrained copy. Of 8 copies of SmolLM2 on 75 prompts of math its standard
# deviation is .045 over copies, .038 with 20 divisions: the band is a little too wide, and takes a quarter of the time.
OF_DRAW = 5
OF_CURVE, UNCLAIMED = 2, 5  # divisions into folds behind a point of a curve but the last; behind an R2 without a claim
LEAST_NUMBER, NUMBERS = 10, "numbers"  # clusters of the smallest part in which R2 is measured; a name for those numbers
OWN_ENTROPY = "untrained, own entropy"
SHARES = ("PC1 share", "PC1+PC2 share", "participation ratio")
RHO, PARTIAL, R2 = "|rho| of PC1 and entropy", "given length and final token", "entropy decodability (held-out R2)"


@dataclass(frozen=True, kw_only=True)
class GeometryResult(Result):
    """Quantities of one site; a layer whose vectors do not vary over prompts is drawn as 0."""

    pc1: Curve = curve("layer", "fraction", "share of variance on PC1", null=HARDEST_BAND)
    pc12: Curve = curve("layer", "fraction", "share of variance on PC1 and PC2", null=HARDEST_BAND)
    participation: Curve = curve("layer", "components", "participation ratio", null=HARDEST_BAND)
    rho: Curve | None = curve(
        "layer",
        "|rho|",
        "|Spearman| of PC1 and entropy; dashed: without context",
        null="|Spearman| of PC1 and entropy, untrained copies",
        beside="rho_no_context",
    )
    rho_no_context: np.ndarray | None = quantity(
        "layer", "|rho|", "|Spearman| of PC1 and entropy, trained model without context"
    )
    rho_p: np.ndarray | None = quantity(
        "layer", "p", "p of |Spearman| against permuted templates, corrected for all layers", Figure("curve")
    )
    r2: Curve | None = curve(
        "layer",
        "R2",
        "held-out R2 of entropy, read from other templates; dashed: without context",
        null="held-out R2 of entropy, untrained copies",
        beside="r2_no_context",
    )
    r2_no_context: np.ndarray | None = quantity("layer", "R2", "held-out R2 of entropy, trained model without context")
    r2_by_n: Curve | None = curve(
        "templates",
        "R2",
        "held-out R2 of entropy against the number of templates, last layer",
        null="the same, untrained copies",
    )
    scores: np.ndarray = quantity(
        "prompt component",
        "standardised units",
        "position on PC1 and PC2, last layer",
        Figure("scatter", layers="layer_scores"),
    )
    layer_scores: np.ndarray = quantity(
        "layer prompt component", "standardised units", "position on PC1 and PC2, signs as in the layer after"
    )
    control_scores: np.ndarray | None = quantity(
        "prompt component", "standardised units", "position on PC1 and PC2, last layer of one untrained copy"
    )
    constant: np.ndarray = quantity("layer", "coordinates", "coordinates that do not vary and were left out")


@dataclass(frozen=True)
class PCASummary:
    """PCA of one layer of one capture; all numbers are 0 if no coordinate varies.

    Attributes:
        numbers: PC1 share, PC1+PC2 share (fractions), participation ratio (components).
        scores: [prompt 2] position on PC1 and PC2.
        dropped: number of coordinates that do not vary.
    """

    numbers: tuple[float, float, float]
    scores: np.ndarray
    dropped: int
    width: int

    @classmethod
    def of(cls, x: np.ndarray) -> PCASummary:
        """Summary of x [prompt coordinate]."""
        if not varies(x):
            return cls((0.0, 0.0, 0.0), np.zeros((len(x), 2)), x.shape[1], x.shape[1])
        pca = shares(x)
        return cls((pca.pc1, pca.pc12, pca.participation_ratio), pca.scores, pca.dropped, x.shape[1])

    def rho(self, entropy: np.ndarray, covariates: np.ndarray | None = None) -> float:
        """|Spearman| of the PC1 score and entropy."""
        return abs(spearman(self.scores[:, 0], entropy, covariates)) if self.scores.any() else 0.0


def pc1(x: np.ndarray) -> np.ndarray:
    """[row] scores on the first component; 0 if no coordinate varies."""
    return PCASummary.of(x).scores[:, 0]


def summaries(
    capture: Capture, site: Site, within: Callable[[np.ndarray], np.ndarray] | None = None
) -> list[PCASummary]:
    """[layer] PCA of a site's vectors, or of what `within` makes of them (`Target.within`)."""
    return [PCASummary.of(within(x) if within else x) for x in layer_matrices(capture, site)]


@dataclass(frozen=True)
class Geometry:
    """Geometry of one site of a model and its controls.

    Attributes:
        fields: fields of a GeometryResult, whose metrics are those of the last layer.
        layers: [layer] summaries of the model.
        untrained: [draw][layer] summaries of the untrained copies.
    """

    fields: Mapping[str, Any]
    layers: list[PCASummary]
    untrained: list[list[PCASummary]]


def measure_geometry(view: ProbeInput, site: Site, claims: Mapping[str, Claim], prefix: str = "") -> Geometry:
    """Shares, participation ratio, |rho| and held-out R2 at every layer with their nulls; metrics of the last layer.

    Args:
        site: the site whose vectors are compared over prompts.
        prefix: prefix of each metric name of this module.

    Raises:
        UserError: the vectors of the last layer are the same for every prompt, or there are too few clusters.
    """
    last = last_layer(view.capture, site)
    if not varies(last):
        raise UserError(f"the {site.value} vectors of the last layer are the same for all {len(last)} prompts")
    layers = summaries(view.capture, site)
    untrained, shuffled = ([summaries(capture, site) for capture in of] for of in (view.untrained, view.shuffled))
    curves, estimates = _spectrum(view, last, layers, {UNTRAINED: untrained, SHUFFLED: shuffled}, claims, prefix)
    fields: dict[str, Any] = {
        "scores": layers[-1].scores,
        "layer_scores": aligned_signs([summary.scores for summary in layers]),
        "control_scores": untrained[0][-1].scores if untrained else None,
        "constant": np.array([summary.dropped for summary in layers]),
        **curves,
        **dict.fromkeys(("rho", "rho_no_context", "rho_p", "r2", "r2_no_context", "r2_by_n")),
    }
    unmeasured: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    try:
        entropy = EntropyGeometry.of(view, site, layers, untrained)
        fields |= entropy.fields
        if NUMBERS in fields:
            fields["ticks"] = {"templates": fields.pop(NUMBERS)}
        estimates += entropy.estimates(claims, prefix)
        notes = () if prefix else tuple(entropy.notes())
    except Constant as reason:
        names = [f"{prefix}{name}" for name in (RHO, f"{RHO}, {PARTIAL}", R2)]
        unmeasured = {name: str(reason) for name in names if name in claims}
    fields |= {"estimates": tuple(estimates), "warnings": (*_constant(site, layers),)}
    fields |= {"unmeasured": unmeasured, "notes": notes}
    return Geometry(fields, layers, untrained)


def _spectrum(
    view: ProbeInput,
    last: np.ndarray,
    layers: list[PCASummary],
    controls: Mapping[str, list[list[PCASummary]]],
    claims: Mapping[str, Claim],
    prefix: str,
) -> tuple[dict[str, Curve], list[Estimate]]:
    """Curves of the shares and of the participation ratio over layers, and their estimates at the last layer.

    Args:
        last: [row coordinate] the last layer's vectors.
        controls: name -> [draw][layer] summaries.
    """
    numbers = np.array([summary.numbers for summary in layers])
    drawn = {name: np.array([[s.numbers for s in draw] for draw in draws]) for name, draws in controls.items() if draws}
    intervals, clusters = share_intervals(last, view.clusters), len(set(view.clusters))
    curves, estimates = {}, []
    for i, (field, metric) in enumerate(zip(("pc1", "pc12", "participation"), SHARES, strict=True)):
        claim = claims[prefix + metric]
        null = null_band({name: draws[:, :, i] for name, draws in drawn.items()}, claim.side)
        curves[field] = Curve(numbers[:, i], null=null)
        nulls = [Null.of(name, draws[:, -1, i], claim.side) for name, draws in drawn.items()]
        value = layers[-1].numbers[i]
        estimates.append(estimate(claim, value, intervals[i], nulls, n=len(last), clusters=clusters))
    return curves, estimates


@dataclass(frozen=True)
class EntropyGeometry:
    """Relation of the vectors of one site to entropy, in the model and in every control.

    Attributes:
        fields: curves over layers for a GeometryResult.
        last: [row coordinate] the last layer's vectors.
        probe: the read-out of the target from them in each division into folds.
        axis: their PC1.
        test: test of |rho| at the last layer.
        untrained: [draw] summaries of the last layer. untrained_r2: R2 of the target, and of the control's own entropy.
        cut: the last layer's vectors without context, with their read-out; None without such a control, or if the
            control sets these vectors to a constant.
    """

    view: ProbeInput
    target: Target
    fields: Mapping[str, Curve | np.ndarray]
    last: np.ndarray
    probe: Readout
    axis: Axis
    test: Test
    untrained: list[PCASummary]
    untrained_r2: Mapping[str, np.ndarray]
    cut: tuple[np.ndarray, Readout] | None

    @classmethod
    def of(
        cls, view: ProbeInput, site: Site, layers: list[PCASummary], untrained: list[list[PCASummary]]
    ) -> EntropyGeometry:
        """Read every layer of the model and of its controls. Raises Constant if entropy does not vary."""
        target = Target.of(view.capture, view.entropy).require()
        fold = repeated_folds(view.clusters, view.seed, REPEATS if site is Site.VALUE else UNCLAIMED)
        y, stratum, positions = target.values, target.stratum, target.covariates()
        if target.exact:  # the spectrum is over all rows; correlations are within position
            layers = summaries(view.capture, site, target.within)
            untrained = [summaries(control, site, target.within) for control in view.untrained]

        def r2_at_layers(capture: Capture, before: int = 1, judged: int = OF_DRAW) -> tuple[np.ndarray, Readout]:
            """Few divisions, since there are many layers and controls; `judged` at the last, which is also returned."""
            *others, last = layer_matrices(capture, site)
            same = [np.stack([*alike]) for _, alike in groupby(others, np.shape)]  # widths may differ between layers
            readout = read(last, y[:, None], fold[:judged], stratum=stratum)
            earlier = [decodability(x, y, fold[:before], stratum) for x in same]
            return np.concatenate([*earlier, [readout.r2.mean()]]), readout

        own_r2, readout = r2_at_layers(view.capture, OF_CURVE, len(fold))
        r2 = np.array([r2_at_layers(control)[0] for control in view.untrained])
        untrained_r2 = {UNTRAINED: r2[:, -1] if len(r2) else r2}
        if not target.exact:
            entropies = [entropy_of(control) for control in view.untrained]
            of_own = [(last_layer(view.untrained[i], site), entropies[i]) for i in follows(entropies)]
            untrained_r2[OWN_ENTROPY] = np.array([decodability(x, own, fold[:OF_DRAW]) for x, own in of_own])
        rho, rho_p, test = _over_layers(layers, target, view)
        rho_null = null_band({UNTRAINED: [[s.rho(y, positions) for s in draw] for draw in untrained]})
        without_context, cut = _without_context(view, site, target, lambda cut: r2_at_layers(cut, judged=len(fold)))
        last = last_layer(view.capture, site)
        return cls(
            view=view,
            target=target,
            fields={
                "rho": Curve(rho, null=rho_null),
                "rho_p": rho_p,
                "r2": Curve(own_r2, null=null_band({UNTRAINED: r2})),
                **without_context,
                **(_r2_by_number(view, site, target) if site is Site.VALUE else {}),
            },
            last=last,
            probe=readout,
            axis=Axis.of(last, target, view.clusters, view.seed),
            test=test,
            untrained=[draw[-1] for draw in untrained],
            untrained_r2=untrained_r2,
            cut=cut,
        )

    def estimates(self, claims: Mapping[str, Claim], prefix: str) -> Iterator[Estimate]:
        """|rho|, |rho| given length and final token, and held-out R2, at the last layer."""
        view, y, clusters = self.view, self.target.values, self.view.clusters
        yield self.rho(claims[prefix + RHO], self.test)
        covariates = length_and_token(view.capture)
        if covariates.shape[1]:
            fixed = self.target.covariates(covariates)
            test = correlation_test(self.axis.scores, y, clusters, PERMUTATIONS, view.seed, fixed)
            partial = self.rho(claims[f"{prefix}{RHO}, {PARTIAL}"], test, covariates)
            # Without an indicator of any final token the claim would say more than was held fixed.
            yield partial if self.fixed_tokens else replace(partial, claim="")
        value, fold, stratum = float(self.probe.r2.mean()), self.probe.fold, self.target.stratum
        permuted = permuted_decodability(self.last, y, fold, clusters, RIDGE_PERMUTATIONS, view.seed, stratum)
        nulls = untrained_nulls(self.untrained_r2)
        # The interval must exclude 0, the R2 of the mean.
        nulls.append(permutation_null("permuted templates", value, permuted, centre=0.0))
        interval = decodability_interval(self.last, self.probe, clusters)
        if self.cut is not None:
            centre, without = float(self.cut[1].r2.mean()), decodability_interval(*self.cut, clusters)
            nulls.append(Null.paired(NO_CONTEXT, value, centre, paired_interval(value - centre, interval, without)))
        elif view.no_context is not None:
            nulls.append(Null.paired(NO_CONTEXT, value, 0.0, interval))
        yield estimate(claims[prefix + R2], value, interval, nulls, n=len(y), clusters=len(set(clusters)))

    @property
    def fixed_tokens(self) -> int:
        """Number of rows whose final token `length_and_token` holds fixed."""
        return int(shares_token(self.view.capture).sum())

    def notes(self) -> Iterator[str]:
        """Controls that are left out, and a caution where length alone is held fixed for most rows."""
        entropies = [] if self.target.exact else [entropy_of(control) for control in self.view.untrained]
        if (varying := len(follows(entropies))) < len(entropies):
            spread = float(np.median([entropy.std(ddof=1) for entropy in entropies]))
            yield (
                f"{OWN_ENTROPY}: {len(entropies) - varying} of {len(entropies)} copies are left out, as their entropy "
                f"hardly varies (sd {spread:.2g} bits in the median copy, {LEAST_SPREAD:g} needed)"
            )
        fixed, rows = self.fixed_tokens, len(self.last)
        if 2 * fixed < rows:
            shared = f"{fixed} of {rows} rows end in a token of three rows or more"
            yield f"{PARTIAL}: {shared}; for the others length alone is held fixed"

    def rho(self, claim: Claim, test: Test, covariates: np.ndarray | None = None) -> Estimate:
        """|rho| of the last layer's PC1, given covariates if any."""
        view, target = self.view, self.target
        draws = control_rhos(view.untrained, self.untrained, target, covariates)
        without = None
        if view.no_context is not None:
            cut = np.zeros((len(self.last), 1)) if self.cut is None else self.cut[0]
            without = Axis.of(cut, target, view.clusters, view.seed)
        return correlation(claim, self.axis, test, draws, covariates, without)


def _without_context(
    view: ProbeInput,
    site: Site,
    target: Target,
    r2_at_layers: Callable[[Capture], tuple[np.ndarray, Readout]],
) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, Readout] | None]:
    """Curves of the model without context, if there is one, and `EntropyGeometry.cut`."""
    if view.no_context is None:
        return {}, None
    if site is Site.ATTENTION_WRITE:
        # The control sets attention's write to a constant: it has no information, by construction.
        nothing = np.zeros(len(view.capture.layers(site)))
        return {"rho_no_context": nothing, "r2_no_context": nothing}, None
    last, layers = last_layer(view.no_context, site), summaries(view.no_context, site, target.within)
    rho = np.array([summary.rho(target.values, target.covariates()) for summary in layers])
    r2, readout = r2_at_layers(view.no_context)
    return {"rho_no_context": rho, "r2_no_context": r2}, (last, readout)


def _r2_by_number(view: ProbeInput, site: Site, target: Target) -> dict[str, Any]:
    """R2 at the last layer of a quarter, a half, three quarters and all of the clusters, with the untrained copies."""
    clusters = view.clusters
    every = len(set(clusters))
    sizes = [size for size in (every // 4, every // 2, 3 * every // 4, every) if size >= LEAST_NUMBER]
    if target.exact or len(sizes) < 2:  # strata of few rows in a part of the clusters
        return {}

    def of(capture: Capture, draws: int = REPEATS) -> np.ndarray:
        return against_number(last_layer(capture, site), target.values, clusters, sizes, view.seed, draws)

    null = null_band({UNTRAINED: [of(control, OF_DRAW) for control in view.untrained]})
    return {"r2_by_n": Curve(of(view.capture), null=null), NUMBERS: tuple(sizes)}


def _over_layers(layers: list[PCASummary], target: Target, view: ProbeInput) -> tuple[np.ndarray, np.ndarray, Test]:
    """|rho| and its corrected p at every layer (0 and 1 where no coordinate varies); and the test of the last layer."""
    rho, p = np.zeros(len(layers)), np.ones(len(layers))
    varying = [layer for layer, summary in enumerate(layers) if summary.scores.any()]
    scores = np.stack([layers[layer].scores[:, 0] for layer in varying])
    tests, corrected = max_statistic(scores, target.values, view.clusters, PERMUTATIONS, view.seed, target.covariates())
    rho[varying], p[varying] = [test.value for test in tests], corrected
    return rho, p, tests[-1]


def length_and_token(capture: Capture) -> np.ndarray:
    """[row column] covariates: a spline in the row's position; an indicator of each final token of at least three rows.

    Vectors at the last layer depend mainly on the token at their position, and so does entropy. Tokens of one or two
    rows get no indicator, since it would explain these rows completely.
    """
    token, position = final_tokens(capture), capture.position.numpy()
    columns = [rank_spline(position), *(token[:, None] == t for t in np.unique(token[shares_token(capture)]))]
    together = np.hstack(columns).astype(np.float64)
    return together[:, (together != together[0]).any(0)]


def shares_token(capture: Capture) -> np.ndarray:
    """[row] whether at least three rows have its token."""
    _, of, count = np.unique(final_tokens(capture), return_inverse=True, return_counts=True)
    return count[of] >= 3


def control_rhos(
    captures: Sequence[Capture], summaries: Sequence[PCASummary], target: Target, covariates: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """[draw] |rho| of each control's PC1 with the target, and, if it is not exact, with the control's own entropy where
    that varies (`targets.follows`)."""
    pairs, fixed = list(zip(captures, summaries, strict=True)), target.covariates(covariates)
    draws = {UNTRAINED: np.array([summary.rho(target.values, fixed) for _, summary in pairs])}
    if not target.exact:
        entropies = [entropy_of(capture) for capture in captures]
        draws[OWN_ENTROPY] = np.array([summaries[i].rho(entropies[i], covariates) for i in follows(entropies)])
    return draws


Score = Callable[[np.ndarray, Callable[[np.ndarray], np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Axis:
    """Scores of rows along one direction or curve, such as PC1, also recomputed without each group of clusters.

    Attributes:
        target: the entropy with which scores are correlated.
        scores: [row] in the unit of the vectors, or of their coordinates' standard deviations for PC1.
        group: [row] number of the group of clusters.
        without: for each group, the numbers of the rows outside it and their scores, with the signs of `scores`.
    """

    target: Target
    scores: np.ndarray
    group: np.ndarray
    without: Sequence[tuple[np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, x: np.ndarray, target: Target, clusters: Clusters, seed: int, score: Score | None = None) -> Axis:
        """Scores of the vectors, and scores without each group. If the target is exact, the vectors' means at a
        position are subtracted.

        If PC2 has .25 to 1 of the variance of PC1, intervals of |rho| cover its mean over samples in .88 to .97 of
        1,000; with PC1 fixed in .48 to .95 (`python -m studies.simulated_coverage`). If the two variances are nearly
        equal, a sample's PC1 mixes both components: the estimand is that mean, not |rho| of the population's PC1.

        Args:
            x: [row coordinate] the vectors.
            clusters: [row] the cluster of each row.
            score: A function of the vectors, and of a function that subtracts their means at a position, to [row]
                scores; by default the scores of PC1.
        """
        score = score or (lambda x, within: pc1(within(x)))
        group = in_groups(clusters, seed)
        scores, without = score(x, target.within), []
        for number in range(int(group.max()) + 1):
            rows = np.flatnonzero(group != number)
            fewer = score(x[rows], target.at(rows).within)
            without.append((rows, -fewer if fewer @ scores[rows] < 0 else fewer))
        return cls(target, scores, group, without)

    def rhos(self, covariates: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """|Spearman| of scores and target given covariates; and [group] the correlation without each group, with the
        sign that makes the correlation over all rows positive."""
        target, fixed = self.target, self.target.covariates(covariates)

        def rho(scores: np.ndarray, rows: np.ndarray) -> float:
            part = None if fixed is None else fixed[rows]
            return spearman(scores, target.at(rows).values, part) if scores.any() else 0.0

        value = rho(self.scores, np.arange(len(self.scores)))
        sign = -1 if value < 0 else 1
        return abs(value), sign * np.array([rho(scores, rows) for rows, scores in self.without])

    def interval(self, covariates: np.ndarray | None = None) -> Interval:
        """Interval of |Spearman| from its values without each group."""
        return regrouped_interval(*self.rhos(covariates), self.group)


def correlation(
    claim: Claim,
    axis: Axis,
    test: Test,
    untrained: Mapping[str, np.ndarray],
    covariates: np.ndarray | None = None,
    without: Axis | None = None,
) -> Estimate:
    """Estimate of a |rho| with its controls.

    Args:
        test: |rho| with its null of permuted templates.
        untrained: name -> |rho| of each draw.
        covariates: [row column] covariates held fixed.
        without: axis of the model without context; all 0 if its vectors are constant.
    """
    value, fewer = axis.rhos(covariates)
    permuted = Null("permuted templates", 0.0, test.null_high, 0.0, test.p, PERMUTATIONS)
    nulls = [*untrained_nulls(untrained), permuted]
    if without is not None:
        centre, other = without.rhos(covariates)
        paired = jackknife_interval(value - centre, fewer - other, axis.group, "identity", 0.95)
        nulls.append(Null.paired(NO_CONTEXT, value, centre, paired))
    return estimate(claim, value, axis.interval(covariates), nulls, n=test.n, clusters=test.clusters)


def untrained_nulls(draws: Mapping[str, np.ndarray]) -> list[Null]:
    """Nulls of a statistic that follows entropy, from untrained controls on the same prompts.

    UNTRAINED uses the trained model's entropy, which a look-up of the same tokens predicts in part. OWN_ENTROPY uses
    the control's own entropy: weights relate a model's vectors to its own entropy even before training. Without the
    second null, untrained models of width 16 passed the first in 24 % of cases (measured). Copies whose entropy hardly
    varies are no such control: a rank correlation with it ranks rounding. With fewer than 5 others it is left out; of
    SmolLM2 and Gemma-3-270M every copy has an entropy of .001 bits of standard deviation.
    """
    copies = len(draws[UNTRAINED])
    few = len(draws.get(OWN_ENTROPY, ())) < min(copies, LEAST_DRAWS)
    return [Null.of(name, null, noisy=True) for name, null in draws.items() if not (few and name == OWN_ENTROPY)]


def aligned_signs(scores: Sequence[np.ndarray]) -> np.ndarray:
    """[layer prompt component] scores with each component's arbitrary sign chosen to agree with the next layer."""
    turned = [scores[-1]]
    for layer in scores[-2::-1]:
        turned.append(layer * np.where((layer * turned[-1]).sum(0) < 0, -1.0, 1.0))
    return np.stack(turned[::-1])


def _constant(site: Site, layers: list[PCASummary]) -> Iterator[str]:
    what = site.value.replace("_", " ")
    for layer, summary in enumerate(layers):
        if summary.dropped == summary.width:
            yield f"layer {layer}: the {what} vectors are the same for every prompt; drawn as 0"
        elif summary.dropped:
            yield f"layer {layer}: {summary.dropped} {what} coordinates do not vary and were left out"
