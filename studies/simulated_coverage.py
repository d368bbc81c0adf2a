"""Coverage of intervals where the truth can be simulated: `python -m studies.simulated_coverage` prints rows.

Each row has the new interval and the one that it replaced, on the same samples. The mean of the statistic over samples
stands for what an interval is about, except for means, whose truth is known.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy.stats import gamma

from llmgeom.probes.shared.representation_geometry import Axis
from llmgeom.probes.shared.rows import Target
from llmgeom.stats.manifold import intrinsic_dimension
from llmgeom.stats.rare_failures import RareFailures
from llmgeom.stats.resampling import jackknife, jackknife_of_means, mean_intervals, student_quantile
from llmgeom.stats.tests import correlation_interval, regrouped_interval

POINTS = 75
UNEQUAL = {
    "thirty of 1, 100, 60": [1] * 30 + [100, 60],
    "ten of 1, five of 20": [1] * 10 + [20] * 5,
    "20 that grow by 1.3": [int(1.3**k) + 1 for k in range(20)],
    "1 to 10": [*range(1, 11)],
    "eight of 5, one of 40": [5] * 8 + [40],
    "forty of 2": [2] * 40,
}
Ends = tuple[float, float]
Sample = tuple[float, Ends, Ends]  # the statistic, the interval, the one that it replaced


def rare(rng: np.random.Generator, n: int, share: float, size: float) -> Sample:
    """A mean of n values of about .003, of which a share is `size`."""
    x = np.where(rng.random(n) < share, size, rng.exponential(0.003, n))
    low, high = mean_intervals([x])[0]
    bounds = RareFailures(1.0, 10.0)
    span = bounds.interval_of(bounds.cut(x))
    return 0.003 * (1 - share) + share * size, (span.low, span.high), (low, high)


def rare_difference(rng: np.random.Generator) -> Sample:
    """A mean of 1,000 values less that of 1,000 others, each with as many rare failures."""
    x, y = (np.where(rng.random(1000) < 1e-3, 10.0, rng.exponential(0.003, 1000)) for _ in range(2))
    bounds = RareFailures(1.0, 10.0)
    span = bounds.interval_of(bounds.cut(x, y))
    half = 1.96 * float(np.hypot(x.std(), y.std())) / 1000**0.5
    difference = float(x.mean() - y.mean())
    return 0.0, (span.low, span.high), (difference - half, difference + half)


def rare_ratio(rng: np.random.Generator) -> Sample:
    """A mean of 1,000 values over that of 1,000 others of about .14; one value of 1,000 is 10."""
    y = rng.gamma(2, 0.07, 1000)
    x, bounds = np.where(rng.random(1000) < 1e-3, 10.0, 0.01 * y), RareFailures(1.0, 10.0)
    span = bounds.interval_of(bounds.ratio(x, y))
    old = jackknife_of_means(lambda means: means[..., 0] / means[..., 1], np.stack([x, y], -1))
    return float(x.mean() / y.mean()), (span.low, span.high), (old.low, old.high)


def rare_states(rng: np.random.Generator) -> Sample:
    """Held-out less seen states of 1,000 sequences; one held-out state of 500 fails by 10 bits."""
    out = rng.random((1000, 5)) < 0.1
    kl = np.where(out & (rng.random(out.shape) < 2e-3), 10.0, rng.exponential(1e-3, out.shape))
    bounds, whole = RareFailures(1.0, 10.0), RareFailures(math.inf, math.inf).matched(kl, out)
    span = bounds.interval_of(bounds.matched(kl, out))
    half = student_quantile(1000) * whole.spread
    return 0.02, (span.low, span.high), (whole.mean - half, whole.mean + half)


def cloud(rng: np.random.Generator, kind: str) -> np.ndarray:
    """[point coordinate] in 20 dimensions."""
    fixed, n = np.random.default_rng(5), POINTS
    if kind == "Gaussian":
        return rng.normal(size=(n, 20)) * 0.8 ** np.arange(20)
    if kind == "curve":
        t = 4 * rng.random(n)
        return np.stack([np.cos(t), np.sin(t)], 1) @ fixed.normal(size=(2, 20)) + 0.05 * rng.normal(size=(n, 20))
    if kind == "t(4) in 3 dimensions":
        return rng.standard_t(4, size=(n, 3)) @ fixed.normal(size=(3, 20))
    centres = 2 * fixed.normal(size=(12, 20))
    return centres[rng.integers(0, 12, n)] + 0.3 * rng.normal(size=(n, 20)) * rng.gamma(1, 1, (n, 1))


def dimension(rng: np.random.Generator, kind: str) -> Sample:
    """TwoNN over that of Gaussian clouds."""
    made = intrinsic_dimension(cloud(rng, kind), np.arange(POINTS), 30, int(rng.integers(2**31)))
    span, k = made.ratio_interval(), int(np.ceil(0.9 * POINTS))
    low, high = (made.ratio * gamma.ppf(tail, k) / (k - 1) for tail in (0.025, 0.975))
    return made.ratio, (span.low, span.high), (low, high)


def component(rng: np.random.Generator, size: float) -> Sample:
    """|rho| of PC1 and a number that one of two directions holds; the other has `size` times its standard deviation."""
    factors = (0.8 * rng.normal(size=(40, 2))).repeat(2, 0) + 0.6 * rng.normal(size=(80, 2))
    directions = np.random.default_rng(7).normal(size=(2, 32))
    directions *= 4 / np.linalg.norm(directions, axis=1, keepdims=True)
    x = factors * [1, size] @ directions + rng.normal(size=(80, 32))
    y, cluster = factors[:, 0] + 0.7 * rng.normal(size=80), np.arange(80) // 2
    axis = Axis.of(x, Target(y, np.zeros(80, dtype=int), False), cluster, int(rng.integers(2**31)))
    span, fixed = regrouped_interval(*axis.rhos(), axis.group), correlation_interval(axis.scores, y, cluster)
    return axis.rhos()[0], (span.low, span.high), (fixed.low, fixed.high)


def unequal(rng: np.random.Generator, sizes: Sequence[int]) -> Sample:
    """A mean over rows of clusters of these sizes, whose rows are the same draw."""
    cluster = np.repeat(np.arange(len(sizes)), sizes)
    x = rng.normal(size=len(sizes))[cluster]
    span = jackknife(np.mean, x, cluster)
    middle, half = float(x.mean()), (span.high - span.low) / 2
    half *= student_quantile(len(sizes)) / student_quantile(span.units)
    return 0.0, (span.low, span.high), (middle - half, middle + half)


def rows() -> Iterator[tuple[str, Callable[[np.random.Generator], Sample], int]]:
    """A simulation: its name, a function that draws one sample, and the number of samples."""
    for share, size in ((0.0, 0.0), (1e-3, 10.0), (3e-4, 10.0), (1e-2, 2.0)):
        name = f"KL of 1,000 sequences, {share * 1e4:g} in 10,000 off by {size:g} bits"
        yield name, lambda rng, share=share, size=size: rare(rng, 1000, share, size), 1000
    yield "difference of two such KL, 10 in 10,000 off by 10 bits", rare_difference, 1000
    yield "KL over .14 bits, 10 in 10,000 off by 10 bits", rare_ratio, 1000
    yield "KL, held-out less seen states, 20 in 10,000 off by 10 bits", rare_states, 1000
    for kind in ("Gaussian", "curve", "t(4) in 3 dimensions", "12 centres"):
        yield f"TwoNN ratio, {kind}", lambda rng, kind=kind: dimension(rng, kind), 300
    for size in (0.5, 0.8, 0.95, 1.0):
        name = f"PC1 and a number, standard deviation of PC2 {size:g} of that of PC1"
        yield name, lambda rng, size=size: component(rng, size), 300
    for name, sizes in UNEQUAL.items():
        yield f"mean over clusters of unequal size, {name}", lambda rng, sizes=sizes: unequal(rng, sizes), 1000


def covered(samples: list[Sample]) -> tuple[float, float]:
    """Coverage of the interval and of the one that it replaced."""
    truth = np.mean([sample[0] for sample in samples])
    new, old = (np.mean([low <= truth <= high for low, high in (s[i] for s in samples)]) for i in (1, 2))
    return float(new), float(old)


if __name__ == "__main__":
    for name, draw, count in rows():
        rng = np.random.default_rng(7)
        new, old = covered([draw(rng) for _ in range(count)])
        print(f"| {name} | {count} | {new:.2f} | {old:.2f} |", flush=True)
