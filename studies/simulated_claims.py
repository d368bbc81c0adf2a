"""Coverage of claims' intervals on simulated effects: `python -m studies.simulated_claims` prints rows.

Effects, losses, activations and weights are drawn at the default size and go through the functions that measure them.
The mean of the statistic over all samples stands for what an interval is about. Bits are drawn as skewed as an
exponential, which the effects of edits and losses are about.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from llmgeom import claims
from llmgeom.probes import key_orthogonality
from llmgeom.probes.belief_clusters import Grouped
from llmgeom.probes.evidence.belief import Coordinates, measure_belief
from llmgeom.probes.evidence.predictions import ExactAnswers, Read
from llmgeom.probes.interventions import axis_ablation, interchange, label_axis
from llmgeom.probes.interventions.axis import SIZE, VARIANCE
from llmgeom.probes.interventions.axis_ablation import CONTROL, DOSES, ODDS, dose_estimate
from llmgeom.probes.interventions.interchange import AS_FAR, RANDOM
from llmgeom.probes.length_generalisation import measure_past
from llmgeom.probes.posterior import results as posterior
from llmgeom.probes.shared.nulls import compare, ratio_of
from llmgeom.prompts import text
from llmgeom.result import Estimate
from llmgeom.stats import weighing
from llmgeom.stats.manifold import distances
from llmgeom.stats.resampling import geometric_mean, jackknife
from llmgeom.wind_tunnels import load_world
from studies.coverage import Estimates, coverage

Draw = Callable[[np.random.Generator], Estimates]
HALF = 37  # clusters of the half of 75 prompts on which edits are measured


def named(probe: str, made: Iterable[Estimate]) -> Estimates:
    """The estimates of one probe."""
    return {f"{probe}: {h.name}": (h.value, h.low, h.high, True) for h in made}


def declared_only(every: Estimates) -> Estimates:
    """Those that are claims."""
    known = {f"{probe}: {name}" for (probe, name), entry in claims.entries().items() if entry.claim}
    return {name: numbers for name, numbers in every.items() if name in known}


def edits(rng: np.random.Generator) -> Estimates:
    """Edits of an axis and of a label's direction."""
    clusters, doses = np.arange(HALF), len(DOSES["project-out"])
    outcomes = ("kl", "odds", "error", "evidence")
    effects = {f"own/{name}": rng.exponential(0.05, (doses, HALF)) for name in outcomes}
    for kind in (SIZE, VARIANCE):
        for dose in DOSES["project-out"]:
            effects |= {f"{kind} {dose:g}/{name}": np.full((39, HALF), 0.01) for name in outcomes}
    numbers = {"scale": 1.0, "lengths": np.ones(3), "share": 0.5, "variance_left": 1.0, "rho": 0.5, "rho_p": 0.001}
    effects |= {name: np.array(x) for name, x in numbers.items()} | {"step": np.ones((1, 4))}
    made = {}
    for probe in ("ablation_pc1", "ablation_ridge"):
        measured = axis_ablation.measure_axis(probe, effects, "project-out", (0,), "all", clusters)
        made |= named(probe, measured.estimates)
    for probe, name, outcome in (
        (CONTROL, ODDS, "odds"), (label_axis.PROBE, label_axis.KL, "kl"), (label_axis.PROBE, label_axis.ODDS, "odds")
    ):  # fmt: skip
        made |= named(probe, [dose_estimate(probe, name, effects, "project-out", outcome, clusters)])
    return made


def exchanges(rng: np.random.Generator) -> Estimates:
    """Evidence that is exchanged between sequences and in text."""
    n = 100
    total = rng.exponential(2.0, n)
    effects = {"total": total, "placebo/lost": np.zeros((1, 1, n)), "dimensions": np.array([2])}
    for kind in ("whole", "frame", "rest", "placebo"):
        effects[f"{kind}/moved"] = 0.5 * total[None, None] + rng.normal(0, 0.5, (1, 1, n))
    effects |= {f"{kind}/moved": rng.normal(0, 0.1, (1, 39, n)) for kind in (RANDOM, AS_FAR)}
    measured = interchange.measure_interchange(effects, [effects], [0], np.arange(n))
    estimates = named("interchange", measured.estimates)
    exact, clusters = rng.uniform(1, 3, 60), np.arange(60) // 3
    shift = exact * (0.6 + 0.3 * rng.standard_normal(20)[clusters]) + rng.normal(0, 0.5, 60)

    def share(rows: np.ndarray) -> float:
        return float(shift[rows].mean() / exact[rows].mean())

    rows = np.arange(60)
    span = jackknife(share, rows, clusters)
    return estimates | {"text_patching: total effect over the exact shift": (share(rows), span.low, span.high, True)}


def weighings(rng: np.random.Generator) -> Estimates:
    """Answers to two-point: slope 2, noise, and a bias for each word that a set of labels shares."""
    batch = text.sample(load_world("two-point", text=True), 50, int(rng.integers(2**31)))
    e = weighing.log_odds(batch.exact.predictive[:, -1].numpy())
    place = np.unique(np.array(batch.cluster), return_inverse=True)[1]
    z = 2 * e + rng.normal(0, 0.5, (place.max() + 1, 1))[place] * [1, -1] + rng.normal(0, 0.5, e.shape)
    exact, answered = batch.exact.predictive[:, -1].numpy(), z - np.logaddexp.reduce(z, 1)[:, None]
    rows = np.flatnonzero(np.array(batch.columns["k"]) > 0)
    w = weighing.Weighing(exact[rows], answered[rows], np.array(batch.cluster)[rows])
    of = {
        "resolution": lambda at: weighing.resolution(w.left[at], w.even[at]),
        "weight of evidence": lambda at: weighing.weight(w.z[at], w.e[at]),
        "calibration loss": lambda at: float((w.raw - w.left)[at].mean()),
    }
    every, made = np.arange(len(rows)), {}
    for name, statistic in of.items():
        span = jackknife(statistic, every, w.cluster)
        made[f"process: {name}"] = (statistic(every), span.low, span.high, True)
    return made


def gradings(rng: np.random.Generator) -> Estimates:
    """Skill over the best trivial predictor: bits of 200 sequences."""
    kl, trivial, made = rng.exponential(0.02, 200), rng.exponential(0.4, 200), {}
    for probe, suffix in (("posterior", ""), ("posterior_mixture", ", mixture")):
        name = f"skill over the best trivial predictor{suffix}"
        made |= named(probe, [posterior.skill(probe, name, kl, trivial)])
    return made


def silhouettes(rng: np.random.Generator) -> Estimates:
    """Four groups of points of 25 sequences with three queries each, which share some of their noise."""
    cluster, label = np.repeat(np.arange(25), 3), rng.integers(0, 4, 75)
    own = rng.standard_normal((25, 8))[cluster] + rng.standard_normal((75, 8))
    groups = Grouped(distances(1.5 * np.eye(8)[label] + 0.7 * own), label)
    span = jackknife(groups.silhouette, np.arange(75), cluster)
    return {"belief_clusters: silhouette beyond the read-out": (groups.silhouette(), span.low, span.high, True)}


def trainings(rng: np.random.Generator) -> Estimates:
    """Ratios of settling steps of five trainings."""
    names = [f"{p}: {name}" for (p, name), e in claims.entries().items() if e.claim and p in ("drift", "gradients")]
    return {name: (*geometric_mean(rng.lognormal(0.5, 0.6, 5)), True) for name in names}


def attention(rng: np.random.Generator) -> Estimates:
    """Attention on bearing positions as a ratio of sums, and |cos| of the columns of random keys."""
    n, estimates = 75, {}
    below = rng.uniform(0.2, 0.8, n)
    for entry in claims.declared("qk_alignment").values():
        if entry.claim:
            above = below * rng.beta(2, 3, n)
            estimates |= named("qk_alignment", [compare(entry, ratio_of, (above, below), np.arange(n), {})])
    heads = np.array([key_orthogonality.mean_abs_cosine(rng.standard_normal((1, 8, 24)))[0] for _ in range(16)])
    span = jackknife(lambda x: float(x.mean()), heads, np.arange(16))
    return estimates | {"key_orthogonality: columns of W_K": (heads.mean(), span.low, span.high, True)}


def horizon(rng: np.random.Generator) -> Estimates:
    """Losses past the horizon, four times those within."""
    kl = rng.exponential(np.where(np.arange(12) < 8, 0.01, 0.04), (75, 12)) * rng.exponential(1, (75, 1))
    return named("length_generalisation", measure_past(kl, [kl], np.ones_like(kl), 8).estimates)


def examples(rng: np.random.Generator) -> Estimates:
    """Labelled examples: answers and a residual stream that hold the exact log odds with noise, some of it a pair's."""
    batch = text.sample(load_world("two-point", text=True), 50, int(rng.integers(2**31)))
    odds, (pair, pairs) = ExactAnswers(batch).log_p, np.unique(batch.cluster, return_inverse=True)
    own = odds[:, 0] - odds[:, 1] + rng.normal(0, 0.4, len(pair))[pairs] + rng.normal(0, 0.4, len(batch))
    along = 0.5 * np.stack([own, -own], 1) + rng.normal(0, 0.5, (len(batch), 2))
    read = Coordinates(along[None])
    return named("sula_belief", measure_belief(batch, read, Read(batch, read), 0).estimates)


DRAWS: tuple[Draw, ...] = (edits, exchanges, weighings, gradings, silhouettes, trainings, attention, horizon, examples)


def covered(draw: Draw, count: int) -> dict[str, tuple[bool, int, float, float, float]]:
    """As `coverage`, for the drawn claims."""
    rng = np.random.default_rng(7)
    return coverage([declared_only(draw(rng)) for _ in range(count)])


def rows(count: int) -> Iterator[str]:
    """Rows of the table: claim, samples, coverage."""
    for draw in DRAWS:
        for name, (_, n, held, _, _) in covered(draw, count).items():
            yield f"| {name} | {n} | {held:.2f} |"


if __name__ == "__main__":
    for row in rows(1000):
        print(row, flush=True)
