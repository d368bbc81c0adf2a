"""Gain of a domain: how many fewer directions its values vary along than those of as many mixed prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmgeom.claims import Claim, Null, estimate
from llmgeom.probe import MATCHED, Capture, ProbeInput, Sample, Site, Unavailable, UserError
from llmgeom.probes.shared.matrices import last_layer, layer_matrices
from llmgeom.probes.shared.nulls import UNTRAINED, null_band
from llmgeom.probes.shared.representation_geometry import Geometry, PCASummary
from llmgeom.result import Curve, Estimate, Result, curve
from llmgeom.stats.pca import share_intervals
from llmgeom.stats.resampling import Interval

AS_DIVERSE = ", as diverse"
STATISTICS = ("gain in PC1 share", "gain in PC1+PC2 share", "change in participation ratio")
GAIN = "the gain of untrained copies"


@dataclass(frozen=True, kw_only=True)
class DomainGain(Result):
    """Differences of shares of variance and participation ratio between a domain and mixed prompts, by layer."""

    TITLE = "Domain restriction"

    pc12: Curve = curve("layer", "fraction", "gain in PC1+PC2 share over mixed prompts as diverse", null=GAIN)
    pc1: Curve = curve("layer", "fraction", "gain in PC1 share over mixed prompts as diverse", null=GAIN)
    participation: Curve = curve(
        "layer",
        "components",
        "change in participation ratio from mixed prompts as diverse",
        null="the change of untrained copies",
    )


def measure_gain(view: ProbeInput, claims: Mapping[str, Claim], values: Geometry) -> DomainGain:
    """Gains at every layer with the controls' band; metrics at the last layer.

    Args:
        view: the main sample, with the sample MATCHED.
        values: geometry of the domain's values.

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
    # [layer statistic], [draw layer statistic]
    domain = np.array([summary.numbers for summary in values.layers])
    untrained = np.array([[summary.numbers for summary in draw] for draw in values.untrained])
    untrained = untrained.reshape(-1, *domain.shape)  # a preview has no draws
    gains = domain - _numbers(sample.capture)
    null = untrained - np.array([_numbers(control) for control in sample.untrained]).reshape(untrained.shape)
    fields: dict[str, Any] = {}
    for column, name in enumerate(("pc1", "pc12", "participation")):
        side = claims[STATISTICS[column] + AS_DIVERSE].side
        fields[name] = Curve(gains[:, column], null=null_band({UNTRAINED: null[:, :, column]}, side))
    domain_sample = Sample(view.capture, view.entropy, view.untrained)
    return DomainGain(
        **fields,
        estimates=tuple(_estimates(domain_sample, sample, claims, gains[-1], null[:, -1])),
        notes=(
            _diversity(
                str(view.capture.batch.source.get("name", "the domain")),
                sample.capture.batch.source["as_diverse"],
                "final tokens" if _final(view.capture) else "tokens at the positions read",
            ),
        ),
    )


def _estimates(
    domain: Sample, mixed: Sample, claims: Mapping[str, Claim], gains: np.ndarray, untrained: np.ndarray
) -> Iterator[Estimate]:
    """Estimates of the last layer's three gains [statistic], with those of the untrained controls [draw statistic]."""
    intervals = [gain_interval(a, b) for a, b in zip(_intervals(domain), _intervals(mixed), strict=True)]
    for column in (1, 0, 2):
        claim = claims[STATISTICS[column] + AS_DIVERSE]
        null = Null.of(UNTRAINED, untrained[:, column], claim.side)
        clusters = min(len(set(domain.clusters)), len(set(mixed.clusters)))
        # If untrained models lose, a smaller loss is no gain.
        nulls = [null, Null.number("no gain", 0.0)]
        yield estimate(claim, gains[column], intervals[column], nulls, n=len(domain.entropy), clusters=clusters)


def gain_interval(domain: tuple[float, Interval], mixed: tuple[float, Interval]) -> Interval:
    """Interval of a - b for two independent samples, from each one's value and interval (a, [l, u]), (b, [m, v]).

    [a - b - sqrt((a - l)^2 + (v - b)^2), a - b + sqrt((u - a)^2 + (b - m)^2)]: Zou and Donner (2008) recover each
    side's variance from the limits, which keeps their skewness. Here the limits are `pca.share_intervals`.
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


def _intervals(sample: Sample) -> list[tuple[float, Interval]]:
    """Value and interval of each statistic, last layer."""
    last = last_layer(sample.capture, Site.VALUE)
    return list(zip(PCASummary.of(last).numbers, share_intervals(last, sample.clusters), strict=True))


def _numbers(capture: Capture) -> np.ndarray:
    """[layer statistic]: PC1 share, PC1+PC2 share, participation ratio."""
    return np.array([PCASummary.of(x).numbers for x in layer_matrices(capture, Site.VALUE)])


def _final(capture: Capture) -> bool:
    """Whether the rows are the final tokens of the prompts, and nothing else."""
    return bool((capture.position == capture.lengths[capture.prompt] - 1).all())


def _diversity(name: str, counts: Mapping[str, Sequence[int]], read: str) -> str:
    """A note on the diversity of the samples, from their source; it starts with a mismatch of more than a tenth."""
    wanted, reached = counts["wanted"], counts["reached"]
    far = any(abs(have - want) > 0.1 * want for want, have in zip(wanted, reached, strict=True))
    lists = {key: "{}, {} and {}".format(*counts[key]) for key in ("wanted", "reached", "start")}
    return (
        f"{f'mixed prompts as diverse as {name} were not found; ' if far else ''}different tokens, different {read} "
        f"and templates: {name} {lists['wanted']}; {MATCHED} {lists['reached']}; before the search {lists['start']}"
    )
