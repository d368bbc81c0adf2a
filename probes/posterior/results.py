"""Results of grading: distance to the posterior, calibration, memory and length generalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmgeom.probes.posterior.scores import (
    CategoricalScores,
    GaussianScores,
    PosteriorScores,
    Scores,
    mae_abs,
    mae_mean,
    skill,
)
from llmgeom.probes.shared.length_curves import (
    Curves,
    Graded,
    LengthGeneralisation,
    curves,
    mean,
    measure_past,
    measured,
    near,
    numbered,
)
from llmgeom.result import Figure, quantity
from llmgeom.stats.resampling import mean_intervals, tail_safe_interval

PROSE = Path(__file__).parents[1] / "texts" / "posterior.md"
POSTERIOR, MIXTURE = "posterior", "posterior_mixture"
# Bits of KL in one sequence: a rare failure is more than USUAL, and one of more than LARGEST counts as LARGEST.
USUAL, LARGEST = 1.0, 10.0
CALIBRATION, MEMORY, HORIZON = "posterior_calibration", "posterior_memory", "posterior_horizon"


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Distance(Curves):
    """The model's answers and the exact ones at the queries within the horizon."""

    TITLE = "Distance to the posterior"
    TEXT = PROSE

    entropy: np.ndarray = quantity(
        "query", "bits", "entropy of the model's answer, mean over sequences", Figure("curve", beside="entropy_exact")
    )
    entropy_exact: np.ndarray = quantity("query", "bits", "exact entropy")
    error: np.ndarray = quantity("query", "bits", "mean |H model - H exact|")
    tv: np.ndarray = quantity(
        "query", "probability", "total variation, mean over sequences", Figure("curve", interval="tv_interval")
    )
    tv_interval: np.ndarray = quantity("query bound", "probability", "95 % interval over sequences")
    predictor: np.ndarray = quantity(
        "predictor", "bits", "KL(exact || predictor)", Figure("curve", interval="predictor_interval")
    )
    predictor_interval: np.ndarray = quantity("predictor bound", "bits", "95 % interval over sequences")
    predictor_mae_abs: np.ndarray = quantity("predictor", "bits", "mae_abs of each predictor")
    predictor_mae_mean: np.ndarray = quantity("predictor", "bits", "mae_mean of each predictor")


@dataclass(frozen=True, kw_only=True)
class MixtureDistance(Distance):
    """The same against the mixture that targets drawn again in training make exact."""

    TITLE = "Distance to the mixture of the training targets"


@dataclass(frozen=True, kw_only=True)
class Calibration(Graded):
    """How often outcomes occur, against the model's probabilities."""

    TITLE = "Calibration"
    TEXT = PROSE

    predicted: np.ndarray = quantity("predicted", "probability", "predicted probability of outcomes")
    exact: np.ndarray = quantity(
        "predicted", "probability", "exact probability of them", Figure("curve", beside="predicted")
    )
    drawn: np.ndarray = quantity(
        "predicted", "fraction", "how often they were drawn", Figure("curve", beside="predicted")
    )
    count: np.ndarray = quantity("predicted", "outcomes", "how many, over queries and sequences")
    accuracy: np.ndarray = quantity(
        "query",
        "fraction",
        "accuracy: the likeliest outcome is the one drawn",
        Figure("curve", beside="accuracy_exact"),
    )
    accuracy_exact: np.ndarray = quantity("query", "fraction", "accuracy of the exact answer")
    leaked: np.ndarray = quantity("query", "probability", "probability of tokens that are no outcome", Figure("curve"))
    ceiling: float = quantity("", "fraction", "accuracy of the exact answer's likeliest outcome, all queries")


@dataclass(frozen=True, kw_only=True)
class Residuals(Graded):
    """How far drawn numbers are from the predicted means, in predicted standard deviations."""

    TITLE = "Calibration of predicted numbers"
    TEXT = PROSE

    rms: np.ndarray = quantity(
        "query",
        "standard deviations",
        "rms of standardised residuals",
        Figure("curve", beside="rms_exact"),
    )
    rms_exact: np.ndarray = quantity("query", "standard deviations", "the exact answer's own")


@dataclass(frozen=True, kw_only=True)
class Memory(Graded):
    """Divergence on hypotheses that training may have shown, and on hypotheses that it never did."""

    TITLE = "Seen and held-out hypotheses"
    TEXT = PROSE

    held_out: np.ndarray = quantity(
        "query",
        "bits",
        "KL on held-out hypotheses, mean over sequences",
        Figure("curve", interval="held_out_interval", beside="seen"),
    )
    held_out_interval: np.ndarray = quantity("query bound", "bits", "95 % interval over sequences")
    seen: np.ndarray = quantity("query", "bits", "KL on seen hypotheses")


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure_distance(
    probe: str,
    scores: PosteriorScores,
    untrained: Sequence[Scores],
    notes: Sequence[str],
    rivals: Mapping[str, Scores] | None = None,
) -> Distance:
    """Distance within the horizon, to the posterior or (probe MIXTURE) to the mixture.

    Args:
        rivals: further predictors by name, listed with the trivial ones; skill is not over them.

    Raises:
        UserError: every trivial predictor is exact; fewer than 5 sequences.
    """
    own, best = scores.own.at(scores.within), scores.best
    trivial = {name: x.at(scores.within) for name, x in scores.trivial.items()}
    controls = [control.at(scores.within) for control in untrained]
    rivals = {name: x.at(scores.within) for name, x in (rivals or {}).items()}
    predictors = {"this model": own, **trivial, **rivals}
    tv = scores.tv[:, scores.within]
    both = np.stack([own.kl.mean(1), trivial[best].kl.mean(1)], -1)
    left_out = [f"{name} gives no probability to what may happen: its KL is infinite" for name in scores.excluded]
    # A table that holds both must not have two metrics of one name.
    target, suffix = ("mixture", ", mixture") if probe == MIXTURE else (POSTERIOR, "")
    return (MixtureDistance if probe == MIXTURE else Distance)(
        **curves(own.kl, [control.kl for control in controls], trivial[best].kl),
        entropy=own.entropy.mean(0),
        entropy_exact=own.exact.mean(0),
        error=np.abs(own.gap).mean(0),
        tv=tv.mean(0),
        tv_interval=mean_intervals(tv.T),
        predictor=np.array([x.kl.mean() for x in predictors.values()]),
        predictor_interval=mean_intervals([x.kl.mean(1) for x in predictors.values()]),
        predictor_mae_abs=np.array([mae_abs(x.gap) for x in predictors.values()]),
        predictor_mae_mean=np.array([mae_mean(x.gap) for x in predictors.values()]),
        estimates=(
            near(probe, f"KL to the {target}", mean, both[:, 0], 0.0, "the exact answer"),
            measured(
                probe,
                f"KL, rare failures included{suffix}",
                mean,
                clipped := own.kl.mean(1).clip(0, LARGEST),
                [control.kl.mean(1).clip(0, LARGEST) for control in controls],
                interval=tail_safe_interval(clipped, USUAL, LARGEST),
            ),
            near(probe, f"skill over the best trivial predictor{suffix}", skill, both, 1.0, "the exact answer"),
            measured(
                probe,
                f"mae_abs{suffix}",
                mean,
                np.abs(own.gap).mean(1),
                [np.abs(control.gap).mean(1) for control in controls],
            ),
            measured(probe, f"mae_mean{suffix}", mae_mean, own.gap, [control.gap for control in controls]),
        ),
        ticks={**numbered(1, scores.trained), "predictor": tuple(predictors)},
        notes=(f"best trivial predictor: {best}", *left_out, *notes),
    )


def measure_calibration(scores: PosteriorScores, untrained: Sequence[Scores]) -> Calibration | Residuals:
    """Calibration within the horizon."""
    every = [x.at(scores.within) for x in (scores.own, scores.exact, *untrained)]
    if numbers := [x for x in every if isinstance(x, GaussianScores)]:
        return _residuals(*numbers)
    return _tenths(*[x for x in every if isinstance(x, CategoricalScores)])


def _residuals(own: GaussianScores, exact: GaussianScores, *controls: GaussianScores) -> Residuals:
    name = "|rms of standardised residuals - 1|"
    return Residuals(
        rms=np.sqrt(np.square(own.residual).mean(0)),
        rms_exact=np.sqrt(np.square(exact.residual).mean(0)),
        estimates=(measured(CALIBRATION, name, _rms_error, own.residual, [x.residual for x in controls]),),
        ticks=numbered(1, own.kl.shape[1]),
    )


def _rms_error(residual: np.ndarray) -> float:
    return abs(float(np.sqrt(np.square(residual).mean())) - 1)


def _tenths(own: CategoricalScores, exact: CategoricalScores, *controls: CategoricalScores) -> Calibration:
    queries = own.kl.shape[1]
    predicted, exact_p, drawn, count = own.tally.sum((0, 1)).T
    rows = count > 0

    def error(tally: np.ndarray) -> float:
        total = tally.sum(0)
        return float(np.abs(total[:, 0] - total[:, 1]).sum() / (len(tally) * queries))

    return Calibration(
        predicted=predicted[rows] / count[rows],
        exact=exact_p[rows] / count[rows],
        drawn=drawn[rows] / count[rows],
        count=count[rows],
        accuracy=own.right.mean(0),
        accuracy_exact=exact.right.mean(0),
        leaked=own.leaked.mean(0),
        ceiling=float(exact.right.mean()),
        estimates=(
            measured(CALIBRATION, "calibration error", error, own.tally.sum(1), [x.tally.sum(1) for x in controls]),
            measured(CALIBRATION, "accuracy", mean, own.right.mean(1), [x.right.mean(1) for x in controls]),
            measured(CALIBRATION, "leaked probability", mean, own.leaked.mean(1), [x.leaked.mean(1) for x in controls]),
        ),
        ticks={**numbered(1, queries), "predicted": tuple(f"{p:.2f}" for p in predicted[rows] / count[rows])},
    )


def measure_memory(
    held_out: PosteriorScores, seen: Scores, untrained: Sequence[Scores], notes: Sequence[str]
) -> Memory:
    """Divergence on held-out less that on seen hypotheses; `untrained` are scores on the seen ones."""
    out, known = held_out.own.kl[:, held_out.within], seen.kl[:, held_out.within]
    rows = np.concatenate([np.stack([kl.mean(1), np.full(len(kl), flag)], 1) for flag, kl in ((1, out), (0, known))])

    def difference(rows: np.ndarray) -> float:
        is_out = rows[:, 1] == 1
        return float(rows[is_out, 0].mean() - rows[~is_out, 0].mean())

    controls = [control.kl[:, held_out.within].mean(1) for control in untrained]
    return Memory(
        held_out=out.mean(0),
        held_out_interval=mean_intervals(out.T),
        seen=known.mean(0),
        estimates=(
            near(MEMORY, "KL, held-out less seen", difference, rows, 0.0, "no difference"),
            measured(MEMORY, "KL, seen", mean, known.mean(1), controls),
        ),
        ticks=numbered(1, held_out.trained),
        notes=tuple(notes),
    )


def measure_horizon(scores: PosteriorScores, untrained: Sequence[Scores]) -> LengthGeneralisation:
    """Divergence at all queries; at least one must lie past the horizon."""
    trivial = scores.trivial[scores.best].kl
    return measure_past(scores.own.kl, [control.kl for control in untrained], trivial, scores.trained)
