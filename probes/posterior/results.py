"""Results of grading: distance to the posterior, calibration, memory and length generalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import log_softmax

from llmgeom.claims import Null, declared, estimate, planned
from llmgeom.errors import UserError
from llmgeom.probes.length_generalisation import (
    FAILURES,
    curves,
    measure_past,
    measured,
    numbered,
)
from llmgeom.probes.posterior.grading import MAIN, SEEN, Grades, StateTable
from llmgeom.probes.posterior.scores import LAST, CategoricalScores, GaussianScores, PosteriorScores
from llmgeom.result import Estimate, Result, labelled, line
from llmgeom.stats.rare_failures import Cut
from llmgeom.stats.resampling import jackknife_of_means, mean_intervals
from llmgeom.stats.weighing import LEAST_BITS, Weighing
from llmgeom.world import Categorical

POSTERIOR, MIXTURE = "posterior", "posterior_mixture"
CALIBRATION, HORIZON = "posterior_calibration", "posterior_horizon"
MEMORY, STATES = "posterior_memory", "posterior_states"
WEIGHT, RESOLUTION = "weight of evidence", "resolution"
# A model of less skill answers seen and held-out hypotheses equally badly; a table of more skill answers both well.
SKILL = 0.5


# ---- measuring ------------------------------------------------------------------------------------------------------


def distance(probe: str, notes: Sequence[str], grades: Grades) -> Result:
    """Distance within the horizon to the posterior or (probe MIXTURE) to the mixture of corrupted targets.

    Rivals are listed with the trivial predictors, but skill is never relative to a rival. Raises UserError: every
    trivial predictor is exact; fewer than 5 sequences.
    """
    scores = grades.scores
    model, best = scores.own.at(scores.within), scores.best
    trivial = {name: x.at(scores.within) for name, x in scores.trivial.items()}
    controls = [control.at(scores.within) for control in grades.control_scores]
    rivals = {name: x.at(scores.within) for name, x in grades.rivals.items()}
    predictors = {"this model": model, **trivial, **rivals}
    tv = scores.tv[:, scores.within]
    left_out = [f"{name} gives no probability to what may happen: its KL is infinite" for name in scores.excluded]
    # One table may contain both, so their metrics need different names.
    target, suffix = ("mixture", ", mixture") if probe == MIXTURE else (POSTERIOR, "")
    size, of_controls = np.abs(model.gap).mean(1), [np.abs(control.gap).mean(1) for control in controls]
    skilled, unmeasured = [], {}
    name = f"skill over the best trivial predictor{suffix}"
    if LAST in scores.as_exact:  # skill over the others is 1 for a look-up of the last observation
        unmeasured[name] = "the last observation alone gives the answer; nothing is left to infer"
    elif (gap := float(trivial[best].kl.mean())) < LEAST_BITS:
        unmeasured[name] = (
            f"{best} is {gap:.2g} bits from the exact answer, and a share of less than {LEAST_BITS:g} says little: "
            "read the KL in bits"
        )
    else:
        skilled.append(skill(probe, name, model.kl.mean(1), trivial[best].kl.mean(1)))
    taken_apart, without = weighed(probe, suffix, grades)
    every, unit = predictors.values(), "bits"
    means, spans = [x.kl.mean() for x in every], mean_intervals([x.kl.mean(1) for x in every])
    of_entropy = "entropy of the model's answer, mean over sequences"
    return Result.of(
        "Distance to the mixture of the training targets" if probe == MIXTURE else "Distance to the posterior",
        {
            **curves(model.kl, [control.kl for control in controls], trivial[best].kl),
            **line("entropy", model.entropy.mean(0), "query", unit, of_entropy, beside="entropy_exact"),
            "entropy_exact": labelled(model.exact.mean(0), "query", unit, "exact entropy"),
            "error": labelled(np.abs(model.gap).mean(0), "query", unit, "mean |H model - H exact|"),
            **line(
                "tv",
                tv.mean(0),
                "query",
                "probability",
                "total variation, mean over sequences",
                interval=("sequences", mean_intervals(tv.T)),
            ),
            **line("predictor", means, "predictor", unit, "KL(exact || predictor)", interval=("sequences", spans)),
            "predictor_mae_abs": labelled([x.mae_abs for x in every], "predictor", unit, "mae_abs of each predictor"),
            "predictor_mae_mean": labelled(
                [x.mae_mean for x in every], "predictor", unit, "mae_mean of each predictor"
            ),
        },
        __name__,
        estimates=(
            divergence(probe, f"KL to the {target}", model.kl.mean(1)),
            *skilled,
            *taken_apart,
            measured(probe, f"mae_abs{suffix}", size, of_controls),
            measured(
                probe, f"mae_mean{suffix}", model.gap, [x.gap for x in controls], lambda gap: np.abs(gap).mean(-1)
            ),
        ),
        ticks={**numbered(scores.trained), "predictor": tuple(predictors)},
        notes=(f"best trivial predictor: {best}", *left_out, *notes),
        unmeasured=unmeasured | without,
        warnings=tuple(filter(None, (useful(grades.table, x.kl, scores) for x in grades.rivals.values()))),
    )


def divergence(probe: str, name: str, kl: np.ndarray, less: np.ndarray | None = None) -> Estimate:
    """Mean KL of sequences, minus that of other sequences if given, claimed to be at most the declared margin above 0.

    Interval and p are valid even if failures are rare (`RareFailures`). The price is n: an exact model needs 4,566
    sequences for this claim and "held-out less seen" to hold. Simulated, 2,000 gradings each: with 6,000 sequences the
    claim held for every model of .003 bits, and for 0.3 % of models that are exact except for 20 bits in 1 sequence of
    1,000; with Student's interval of 1,000 sequences it held for 36 % of those. A model of .005 bits needs 10,000.

    Args:
        kl: [sequence] bits, mean over queries.
        less: [sequence] bits, for other sequences.
    """
    known = None if less is None else FAILURES.clip(less)
    n = len(kl) + (0 if known is None else len(known))
    exact = "the exact answer" if known is None else "no difference"
    return rare(probe, name, FAILURES.cut(FAILURES.clip(kl), known), exact, 0.0, n)


def skill(probe: str, name: str, kl: np.ndarray, trivial: np.ndarray) -> Estimate:
    """1 - mean KL / mean KL of the trivial predictor, claimed to lie within the declared margin of 1.

    As in `divergence`, failures may be rare, and a sequence counts at most 10 bits; the trivial predictor's are not
    clipped. An exact model needs at most n = 914 / (the trivial predictor's bits). Simulated, 2,000 gradings each, with
    .14 trivial bits: for a skill of .93 (10 bits in 1 sequence of 1,000) the claim held in .2 % (6,000 sequences), with
    the jackknife's interval in 38 % (1,000) and 2 % (6,000); for a skill of .99 without such failures in all (10,000).

    Args:
        kl: [sequence] bits, mean over queries.
        trivial: [sequence] bits of the trivial predictor on the same sequences.
    """
    lost = FAILURES.ratio(FAILURES.clip(kl), trivial)
    return rare(probe, name, lost, "the exact answer", 1.0, len(kl), float(trivial.mean()))


def weighed(probe: str, suffix: str, grades: Grades) -> tuple[list[Estimate], dict[str, str]]:
    """Weight of evidence and resolution of answers among tokens, as in `llmgeom evidence` (`stats.weighing`).

    Rows are queries within the horizon, clusters are sequences, and the even answer is uniform over the outcomes.
    Returns the estimates, and by name why one has none: an exact answer that excludes outcomes has infinite log odds.
    """
    evaluation, scores = grades.evaluation, grades.scores
    if not isinstance(evaluation.task.answers, Categorical):
        return [], {}
    outcomes, sequences = len(evaluation.task.answers.tokens), len(evaluation.batch)
    forms = (form[:, scores.within, :outcomes].double().numpy() for form in (evaluation.exact, grades.own[MAIN]))
    exact, own = (log_softmax(form.reshape(-1, outcomes), axis=1) for form in forms)
    of = Weighing(exact, own, np.repeat(np.arange(sequences), scores.trained))

    def row(name: str, statistic: Callable[[np.ndarray], np.ndarray], null: str, *columns: np.ndarray) -> Estimate:
        x = np.stack([one.reshape(sequences, scores.trained, -1).mean(1) for one in columns], 1)
        value, span, nulls = float(statistic(x.mean(0))), jackknife_of_means(statistic, x), [Null.number(null, 1.0)]
        return estimate(declared(probe)[name + suffix], value, span, nulls, n=sequences, clusters=sequences)

    def slope(mean: np.ndarray) -> np.ndarray:  # `weighing.weight` from means over sequences
        z, e, product, square = np.moveaxis(mean, -2, 0)
        return (product - z * e).sum(-1) / (square - e * e).sum(-1)

    resolved = row(RESOLUTION, lambda mean: 1 - mean[..., 0, 0] / mean[..., 1, 0], "the exact answer", of.left, of.even)
    if np.exp(exact).min() == 0:
        why = "the exact answer excludes outcomes, whose log odds are infinite: read KL and resolution"
        return [resolved], {WEIGHT + suffix: why}
    return [row(WEIGHT, slope, "Bayes' rule", of.z, of.e, of.z * of.e, of.e**2), resolved], {}


def rare(probe: str, name: str, above: Cut, null: str, centre: float, n: int, unit: float = 1.0) -> Estimate:
    """Estimate of a number that rare failures may dominate, claimed to lie within the declared margin of `centre`.

    The bound falls with 1 / n and not with its root, so this function plans n itself, for two claims by Holm.

    Args:
        above: Distance of the number from the centre on the side of failures: above 0, or below 1 if the centre is 1.
        centre: 0 or 1.
        unit: A failure in every sequence adds (largest - c) / unit.
    """
    claim, span = declared(probe)[name], FAILURES.interval_of(above)
    value, control = above.value, Null.number(null, centre, FAILURES.within_p_of(above, claim.effect))
    if centre:
        value, span = centre - value, replace(span, low=centre - span.high, high=centre - span.low)
    estimated = estimate(claim, value, span, [control], n=n, clusters=n)
    return planned(estimated, FAILURES.needed(claim.effect * unit))


def calibration(grades: Grades) -> Result:
    """Frequencies of outcomes within the horizon compared with the model's probabilities."""
    every = [x.at(grades.scores.within) for x in (grades.scores.own, grades.scores.exact, *grades.control_scores)]
    if numbers := [x for x in every if isinstance(x, GaussianScores)]:
        return _residuals(*numbers)
    return _tenths(*[x for x in every if isinstance(x, CategoricalScores)])


def _residuals(model: GaussianScores, exact: GaussianScores, *controls: GaussianScores) -> Result:
    def error(square: np.ndarray) -> np.ndarray:
        return np.abs(np.sqrt(square) - 1)

    name, unit = "|rms of standardised residuals - 1|", "standard deviations"
    own, of_exact = (np.sqrt(np.square(x.residual).mean(0)) for x in (model, exact))
    squares, *of_controls = (np.square(x.residual).mean(1) for x in (model, *controls))  # [sequence]
    return Result.of(
        "Calibration of predicted numbers",
        {
            **line("rms", own, "query", unit, "rms of standardised residuals", beside="rms_exact"),
            "rms_exact": labelled(of_exact, "query", unit, "the exact answer's own"),
        },
        __name__,
        estimates=(measured(CALIBRATION, name, squares, of_controls, error),),
        ticks=numbered(model.kl.shape[1]),
    )


def _tenths(model: CategoricalScores, exact: CategoricalScores, *controls: CategoricalScores) -> Result:
    queries = model.kl.shape[1]
    predicted, exact_p, drawn, count = model.tally.sum((0, 1)).T
    rows = count > 0

    def error(tally: np.ndarray) -> np.ndarray:
        return np.abs(tally[..., 0] - tally[..., 1]).sum(-1) / queries

    p, exact_of_p, share = (x[rows] / count[rows] for x in (predicted, exact_p, drawn))
    right, most = "accuracy: the likeliest outcome is the one drawn", exact.right.mean()
    return Result.of(
        "Calibration",
        {
            "predicted": labelled(p, "predicted", "probability", "predicted probability of outcomes"),
            **line("exact", exact_of_p, "predicted", "probability", "exact probability of them", beside="predicted"),
            **line("drawn", share, "predicted", "fraction", "how often they were drawn", beside="predicted"),
            "count": labelled(count[rows], "predicted", "outcomes", "how many, over queries and sequences"),
            **line("accuracy", model.right.mean(0), "query", "fraction", right, beside="accuracy_exact"),
            "accuracy_exact": labelled(exact.right.mean(0), "query", "fraction", "accuracy of the exact answer"),
            **line("leaked", model.leaked.mean(0), "query", "probability", "probability of tokens that are no outcome"),
            "ceiling": labelled(most, "", "fraction", "accuracy of the exact answer's likeliest outcome, all queries"),
        },
        __name__,
        estimates=(
            measured(CALIBRATION, "calibration error", model.tally.sum(1), [x.tally.sum(1) for x in controls], error),
            measured(CALIBRATION, "accuracy", model.right.mean(1), [x.right.mean(1) for x in controls]),
            measured(CALIBRATION, "leaked probability", model.leaked.mean(1), [x.leaked.mean(1) for x in controls]),
        ),
        ticks={**numbered(queries), "predicted": tuple(f"{each:.2f}" for each in p)},
    )


def horizon(grades: Grades) -> Result:
    """Divergence at all queries; at least one must lie beyond the horizon."""
    scores = grades.scores
    trivial = scores.trivial[scores.best].kl
    return measure_past(scores.own.kl, [control.kl for control in grades.control_scores], trivial, scores.trained)


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory(notes: Sequence[str], grades: Grades) -> Result:
    """KL on held-out minus seen hypotheses. Raises UserError if a table would pass, or the model infers too little."""
    evaluation, scores = grades.evaluation, grades.scores
    if why := evaluation.task.memorisable:
        raise UserError(f"memorisable: {why}")
    shown = replace(evaluation, split="seen")
    out, known = scores.own.kl[:, scores.within], shown.scores(grades.own[SEEN]).kl[:, scores.within]
    require_skill(known, scores)
    for rival in grades.rivals.values():  # a model that is such a table would pass "nothing was memorised"
        if why := useful(grades.table, rival.kl, scores):
            raise UserError(f"memorisable: {why}")
    controls = [shown.scores(forms[SEEN]).kl[:, scores.within].mean(1) for forms in grades.untrained]
    interval, said = ("sequences", mean_intervals(out.T)), "KL on held-out hypotheses, mean over sequences"
    return Result.of(
        "Seen and held-out hypotheses",
        {
            **line("held_out", out.mean(0), "query", "bits", said, interval=interval, beside="seen"),
            "seen": labelled(known.mean(0), "query", "bits", "KL on seen hypotheses"),
        },
        __name__,
        estimates=(
            divergence(MEMORY, "KL, held-out less seen", out.mean(1), known.mean(1)),
            measured(MEMORY, "KL, seen", known.mean(1), controls),
        ),
        ticks=numbered(scores.trained),
        notes=tuple(notes),
    )


def states(notes: Sequence[str], grades: Grades) -> Result:
    """KL in held-out minus seen states of the evidence."""
    inputs = grades.evaluation.batch.tokens.data
    return measure_states(grades.scores, grades.evaluation.task.held_out_states(inputs).numpy(), notes)


def measure_states(
    scores: PosteriorScores, held_out: Bool[np.ndarray, "sequence query"], notes: Sequence[str] = ()
) -> Result:
    """KL in held-out states minus KL in seen states at the same query, mean over sequences.

    A sequence without a held-out state does not count; one with several counts once, by their mean. The mean of seen
    states at the same query is subtracted, since queries differ in difficulty. Derived here.

    Failures may be rare, as in `divergence`, and a query counts at most 10 bits. An exact model needs 4,566 sequences
    with a held-out state. Simulated with the states of a bijection, 400 to 1,000 gradings each: at a difference of .01
    bits (10 bits in 1 of 1,000 held-out states) the claim held in none, but with a jackknife interval of the mean over
    queries in 53 % (1,000 sequences) and 12 % (12,000); at .003 bits everywhere it held in all (12,000 sequences).

    Args:
        scores: scores of sequences whose queries are in states of both kinds.
        held_out: `World.held_out_states` of these sequences.

    Raises:
        UserError: too little skill; no query with states of both kinds.
    """
    kl, out = scores.own.kl[:, scores.within], held_out[:, scores.within]
    require_skill(kl[~out], scores)
    both = out.any(0) & ~out.all(0)
    if not both.any():
        raise UserError("no query has both held-out and seen states: its states are too few to hold some out")
    kl, out = kl[:, both], out[:, both]
    name, difference = "KL, held-out less seen states", FAILURES.matched(FAILURES.clip(kl), out)
    own, seen = ((kl * where).sum(0) / where.sum(0).clip(min=1) for where in (out, ~out))
    return Result.of(
        "Seen and held-out states",
        {
            **line("held_out", own, "query", "bits", "KL in held-out states, mean over sequences", beside="seen"),
            "seen": labelled(seen, "query", "bits", "KL in seen states"),
            "share": labelled(out.mean(0), "query", "fraction", "share of sequences in a held-out state"),
        },
        __name__,
        estimates=(rare(STATES, name, difference, "no difference", 0.0, len(kl), float(out.any(1).mean())),),
        ticks={"query": tuple((np.flatnonzero(both) + 1).tolist())},
        notes=tuple(notes),
    )


def require_skill(seen: Float[np.ndarray, "*at"], scores: PosteriorScores) -> None:
    """Raise UserError for a model that is hardly better than a trivial predictor on what training showed.

    Such a model has the same error on held-out hypotheses, and "nothing was memorised" would be vacuous.

    Args:
        seen: the model's KL(exact || model) on seen hypotheses, or in seen states, bits.
        scores: the model's scores on held-out hypotheses, with those of trivial predictors.
    """
    reached = skill_of(seen, scores)
    if reached < SKILL:
        raise UserError(
            f"skill over {scores.best} is {reached:.2f} on what training showed, and {SKILL} is needed: "
            "without inference held-out evidence is answered as badly as seen evidence, with or "
            "without memorisation"
        )


def skill_of(kl: Float[np.ndarray, "*at"], scores: PosteriorScores) -> float:
    """1 - mean KL / mean KL of the best trivial predictor on the sequences of `scores`, within the horizon."""
    return float(1 - kl.mean() / scores.trivial[scores.best].kl[:, scores.within].mean())


def useful(table: StateTable | None, kl: Float[np.ndarray, "sequence query"], scores: PosteriorScores) -> str:
    """The reason if good answers to held-out hypotheses are no sign of inference, since a table gives them; else empty.

    Args:
        table: A table from as many sequences as training drew.
        kl: KL(exact || table) on the sequences of `scores`, bits.
        scores: The model's scores on held-out hypotheses.
    """
    reached = skill_of(kl[:, scores.within], scores)
    if table is None or reached <= SKILL:
        return ""
    remedy = "read what it answers in held-out states" if table.states_held_out else "train with --hold-out states"
    return (
        f"a table of {table.sequences:,} training sequences ({len(table.keys):,} states of the evidence) answers "
        f"held-out hypotheses with skill {reached:.2f}, so that answering them is no sign of inference; {remedy}"
    )
