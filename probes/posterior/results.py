"""What a grade says: nearness to the posterior, calibration, memory and the horizon, each with its verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmgeom.probes.posterior.scores import Grade, Numbers, Outcomes, Scores, mae_abs, mae_mean, skill
from llmgeom.probes.shared.length_curves import (
    UNTRAINED,
    Curves,
    Graded,
    Horizon,
    curves,
    mean,
    measured,
    near,
    numbered,
    past,
)
from llmgeom.result import Figure, quantity
from llmgeom.stats.resampling import mean_intervals

POSTERIOR, MIXTURE = "posterior", "posterior_mixture"
CALIBRATION, MEMORY, HORIZON = "posterior_calibration", "posterior_memory", "posterior_horizon"


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Posterior(Curves):
    """The model's answers at the queries within the horizon, beside the exact ones."""

    TITLE: ClassVar[str] = "Nearness to the posterior"
    MEANING: ClassVar[str] = (
        "At every query Bayes' rule has one answer, and KL says how many bits a drawn outcome costs a reader of the "
        "model beyond it: 0 is the posterior itself. Skill says how much of the way from the best predictor that does "
        "not infer has been gone. Errors of entropy alone are what was published: a model that is as certain as it "
        "should be, of the wrong thing, has none."
    )
    COMPUTED: ClassVar[str] = (
        "KL(exact || model) over the whole vocabulary, so that probability on tokens that are no outcome counts "
        "against the model; entropies take these tokens as one more outcome. mae_abs: mean of |H model - H exact| over "
        "sequences and queries; mae_mean: mean over queries of |mean H model - mean H exact|, in which errors of "
        "either sign cancel. Skill = 1 - KL of the model / KL of the best trivial predictor that is not itself exact. "
        "The constant and the position's mean are taken over other sequences. Intervals are jackknifed over sequences."
    )
    NULL: ClassVar[str] = "KL and skill: the exact answer (0 bits, skill 1). Errors of entropy: " + UNTRAINED.lower()
    FAILURE_MODES: ClassVar[str] = (
        "A low KL says nothing about inference where a trivial predictor is nearly exact (read the skill), or where a "
        "table of all hypotheses fits into the parameters (read held-out less seen). mae_mean is small for any model "
        "whose errors cancel in the mean."
    )

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
class Mixture(Posterior):
    """The same against what a model whose labels were drawn again should say."""

    TITLE: ClassVar[str] = "Nearness to the mixture it was trained on"
    MEANING: ClassVar[str] = (
        "Some of the labels it was trained on were drawn again, evenly over outcomes. Bayes' rule then says (1 - p) of "
        "the posterior and p of an even answer: a model that learned it is far from the posterior, and right."
    )


@dataclass(frozen=True, kw_only=True)
class Calibration(Graded):
    """Are outcomes as frequent as the model says?"""

    TITLE: ClassVar[str] = "Calibration"
    MEANING: ClassVar[str] = (
        "Outcomes to which the model gives a probability, against their exact probability and how often they were "
        "drawn. A calibrated model need not be near the posterior (the prior is calibrated too); a model near the "
        "posterior is calibrated."
    )
    COMPUTED: ClassVar[str] = (
        "Every outcome of every query within the horizon, in tenths of the predicted probability; tenths in which "
        "nothing lies are left out. Calibration error: sum over tenths of |predicted - exact| probability of the "
        "outcomes in it, a query; 0 to 2. Accuracy: the likeliest outcome is the one drawn. Leaked: probability of "
        "what is no outcome."
    )
    NULL: ClassVar[str] = UNTRAINED
    FAILURE_MODES: ClassVar[str] = (
        "Errors of either sign cancel within a tenth. Accuracy is bounded by the exact answer's own, printed beside. "
        "Held-out hypotheses are a tenth of the prior: where there are few, what is drawn need not be as frequent as "
        "the exact answer says, so the error is against exact probabilities."
    )

    said: np.ndarray = quantity("predicted", "probability", "predicted probability of outcomes")
    owed: np.ndarray = quantity("predicted", "probability", "exact probability of them", Figure("curve", beside="said"))
    drawn: np.ndarray = quantity("predicted", "fraction", "how often they were drawn", Figure("curve", beside="said"))
    count: np.ndarray = quantity("predicted", "outcomes", "how many, over queries and sequences")
    accuracy: np.ndarray = quantity(
        "query",
        "fraction",
        "accuracy: the likeliest outcome is the one drawn",
        Figure("curve", beside="accuracy_exact"),
    )
    accuracy_exact: np.ndarray = quantity("query", "fraction", "accuracy of the exact answer")
    leaked: np.ndarray = quantity("query", "probability", "probability of no outcome", Figure("curve"))
    ceiling: float = quantity("", "fraction", "accuracy of the exact answer's likeliest outcome, all queries")


@dataclass(frozen=True, kw_only=True)
class Residuals(Graded):
    """Is a predicted number as far from the drawn one as the model says?"""

    TITLE: ClassVar[str] = "Calibration"
    MEANING: ClassVar[str] = (
        "The drawn value less the predicted mean, over the predicted standard deviation, has a root mean square of 1 "
        "where the model is as sure as it may be; above 1 it is too sure."
    )
    COMPUTED: ClassVar[str] = "Over sequences at each query, and over all queries within the horizon."
    NULL: ClassVar[str] = UNTRAINED
    FAILURE_MODES: ClassVar[str] = (
        "The prior is calibrated too, and errors of either sign cancel in a mean square. Held-out hypotheses are a "
        "tenth of the prior: where there are few, the exact answer's own value is not 1 either."
    )

    rms: np.ndarray = quantity(
        "query",
        "standard deviations",
        "rms of standardised residuals",
        Figure("curve", beside="rms_exact"),
    )
    rms_exact: np.ndarray = quantity("query", "standard deviations", "the exact answer's own")


@dataclass(frozen=True, kw_only=True)
class Memory(Graded):
    """Answers to hypotheses that training may have shown, beside those it never did."""

    TITLE: ClassVar[str] = "Seen and held-out hypotheses"
    MEANING: ClassVar[str] = (
        "A tenth of the hypotheses was never trained on. A model that infers is as near to the posterior on these as "
        "on the others; one that looks its answer up is not."
    )
    COMPUTED: ClassVar[str] = (
        "Mean KL(exact || model) on sequences from held-out hypotheses less that on as many from the others."
    )
    NULL: ClassVar[str] = f"The difference: none. The KL on seen ones: {UNTRAINED.lower()}"
    FAILURE_MODES: ClassVar[str] = (
        "Where there are far more hypotheses than training drew, few sequences of either kind were seen, and nothing "
        "could have been memorised."
    )

    held_out: np.ndarray = quantity(
        "query",
        "bits",
        "KL on held-out hypotheses, mean over sequences",
        Figure("curve", interval="held_out_interval", beside="seen"),
    )
    held_out_interval: np.ndarray = quantity("query bound", "bits", "95 % interval over sequences")
    seen: np.ndarray = quantity("query", "bits", "KL on seen hypotheses")


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure_posterior(probe: str, found: Grade, untrained: Sequence[Scores], notes: Sequence[str]) -> Posterior:
    """Within the horizon. Raises UserError where every trivial predictor is exact, and for fewer than 5 sequences."""
    own, trivial = found.own.at(found.within), {name: one.at(found.within) for name, one in found.trivial.items()}
    best, others = found.best, [control.at(found.within) for control in untrained]
    predictors = {"this model": own, **trivial}
    tv = found.tv[:, found.within]
    each = np.stack([own.kl.mean(1), trivial[best].kl.mean(1)], -1)
    left_out = [f"{name} gives no probability to what may happen: its KL is infinite" for name in found.excluded]
    # In a table of both two metrics must not have one name.
    of = "mixture" if probe == MIXTURE else ""
    also = f", {of}" if of else ""
    return (Mixture if of else Posterior)(
        **curves(own.kl, [control.kl for control in others], trivial[best].kl),
        entropy=own.entropy.mean(0),
        entropy_exact=own.exact.mean(0),
        error=np.abs(own.gap).mean(0),
        tv=tv.mean(0),
        tv_interval=mean_intervals(tv.T),
        predictor=np.array([one.kl.mean() for one in predictors.values()]),
        predictor_interval=mean_intervals([one.kl.mean(1) for one in predictors.values()]),
        predictor_mae_abs=np.array([mae_abs(one.gap) for one in predictors.values()]),
        predictor_mae_mean=np.array([mae_mean(one.gap) for one in predictors.values()]),
        estimates=(
            near(probe, f"KL to the {of or POSTERIOR}", mean, each[:, 0], 0.0, "the exact answer"),
            near(probe, f"skill over the best trivial predictor{also}", skill, each, 1.0, "the exact answer"),
            measured(
                probe,
                f"mae_abs{also}",
                mean,
                np.abs(own.gap).mean(1),
                [np.abs(control.gap).mean(1) for control in others],
            ),
            measured(probe, f"mae_mean{also}", mae_mean, own.gap, [control.gap for control in others]),
        ),
        ticks={**numbered(1, found.trained), "predictor": tuple(predictors)},
        notes=(f"best trivial predictor: {best}", *left_out, *notes),
    )


def measure_calibration(found: Grade, untrained: Sequence[Scores]) -> Calibration | Residuals:
    """Within the horizon."""
    every = [one.at(found.within) for one in (found.own, found.owed, *untrained)]
    if numbers := [one for one in every if isinstance(one, Numbers)]:
        return _of_numbers(*numbers)
    return _of_outcomes(*[one for one in every if isinstance(one, Outcomes)])


def _of_numbers(own: Numbers, exact: Numbers, *others: Numbers) -> Residuals:
    off = "|rms of standardised residuals - 1|"
    return Residuals(
        rms=np.sqrt(np.square(own.residual).mean(0)),
        rms_exact=np.sqrt(np.square(exact.residual).mean(0)),
        estimates=(measured(CALIBRATION, off, _too_sure, own.residual, [control.residual for control in others]),),
        ticks=numbered(1, own.kl.shape[1]),
    )


def _too_sure(residual: np.ndarray) -> float:
    return abs(float(np.sqrt(np.square(residual).mean())) - 1)


def _of_outcomes(own: Outcomes, exact: Outcomes, *others: Outcomes) -> Calibration:
    queries = own.kl.shape[1]
    said, owed, drawn, count = own.tally.sum((0, 1)).T
    rows = count > 0

    def error(tally: np.ndarray) -> float:
        total = tally.sum(0)
        return float(np.abs(total[:, 0] - total[:, 1]).sum() / (len(tally) * queries))

    return Calibration(
        said=said[rows] / count[rows],
        owed=owed[rows] / count[rows],
        drawn=drawn[rows] / count[rows],
        count=count[rows],
        accuracy=own.right.mean(0),
        accuracy_exact=exact.right.mean(0),
        leaked=own.leaked.mean(0),
        ceiling=float(exact.right.mean()),
        estimates=(
            measured(CALIBRATION, "calibration error", error, own.tally.sum(1), [t.tally.sum(1) for t in others]),
            measured(CALIBRATION, "accuracy", mean, own.right.mean(1), [control.right.mean(1) for control in others]),
            measured(
                CALIBRATION,
                "leaked probability",
                mean,
                own.leaked.mean(1),
                [control.leaked.mean(1) for control in others],
            ),
        ),
        ticks={**numbered(1, queries), "predicted": tuple(f"{p:.2f}" for p in said[rows] / count[rows])},
    )


def measure_memory(held: Grade, seen: Scores, untrained: Sequence[Scores], notes: Sequence[str]) -> Memory:
    """Held-out against seen; `untrained` are scores on the seen ones."""
    out, known = held.own.kl[:, held.within], seen.kl[:, held.within]
    rows = np.concatenate([np.stack([kl.mean(1), np.full(len(kl), flag)], 1) for flag, kl in ((1, out), (0, known))])

    def less(rows: np.ndarray) -> float:
        held_out = rows[:, 1] == 1
        return float(rows[held_out, 0].mean() - rows[~held_out, 0].mean())

    others = [control.kl[:, held.within].mean(1) for control in untrained]
    return Memory(
        held_out=out.mean(0),
        held_out_interval=mean_intervals(out.T),
        seen=known.mean(0),
        estimates=(
            near(MEMORY, "KL, held-out less seen", less, rows, 0.0, "no difference"),
            measured(MEMORY, "KL, seen", mean, known.mean(1), others),
        ),
        ticks=numbered(1, held.trained),
        notes=tuple(notes),
    )


def measure_horizon(found: Grade, untrained: Sequence[Scores]) -> Horizon:
    """All queries; past the horizon there must be one at least."""
    return Horizon(
        **past(found.own.kl, [control.kl for control in untrained], found.trivial[found.best].kl, found.trained)
    )
