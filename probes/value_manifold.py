"""Do values and attention's writes lie on a low-dimensional manifold that is ordered by predictive entropy?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from llmgeom.claims import Null, declared, estimate
from llmgeom.probe import MATCHED, UNTRAINED, Capture, Needs, ProbeInput, Site, Unavailable, UserError
from llmgeom.probes.shared.nulls import null_band
from llmgeom.probes.shared.representation_geometry import measure_geometry, numbers_of, pca
from llmgeom.probes.shared.rows import captured, final_tokens, last_layer, layer_matrices
from llmgeom.result import Labelled, Result, labelled, line
from llmgeom.stats.manifold import intrinsic_dimension, share_intervals
from llmgeom.stats.resampling import Interval

NEEDS = Needs(
    frozenset({Site.VALUE}),
    optional=frozenset({Site.ATTN_OUT}),
    samples=frozenset({MATCHED}),
    chosen_layers=True,
)
MOST_FIXED = 0.5  # share of prompts: with 5 single prompts and 20 templates of 2 to 21, an |rho| of .88 had p = .057
CLAIMS = declared("value_manifold")
WRITE, DOMAIN = "attn_out_", "domain_"  # prefixes of quantities
CALLED = "attn_out: "  # prefix of the names of its metrics
DIMENSION, GAIN = "intrinsic dimension (TwoNN) over Gaussian", "gain in PC1+PC2 share, as diverse"
PC12 = 1  # the place of that share among the numbers of a spectrum
GAUSSIANS, GAUSSIANS_OF_CONTROLS = 199, 39
FAR, SHOWN = 6.0, 5  # robust standard deviations; rows that a warning lists


def unequal(clusters: Sequence[str]) -> list[str]:
    """The warning that permutations of whole clusters leave most prompts in place."""
    size = Counter(clusters)
    alike = Counter(size.values())
    fixed = sum(n for n in size.values() if alike[n] == 1) / len(clusters)
    if fixed <= MOST_FIXED:
        return []
    return [
        f"{fixed:.0%} of the prompts are in templates of a size that no other has: a permutation of whole templates "
        "leaves them in place and can miss an effect, however many prompts there are. Give templates equal sizes"
    ]


def measure(view: ProbeInput) -> Result:
    """Geometry of both sites at every layer with nulls, their metrics at the last layer, and the gain of a domain.

    Raises:
        UserError: neither site can be measured. A single part that cannot is a warning, or a note if this model or
            source has no such part.
    """

    def write() -> Result:
        if not captured(view.capture, Site.ATTN_OUT):
            raise Unavailable("the module that writes attention to the residual stream is unknown in this model")
        fields, said, *_ = measure_geometry(view, Site.ATTN_OUT, CLAIMS, CALLED)
        return Result.of("attn_out", fields, **said)

    # Many small matrices, a core each: a cached scan of SmolLM2 takes 19 s, not 26. From disk one layer at a time.
    with ThreadPoolExecutor(2 if isinstance(view.capture.tensors, dict) else 1) as pool:
        geometry = pool.submit(measure_geometry, view, Site.VALUE, CLAIMS).result
        written = pool.submit(write).result
    parts: dict[str, Result] = {}
    reasons: dict[str, UserError] = {}
    notes: list[str] = []
    warnings = unequal(view.capture.batch.cluster)
    for prefix, name, part in (
        (WRITE, "attn_out", written),
        ("", "values", lambda: _values(view, *geometry()[:2])),
        (DOMAIN, "domain restriction", lambda: measure_gain(view, *geometry()[2:])),
    ):
        try:
            parts[prefix] = part()
        except UserError as reason:
            reasons[name] = reason
            missing = notes if isinstance(reason, Unavailable) else warnings
            missing.append(f"{name}: not measured, because {reason}")
    if not parts:
        raise reasons["values"]
    return Result.joined("Value manifold", parts, __name__, warnings=warnings, notes=notes)


def _values(view: ProbeInput, fields: Mapping[str, Labelled | None], said: Mapping[str, Any]) -> Result:
    """The geometry of the values, with their intrinsic dimension and warnings about the points.

    Gaussian clouds of the same spectrum are an exact test of "a Gaussian", but a departure need not be learnt: tokens
    are discrete, and an untrained model's values cluster by them too. So untrained controls decide as well.
    """
    last = last_layer(view.capture, Site.VALUE)
    more: dict[str, Labelled | None] = {}
    estimates, warnings = [], []
    try:
        found = intrinsic_dimension(last, view.clusters, GAUSSIANS, view.seed)
        controls = [last_layer(control, Site.VALUE) for control in view.untrained]
        untrained = np.array(
            [intrinsic_dimension(x, view.clusters, GAUSSIANS_OF_CONTROLS, view.seed).ratio for x in controls]
        )
        # Gaussian clouds and controls have the same sampling noise of neighbours as the model.
        drawn = {"Gaussian of the same spectrum": found.gaussian / np.median(found.gaussian), UNTRAINED: untrained}
        nulls = [Null.of(name, ratios, "lower", noisy=True) for name, ratios in drawn.items()]
        counts = {"n": found.points, "clusters": found.points}
        estimates.append(estimate(CLAIMS[DIMENSION], found.ratio, found.ratio_interval(), nulls, **counts))
        of_clouds = labelled(
            np.median(found.gaussian), "", "dimensions", "its median in Gaussian clouds with the same spectrum"
        )
        own = labelled(found.twonn, "", "dimensions", "intrinsic dimension, TwoNN, last layer")
        more = {"dimension": own, "dimension_gaussian": of_clouds}
        if found.coinciding:
            warnings.append(
                f"the dimension leaves out {found.coinciding} prompts whose values equal those of another prompt"
            )
    except UserError as reason:
        warnings.append(f"{DIMENSION}: not measured, because {reason}")
    added = {
        "estimates": (*said["estimates"], *estimates),
        "warnings": (*said["warnings"], *warnings, *_far(view.capture, last)),
    }
    return Result.of("values", {**fields, **more}, **{**said, **added})


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


# ---- the gain of a domain over mixed prompts -------------------------------------------------------------------------


def measure_gain(view: ProbeInput, domain: np.ndarray, untrained: np.ndarray) -> Result:
    """Gains at every layer with the controls' band; metrics at the last layer.

    Args:
        view: the main sample, with the sample MATCHED.
        domain: the numbers of the spectrum of the domain's values [layer 3] (`measure_geometry`).
        untrained: those of untrained copies [draw layer 3].

    Raises:
        Unavailable: there are no mixed prompts to compare with.
        UserError: the samples differ in size.
    """
    if MATCHED not in view.samples:
        raise Unavailable("there is no sample of as many mixed prompts: scan --domain math")
    sample = view.samples[MATCHED]
    if len(sample.entropy) != len(view.entropy):
        raise UserError(
            f"{len(view.entropy)} rows of the domain and {len(sample.entropy)} of mixed prompts: shares of samples "
            "of unequal size cannot be compared; read as many positions of each prompt, e.g. --positions last"
        )

    def numbers(capture: Capture) -> np.ndarray:
        return numbers_of([*map(pca, layer_matrices(capture, Site.VALUE))])

    gains = (domain - numbers(sample.capture))[:, PC12]
    matched = np.array([numbers(control) for control in sample.untrained]).reshape(untrained.shape)
    null = (untrained - matched)[:, :, PC12]
    samples, value = (view, sample), domain[-1, PC12]
    spans = [share_intervals(last_layer(one.capture, Site.VALUE), one.clusters)[PC12] for one in samples]
    claim, clusters = CLAIMS[GAIN], min(len(set(one.clusters)) for one in samples)
    # If untrained models lose, a smaller loss is no gain.
    nulls = [Null.of(UNTRAINED, null[:, -1], claim.side), Null.number("no gain", 0.0)]
    span = gain_interval((value, spans[0]), (value - gains[-1], spans[1]))
    found = estimate(claim, gains[-1], span, nulls, n=len(view.entropy), clusters=clusters)
    final = bool((view.capture.position == view.capture.lengths[view.capture.prompt] - 1).all())
    name, counts = str(view.capture.batch.source.get("name", "the domain")), sample.capture.batch.source["as_diverse"]
    read = "final tokens" if final else "tokens at the positions read"
    # How diverse the samples are; a mismatch of more than a tenth stands first.
    lists = {key: "{}, {} and {}".format(*counts[key]) for key in ("wanted", "reached", "start")}
    far = any(abs(have - want) > 0.1 * want for want, have in zip(counts["wanted"], counts["reached"], strict=True))
    diversity = (
        f"{f'mixed prompts as diverse as {name} were not found; ' if far else ''}different tokens, different {read} "
        f"and templates: {name} {lists['wanted']}; {MATCHED} {lists['reached']}; before the search {lists['start']}"
    )
    band = null_band({UNTRAINED: null}, claim.side)
    said, null = "gain in PC1+PC2 share over mixed prompts as diverse", ("the gain of untrained copies", band)
    return Result.of(
        "Domain restriction",
        line("pc12", gains, "layer", "fraction", said, null=null),
        estimates=(found,),
        notes=(diversity,),
    )


def gain_interval(domain: tuple[float, Interval], mixed: tuple[float, Interval]) -> Interval:
    """Interval of a - b for two independent samples, from each one's value and interval (a, [l, u]), (b, [m, v]).

    [a - b - sqrt((a - l)^2 + (v - b)^2), a - b + sqrt((u - a)^2 + (b - m)^2)]: Zou and Donner (2008) recover each
    side's variance from the limits, which keeps their skewness. Here the limits are `stats.manifold.share_intervals`.
    Measured at d = 128, coverage of 95 % intervals of the difference in PC1, PC1+PC2 and participation ratio, over 400
    repetitions (the bootstrap: percentiles, over 150):

                                                          this         two jackknives   bootstrap of templates
    75 prompts, Gaussian factors, no difference           96, 97, 94   96, 97, 94       99, 99, 97
    75 prompts, Gaussian factors, gain .11 and .14        95, 94, 93   95, 94, 93       95, 93, 86
    75 prompts, t(4) factors in 40 templates, gain .12    92, 92, 92   92, 91, 93       91, 89, 91
    30 prompts, Gaussian factors, gain .12 and .15        97, 97, 96   98, 96, 96       97, 96, 79
    75 prompts, noise alone                               100          100              100

    Two jackknives: identity scale, variances added, Student's t with Welch and Satterthwaite's degrees of freedom. The
    bootstrap's inflation of shares (repeated rows) cancels only if the two samples have the same spectrum.
    """
    (a, own_domain), (b, over_mixed) = domain, mixed
    groups = over_mixed.method.removeprefix("jackknife over ").split(",")[0]
    return Interval(
        a - b - math.hypot(a - own_domain.low, over_mixed.high - b),
        a - b + math.hypot(own_domain.high - a, b - over_mixed.low),
        own_domain.level,
        f"{own_domain.method.split(',')[0]}, and {groups} of mixed prompts",
        min(own_domain.units, over_mixed.units),
    )
