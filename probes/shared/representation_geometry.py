"""Geometry of one activation site across prompts, per layer: PCA spectrum, and its relation to next-token entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from llmgeom.claims import Claim, Null, estimate
from llmgeom.probe import NO_CONTEXT, SHUFFLED, UNTRAINED, Capture, ProbeInput, Site, UserError
from llmgeom.probes.shared.nulls import HARDEST_BAND, null_band, permutation_null
from llmgeom.probes.shared.rows import LEAST_SPREAD, Constant, Target, final_tokens, last_layer, layer_matrices, varies
from llmgeom.result import Estimate, Figure, Labelled, labelled, line
from llmgeom.stats.manifold import Spectrum, share_intervals, shares
from llmgeom.stats.resampling import Clusters, in_groups, jackknife_interval, paired_interval
from llmgeom.stats.ridge_probe import (
    REPEATS,
    Readout,
    decodability,
    decodability_interval,
    permuted_decodability,
    read,
    repeated_folds,
)
from llmgeom.stats.tests import correlation_test, rank_spline, regrouped_interval, spearman
from llmgeom.stats.verdict import LEAST_DRAWS

PERMUTATIONS = 10_000
RIDGE_PERMUTATIONS = 1_000  # fewer, since each chooses its penalty anew
# Divisions into folds behind the R2 of each untrained copy. Of 8 copies of SmolLM2 on 75 prompts of math its standard
# deviation is .045 over copies, .038 with 20 divisions: the band is a little too wide, and takes a quarter of the time.
OF_DRAW = 5
OF_CURVE, UNCLAIMED = 2, 5  # divisions into folds behind a point of a curve but the last; behind an R2 without a claim
OWN_ENTROPY = "untrained, own entropy"
SHARES = (  # quantity, metric, unit, meaning
    ("pc1", "PC1 share", "fraction", "share of variance on PC1"),
    ("pc12", "PC1+PC2 share", "fraction", "share of variance on PC1 and PC2"),
    ("participation", "participation ratio", "components", "participation ratio"),
)
RHO, PARTIAL, R2 = "|rho| of PC1 and entropy", "given length and final token", "entropy decodability (held-out R2)"


def pca(x: np.ndarray) -> Spectrum:
    """PCA of x [prompt coordinate]; all numbers and scores are 0 if no coordinate varies."""
    return shares(x) if varies(x) else Spectrum(np.zeros(1), np.zeros((len(x), 2)), len(x), 0, x.shape[1])


def rho_of(spectrum: Spectrum, entropy: np.ndarray, covariates: np.ndarray | None = None) -> float:
    """|Spearman| of the PC1 score and entropy; 0 if no coordinate varies."""
    return abs(spearman(spectrum.scores[:, 0], entropy, covariates)) if spectrum.scores.any() else 0.0


def numbers_of(layers: Sequence[Spectrum]) -> np.ndarray:
    """[layer 3]: PC1 share, PC1+PC2 share, participation ratio."""
    return np.array([layer.numbers for layer in layers])


def measure_geometry(
    view: ProbeInput, site: Site, claims: Mapping[str, Claim], prefix: str = ""
) -> tuple[dict[str, Labelled | None], dict[str, Any], np.ndarray, np.ndarray]:
    """Shares, participation ratio, |rho| and held-out R2 at every layer with their nulls; metrics of the last layer.

    Args:
        site: the site whose vectors are compared over prompts.
        prefix: prefix of each metric name of this module.

    Returns:
        Labelled arrays, in which a layer whose vectors do not vary over prompts is drawn as 0; estimates, warnings,
        notes and what is unmeasured; the three numbers of the spectrum [layer 3], and those of untrained copies
        [draw layer 3].

    Raises:
        UserError: the vectors of the last layer are the same for every prompt, or there are too few clusters.
    """
    last = last_layer(view.capture, site)
    if not varies(last):
        raise UserError(f"the {site.value} vectors of the last layer are the same for all {len(last)} prompts")

    def layers_of(capture: Capture) -> list[Spectrum]:
        return [*map(pca, layer_matrices(capture, site))]

    layers, untrained = layers_of(view.capture), [layers_of(capture) for capture in view.untrained]
    shuffled = [numbers_of(layers_of(capture)) for capture in view.shuffled]
    numbers, theirs = numbers_of(layers), np.array([numbers_of(draw) for draw in untrained])
    drawn = {name: np.array(draws) for name, draws in ((UNTRAINED, theirs), (SHUFFLED, shuffled)) if len(draws)}
    fields: dict[str, Labelled | None] = {}
    estimates, unmeasured, notes, warnings = [], {}, [], []
    intervals, clusters = share_intervals(last, view.clusters), len(set(view.clusters))
    for i, (field, metric, unit, meaning) in enumerate(SHARES):
        claim = claims[prefix + metric]
        band = null_band({name: draws[:, :, i] for name, draws in drawn.items()}, claim.side)
        fields |= line(field, numbers[:, i], "layer", unit, meaning, null=(HARDEST_BAND, band))
        nulls = [Null.of(name, draws[:, -1, i], claim.side) for name, draws in drawn.items()]
        estimates.append(estimate(claim, numbers[-1, i], intervals[i], nulls, n=len(last), clusters=clusters))
    try:
        more, of_entropy, told = _entropy(view, site, claims, prefix, [layers, *untrained])
        fields |= more
        estimates += of_entropy
        notes += [] if prefix else told
    except Constant as reason:
        names = [f"{prefix}{name}" for name in (RHO, f"{RHO}, {PARTIAL}", R2)]
        unmeasured = {name: str(reason) for name in names if name in claims}
    what = site.value.replace("_", " ")
    for layer, spectrum in enumerate(layers):
        if not spectrum.d:
            warnings.append(f"layer {layer}: the {what} vectors are the same for every prompt; drawn as 0")
        elif spectrum.dropped:
            warnings.append(f"layer {layer}: {spectrum.dropped} {what} coordinates do not vary and were left out")
    unit, axes, plane = "standardised units", "prompt component", Figure("scatter", layers="layer_scores")
    of_layers, control = aligned_signs([layer.scores for layer in layers]), [draw[-1].scores for draw in untrained[:1]]
    said = "position on PC1 and PC2, signs as in the layer after"
    fields |= {
        "scores": labelled(layers[-1].scores, axes, unit, "position on PC1 and PC2, last layer", plane),
        "layer_scores": labelled(of_layers, f"layer {axes}", unit, said),
        "control_scores": labelled(
            control[0] if control else None, axes, unit, "position on PC1 and PC2, last layer of one untrained copy"
        ),
    }
    facts = {
        "estimates": tuple(estimates),
        "warnings": tuple(warnings),
        "notes": tuple(notes),
        "unmeasured": unmeasured,
    }
    return fields, facts, numbers, theirs.reshape(-1, *numbers.shape)


Part = tuple[dict[str, Labelled | None], list[Estimate], list[str]]  # fields, estimates and notes


def _entropy(
    view: ProbeInput, site: Site, claims: Mapping[str, Claim], prefix: str, spectra: list[list[Spectrum]]
) -> Part:
    """Relation of the vectors of one site to entropy, in the model and in every control.

    Args:
        spectra: by layer, of the model and of each untrained copy.

    Raises Constant if entropy does not vary.
    """
    target = Target.of(view.capture, view.entropy).require()
    own = [] if target.exact else [control.entropy.numpy() for control in view.untrained]
    # Copy -> its own entropy, where that varies as the model's must.
    varying = {i: of for i, of in enumerate(own) if len(of) > 1 and of.std(ddof=1) >= LEAST_SPREAD}
    notes = []
    if len(varying) < len(own):
        spread = float(np.median([entropy.std(ddof=1) for entropy in own]))
        notes.append(
            f"{OWN_ENTROPY}: {len(own) - len(varying)} of {len(own)} copies are left out, as their entropy "
            f"hardly varies (sd {spread:.2g} bits in the median copy, {LEAST_SPREAD:g} needed)"
        )
    fields, estimates, told = _correlation(view, site, claims, prefix, spectra, target, varying)
    more, decoded = _decodability(view, site, claims[prefix + R2], target, varying)
    return fields | more, [*estimates, decoded], notes + told


def _correlation(
    view: ProbeInput,
    site: Site,
    claims: Mapping[str, Claim],
    prefix: str,
    spectra: list[list[Spectrum]],
    target: Target,
    varying: Mapping[int, np.ndarray],
) -> Part:
    """|rho| of PC1 over layers; |rho|, and |rho| given length and final token, at the last layer.

    A note cautions where length alone is held fixed for most rows.
    """
    y, positions, clusters, last = target.values, target.covariates(), view.clusters, last_layer(view.capture, site)

    def within(capture: Capture) -> list[Spectrum]:
        return [pca(target.within(x)) for x in layer_matrices(capture, site)]

    def curve(layers: Sequence[Spectrum]) -> np.ndarray:
        return np.array([rho_of(layer, y, positions) for layer in layers])

    if target.exact:  # the spectrum is over all rows; correlations are within position
        spectra = [within(capture) for capture in (view.capture, *view.untrained)]
    model, *untrained = spectra
    band = null_band({UNTRAINED: [curve(draw) for draw in untrained]})
    axis, without, alone = Axis.of(last, target, clusters, view.seed), None, None
    if view.no_context is not None:
        # Without context attention's write is a constant: it has no information, by construction.
        nothing = site is Site.ATTN_OUT
        cut = np.zeros((len(last), 1)) if nothing else last_layer(view.no_context, site)
        without = Axis.of(cut, target, clusters, view.seed)
        alone = np.zeros(len(model)) if nothing else curve(within(view.no_context))

    def rho(claim: Claim, covariates: np.ndarray | None = None) -> Estimate:
        """|rho| of the last layer's PC1, given covariates if any."""
        fixed = target.covariates(covariates)
        draws = {UNTRAINED: np.array([rho_of(draw[-1], y, fixed) for draw in untrained])}
        if not target.exact:
            own = [rho_of(untrained[i][-1], entropy, covariates) for i, entropy in varying.items()]
            draws[OWN_ENTROPY] = np.array(own)
        test = correlation_test(axis.scores, y, clusters, PERMUTATIONS, view.seed, fixed)
        (value, fewer), nulls = axis.rhos(covariates), untrained_nulls(draws)
        nulls.append(Null("permuted templates", 0.0, test.null_high, 0.0, test.p, PERMUTATIONS))
        if without is not None:  # all 0 if its vectors are constant
            centre, other = without.rhos(covariates)
            paired = jackknife_interval(value - centre, fewer - other, axis.group, "identity", 0.95)
            nulls.append(Null.paired(NO_CONTEXT, value, centre, paired))
        span = regrouped_interval(value, fewer, axis.group)
        return estimate(claim, value, span, nulls, n=test.n, clusters=test.clusters)

    said, beside = "|Spearman| of PC1 and entropy", "rho_no_context"
    null = (f"{said}, untrained copies", band)
    fields = line("rho", curve(model), "layer", "|rho|", f"{said}; dashed: without context", null=null, beside=beside)
    fields[beside] = labelled(alone, "layer", "|rho|", f"{said}, trained model without context")
    estimates, notes = [rho(claims[prefix + RHO])], []
    covariates, shared = length_and_token(view.capture), int(shares_token(view.capture).sum())
    if covariates.shape[1]:
        partial = rho(claims[f"{prefix}{RHO}, {PARTIAL}"], covariates)
        # Without an indicator of any final token the claim would say more than was held fixed.
        estimates.append(partial if shared else partial.saying(""))
    if 2 * shared < len(last):
        told = f"{shared} of {len(last)} rows end in a token of three rows or more"
        notes.append(f"{PARTIAL}: {told}; for the others length alone is held fixed")
    return fields, estimates, notes


def _decodability(
    view: ProbeInput, site: Site, claim: Claim, target: Target, varying: Mapping[int, np.ndarray]
) -> tuple[dict[str, Labelled | None], Estimate]:
    """Held-out R2 of the target over layers, and its estimate at the last layer."""
    fold = repeated_folds(view.clusters, view.seed, REPEATS if site is Site.VALUE else UNCLAIMED)
    y, stratum, clusters, last = target.values, target.stratum, view.clusters, last_layer(view.capture, site)

    def at_layers(capture: Capture, before: int = 1, judged: int = OF_DRAW) -> tuple[np.ndarray, Readout]:
        """Few divisions, since there are many layers and controls; `judged` at the last, which is also returned."""
        *others, last = layer_matrices(capture, site)
        same = [np.stack([*alike]) for _, alike in groupby(others, np.shape)]  # widths may differ between layers
        readout = read(last, y[:, None], fold[:judged], stratum=stratum)
        earlier = [decodability(x, y, fold[:before], stratum) for x in same]
        return np.concatenate([*earlier, [readout.r2.mean()]]), readout

    r2, readout = at_layers(view.capture, OF_CURVE, len(fold))
    untrained = np.array([at_layers(control)[0] for control in view.untrained])
    alone: np.ndarray | None = None
    draws = {UNTRAINED: untrained[:, -1] if len(untrained) else untrained}
    if not target.exact:
        of_own = [(last_layer(view.untrained[i], site), entropy) for i, entropy in varying.items()]
        draws[OWN_ENTROPY] = np.array([decodability(x, entropy, fold[:OF_DRAW]) for x, entropy in of_own])
    value = float(readout.r2.mean())
    permuted = permuted_decodability(last, y, readout.fold, clusters, RIDGE_PERMUTATIONS, view.seed, stratum)
    # The interval must exclude 0, the R2 of the mean.
    nulls = [*untrained_nulls(draws), permutation_null("permuted templates", value, permuted, centre=0.0)]
    interval = decodability_interval(last, readout, clusters)
    if view.no_context is not None and site is Site.ATTN_OUT:
        alone = np.zeros(len(r2))
        nulls.append(Null.paired(NO_CONTEXT, value, 0.0, interval))
    elif view.no_context is not None:
        alone, without = at_layers(view.no_context, judged=len(fold))
        centre = float(without.r2.mean())
        span = decodability_interval(last_layer(view.no_context, site), without, clusters)
        nulls.append(Null.paired(NO_CONTEXT, value, centre, paired_interval(value - centre, interval, span)))
    said, beside = "held-out R2 of entropy, read from other templates; dashed: without context", "r2_no_context"
    null = ("held-out R2 of entropy, untrained copies", null_band({UNTRAINED: untrained}))
    fields = line("r2", r2, "layer", "R2", said, null=null, beside=beside)
    fields[beside] = labelled(alone, "layer", "R2", "held-out R2 of entropy, trained model without context")
    return fields, estimate(claim, value, interval, nulls, n=len(y), clusters=len(set(clusters)))


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


@dataclass(frozen=True)
class Axis:
    """Scores of rows along PC1, also recomputed without each group of clusters.

    Attributes:
        target: the entropy with which scores are correlated.
        scores: [row] in units of the coordinates' standard deviations.
        group: [row] number of the group of clusters.
        without: for each group, the numbers of the rows outside it and their scores, with the signs of `scores`.
    """

    target: Target
    scores: np.ndarray
    group: np.ndarray
    without: Sequence[tuple[np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, x: np.ndarray, target: Target, clusters: Clusters, seed: int) -> Axis:
        """Scores of the vectors, and scores without each group. If the target is exact, the vectors' means at a
        position are subtracted.

        If PC2 has .25 to 1 of the variance of PC1, intervals of |rho| cover its mean over samples in .88 to .97 of
        1,000; with PC1 fixed in .48 to .95 (`python -m studies.simulated_coverage`). If the two variances are nearly
        equal, a sample's PC1 mixes both components: the estimand is that mean, not |rho| of the population's PC1.

        Args:
            x: [row coordinate] the vectors.
            clusters: [row] the cluster of each row.
        """
        group = in_groups(clusters, seed)
        scores, without = pca(target.within(x)).scores[:, 0], []
        for number in range(int(group.max()) + 1):
            rows = np.flatnonzero(group != number)
            fewer = pca(target.at(rows).within(x[rows])).scores[:, 0]
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
