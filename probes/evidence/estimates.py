"""Estimates of in-context evidence: a statistic of the model with an interval over clusters and controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from llmgeom.claims import Claim, Null, declared
from llmgeom.probes.shared.nulls import UNTRAINED, Statistic, compare
from llmgeom.result import Curve, Estimate
from llmgeom.stats.resampling import Interval, mean_intervals

SHUFFLED = "evidence of other prompts"
BASELINE = "the observer that skill is counted from"


def mean_by(group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[group] means, in ascending order of the group."""
    return np.array([values[group == name].mean() for name in np.unique(group)])


def curve_by(group: np.ndarray, values: np.ndarray, cluster: np.ndarray) -> Curve:
    """`mean_by` with 95 % intervals over clusters."""
    at = [np.flatnonzero(group == name) for name in np.unique(group)]
    interval = np.concatenate([mean_intervals(values[None, rows], cluster[rows]) for rows in at])
    return Curve(mean_by(group, values), interval=interval)


def indicators(group: np.ndarray) -> np.ndarray:
    """[row group] indicators of all groups but the first, as covariates of a rank correlation."""
    return (group[:, None] == np.unique(group)[1:]).astype(float)


def exchanged(group: np.ndarray, draws: int, rng: np.random.Generator) -> Int[np.ndarray, "draw row"]:
    """[draw row] the row that replaces each row: random permutations within groups."""
    order = np.tile(np.arange(len(group)), (draws, 1))
    for one in np.unique(group):
        at = np.flatnonzero(group == one)
        order[:, at] = rng.permuted(np.tile(at, (draws, 1)), axis=1)
    return order


def against_untrained(
    probe: str,
    name: str,
    statistic: Statistic,
    models: Sequence[Any],
    rows: np.ndarray,
    cluster: np.ndarray,
    interval: Interval | None = None,
    nulls: Sequence[Null] = (),
) -> Estimate:
    """A statistic of the first model compared with the others, its untrained controls, and with further `nulls`; by
    default jackknifed."""
    (own, *untrained), claim = models, declared(probe)[name]

    def of_rows(model: Any, kept: np.ndarray) -> float:
        return statistic(model, rows[kept])

    return compare(claim, of_rows, own, cluster[rows], {UNTRAINED: untrained}, nulls, interval=interval)


@dataclass(frozen=True, eq=False)
class Losses:
    """KL(exact || answer) in bits in one process, over its prompts that show evidence.

    Attributes:
        baseline: losses of the observer from which skill is counted.
        without_context: losses of the model without context; None without such a control.
        untrained: mean loss over prompts of each untrained control.
        exchanged: mean loss over prompts if the model's answers are exchanged between prompts, for each exchange.
    """

    own: Float[np.ndarray, " prompt"]
    baseline: Float[np.ndarray, " prompt"]
    without_context: Float[np.ndarray, " prompt"] | None
    untrained: Float[np.ndarray, " draw"]
    exchanged: Float[np.ndarray, " exchange"]
    cluster: np.ndarray


def skill_estimate(claim: Claim, losses: Sequence[Losses]) -> Estimate:
    """Skill pooled over processes, with its interval, three controls and the baseline itself, which has skill 0.

    1 - sum_c L_c(model) / sum_c L_c(baseline), L_c the mean loss in process c: the share of the baselines' losses that
    the model avoids. For one process it is `stats.information.skill`. Derived here. In this ratio of sums, a process in
    which the baseline loses little has little weight; in a mean of skills it would have the most.

    The jackknife leaves out a set of labels in all processes together. The draws of a control are paired: draw i is the
    same untrained model in every process. Draws that one process lacks, because its run ended early, are left out. In
    200 simulated samples of SULA, with 40 pairs that each have a bias of their own, the interval covered .915.
    """
    process = np.repeat(np.arange(len(losses)), [len(loss.own) for loss in losses])
    cluster = np.concatenate([loss.cluster for loss in losses])
    model, baseline = (np.concatenate([getattr(loss, name) for loss in losses]) for name in ("own", "baseline"))

    def total(values: np.ndarray, rows: np.ndarray) -> float:
        """The sum over processes of the mean in each process."""
        return float((np.bincount(process[rows], values[rows]) / np.bincount(process[rows])).sum())

    def skill(values: np.ndarray, rows: np.ndarray) -> float:
        return 1 - total(values, rows) / total(baseline, rows)

    best = total(baseline, np.arange(len(process)))
    paired = min(len(loss.untrained) for loss in losses)
    draws = {
        UNTRAINED: 1 - np.sum([loss.untrained[:paired] for loss in losses], 0) / best,
        SHUFFLED: 1 - np.sum([loss.exchanged for loss in losses], 0) / best,
    }
    # Without the control 0, a simple observer would hold: it beats untrained models, which lie far below it.
    nulls = [Null.number(BASELINE, 0.0)]
    nulls += [Null.of(name, control, claim.side) for name, control in draws.items()]
    cut = [loss.without_context for loss in losses if loss.without_context is not None]
    without = (model, np.concatenate(cut), cluster) if len(cut) == len(losses) else None
    return compare(claim, skill, model, cluster, {}, nulls, without=without)
